//! The ledger in the kernel: real programs, a real map, both sides writing the same words.
//!
//! Where there are no privileges these tests say so and pass; where there are (root, as in CI) they run.

use std::sync::atomic::Ordering::Relaxed;

use prefixlb::config::KernelMode;
use prefixlb::kernel::{LedgerBacking, Programs, open_ledger};
use prefixlb_common::ledger_op::{LedgerOp, OP_CHARGE, OP_END, OP_FIRST_BYTE};

/// The programs; `None` only where the kernel could not run them: not root, or no BPF at all.
fn programs() -> Option<Programs> {
    let root = std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status
            .lines()
            .any(|line| line == "CapEff:\t000001ffffffffff")
    });
    match Programs::load() {
        Ok(programs) => Some(programs),
        Err(why) if !root => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("all capabilities are there, and still {why}"),
    }
}

fn op(op: u32, slot: u32, tokens: u64) -> LedgerOp {
    LedgerOp { op, slot, tokens }
}

#[test]
fn each_side_sees_what_the_other_writes() {
    let Some(programs) = programs() else { return };
    let cell = programs.ledger().cell(7);
    let charge = programs.ledger().try_charge(7, 500).expect("no cap");
    assert_eq!(programs.apply(op(OP_CHARGE, 7, 1000), 3), Ok(true));
    assert_eq!(cell.active.load(Relaxed), 4);
    assert_eq!(cell.prefill_tokens.load(Relaxed), 3500);
    assert_eq!(programs.apply(op(OP_FIRST_BYTE, 7, 1000), 3), Ok(true));
    assert_eq!(cell.prefill_tokens.load(Relaxed), 500);
    drop(charge);
    assert_eq!(programs.apply(op(OP_END, 7, 0), 3), Ok(true));
    assert_eq!(
        (cell.active.load(Relaxed), cell.prefill_tokens.load(Relaxed)),
        (0, 0)
    );
    assert_eq!(cell.charged.load(Relaxed), 4);
    assert_eq!(
        programs.ledger().cell(6).charged.load(Relaxed),
        0,
        "a neighbour"
    );
}

#[test]
fn no_count_is_lost_when_both_write_at_once() {
    const EACH: u32 = 20_000;
    let Some(programs) = programs() else { return };
    let ledger = programs.ledger();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..EACH {
                    let mut charge = ledger.try_charge(1, 3).expect("no cap");
                    charge.first_byte();
                    std::mem::forget(charge); // the programs end these
                }
            });
        }
        scope.spawn(|| {
            assert_eq!(programs.apply(op(OP_CHARGE, 1, 3), EACH), Ok(true));
            assert_eq!(programs.apply(op(OP_FIRST_BYTE, 1, 3), EACH), Ok(true));
        });
    });
    assert_eq!(programs.apply(op(OP_END, 1, 0), 3 * EACH), Ok(true));
    let cell = ledger.cell(1);
    assert_eq!(
        (cell.active.load(Relaxed), cell.prefill_tokens.load(Relaxed)),
        (0, 0)
    );
    assert_eq!(cell.charged.load(Relaxed), u64::from(3 * EACH));
}

#[test]
fn an_operation_on_no_slot_or_of_no_kind_is_refused() {
    let Some(programs) = programs() else { return };
    assert_eq!(programs.apply(op(OP_CHARGE, 1024, 1), 1), Ok(false));
    assert_eq!(programs.apply(op(9, 0, 1), 1), Ok(false));
}

#[test]
fn the_ledger_works_without_the_kernel_too() {
    let (ledger, backing) = open_ledger(KernelMode::Off).expect("off needs nothing");
    assert!(matches!(backing, LedgerBacking::Memory { .. }));
    let charge = ledger.try_charge(1023, 5).expect("no cap");
    assert_eq!(ledger.cell(1023).active.load(Relaxed), 1);
    drop(charge);
    assert_eq!(ledger.cell(1023).active.load(Relaxed), 0);
}

#[test]
fn auto_takes_the_map_where_it_can() {
    if programs().is_none() {
        return;
    }
    let (_, backing) = open_ledger(KernelMode::Auto).expect("auto never fails");
    assert!(matches!(backing, LedgerBacking::BpfMap), "{backing}");
    assert!(open_ledger(KernelMode::Require).is_ok());
}

#[test]
fn programs_verify_within_the_limit() {
    let Some(programs) = programs() else { return };
    let counts = programs.verified_instructions();
    assert!(!counts.is_empty());
    for (program, count) in counts {
        println!("{program}: {count} instructions walked by the verifier");
        assert!(count <= 100_000, "{program}: {count}");
    }
}
