//! Readiness: whether it makes sense to send this process a request.
//!
//! Not while it drains. Otherwise it is ready as long as *some* pool can take a request: who takes a
//! balancer out of service because one of its models is down takes the other models down with it, and its
//! twins see the same backends anyway. The answer names the pools that cannot.
//!
//! A pool can take a request if a backend of it admits, or, in panic mode, if there is one that no operator
//! drains: panic mode uses backends against their probes' word, never against an operator's. A backend whose
//! name was never resolved is none: right after the start that is so for a moment.

use std::sync::atomic::Ordering::Relaxed;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use prefixlb_common::ledger::{LedgerEntry, STATE_DRAINING};
use serde_json::json;

use crate::state::{Phase, Pool, Shared};

/// 200 or 503, and why.
pub fn answer(shared: &Shared) -> Response {
    let draining = *shared.phase.borrow() != Phase::Serving;
    let snapshot = shared.snapshot.load();
    let (able, unable): (Vec<_>, Vec<_>) = snapshot
        .pools
        .iter()
        .partition(|pool| takes_requests(shared, pool));
    let ready = !draining && !able.is_empty();
    let unable: Vec<&str> = unable.iter().map(|p| p.settings.name.as_str()).collect();
    let body = json!({
        "ready": ready,
        "draining": draining,
        "pools_without_backend": unable,
    });
    let status = if ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(body)).into_response()
}

fn takes_requests(shared: &Shared, pool: &Pool) -> bool {
    pool.backends.iter().any(|backend| {
        let state = shared.ledger.cell(backend.slot).state.load(Relaxed);
        let panics = pool.settings.health.panic && state & STATE_DRAINING == 0;
        !backend.addrs.load().is_empty() && (panics || LedgerEntry::admits(state))
    })
}
