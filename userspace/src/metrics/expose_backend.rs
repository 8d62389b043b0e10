//! The families of the metrics page that have a line for each backend.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prefixlb_common::ledger::{STATE_DRAINING, STATE_EJECTED, STATE_HEALTHY, WEIGHT_ONE};

use crate::metrics::expose_text::{Kind, Page, labels};
use crate::metrics::{BackendMetrics, Counter, Histogram};
use crate::picker::ledger::LedgerCell;
use crate::picker::{EngineSignal, PickReason};
use crate::state::{Pool, Shared};

use Kind::{Counter as C, Gauge as G};

/// Writes them all.
pub fn backends(page: &mut Page, shared: &Shared, pools: &[Arc<Pool>]) {
    let rows = rows(shared, pools);
    load(page, &rows);
    signals(page, &rows);
    outcomes(page, &rows);
    hit_shares(page, &rows);
    counters(page, &rows);
    latencies(page, &rows);
}

/// A backend's line in every family.
struct Row<'a> {
    labels: String,
    cell: &'static LedgerCell,
    signal: EngineSignal,
    counted: &'a BackendMetrics,
    index_blocks: u32,
    resolution_failing: bool,
}

fn rows<'a>(shared: &Shared, pools: &'a [Arc<Pool>]) -> Vec<Row<'a>> {
    let now = shared.now_ms();
    let backends = pools
        .iter()
        .flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)));
    backends
        .map(|(pool, backend)| Row {
            labels: labels(&[
                ("pool", &pool.settings.name),
                ("backend", &backend.settings.name),
            ]),
            cell: shared.ledger.cell(backend.slot),
            signal: shared.signals.load(backend.slot, now),
            counted: &backend.metrics,
            index_blocks: pool.picker.index().held(backend.slot),
            resolution_failing: backend.resolution.is_failing(),
        })
        .collect()
}

fn load(page: &mut Page, rows: &[Row<'_>]) {
    type Read = fn(&Row<'_>) -> f64;
    let families: [(&'static str, &str, Read); 10] = [
        (
            "prefixlb_backend_active_requests",
            "Requests picked and not ended.",
            |row| row.cell.active.load(Relaxed) as f64,
        ),
        (
            "prefixlb_backend_prefill_tokens",
            "Uncached prompt tokens in flight, held from the pick to the first body byte (estimated).",
            |row| row.cell.prefill_tokens.load(Relaxed) as f64,
        ),
        (
            "prefixlb_backend_healthy",
            "1 while active health checks pass, or are off.",
            |row| bit(row.cell, STATE_HEALTHY),
        ),
        (
            "prefixlb_backend_draining",
            "1 while an operator wants no new requests on it.",
            |row| bit(row.cell, STATE_DRAINING),
        ),
        (
            "prefixlb_backend_ejected",
            "1 while passive health keeps it out.",
            |row| bit(row.cell, STATE_EJECTED),
        ),
        (
            "prefixlb_backend_weight",
            "Effective weight: the configured one times slow start.",
            |row| f64::from(row.cell.weight.load(Relaxed)) / f64::from(WEIGHT_ONE),
        ),
        (
            "prefixlb_backend_tau",
            "The gate, beyond which stickiness ends; tokens, or requests under the scorer active-requests.",
            |row| row.cell.tau.load(Relaxed) as f64,
        ),
        (
            "prefixlb_backend_cap_requests",
            "Most requests in flight; 0: no cap.",
            |row| f64::from(row.cell.cap.load(Relaxed)),
        ),
        (
            "prefixlb_backend_index_blocks",
            "Prompt blocks that the index believes cached there.",
            |row| f64::from(row.index_blocks),
        ),
        (
            "prefixlb_backend_resolution_failing",
            "1 while its name cannot be resolved and older addresses are in use.",
            |row| f64::from(u8::from(row.resolution_failing)),
        ),
    ];
    for (name, help, read) in families {
        page.family(name, G, help);
        for row in rows {
            page.number(&row.labels, read(row));
        }
    }
}

fn bit(cell: &LedgerCell, bit: u32) -> f64 {
    f64::from(u8::from(cell.state.load(Relaxed) & bit != 0))
}

fn signals(page: &mut Page, rows: &[Row<'_>]) {
    type Read = fn(&EngineSignal) -> Option<f64>;
    let families: [(&'static str, &str, Read); 3] = [
        (
            "prefixlb_engine_waiting_requests",
            "Requests in the engine's own queue, as it last said.",
            |signal| signal.waiting.map(f64::from),
        ),
        (
            "prefixlb_engine_running_requests",
            "Requests that the engine runs, as it last said.",
            |signal| signal.running.map(f64::from),
        ),
        (
            "prefixlb_engine_kv_use_ratio",
            "The engine's KV cache in use, 0-1, as it last said.",
            |signal| signal.kv_use.map(f64::from),
        ),
    ];
    for (name, help, read) in families {
        page.family(name, G, help);
        for row in rows {
            if let Some(value) = read(&row.signal) {
                page.number(&row.labels, value);
            }
        }
    }
}

fn outcomes(page: &mut Page, rows: &[Row<'_>]) {
    page.family(
        "prefixlb_backend_requests_charged_total",
        C,
        "Requests ever charged to the backend's place in the ledger.",
    );
    for row in rows {
        page.count(&row.labels, row.cell.charged.load(Relaxed));
    }
    page.family(
        "prefixlb_backend_responses_total",
        C,
        "Answers of the backend, by status class.",
    );
    for row in rows {
        for (class, count) in ["2xx", "3xx", "4xx", "5xx"]
            .iter()
            .zip(&row.counted.responses)
        {
            page.count(&format!("{},class=\"{class}\"", row.labels), count.get());
        }
    }
    page.family(
        "prefixlb_backend_picks_total",
        C,
        "Picks of the backend, by reason; spill: a warm backend was left because of the gate.",
    );
    for row in rows {
        for reason in PickReason::ALL {
            let labels = format!("{},reason=\"{}\"", row.labels, reason.as_str());
            page.count(&labels, row.counted.picks[reason as usize].get());
        }
    }
    page.family(
        "prefixlb_backend_pooled_connections",
        G,
        "Idle pooled connections, all workers.",
    );
    for row in rows {
        page.number(&row.labels, row.counted.pool_idle.get().max(0) as f64);
    }
}

fn latencies(page: &mut Page, rows: &[Row<'_>]) {
    type Read = fn(&BackendMetrics) -> &Histogram;
    let histograms: [(&'static str, &str, Read); 2] = [
        (
            "prefixlb_backend_ttft_seconds",
            "From a request's first byte to the first byte of the answer's body.",
            |counted| &counted.ttft,
        ),
        (
            "prefixlb_backend_request_duration_seconds",
            "From a request's first byte to the end of its answer.",
            |counted| &counted.duration,
        ),
    ];
    for (name, help, read) in histograms {
        page.family(name, Kind::Histogram, help);
        for row in rows {
            page.histogram(&row.labels, read(row.counted));
        }
    }
}

fn hit_shares(page: &mut Page, rows: &[Row<'_>]) {
    type Read = fn(&BackendMetrics) -> (&Counter, &Counter);
    let families: [(&'static str, &str, Read); 2] = [
        (
            "prefixlb_backend_hit_share_ratio",
            "Share of prompt tokens that the index believed cached, since start (estimated); NaN: none yet.",
            |counted| (&counted.matched_tokens, &counted.prompt_tokens),
        ),
        (
            "prefixlb_engine_hit_share_ratio",
            "Share of prompt tokens found in the prefix cache by the engine's own count, since start; NaN: not told.",
            |counted| (&counted.engine_hit_tokens, &counted.engine_prompt_tokens),
        ),
    ];
    for (name, help, read) in families {
        page.family(name, G, help);
        for row in rows {
            let (part, whole) = read(row.counted);
            page.number(&row.labels, part.get() as f64 / whole.get() as f64);
        }
    }
}

fn counters(page: &mut Page, rows: &[Row<'_>]) {
    type Read = fn(&BackendMetrics) -> &Counter;
    let families: [(&'static str, &str, Read); 16] = [
        (
            "prefixlb_backend_prompt_tokens_total",
            "Prompt tokens of requests sent to the backend (estimated).",
            |m| &m.prompt_tokens,
        ),
        (
            "prefixlb_backend_matched_tokens_total",
            "Of these, tokens that the index believed cached there (estimated).",
            |m| &m.matched_tokens,
        ),
        (
            "prefixlb_engine_prompt_tokens_total",
            "Prompt tokens by the engine's own count, since prefixlb saw it first.",
            |m| &m.engine_prompt_tokens,
        ),
        (
            "prefixlb_engine_hit_tokens_total",
            "Of these, tokens that the engine found in its prefix cache.",
            |m| &m.engine_hit_tokens,
        ),
        (
            "prefixlb_backend_connects_total",
            "Fresh connections opened.",
            |m| &m.connects,
        ),
        (
            "prefixlb_backend_connect_errors_total",
            "Connections that could not be opened.",
            |m| &m.connect_errors,
        ),
        (
            "prefixlb_backend_pool_reuses_total",
            "Requests sent on a pooled connection.",
            |m| &m.pool_reuses,
        ),
        (
            "prefixlb_backend_pool_discards_total",
            "Pooled connections found dead or with surplus bytes.",
            |m| &m.pool_discards,
        ),
        (
            "prefixlb_backend_replays_total",
            "Requests replayed on a fresh connection.",
            |m| &m.replays,
        ),
        (
            "prefixlb_backend_client_aborts_total",
            "Clients that left before the answer ended.",
            |m| &m.client_aborts,
        ),
        (
            "prefixlb_backend_truncated_answers_total",
            "Answers that the backend broke off.",
            |m| &m.truncated,
        ),
        (
            "prefixlb_backend_request_body_bytes_total",
            "Request body bytes sent to the backend.",
            |m| &m.request_bytes,
        ),
        (
            "prefixlb_backend_response_body_bytes_total",
            "Response body bytes relayed from the backend.",
            |m| &m.response_bytes,
        ),
        (
            "prefixlb_backend_probe_failures_total",
            "Health probes that failed or came too late.",
            |m| &m.probe_failures,
        ),
        (
            "prefixlb_backend_ejections_total",
            "Times that passive health took the backend out.",
            |m| &m.ejections,
        ),
        (
            "prefixlb_backend_scrape_failures_total",
            "Scrapes of the engine's metrics page that failed.",
            |m| &m.scrape_failures,
        ),
    ];
    for (name, help, read) in families {
        page.family(name, C, help);
        for row in rows {
            page.count(&row.labels, read(row.counted).get());
        }
    }
}
