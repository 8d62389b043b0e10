//! Slow start: a backend that comes back gets its share little by little; the one writer of the weight.
//!
//! An engine that was away has an empty cache and, under least load, would be everybody's first choice at
//! once. Its effective weight rises from a tenth to the whole over `slow_start`.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::supervise::Watch;
use crate::picker::ledger::fixed_weight;

/// Share of its weight that a backend starts with.
const FLOOR: f64 = 0.1;
/// The weight is written anew this many times on the way.
const STEPS: u32 = 20;

/// The share of its weight that a backend has after `elapsed` of a slow start over `whole`.
#[must_use]
pub fn factor(elapsed: Duration, whole: Duration) -> f64 {
    if elapsed >= whole {
        return 1.0;
    }
    FLOOR + (1.0 - FLOOR) * (elapsed.as_secs_f64() / whole.as_secs_f64())
}

/// Starts (again) at the floor; before the caller lets requests in.
pub(super) fn begin(watch: &Watch) {
    let whole = watch.plan.borrow().settings().health.slow_start;
    write(watch, factor(Duration::ZERO, whole));
    watch.ramp.notify_one();
}

fn write(watch: &Watch, factor: f64) {
    if let Some(cell) = watch.cell() {
        let weight = watch.plan.borrow().backend().weight;
        cell.weight.store(fixed_weight(weight, factor), Relaxed);
    }
}

/// Keeps the ledger's weight at what settings and slow start make of it.
pub(super) async fn run(watch: &Watch) {
    let mut plan = watch.plan.clone();
    let mut began: Option<Instant> = None;
    loop {
        let whole = plan.borrow_and_update().settings().health.slow_start;
        let share = began.map_or(1.0, |began| factor(began.elapsed(), whole));
        if share >= 1.0 {
            began = None;
        }
        write(watch, share);
        let step = (whole / STEPS).max(Duration::from_millis(1));
        tokio::select! {
            () = watch.ramp.notified() => began = Some(Instant::now()),
            changed = plan.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(step), if began.is_some() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_a_tenth_to_the_whole_and_never_back() {
        let whole = Duration::from_secs(10);
        let shares: Vec<f64> = (0..=12)
            .map(|s| factor(Duration::from_secs(s), whole))
            .collect();
        assert!((shares[0] - 0.1).abs() < 1e-9);
        assert!((shares[5] - 0.55).abs() < 1e-9);
        assert!((shares[10] - 1.0).abs() < 1e-9);
        assert!(shares.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!((factor(Duration::ZERO, Duration::ZERO) - 1.0).abs() < 1e-9);
    }
}
