//! The ledger in the kernel: real programs, a real map, both sides writing the same words.
//!
//! Where the kernel cannot run them these tests say why and pass; where it could, a failure to load is a failure.

use std::sync::atomic::Ordering::Relaxed;

use prefixlb::config::KernelMode;
use prefixlb::kernel::{LedgerBacking, Programs, open_ledger};
use prefixlb_common::ledger_op::{LedgerOp, OP_CHARGE, OP_END, OP_FIRST_BYTE};

/// Whether the kernel could run them: a skip must prove itself, so this looks for itself and asks nobody.
fn able() -> bool {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let status = read("/proc/self/status");
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .expect("/proc tells the capabilities");
    let has = |bit: u32| effective & (1 << bit) != 0;
    let privileged = has(21) || (has(39) && has(12)); // CAP_SYS_ADMIN, or CAP_BPF with CAP_NET_ADMIN
    // Capabilities within a user namespace are none to bpf(2).
    let at_home = read("/proc/self/uid_map")
        .split_whitespace()
        .eq(["0", "0", "4294967295"]);
    privileged && at_home
}

/// The programs; `None` only where the kernel cannot run them.
fn programs() -> Option<Programs> {
    match Programs::load() {
        Ok(programs) => Some(programs),
        Err(why) if !able() => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("all privileges are there, and still {why}"),
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
fn a_cap_holds_between_both_sides() {
    let Some(programs) = programs() else { return };
    let ledger = programs.ledger();
    let cell = ledger.cell(2);
    cell.cap.store(3, Relaxed);
    let ours = ledger.try_charge(2, 10).expect("below the cap");
    assert_eq!(programs.apply(op(OP_CHARGE, 2, 10), 2), Ok(true));
    assert_eq!(programs.apply(op(OP_CHARGE, 2, 10), 1), Ok(false));
    assert!(ledger.try_charge(2, 10).is_none());
    assert_eq!(cell.active.load(Relaxed), 3);
    assert_eq!(
        cell.prefill_tokens.load(Relaxed),
        30,
        "a refusal leaves nothing"
    );
    drop(ours);
    assert_eq!(
        programs.apply(op(OP_CHARGE, 2, 10), 1),
        Ok(true),
        "room again"
    );
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
