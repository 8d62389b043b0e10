//! The metrics page: every name, HELP and unit in one place.
//!
//! Written by hand rather than through a registry: the numbers are atomics that the data path owns, and a
//! page is one pass over them. Labels are pools, backends and fixed lists, so the number of series follows
//! from the configuration and from nothing that clients send. The one exception is deliberate: what an
//! engine does not tell has no series, since unknown is not zero.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use crate::metrics::expose_backend::backends;
use crate::metrics::expose_text::{Kind, Page, labels};
use crate::picker::key::NoKey;
use crate::picker::ledger::LedgerCell;
use crate::proxy::Reason;
use crate::state::{Phase, Pool, Shared, Snapshot};

/// The page's media type.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

use Kind::{Counter as C, Gauge as G};

/// The whole page.
#[must_use]
pub fn render(shared: &Shared) -> String {
    let snapshot = shared.snapshot.load();
    let mut page = Page::default();
    process(&mut page, shared, &snapshot);
    clients(&mut page, shared);
    pools(&mut page, shared, &snapshot.pools);
    backends(&mut page, shared, &snapshot.pools);
    page.finish()
}

fn process(page: &mut Page, shared: &Shared, snapshot: &Snapshot) {
    let version = labels(&[("version", env!("CARGO_PKG_VERSION"))]);
    page.family("prefixlb_build_info", G, "The running version, always 1.")
        .count(&version, 1);
    page.family(
        "prefixlb_process_start_time_seconds",
        G,
        "When the process started, in seconds since 1970.",
    )
    .number("", start_time(shared));
    page.family(
        "prefixlb_process_resident_memory_bytes",
        G,
        "Memory of the process that is in RAM.",
    )
    .count("", resident_bytes().unwrap_or(0));
    let backing = shared.metrics.ledger_backing.get();
    let backing = backing.map_or("memory", String::as_str);
    page.family(
        "prefixlb_ledger_info",
        G,
        "Where the ledger's memory is, always 1.",
    )
    .count(&labels(&[("backing", backing)]), 1);
    page.family("prefixlb_workers", G, "Worker threads configured.")
        .count("", snapshot.settings.workers as u64);
    page.family(
        "prefixlb_draining",
        G,
        "1 while the process finishes its streams and takes no new requests.",
    )
    .count("", u64::from(*shared.phase.borrow() != Phase::Serving));
    page.family(
        "prefixlb_config_generation",
        G,
        "Number of the configuration in force; each reload that takes effect raises it.",
    )
    .count("", snapshot.generation);
    page.family(
        "prefixlb_config_reloads_total",
        C,
        "Reloads of the configuration, by result; refused: the old one stayed in force.",
    )
    .count("result=\"applied\"", shared.metrics.reloads.get())
    .count("result=\"refused\"", shared.metrics.reloads_refused.get());
}

fn clients(page: &mut Page, shared: &Shared) {
    let counted = &shared.metrics;
    let open = |n: i64| u64::try_from(n).unwrap_or(0);
    page.family(
        "prefixlb_client_connections_total",
        C,
        "Client connections accepted.",
    )
    .count("", counted.connections.get());
    page.family(
        "prefixlb_client_connections_open",
        G,
        "Client connections open now.",
    )
    .count("", open(counted.connections_open.get()));
    page.family(
        "prefixlb_requests_total",
        C,
        "Requests whose head was read.",
    )
    .count("", counted.requests.get());
    page.family(
        "prefixlb_requests_active",
        G,
        "Requests in flight now, from head to end.",
    )
    .count("", open(counted.requests_active.get()));
    page.family(
        "prefixlb_failures_total",
        C,
        "Answers that prefixlb gave itself and transfers that broke off, by reason.",
    );
    for reason in Reason::ALL {
        let count = counted.failures[reason as usize].get();
        page.count(&labels(&[("reason", reason.as_str())]), count);
    }
    page.family(
        "prefixlb_keyless_requests_total",
        C,
        "Requests whose body gave no prefix key, by why; they are balanced by load.",
    );
    for why in NoKey::ALL {
        let count = counted.no_key[why as usize].get();
        page.count(&labels(&[("why", no_key_label(why))]), count);
    }
    page.family(
        "prefixlb_bad_header_keys_total",
        C,
        "Header keys that were malformed and ignored.",
    )
    .count("", counted.bad_header_keys.get());
    page.family(
        "prefixlb_log_lines_dropped_total",
        C,
        "Request-log lines dropped because the writer was behind.",
    )
    .count("", counted.log_dropped.get());
}

fn pools(page: &mut Page, shared: &Shared, pools: &[Arc<Pool>]) {
    let each = |page: &mut Page, read: &dyn Fn(&Pool) -> f64| {
        for pool in pools {
            page.number(&labels(&[("pool", &pool.settings.name)]), read(pool));
        }
    };
    page.family(
        "prefixlb_pool_waiting_requests",
        G,
        "Requests waiting now for a backend below its cap.",
    );
    each(page, &|pool| pool.metrics.queued.get().max(0) as f64);
    page.family(
        "prefixlb_pool_queued_requests_total",
        C,
        "Requests that had to wait for a backend below its cap.",
    );
    each(page, &|pool| pool.metrics.queued_total.get() as f64);
    page.family(
        "prefixlb_pool_panic_picks_total",
        C,
        "Picks among backends that are all out, in panic mode.",
    );
    each(page, &|pool| pool.metrics.panic_picks.get() as f64);
    page.family(
        "prefixlb_pool_index_evictions_total",
        C,
        "Blocks evicted from the prefix index because a backend's cache is believed full.",
    );
    each(page, &|pool| pool.picker.index().evictions() as f64);
    page.family(
        "prefixlb_pool_index_bytes",
        G,
        "Memory of the pool's prefix index; fixed.",
    );
    each(page, &|pool| pool.picker.index().bytes() as f64);
    page.family(
        "prefixlb_pool_charged_skew_ratio",
        G,
        "Most requests ever charged to one backend of the pool, over the mean of all; 1 is even, NaN: none yet.",
    );
    each(page, &|pool| {
        skew(shared, pool, |cell| cell.charged.load(Relaxed))
    });
    page.family(
        "prefixlb_pool_active_skew_ratio",
        G,
        "Most requests now in flight on one backend of the pool, over the mean of all; 1 is even, NaN: none.",
    );
    each(page, &|pool| {
        skew(shared, pool, |cell| cell.active.load(Relaxed))
    });
}

fn skew(shared: &Shared, pool: &Pool, read: impl Fn(&LedgerCell) -> u64) -> f64 {
    let loads = pool
        .backends
        .iter()
        .map(|backend| read(shared.ledger.cell(backend.slot)));
    let (most, sum) = loads.fold((0, 0), |(most, sum), n| (n.max(most), sum + n));
    most as f64 * pool.backends.len() as f64 / sum as f64
}

const fn no_key_label(why: NoKey) -> &'static str {
    match why {
        NoKey::NotLookedAt => "not_looked_at",
        NoKey::Malformed => "malformed",
        NoKey::TooDeep => "too_deep",
        NoKey::NoPrompt => "no_prompt",
    }
}

/// Start of the process in seconds since 1970; read once, so that a clock that is set does not move it.
fn start_time(shared: &Shared) -> f64 {
    static START: OnceLock<f64> = OnceLock::new();
    *START.get_or_init(|| {
        let since_1970 = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        since_1970
            .saturating_sub(shared.epoch.elapsed())
            .as_secs_f64()
    })
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}
