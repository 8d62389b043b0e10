//! What all workers share: one immutable snapshot of pools and backends, swapped whole; and the counters.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use arc_swap::ArcSwap;

use crate::backend::health::Passive;
use crate::backend::resolve::Resolution;
use crate::config::{BackendSettings, PoolSettings, Settings};
use crate::metrics::{BackendMetrics, PoolMetrics, ProxyMetrics};
use crate::picker::{Ledger, Member, Picker, SignalTable};
use crate::proxy::Waiters;
use crate::reqlog::RequestLog;

/// Everything that outlives a configuration.
#[derive(Debug)]
pub struct Shared {
    /// The configuration in force and what was built from it.
    pub snapshot: ArcSwap<Snapshot>,
    /// Load in flight.
    pub ledger: Ledger,
    /// What engines say.
    pub signals: SignalTable,
    /// Counters that belong to no pool.
    pub metrics: ProxyMetrics,
    /// Zero of the millisecond clock that picks and signals use.
    pub epoch: Instant,
    /// How far the process is from its end; workers, probes and the admin listener watch it.
    pub phase: tokio::sync::watch::Sender<Phase>,
    /// The request log's writer.
    pub log: RequestLog,
}

/// The stages of a process's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Serving.
    Serving,
    /// SIGTERM came: not ready, no new requests, streams finish.
    Draining,
    /// Streams are cut now.
    Aborting,
}

impl Shared {
    /// The state of a process that starts with `settings`.
    pub fn start(settings: Settings, ledger: Ledger) -> Result<Arc<Self>, String> {
        let log = RequestLog::start(&settings.log);
        let first = crate::generation::build(settings, None, ledger)?;
        Ok(Arc::new(Self {
            snapshot: ArcSwap::from_pointee(first),
            ledger,
            signals: SignalTable::default(),
            metrics: ProxyMetrics::default(),
            epoch: Instant::now(),
            phase: tokio::sync::watch::Sender::new(Phase::Serving),
            log,
        }))
    }

    /// Milliseconds since start, the clock of picks and signals.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }
}

/// One generation of the configuration, built off the path and never changed afterwards.
#[derive(Debug)]
pub struct Snapshot {
    /// Counts up with each reload.
    pub generation: u64,
    /// What was meant.
    pub settings: Settings,
    /// Built from `settings.pools`, same order.
    pub pools: Vec<Arc<Pool>>,
}

/// A pool at work. What must survive a reload (picker with its index, counters, waiters) is shared with the
/// pool of the same name in the generation before.
#[derive(Debug)]
pub struct Pool {
    /// What was meant.
    pub settings: PoolSettings,
    /// Same order as the settings.
    pub backends: Vec<Arc<Backend>>,
    /// The same backends as the picker sees them: `members[i].slot == backends[i].slot`.
    pub members: Vec<Member>,
    /// Policy and index.
    pub picker: Arc<Picker>,
    /// Requests that wait for a backend below its cap.
    pub waiters: Arc<Waiters>,
    /// Counters.
    pub metrics: Arc<PoolMetrics>,
    /// Bytes of prompt a token, learned; ×1024 fixed point.
    pub bytes_per_token_fp: Arc<AtomicU32>,
}

impl Pool {
    /// The backend on `slot`.
    #[must_use]
    pub fn backend(&self, slot: u16) -> Option<&Arc<Backend>> {
        self.backends.iter().find(|backend| backend.slot == slot)
    }
}

/// One engine replica. The same object lives on through reloads as long as its name, host and port do.
#[derive(Debug)]
pub struct Backend {
    /// What was meant.
    pub settings: BackendSettings,
    /// Ledger slot.
    pub slot: u16,
    /// Gives the slot back when the last flow that knows this backend has ended.
    pub lease: SlotLease,
    /// `Host` field sent, and label where no name was given.
    pub authority: String,
    /// Addresses, as last resolved; empty until the first answer.
    pub addrs: ArcSwap<Vec<SocketAddr>>,
    /// What name resolution and the data path tell each other.
    pub resolution: Resolution,
    /// Raised when pooled connections must not be used any more (address changed, drained, removed).
    pub pool_epoch: AtomicU64,
    /// What traffic says of its health.
    pub passive: Passive,
    /// Counters.
    pub metrics: BackendMetrics,
}

/// The right to a ledger slot: the slot is not given to another backend while this lives.
///
/// A flow that picks from an older snapshot must never charge, or be sent by, a slot that means another
/// backend by now. So the slot goes with the backend's last reference, not with its place in the file.
#[derive(Debug)]
pub struct SlotLease {
    /// Where the slot is.
    pub ledger: Ledger,
    /// Which one.
    pub slot: u16,
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        self.ledger.cell(self.slot).state.store(0, Relaxed);
    }
}

impl Backend {
    /// Pooled connections of earlier epochs are dropped at checkout.
    pub fn drop_pooled(&self) {
        self.pool_epoch.fetch_add(1, Relaxed);
    }
}
