//! `/backends`: what is known of every backend, for people and scripts.

use std::sync::atomic::Ordering::Relaxed;

use prefixlb_common::ledger::{
    LedgerEntry, STATE_DRAINING, STATE_EJECTED, STATE_HEALTHY, WEIGHT_ONE,
};
use serde_json::{Map, Value, json};

use crate::picker::PickReason;
use crate::state::{Backend, Pool, Shared};

/// All pools with their backends.
pub fn backends(shared: &Shared) -> Value {
    let snapshot = shared.snapshot.load();
    let pools: Vec<Value> = snapshot
        .pools
        .iter()
        .map(|pool| {
            let backends: Vec<Value> = pool
                .backends
                .iter()
                .map(|it| backend(shared, pool, it))
                .collect();
            json!({
                "name": pool.settings.name,
                "policy": pool.picker.policy().kind.as_str(),
                "queued": pool.metrics.queued.get(),
                "backends": backends,
            })
        })
        .collect();
    json!({"generation": snapshot.generation, "pools": pools})
}

/// One backend.
pub fn backend(shared: &Shared, pool: &Pool, backend: &Backend) -> Value {
    let cell = shared.ledger.cell(backend.slot);
    let state = cell.state.load(Relaxed);
    let signal = shared.signals.load(backend.slot, shared.now_ms());
    let counted = &backend.metrics;
    let picks: Map<String, Value> = PickReason::ALL
        .iter()
        .map(|&reason| {
            let count = counted.picks[reason as usize].get();
            (reason.as_str().to_owned(), count.into())
        })
        .collect();
    let cap = cell.cap.load(Relaxed);
    json!({
        "pool": pool.settings.name,
        "name": backend.settings.name,
        "address": backend.authority,
        "addrs": backend.addrs.load().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "resolution_failing": backend.resolution.is_failing(),
        "state": state_name(state),
        "healthy": state & STATE_HEALTHY != 0,
        "draining": state & STATE_DRAINING != 0,
        "ejected": state & STATE_EJECTED != 0,
        "weight": f64::from(cell.weight.load(Relaxed)) / f64::from(WEIGHT_ONE),
        "active": cell.active.load(Relaxed),
        "prefill_tokens": cell.prefill_tokens.load(Relaxed),
        "cap": (cap != 0).then_some(cap),
        "tau": cell.tau.load(Relaxed),
        "requests": cell.charged.load(Relaxed),
        "picks": picks,
        "signals": {
            "waiting": signal.waiting,
            "running": signal.running,
            "kv_use": signal.kv_use.map(f64::from),
        },
        "hit_share": {
            "estimated": share(counted.matched_tokens.get(), counted.prompt_tokens.get()),
            "engine": share(counted.engine_hit_tokens.get(), counted.engine_prompt_tokens.get()),
        },
    })
}

/// The one word for a backend's state: what an operator did goes before what health says.
fn state_name(state: u32) -> &'static str {
    if state & STATE_DRAINING != 0 {
        "draining"
    } else if state & STATE_EJECTED != 0 {
        "ejected"
    } else if LedgerEntry::admits(state) {
        "healthy"
    } else {
        "unhealthy"
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
