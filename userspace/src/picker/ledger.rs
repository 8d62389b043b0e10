//! The user-space side of the ledger: atomics on the shared array, and the guard that gives a charge back.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use prefixlb_common::ledger::{LEDGER_SLOTS, LedgerEntry, WEIGHT_ONE};

/// [`LedgerEntry`] as user space reaches it: the same bytes, as atomics.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct LedgerCell {
    /// See [`LedgerEntry::prefill_tokens`].
    pub prefill_tokens: AtomicU64,
    /// See [`LedgerEntry::active`].
    pub active: AtomicU64,
    /// See [`LedgerEntry::tau`].
    pub tau: AtomicU64,
    /// See [`LedgerEntry::charged`].
    pub charged: AtomicU64,
    /// See [`LedgerEntry::state`].
    pub state: AtomicU32,
    /// See [`LedgerEntry::weight`].
    pub weight: AtomicU32,
    /// See [`LedgerEntry::cap`].
    pub cap: AtomicU32,
    /// See [`LedgerEntry::generation`].
    pub generation: AtomicU32,
    reserved: [AtomicU64; 2],
}

const _: () = assert!(size_of::<LedgerCell>() == size_of::<LedgerEntry>());
const _: () = assert!(align_of::<LedgerCell>() == align_of::<LedgerEntry>());

/// A handle on the shared array; copies are handles on the same memory.
///
/// The array lives as long as the process: flows end in any order, and a charge must never dangle.
#[derive(Clone, Copy, Debug)]
pub struct Ledger(&'static [LedgerCell]);

impl Ledger {
    /// A ledger over memory that is shared with the kernel (see `kernel`).
    #[must_use]
    pub fn over(cells: &'static [LedgerCell]) -> Self {
        Self(cells)
    }

    /// A ledger in this process's own memory, for tests and simulations. Never freed.
    #[must_use]
    pub fn in_process() -> Self {
        let cells: Vec<LedgerCell> = (0..LEDGER_SLOTS).map(|_| LedgerCell::default()).collect();
        Self(cells.leak())
    }

    /// The entry of `slot`.
    ///
    /// # Panics
    /// If `slot` is not below [`LEDGER_SLOTS`]; slots come from the slot allocator, which never gives one.
    #[must_use]
    pub fn cell(&self, slot: u16) -> &'static LedgerCell {
        &self.0[usize::from(slot)]
    }

    /// Counts a request with `tokens` uncached prompt tokens on `slot`, unless that would go over its cap.
    ///
    /// The cap is exact between threads: an add that went over is taken back before anyone is told.
    #[must_use]
    pub fn try_charge(&self, slot: u16, tokens: u64) -> Option<Charge> {
        let cell = self.cell(slot);
        let cap = u64::from(cell.cap.load(Relaxed));
        if cell.active.fetch_add(1, Relaxed) >= cap && cap != 0 {
            cell.active.fetch_sub(1, Relaxed);
            return None;
        }
        cell.prefill_tokens.fetch_add(tokens, Relaxed);
        cell.charged.fetch_add(1, Relaxed);
        Some(Charge {
            cell,
            slot,
            prefill: tokens,
        })
    }
}

/// What one request owes the ledger; given back exactly once, at the latest when dropped.
#[derive(Debug)]
#[must_use = "dropping a charge gives it back"]
pub struct Charge {
    cell: &'static LedgerCell,
    slot: u16,
    prefill: u64,
}

impl Charge {
    /// Which backend is charged.
    #[must_use]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// The first body byte came: prefill is over. Later calls do nothing.
    pub fn first_byte(&mut self) {
        let tokens = std::mem::take(&mut self.prefill);
        if tokens != 0 {
            self.cell.prefill_tokens.fetch_sub(tokens, Relaxed);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.first_byte();
        self.cell.active.fetch_sub(1, Relaxed);
    }
}

/// Effective weight as the ledger keeps it: `weight` × `factor`, at least 1/256 so that nothing divides by 0.
#[must_use]
pub fn fixed_weight(weight: f64, factor: f64) -> u32 {
    let scaled = (weight * factor * f64::from(WEIGHT_ONE)).round();
    scaled.clamp(1.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_is_given_back_exactly_once() {
        let ledger = Ledger::in_process();
        let mut charge = ledger.try_charge(3, 700).expect("no cap");
        charge.first_byte();
        charge.first_byte();
        assert_eq!(ledger.cell(3).prefill_tokens.load(Relaxed), 0);
        assert_eq!(ledger.cell(3).active.load(Relaxed), 1);
        drop(charge);
        assert_eq!(ledger.cell(3).active.load(Relaxed), 0);
        assert_eq!(ledger.cell(3).charged.load(Relaxed), 1);
    }

    #[test]
    fn a_cap_is_never_exceeded() {
        let ledger = Ledger::in_process();
        ledger.cell(0).cap.store(2, Relaxed);
        let held: Vec<_> = (0..5).filter_map(|_| ledger.try_charge(0, 1)).collect();
        assert_eq!(held.len(), 2);
        assert_eq!(ledger.cell(0).active.load(Relaxed), 2);
    }
}
