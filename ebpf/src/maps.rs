//! Every map: who writes, who reads, how long it lives.

use aya_ebpf::bindings::BPF_F_MMAPABLE;
use aya_ebpf::macros::map;
use aya_ebpf::maps::Array;
use prefixlb_common::ledger::{LEDGER_LAYOUT, LEDGER_SLOTS, LedgerEntry};

/// Load in flight, one cache line a backend, index = slot.
///
/// Written by user space (through its mapping of the array) and by programs, both with atomics; read by both.
/// Lives as long as the process that loaded it.
#[map(name = "plb_ledger")]
static LEDGER: Array<LedgerEntry> = Array::with_max_entries(LEDGER_SLOTS, BPF_F_MMAPABLE);

/// The entry of `slot`, if there is one.
#[inline(always)]
pub fn ledger_entry(slot: u32) -> Option<*mut LedgerEntry> {
    LEDGER.get_ptr_mut(slot)
}

/// Which layout the programs were compiled with, at index 0.
///
/// Written by a program when it is greeted, read by user space, which refuses any layout but its own. Lives as
/// long as the ledger.
#[map(name = "plb_meta")]
static META: Array<[u32; 4]> = Array::with_max_entries(1, 0);

/// Notes the layout; whether that worked.
#[inline(always)]
pub fn note_layout() -> bool {
    META.set(0, LEDGER_LAYOUT, 0).is_ok()
}
