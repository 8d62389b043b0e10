//! The kernel programs of prefixlb. Entry points only: dispatch, and one verdict on the way out.
#![no_std]
#![no_main]
// The target has atomic instructions, but `core` offers them only as intrinsics.
#![feature(core_intrinsics)]
#![expect(
    internal_features,
    reason = "the only way to the BPF atomic instructions"
)]

mod ledger;
mod maps;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use prefixlb_common::ledger_op::{LedgerOp, OP_CHARGE, OP_END, OP_FIRST_BYTE, OP_HELLO};

/// Applies a [`LedgerOp`] that stands at the start of a frame. Never attached: user space runs it once at start
/// (`BPF_PROG_TEST_RUN`) to see that the kernel's atomics and its own reach the same memory.
#[xdp]
pub fn plb_ledger_op(context: XdpContext) -> u32 {
    match apply(&context) {
        Some(true) => XDP_PASS,
        Some(false) | None => XDP_DROP,
    }
}

/// Whether the operation was done: `None` if it is not one, `Some(false)` if it is refused.
fn apply(context: &XdpContext) -> Option<bool> {
    let start = context.data();
    if start + size_of::<LedgerOp>() > context.data_end() {
        return None;
    }
    // SAFETY: the bounds were checked just above, and the fields are plain integers.
    let op = unsafe { core::ptr::read_unaligned(start as *const LedgerOp) };
    if op.op == OP_HELLO {
        return Some(maps::note_layout());
    }
    let entry = maps::ledger_entry(op.slot)?;
    match op.op {
        OP_CHARGE => return Some(ledger::try_charge(entry, op.tokens)),
        OP_FIRST_BYTE => ledger::first_byte(entry, op.tokens),
        OP_END => ledger::end(entry),
        _ => return None,
    }
    Some(true)
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
