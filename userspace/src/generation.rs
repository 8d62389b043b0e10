//! A generation: from settings to a snapshot, and from one snapshot to the next.
//!
//! A change is a diff and then ordered writes. New backends get their ledger slot and are present before the
//! snapshot that names them is swapped in; backends that left lose their state bits after it, when no worker
//! can pick them from the new snapshot any more. What a pool or backend has learnt stays with its name.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use prefixlb_common::ledger::{LEDGER_SLOTS, STATE_HEALTHY, STATE_PRESENT};
use xxhash_rust::xxh3::xxh3_64;

use crate::backend::health::Passive;
use crate::backend::resolve::{Resolution, literal};
use crate::config::{BackendSettings, PoolSettings, Settings};
use crate::metrics::{BackendMetrics, PoolMetrics};
use crate::picker::ledger::fixed_weight;
use crate::picker::{Ledger, Member, Picker};
use crate::proxy::Waiters;
use crate::state::{Backend, Pool, Shared, Snapshot};

/// Builds the snapshot for `settings`, keeping what `previous` has learnt.
///
/// Backends of the first generation count as healthy at once, so that the first request is served without
/// waiting for a probe; later ones must pass a probe first, if there are probes.
pub fn build(
    settings: Settings,
    previous: Option<&Snapshot>,
    ledger: Ledger,
) -> Result<Snapshot, String> {
    let wanted: usize = settings.pools.iter().map(|pool| pool.backends.len()).sum();
    if wanted > LEDGER_SLOTS as usize {
        return Err(format!(
            "{wanted} backends are configured, and there is room for {LEDGER_SLOTS}: remove some"
        ));
    }
    let mut taken = HashSet::new();
    let mut pools = Vec::with_capacity(settings.pools.len());
    for pool in &settings.pools {
        let old = previous.and_then(|snapshot| find_pool(snapshot, &pool.name));
        // A policy set at run time stays until the file itself says something new.
        let tau = old
            .filter(|old| old.settings.policy == pool.policy)
            .map_or_else(
                || pool.policy.effective_tau(),
                |old| old.picker.policy().effective_tau(),
            );
        let mut backends = Vec::with_capacity(pool.backends.len());
        for backend in &pool.backends {
            let kept = old.and_then(|pool| find_backend(pool, backend));
            let built = match kept {
                Some(kept) => kept.clone(),
                None => admit(backend, pool, previous.is_none(), ledger, &mut taken)?,
            };
            let cell = ledger.cell(built.slot);
            cell.cap.store(backend.max_active.unwrap_or(0), Relaxed);
            cell.tau.store(tau, Relaxed);
            backends.push(built);
        }
        pools.push(Arc::new(build_pool(pool, backends, old, &settings)));
    }
    Ok(Snapshot {
        generation: previous.map_or(1, |snapshot| snapshot.generation + 1),
        settings,
        pools,
    })
}

/// Swaps `next` in and takes leave of the backends that are not in it.
pub fn install(shared: &Shared, next: Snapshot) {
    let kept: HashSet<u16> = next
        .pools
        .iter()
        .flat_map(|pool| pool.backends.iter().map(|backend| backend.slot))
        .collect();
    for pool in &next.pools {
        set_members(pool);
    }
    let old = shared.snapshot.swap(Arc::new(next));
    for backend in old.pools.iter().flat_map(|pool| &pool.backends) {
        if !kept.contains(&backend.slot) {
            shared.ledger.cell(backend.slot).state.store(0, Relaxed);
            shared.signals.clear(backend.slot);
            backend.drop_pooled();
        }
    }
}

/// Tells the picker which backends there are, with the weights that were meant.
fn set_members(pool: &Pool) {
    let backends = pool.settings.backends.iter();
    let weights: Vec<u32> = backends.map(|b| fixed_weight(b.weight, 1.0)).collect();
    pool.picker.set_members(&pool.members, &weights);
}

fn find_pool<'s>(snapshot: &'s Snapshot, name: &str) -> Option<&'s Arc<Pool>> {
    snapshot
        .pools
        .iter()
        .find(|pool| pool.settings.name == name)
}

fn find_backend<'p>(pool: &'p Pool, wanted: &BackendSettings) -> Option<&'p Arc<Backend>> {
    pool.backends.iter().find(|backend| {
        let has = &backend.settings;
        has.name == wanted.name && has.host == wanted.host && has.port == wanted.port
    })
}

/// Gives a new backend its slot.
fn admit(
    settings: &BackendSettings,
    pool: &PoolSettings,
    first_generation: bool,
    ledger: Ledger,
    taken: &mut HashSet<u16>,
) -> Result<Arc<Backend>, String> {
    let Some(slot) = free_slot(ledger, taken) else {
        return Err(format!(
            "no ledger slot is free for backend {}: requests to removed backends are still running, reload again later",
            settings.name
        ));
    };
    taken.insert(slot);
    let cell = ledger.cell(slot);
    cell.generation.fetch_add(1, Relaxed);
    cell.prefill_tokens.store(0, Relaxed);
    cell.charged.store(0, Relaxed);
    let healthy = first_generation || !pool.health.active;
    let state = STATE_PRESENT | if healthy { STATE_HEALTHY } else { 0 };
    cell.weight
        .store(fixed_weight(settings.weight, 1.0), Relaxed);
    cell.state.store(state, Relaxed);
    let addrs = literal(&settings.host, settings.port);
    Ok(Arc::new(Backend {
        settings: settings.clone(),
        slot,
        authority: settings.authority(),
        addrs: ArcSwap::from_pointee(addrs.into_iter().collect()),
        resolution: Resolution::default(),
        pool_epoch: AtomicU64::new(0),
        passive: Passive::new(ledger, slot, &pool.health),
        metrics: BackendMetrics::default(),
    }))
}

/// A slot that no backend has and no flow still owes to.
fn free_slot(ledger: Ledger, taken: &HashSet<u16>) -> Option<u16> {
    (0..LEDGER_SLOTS as u16).find(|slot| {
        let cell = ledger.cell(*slot);
        !taken.contains(slot)
            && cell.state.load(Relaxed) & STATE_PRESENT == 0
            && cell.active.load(Relaxed) == 0
    })
}

fn build_pool(
    settings: &PoolSettings,
    backends: Vec<Arc<Backend>>,
    old: Option<&Arc<Pool>>,
    all: &Settings,
) -> Pool {
    let members: Vec<Member> = backends
        .iter()
        .map(|backend| Member {
            slot: backend.slot,
            identity: xxh3_64(backend.settings.name.as_bytes()),
        })
        .collect();
    let Some(old) = old else {
        let ratio = (all.key.bytes_per_token * 1024.0) as u32;
        let pool = Pool {
            settings: settings.clone(),
            backends,
            members,
            picker: Arc::new(Picker::new(settings, &all.key)),
            waiters: Arc::new(Waiters::default()),
            metrics: Arc::new(PoolMetrics::default()),
            bytes_per_token_fp: Arc::new(AtomicU32::new(ratio)),
        };
        set_members(&pool);
        return pool;
    };
    if old.settings.policy != settings.policy {
        old.picker.set_policy(settings.policy.clone());
    }
    old.picker.set_panic(settings.health.panic);
    Pool {
        settings: settings.clone(),
        backends,
        members,
        picker: old.picker.clone(),
        waiters: old.waiters.clone(),
        metrics: old.metrics.clone(),
        bytes_per_token_fp: old.bytes_per_token_fp.clone(),
    }
}
