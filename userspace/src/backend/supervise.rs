//! One task for each backend of the configuration in force, and none for any other.
//!
//! A reload swaps the snapshot; here the new one is held against the tasks that run. A backend that is still
//! there (the same object) keeps its task, its streaks and its timers, and is told the new settings; one that
//! left loses its task before anything is started for those that came.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::backend::resolve::{Lookup, SystemLookup};
use crate::backend::{eject, probe, resolve, scrape, slow_start};
use crate::config::{BackendSettings, PoolSettings};
use crate::picker::ledger::LedgerCell;
use crate::state::{Backend, Phase, Pool, Shared, Snapshot};

/// How often the snapshot is looked at. A reload is rare and not urgent; a look is one load.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Watches over all backends until the process aborts. Runs on the control plane's runtime.
pub async fn supervise(shared: Arc<Shared>) {
    supervise_with(shared, Arc::new(SystemLookup)).await;
}

/// [`supervise`], with names looked up by `lookup`.
pub async fn supervise_with(shared: Arc<Shared>, lookup: Arc<dyn Lookup>) {
    let mut phase = shared.phase.subscribe();
    let mut supervisor = Supervisor {
        shared,
        lookup,
        in_force: None,
        watched: Vec::new(),
        tasks: JoinSet::new(),
    };
    let mut look = tokio::time::interval(LOOK_EVERY);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = phase.wait_for(|phase| *phase == Phase::Aborting) => return,
            Some(ended) = supervisor.tasks.join_next() => supervisor.note_end(&ended),
            _ = look.tick() => supervisor.follow(),
        }
    }
}

/// What a backend's task must know of the configuration; replaced by each reload.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub pool: Arc<Pool>,
    place: usize,
}

impl Plan {
    pub fn settings(&self) -> &PoolSettings {
        &self.pool.settings
    }

    /// The backend's settings now: its object outlives reloads, and with it the settings it was made from.
    pub fn backend(&self) -> &BackendSettings {
        let now = self.pool.settings.backends.get(self.place);
        now.unwrap_or(&self.pool.backends[self.place].settings)
    }
}

/// What the parts of one backend's task share.
pub(super) struct Watch {
    pub shared: Arc<Shared>,
    pub backend: Arc<Backend>,
    pub plan: watch::Receiver<Plan>,
    pub lookup: Arc<dyn Lookup>,
    /// It was in the first configuration: there is nothing to protect it from, nor anyone to take over.
    pub from_start: bool,
    /// The ledger entry's generation when the task began.
    slot_generation: u32,
    /// Slow start begins (again).
    pub ramp: Notify,
    /// Answers from name resolution so far.
    pub resolved: watch::Sender<u64>,
}

impl Watch {
    /// The backend's ledger entry, as long as it is this backend's.
    pub fn cell(&self) -> Option<&'static LedgerCell> {
        let cell = self.shared.ledger.cell(self.backend.slot);
        (cell.generation.load(Relaxed) == self.slot_generation).then_some(cell)
    }

    pub fn name(&self) -> &str {
        &self.backend.settings.name
    }

    /// Runs all parts; ends only by being aborted.
    async fn run(self) {
        tokio::join!(
            resolve::run(&self),
            probe::run(&self),
            eject::run(&self),
            slow_start::run(&self),
            scrape::run(&self),
        );
    }
}

struct Watched {
    backend: Arc<Backend>,
    plan: watch::Sender<Plan>,
    task: AbortHandle,
}

struct Supervisor {
    shared: Arc<Shared>,
    lookup: Arc<dyn Lookup>,
    in_force: Option<Arc<Snapshot>>,
    watched: Vec<Watched>,
    tasks: JoinSet<()>,
}

impl Supervisor {
    /// Makes the tasks those of the snapshot in force.
    fn follow(&mut self) {
        let snapshot = self.shared.snapshot.load_full();
        let before = self.in_force.replace(Arc::clone(&snapshot));
        if before
            .as_ref()
            .is_some_and(|old| Arc::ptr_eq(old, &snapshot))
        {
            return;
        }
        let mut kept = std::mem::take(&mut self.watched);
        let mut fresh = Vec::new();
        for pool in &snapshot.pools {
            for (place, backend) in pool.backends.iter().enumerate() {
                let plan = Plan {
                    pool: Arc::clone(pool),
                    place,
                };
                backend.passive.apply(&pool.settings.health);
                match kept
                    .iter()
                    .position(|old| Arc::ptr_eq(&old.backend, backend))
                {
                    Some(i) => {
                        let old = kept.swap_remove(i);
                        old.plan.send_replace(plan);
                        self.watched.push(old);
                    }
                    None => fresh.push((Arc::clone(backend), plan)),
                }
            }
        }
        for gone in kept {
            gone.task.abort();
        }
        for (backend, plan) in fresh {
            self.start(backend, plan, before.is_none());
        }
    }

    fn start(&mut self, backend: Arc<Backend>, plan: Plan, from_start: bool) {
        let slot = backend.slot;
        self.shared.signals.clear(slot);
        let (plan, followed) = watch::channel(plan);
        let watch = Watch {
            shared: Arc::clone(&self.shared),
            backend: Arc::clone(&backend),
            plan: followed,
            lookup: Arc::clone(&self.lookup),
            from_start,
            slot_generation: self.shared.ledger.cell(slot).generation.load(Relaxed),
            ramp: Notify::new(),
            resolved: watch::Sender::new(0),
        };
        let task = self.tasks.spawn(watch.run());
        self.watched.push(Watched {
            backend,
            plan,
            task,
        });
    }

    /// A task that ended otherwise than by an abort has hit a fault of ours: say so and start it anew.
    fn note_end(&mut self, ended: &Result<(), tokio::task::JoinError>) {
        if let Err(error) = ended
            && error.is_cancelled()
        {
            return;
        }
        tracing::error!(
            ?ended,
            "the task that watches a backend ended; starting it anew"
        );
        self.watched.retain(|watched| !watched.task.is_finished());
        let Some(snapshot) = self.in_force.clone() else {
            return;
        };
        for pool in &snapshot.pools {
            for (place, backend) in pool.backends.iter().enumerate() {
                let lacks = !self
                    .watched
                    .iter()
                    .any(|watched| Arc::ptr_eq(&watched.backend, backend));
                if lacks {
                    let plan = Plan {
                        pool: Arc::clone(pool),
                        place,
                    };
                    self.start(Arc::clone(backend), plan, false);
                }
            }
        }
    }
}

/// Sleeps until `began` + `interval` × `factor`, with the interval as the plan says it at any time; returns
/// early with `true` when `stop` holds of a new plan.
pub(super) async fn pause(
    plan: &mut watch::Receiver<Plan>,
    began: tokio::time::Instant,
    factor: f64,
    interval: impl Fn(&PoolSettings) -> Duration,
    stop: impl Fn(&PoolSettings) -> bool,
) -> bool {
    loop {
        let wait = {
            let plan = plan.borrow_and_update();
            if stop(plan.settings()) {
                return true;
            }
            interval(plan.settings()).mul_f64(factor)
        };
        tokio::select! {
            () = tokio::time::sleep_until(began + wait) => return false,
            changed = plan.changed() => if changed.is_err() {
                // The supervisor is gone; so will this task be.
                std::future::pending::<()>().await;
            },
        }
    }
}

/// A factor in 0.9–1.1, so that probes of many backends (and of many prefixlbs) do not march in step.
pub(super) fn jitter() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    // Each RandomState has keys of its own; its hash of anything is a random word.
    let word = RandomState::new().hash_one(0u8);
    0.9 + 0.2 * (word as f64 / u64::MAX as f64)
}

#[cfg(test)]
mod tests {
    #[test]
    fn jitter_stays_within_a_tenth() {
        for _ in 0..1000 {
            let factor = super::jitter();
            assert!((0.9..=1.1).contains(&factor), "{factor}");
        }
    }
}
