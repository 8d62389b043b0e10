//! The gate and the orders that picks depend on: integers only, so that a BPF program computes the same.

use crate::ledger::WEIGHT_ONE;

/// Share of 1 in the fixed point of thresholds and hysteresis.
pub const SHARE_ONE: u64 = 1024;

/// `load` as it weighs on a backend of this effective weight (1/256).
#[must_use]
pub const fn weighted(load: u64, weight: u32) -> u64 {
    if weight == WEIGHT_ONE {
        return load; // the usual case costs no division
    }
    let weight = if weight == 0 { 1 } else { weight };
    load.saturating_mul(WEIGHT_ONE as u64) / weight as u64
}

/// Whether the gate of a warm backend is closed, from whether it was.
///
/// It closes when `over` passes tau and opens again at `reopen` (in [`SHARE_ONE`]s) of it: at one threshold
/// alone, each ended request would open it and the next would close it.
#[must_use]
pub const fn closed(was_closed: bool, over: u64, tau: u64, reopen: u64) -> bool {
    if was_closed {
        over > tau / SHARE_ONE * reopen + tau % SHARE_ONE * reopen / SHARE_ONE
    } else {
        over > tau
    }
}

/// Rendezvous rank of a backend for a key: the order of backends by it is the key's own, stable when backends
/// come and go, and even over keys.
#[must_use]
pub const fn rank(key: u64, identity: u64) -> u64 {
    mix(key ^ identity.rotate_left(32), 0x9e37_79b9_7f4a_7c15)
}

/// Two words into one, well mixed; not symmetric. 64-bit products only: the BPF target has no wider ones.
#[must_use]
pub const fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_has_hysteresis() {
        assert!(!closed(false, 100, 100, 512));
        assert!(closed(false, 101, 100, 512));
        assert!(closed(true, 51, 100, 512));
        assert!(!closed(true, 50, 100, 512));
        assert!(!closed(true, u64::MAX / 2, u64::MAX, SHARE_ONE));
    }

    #[test]
    fn half_the_weight_is_twice_the_load() {
        assert_eq!(weighted(100, WEIGHT_ONE), 100);
        assert_eq!(weighted(100, WEIGHT_ONE / 2), 200);
        assert_eq!(weighted(100, 0), 25_600);
    }

    #[test]
    fn first_places_are_even_and_only_a_leaver_moves_keys() {
        let identities: [u64; 10] = core::array::from_fn(|i| mix(i as u64, 77));
        let first = |key: u64, without: usize| {
            (0..10)
                .filter(|i| *i != without)
                .max_by_key(|i| rank(key, identities[*i]))
        };
        let mut count = [0; 10];
        for key in 0..10_000 {
            let key = mix(key, 1);
            let owner = first(key, 99).unwrap_or(0);
            count[owner] += 1;
            let without_3 = first(key, 3).unwrap_or(0);
            assert!(owner == 3 || owner == without_3);
        }
        assert!(count.iter().all(|n| (850..1150).contains(n)), "{count:?}");
    }
}
