//! The programs' side of the ledger: what user space does with `picker::ledger`, in BPF atomics.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use prefixlb_common::ledger::LedgerEntry;

#[inline(always)]
fn add(word: *mut u64, n: u64) {
    // SAFETY: `word` lies within an entry that the map look-up returned; it is only ever touched by atomics.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(word, n) };
}

/// A request with `tokens` uncached prompt tokens was picked.
#[inline(always)]
pub fn charge(entry: *mut LedgerEntry, tokens: u64) {
    // SAFETY: only addresses are taken; the entry is valid for as long as the program runs.
    unsafe {
        add(&raw mut (*entry).active, 1);
        add(&raw mut (*entry).prefill_tokens, tokens);
        add(&raw mut (*entry).charged, 1);
    }
}

/// Its first body byte came.
#[inline(always)]
pub fn first_byte(entry: *mut LedgerEntry, tokens: u64) {
    // SAFETY: as in `charge`. Subtraction is addition of the complement.
    unsafe { add(&raw mut (*entry).prefill_tokens, tokens.wrapping_neg()) };
}

/// It ended.
#[inline(always)]
pub fn end(entry: *mut LedgerEntry) {
    // SAFETY: as in `charge`.
    unsafe { add(&raw mut (*entry).active, u64::MAX) };
}
