//! Maglev: a table of 65,537 places that hands out keys evenly and moves few when backends come or go
//! (Eisenbud et al., NSDI 2016). Built by user space, read by both sides.

use crate::gate::mix;

/// Places in the table: a prime well above 100 × the backends of a pool.
pub const PLACES: usize = 65_537;
/// A place that no backend has; only in a table without backends.
pub const NOBODY: u16 = u16::MAX;

/// Fills `table` with indices into `identities`; a backend of twice the weight gets twice the places.
///
/// `next` is scratch of the same length as `identities`. What a backend gets depends on its identity and not
/// on its place in the list, so order, restart and instance make no difference.
///
/// # Panics
/// If the slices are shorter than described.
pub fn build(table: &mut [u16], identities: &[u64], weights: &[u32], next: &mut [u32]) {
    table.fill(NOBODY);
    if identities.is_empty() {
        return;
    }
    next.fill(0);
    let heaviest = weights.iter().copied().max().unwrap_or(1).max(1) as u64;
    let mut filled = 0;
    let mut round = 0u64;
    while filled < PLACES {
        round += 1;
        for (i, identity) in identities.iter().enumerate() {
            // Takes its turn whenever its share of the rounds passes another whole.
            let weight = (weights[i] as u64).max(1);
            if round * weight / heaviest == (round - 1) * weight / heaviest {
                continue;
            }
            let offset = mix(*identity, 1) % PLACES as u64;
            let skip = mix(*identity, 2) % (PLACES as u64 - 1) + 1;
            loop {
                let place = ((offset + next[i] as u64 * skip) % PLACES as u64) as usize;
                next[i] += 1;
                if table[place] == NOBODY {
                    table[place] = i as u16;
                    filled += 1;
                    break;
                }
            }
            if filled == PLACES {
                break;
            }
        }
    }
}

/// The place of `hash`.
#[must_use]
pub const fn place(hash: u64) -> usize {
    (hash % PLACES as u64) as usize
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn table(identities: &[u64], weights: &[u32]) -> Vec<u16> {
        let mut table = vec![0; PLACES];
        build(
            &mut table,
            identities,
            weights,
            &mut vec![0; identities.len()],
        );
        table
    }

    #[test]
    fn places_follow_weights() {
        let table = table(&[11, 22, 33], &[256, 256, 512]);
        let mut count = [0usize; 3];
        for owner in table {
            count[owner as usize] += 1;
        }
        for (got, want) in count.iter().zip([0.25, 0.25, 0.5]) {
            let share = *got as f64 / PLACES as f64;
            assert!((share - want).abs() < 0.01, "{count:?}");
        }
    }

    #[test]
    fn a_leaver_moves_few_keys_of_others_and_all_come_home() {
        let ten: Vec<u64> = (0..10).map(|i| mix(i, 5)).collect();
        let nine: Vec<u64> = ten[..9].to_vec();
        let (before, after) = (table(&ten, &[256; 10]), table(&nine, &[256; 9]));
        let moved = before
            .iter()
            .zip(&after)
            .filter(|(a, b)| **a != 9 && a != b)
            .count();
        assert!(
            moved < PLACES / 20,
            "{moved} places of backends that stayed"
        );
        assert_eq!(before, table(&ten, &[256; 10]));
    }

    #[test]
    fn order_in_the_list_moves_few_keys() {
        let some: Vec<u64> = (0..5).map(|i| mix(i, 5)).collect();
        let reversed: Vec<u64> = some.iter().rev().copied().collect();
        let (a, b) = (table(&some, &[256; 5]), table(&reversed, &[256; 5]));
        let moved = a.iter().zip(&b).filter(|(a, b)| **a != 4 - **b).count();
        assert!(moved < PLACES / 50, "{moved}");
    }

    #[test]
    fn without_backends_nobody_has_a_place() {
        assert!(table(&[], &[]).iter().all(|owner| *owner == NOBODY));
    }
}
