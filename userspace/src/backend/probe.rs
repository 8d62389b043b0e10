//! Active health: a GET to each backend, again and again; the one writer of the healthy bit.
//!
//! Only 2xx is healthy: llama.cpp answers 503 while it loads its model. Verdicts need several probes of a
//! kind in a row, with one exception: at the start of the process nobody knows anything, and the first probe
//! decides, unless it is merely slow. A backend that is out is asked five times as often: that costs little,
//! and it comes back sooner. And slow probes are not proof: an engine with a full batch answers `/health` late and
//! serves well all the same, so a probe that timed out says nothing while good answers go on coming.

use std::time::Duration;

use prefixlb_common::ledger::STATE_HEALTHY;
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::Instant;

use crate::backend::fetch::{self, FetchError};
use crate::backend::supervise::{Watch, jitter, pause};
use crate::backend::{request_resolve, slow_start};
use crate::config::{HealthSettings, PoolSettings};

/// How much more often a backend is probed while it is out.
const SOONER: u32 = 5;

/// What one probe showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// 2xx in time.
    Good,
    /// No connection, a broken exchange, or another status.
    Bad,
    /// No answer in time.
    Slow,
}

/// Probes in a row, and the verdict they led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streak {
    healthy: bool,
    /// Nothing is known yet: the first probe decides.
    fresh: bool,
    good: u32,
    bad: u32,
}

impl Streak {
    /// A backend of which nothing is known and that has this verdict meanwhile; its first probe decides.
    #[must_use]
    pub const fn unknown(healthy: bool) -> Self {
        Self {
            healthy,
            fresh: true,
            good: 0,
            bad: 0,
        }
    }

    /// A backend with this verdict so far.
    #[must_use]
    pub const fn known(healthy: bool) -> Self {
        Self {
            healthy,
            fresh: false,
            good: 0,
            bad: 0,
        }
    }

    /// Takes in a probe; `serving`: good answers came since the last one. Returns the verdict if it changed.
    pub fn note(&mut self, probe: Probe, serving: bool, fall: u32, rise: u32) -> Option<bool> {
        match probe {
            Probe::Slow if serving => return None,
            Probe::Good => {
                self.bad = 0;
                self.good = self.good.saturating_add(1);
            }
            Probe::Bad | Probe::Slow => {
                self.good = 0;
                self.bad = self.bad.saturating_add(1);
            }
        }
        let fresh = std::mem::replace(&mut self.fresh, false);
        let verdict = if self.good > 0 {
            self.healthy || fresh || self.good >= rise
        } else {
            self.healthy && self.bad < fall && !(fresh && probe == Probe::Bad)
        };
        (std::mem::replace(&mut self.healthy, verdict) != verdict).then_some(verdict)
    }
}

/// Probes the backend for as long as its task lives.
pub(super) async fn run(watch: &Watch) {
    let mut plan = watch.plan.clone();
    let mut streak = first_verdict(watch);
    loop {
        let health = plan.borrow_and_update().settings().health.clone();
        if !health.active {
            streak = Streak::known(true);
            come_up(watch, false);
            if plan.changed().await.is_err() {
                return;
            }
            continue;
        }
        let began = Instant::now();
        let (probe, why) = probe(watch, &health).await;
        if probe != Probe::Good {
            watch.backend.metrics.probe_failures.inc();
        }
        let serving = watch.backend.passive.was_alive();
        let came_back = !(streak.fresh && watch.from_start);
        match streak.note(probe, serving, health.fall, health.rise) {
            Some(true) => come_up(watch, came_back),
            Some(false) => go_down(watch, &why),
            None => {}
        }
        let sooner = if streak.healthy { 1 } else { SOONER };
        let interval = |pool: &PoolSettings| pool.health.interval / sooner;
        pause(&mut plan, began, jitter(), interval, |pool| {
            !pool.health.active
        })
        .await;
    }
}

/// Where a backend starts: with the bit that its slot carries. At the process's start that is hope, and the
/// first probe decides; later (added by a reload, others serve) it is to rise like any other.
fn first_verdict(watch: &Watch) -> Streak {
    let carried = watch
        .cell()
        .is_some_and(|cell| cell.state.load(Relaxed) & STATE_HEALTHY != 0);
    if watch.from_start {
        Streak::unknown(carried)
    } else {
        Streak::known(carried)
    }
}

/// Asks once; with a probe that was not good comes why.
async fn probe(watch: &Watch, health: &HealthSettings) -> (Probe, String) {
    wait_for_address(watch, health.timeout).await;
    let backend = &watch.backend;
    let addrs = backend.addrs.load_full();
    let answer = fetch::get(&addrs, &backend.authority, &health.path, 0, health.timeout).await;
    match answer {
        Ok(answer) if (200..300).contains(&answer.status) => (Probe::Good, String::new()),
        Ok(answer) => (Probe::Bad, format!("status {}", answer.status)),
        Err(error) => {
            if matches!(error, FetchError::Connect(_)) {
                request_resolve(backend);
            }
            let probe = match error {
                FetchError::Timeout => Probe::Slow,
                FetchError::Connect(_) | FetchError::Broken(_) => Probe::Bad,
            };
            (probe, error.to_string())
        }
    }
}

/// A name's first look-up may still be under way: wait for it rather than fail a backend for that.
async fn wait_for_address(watch: &Watch, limit: Duration) {
    if watch.backend.addrs.load().is_empty() {
        let mut resolved = watch.resolved.subscribe();
        // Whether it came or the limit passed, the probe that follows finds out.
        let _ = tokio::time::timeout(limit, resolved.wait_for(|answers| *answers > 0)).await;
    }
}

fn come_up(watch: &Watch, came_back: bool) {
    let Some(cell) = watch.cell() else { return };
    if came_back {
        slow_start::begin(watch);
    }
    let before = cell.state.fetch_or(STATE_HEALTHY, Relaxed);
    if before & STATE_HEALTHY == 0 {
        tracing::info!(backend = watch.name(), "backend is healthy");
        watch.plan.borrow().pool.waiters.wake_first();
    }
}

fn go_down(watch: &Watch, why: &str) {
    let Some(cell) = watch.cell() else { return };
    cell.state.fetch_and(!STATE_HEALTHY, Relaxed);
    tracing::warn!(
        backend = watch.name(),
        why,
        "backend is unhealthy by its probes: new requests go to others, open streams go on"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use Probe::{Bad, Good, Slow};

    fn run(mut streak: Streak, probes: &[(Probe, bool)]) -> Vec<Option<bool>> {
        probes
            .iter()
            .map(|&(probe, serving)| streak.note(probe, serving, 3, 2))
            .collect()
    }

    #[test]
    fn verdicts_need_probes_in_a_row() {
        let quiet = |probes: &[Probe]| probes.iter().map(|&p| (p, false)).collect::<Vec<_>>();
        let up = Streak::known(true);
        let down = Streak::known(false);
        let rows = [
            (up, quiet(&[Bad, Bad, Good, Bad, Bad]), vec![None; 5]),
            (up, quiet(&[Bad, Slow, Bad]), vec![None, None, Some(false)]),
            (
                down,
                quiet(&[Good, Bad, Good, Good, Good]),
                vec![None, None, None, Some(true), None],
            ),
            (Streak::unknown(false), quiet(&[Good]), vec![Some(true)]),
            (Streak::unknown(true), quiet(&[Good]), vec![None]),
            (Streak::unknown(true), quiet(&[Bad]), vec![Some(false)]),
            (
                Streak::unknown(true),
                quiet(&[Slow, Bad, Bad]),
                vec![None, None, Some(false)],
            ),
            (
                Streak::unknown(false),
                quiet(&[Bad, Good, Good]),
                vec![None, None, Some(true)],
            ),
        ];
        for (streak, probes, verdicts) in rows {
            assert_eq!(run(streak, &probes), verdicts, "{streak:?} {probes:?}");
        }
    }

    #[test]
    fn slow_probes_alone_do_not_take_out_a_backend_that_serves() {
        let busy = vec![(Slow, true); 50];
        assert_eq!(run(Streak::known(true), &busy), vec![None; 50]);
        // Nor do they clear what hard failures have shown.
        assert_eq!(
            run(
                Streak::known(true),
                &[(Bad, true), (Slow, true), (Bad, true), (Bad, true)]
            ),
            vec![None, None, None, Some(false)]
        );
    }
}
