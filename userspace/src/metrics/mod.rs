//! What is counted, and how it is counted on the data path: relaxed atomics, no locks, no look-ups.
//!
//! Labels come from the configuration alone, so the number of series never depends on what clients send.
//! Exposition (names, HELP, units) is `expose`'s business.

pub mod expose;
mod expose_backend;
mod expose_text;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::picker::PickReason;
use crate::proxy::Reason;

/// A count that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// One more.
    pub fn inc(&self) {
        self.add(1);
    }
    /// `n` more.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }
    /// The count so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// Adds `n`, which may be negative.
    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Relaxed);
    }
    /// Sets it.
    pub fn set(&self, n: i64) {
        self.0.store(n, Relaxed);
    }
    /// Its value now.
    #[must_use]
    pub fn get(&self) -> i64 {
        self.0.load(Relaxed)
    }
}

/// Upper bounds of the latency buckets, seconds: from a cached prefill to a saturated queue.
pub const LATENCY_BUCKETS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
];

/// A latency histogram with [`LATENCY_BUCKETS`].
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; LATENCY_BUCKETS.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    /// Counts one observation.
    pub fn observe(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = LATENCY_BUCKETS.partition_point(|&bound| bound < seconds);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_us.fetch_add(took.as_micros() as u64, Relaxed);
    }
    /// Observations in each bucket (not cumulative; the last is +Inf) and their sum in seconds.
    #[must_use]
    pub fn read(&self) -> ([u64; LATENCY_BUCKETS.len() + 1], f64) {
        let counts = std::array::from_fn(|i| self.counts[i].load(Relaxed));
        (counts, self.sum_us.load(Relaxed) as f64 / 1e6)
    }
}

/// How the requests that reached one backend went. Label `backend` and `pool`.
#[derive(Debug, Default)]
pub struct BackendMetrics {
    /// Answers by status class: 1xx is never final, so index 0 is 2xx, then 3xx, 4xx, 5xx.
    pub responses: [Counter; 4],
    /// Picks by reason; index is `PickReason as usize`.
    pub picks: [Counter; PickReason::COUNT],
    /// Prompt tokens of requests sent here (estimated).
    pub prompt_tokens: Counter,
    /// Of these, tokens the index believed to be cached here (estimated).
    pub matched_tokens: Counter,
    /// Prompt tokens by the engine's own counters (scraped), and of these, hits.
    pub engine_prompt_tokens: Counter,
    /// See `engine_prompt_tokens`.
    pub engine_hit_tokens: Counter,
    /// From the request's first byte to the first response body byte.
    pub ttft: Histogram,
    /// From the request's first byte to the end of the answer.
    pub duration: Histogram,
    /// Fresh connections opened.
    pub connects: Counter,
    /// Connections that could not be opened.
    pub connect_errors: Counter,
    /// Requests sent on a pooled connection.
    pub pool_reuses: Counter,
    /// Idle pooled connections found dead or with surplus bytes.
    pub pool_discards: Counter,
    /// Idle pooled connections now, all workers.
    pub pool_idle: Gauge,
    /// Requests replayed on a fresh connection.
    pub replays: Counter,
    /// Clients that left before the answer ended.
    pub client_aborts: Counter,
    /// Answers the backend broke off.
    pub truncated: Counter,
    /// Response body bytes relayed.
    pub response_bytes: Counter,
    /// Request body bytes sent.
    pub request_bytes: Counter,
    /// Health probes that failed.
    pub probe_failures: Counter,
    /// Passive ejections.
    pub ejections: Counter,
    /// Scrapes that failed.
    pub scrape_failures: Counter,
}

/// How one pool fares. Label `pool`.
#[derive(Debug, Default)]
pub struct PoolMetrics {
    /// Requests waiting for a backend below its cap, now.
    pub queued: Gauge,
    /// Requests that had to wait.
    pub queued_total: Counter,
    /// Picks made in panic mode.
    pub panic_picks: Counter,
}

/// What belongs to no backend.
#[derive(Debug, Default)]
pub struct ProxyMetrics {
    /// Client connections accepted.
    pub connections: Counter,
    /// Client connections open now.
    pub connections_open: Gauge,
    /// Requests whose head was read.
    pub requests: Counter,
    /// Requests in flight now, from head to end.
    pub requests_active: Gauge,
    /// Answers prefixlb gave itself, and transfers it broke off, by reason; index is `Reason as usize`.
    pub failures: [Counter; Reason::COUNT],
    /// Header keys that were malformed and ignored.
    pub bad_header_keys: Counter,
    /// Bodies without a usable key, by why; index is `key::NoKey as usize`.
    pub no_key: [Counter; crate::picker::key::NoKey::COUNT],
    /// Request-log lines dropped because the writer was behind.
    pub log_dropped: Counter,
    /// Configuration reloads that took effect, and that were refused.
    pub reloads: Counter,
    /// See `reloads`.
    pub reloads_refused: Counter,
    /// Where the ledger's memory is, once that is known.
    pub ledger_backing: OnceLock<String>,
}
