//! The programs' side of the ledger: what user space does with `picker::ledger`, in BPF atomics.
//!
//! Same order of writes, same words: a charge made on one side may be given back on the other.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use prefixlb_common::ledger::LedgerEntry;

/// Adds `n`, wrapping.
#[inline(always)]
fn add(word: *mut u64, n: u64) {
    // SAFETY: `word` lies within an entry that the map look-up returned; it is only ever touched by atomics.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(word, n) };
}

/// Adds 1 and returns what was there before.
///
/// Not relaxed: LLVM 22 compiles a relaxed addition to the instruction that fetches nothing, *even if the result
/// is used*, and the "old value" is then whatever the register held. Any stronger order gives `atomic_fetch_add`,
/// which is what the kernel makes of both anyway. The test of the cap in user space would notice.
#[inline(always)]
fn fetch_add_one(word: *mut u64) -> u64 {
    // SAFETY: as in `add`.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(word, 1) }
}

/// Counts a request with `tokens` uncached prompt tokens, unless that would go over the backend's cap.
///
/// The cap is exact between both sides: an add that went over is taken back before anyone is told.
#[inline(always)]
pub fn try_charge(entry: *mut LedgerEntry, tokens: u64) -> bool {
    // SAFETY: the entry is valid for as long as the program runs; user space may write `cap` at any time, and a
    // 32-bit load sees the old word or the new one.
    let cap = u64::from(unsafe { (&raw const (*entry).cap).read_volatile() });
    // SAFETY: only addresses are taken.
    let (active, prefill, charged) = unsafe {
        (
            &raw mut (*entry).active,
            &raw mut (*entry).prefill_tokens,
            &raw mut (*entry).charged,
        )
    };
    if fetch_add_one(active) >= cap && cap != 0 {
        add(active, u64::MAX);
        return false;
    }
    add(prefill, tokens);
    add(charged, 1);
    true
}

/// The first body byte of a charged request came.
#[inline(always)]
pub fn first_byte(entry: *mut LedgerEntry, tokens: u64) {
    // SAFETY: only an address is taken. Subtraction is addition of the complement.
    add(
        unsafe { &raw mut (*entry).prefill_tokens },
        tokens.wrapping_neg(),
    );
}

/// A charged request ended.
#[inline(always)]
pub fn end(entry: *mut LedgerEntry) {
    // SAFETY: only an address is taken.
    add(unsafe { &raw mut (*entry).active }, u64::MAX);
}
