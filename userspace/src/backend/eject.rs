//! Passive ejection: the decision that [`super::health`] only asks for; the one writer of the ejected bit.
//!
//! The last backend of a pool that admits requests is never ejected, whatever it answers. With nobody to
//! take over, an ejection would turn some failures into only failures (panic mode off), or spread requests
//! over backends known to be dead (panic mode on). All decisions are made on one thread, so two backends
//! that fail together cannot each believe that the other stays.

use std::sync::atomic::Ordering::Relaxed;

use prefixlb_common::ledger::{LedgerEntry, STATE_EJECTED};

use crate::backend::slow_start;
use crate::backend::supervise::Watch;

/// Ejections are doubled this many times at most: 8×.
const MOST_DOUBLINGS: u32 = 3;

/// Ejects the backend when its failures call for it, and lets it back in.
pub(super) async fn run(watch: &Watch) {
    let passive = &watch.backend.passive;
    let mut doublings = 0;
    loop {
        passive.struck().await;
        if !passive.is_due() || is_last_admitted(watch) {
            continue;
        }
        let Some(cell) = watch.cell() else { return };
        doublings = if passive.has_proved_itself() {
            0
        } else {
            (doublings + 1).min(MOST_DOUBLINGS)
        };
        let first = watch.plan.borrow().settings().health.eject_for;
        let time = first * (1 << doublings);
        cell.state.fetch_or(STATE_EJECTED, Relaxed);
        watch.backend.metrics.ejections.inc();
        tracing::warn!(
            backend = watch.name(),
            for_seconds = time.as_secs_f64(),
            "backend is ejected: its last answers all failed"
        );
        tokio::time::sleep(time).await;
        let Some(cell) = watch.cell() else { return };
        passive.readmit();
        slow_start::begin(watch);
        cell.state.fetch_and(!STATE_EJECTED, Relaxed);
        watch.plan.borrow().pool.waiters.wake_first();
        tracing::info!(backend = watch.name(), "backend's ejection is over");
    }
}

fn is_last_admitted(watch: &Watch) -> bool {
    let plan = watch.plan.borrow();
    let ledger = &watch.shared.ledger;
    !plan.pool.backends.iter().any(|other| {
        other.slot != watch.backend.slot
            && LedgerEntry::admits(ledger.cell(other.slot).state.load(Relaxed))
    })
}
