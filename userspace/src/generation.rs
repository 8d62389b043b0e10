//! A generation: from settings to a snapshot, and from one snapshot to the next.
//!
//! A change is a diff and then ordered writes. New backends get their ledger slot and are present before the
//! snapshot that names them is swapped in; backends that left are retired after it, when no worker can pick
//! them from the new snapshot any more. What a pool or backend has learnt stays with its name.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use prefixlb_common::ledger::{LEDGER_SLOTS, STATE_HEALTHY, STATE_PRESENT, STATE_RETIRED};
use xxhash_rust::xxh3::xxh3_64;

use crate::backend::health::Passive;
use crate::backend::resolve::{Resolution, literal};
use crate::config::{BackendSettings, PoolSettings, Settings};
use crate::metrics::BackendMetrics;
use crate::picker::ledger::fixed_weight;
use crate::picker::{Ledger, Member, Picker};
use crate::state::{Backend, Pool, Shared, SlotLease, Snapshot};

/// Builds the snapshot for `settings`, keeping what `previous` has learnt.
///
/// Backends of the first generation count as healthy at once, so that the first request is served without
/// waiting for a probe; later ones must pass a probe first, if there are probes and another can serve until
/// then.
pub fn build(
    settings: Settings,
    previous: Option<&Snapshot>,
    ledger: Ledger,
) -> Result<Snapshot, String> {
    let mut admitted = Vec::with_capacity(settings.pools.len());
    for pool in &settings.pools {
        let old = previous.and_then(|snapshot| find_pool(snapshot, &pool.name));
        // Up to here a refusal leaves no trace: backends admitted in vain give their slots back.
        admitted.push((pool, old, backends(pool, old, previous.is_none(), ledger)?));
    }
    let mut pools = Vec::with_capacity(admitted.len());
    for (pool, old, backends) in admitted {
        write_words(pool, old, &backends, ledger);
        let old = old.map(|old| {
            (
                &**old,
                previous.is_some_and(|p| p.settings.key == settings.key),
            )
        });
        pools.push(Arc::new(build_pool(pool, backends, old, &settings)));
    }
    Ok(Snapshot {
        generation: previous.map_or(1, |snapshot| snapshot.generation + 1),
        settings,
        pools,
    })
}

/// The pool's backends: those that were there before, and new ones on slots of their own.
fn backends(
    pool: &PoolSettings,
    old: Option<&Arc<Pool>>,
    first_generation: bool,
    ledger: Ledger,
) -> Result<Vec<Arc<Backend>>, String> {
    let kept = |backend| old.and_then(|pool| find_backend(pool, backend));
    // Waiting for a probe helps only where another backend can serve in the meantime.
    let trusted = first_generation
        || !pool.health.active
        || pool.backends.iter().all(|backend| kept(backend).is_none());
    let each = pool.backends.iter().map(|backend| match kept(backend) {
        Some(kept) => Ok(kept.clone()),
        None => admit(backend, pool, trusted, ledger),
    });
    each.collect()
}

/// The ledger words that settings decide alone; weight is slow start's and state is health's.
fn write_words(
    pool: &PoolSettings,
    old: Option<&Arc<Pool>>,
    backends: &[Arc<Backend>],
    ledger: Ledger,
) {
    // A policy set at run time stays until the file itself says something new.
    let tau = old
        .filter(|old| old.settings.policy == pool.policy)
        .map_or_else(|| pool.policy.clone(), |old| (*old.picker.policy()).clone())
        .effective_tau();
    for (settings, backend) in pool.backends.iter().zip(backends) {
        let cell = ledger.cell(backend.slot);
        cell.cap.store(settings.max_active.unwrap_or(0), Relaxed);
        cell.tau.store(tau, Relaxed);
    }
}

/// Swaps `next` in and takes leave of the backends that are not in it.
pub fn install(shared: &Shared, next: Snapshot) {
    let kept: HashSet<u16> = next
        .pools
        .iter()
        .flat_map(|pool| pool.backends.iter().map(|backend| backend.slot))
        .collect();
    for pool in &next.pools {
        forget_earlier_tenants(pool, shared);
        pool.picker.set_members(&pool.members);
    }
    let old = shared.snapshot.swap(Arc::new(next));
    for backend in old.pools.iter().flat_map(|pool| &pool.backends) {
        if !kept.contains(&backend.slot) {
            shared
                .ledger
                .cell(backend.slot)
                .state
                .store(STATE_RETIRED, Relaxed);
            shared.signals.clear(backend.slot);
            backend.drop_pooled();
        }
    }
}

/// A late answer may have taught the index something of a slot after its backend had left. If the slot has a
/// new backend now, the picker is told of a set without it first, so that it starts with nothing.
fn forget_earlier_tenants(pool: &Pool, shared: &Shared) {
    let current = shared.snapshot.load();
    let known = find_pool(&current, &pool.settings.name);
    let (stay, come): (Vec<Member>, Vec<Member>) = pool
        .members
        .iter()
        .cloned()
        .partition(|member| known.is_some_and(|old| old.backend(member.slot).is_some()));
    let recycled = |member: &Member| shared.ledger.cell(member.slot).generation.load(Relaxed) > 1;
    if known.is_some() && come.iter().any(recycled) {
        pool.picker.set_members(&stay);
    }
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

/// Gives a new backend its slot; `trusted` ones are picked before their first probe.
fn admit(
    settings: &BackendSettings,
    pool: &PoolSettings,
    trusted: bool,
    ledger: Ledger,
) -> Result<Arc<Backend>, String> {
    let Some(slot) = free_slot(ledger) else {
        return Err(format!(
            "no ledger slot is free for backend {}: requests to removed backends are still running, reload again later",
            settings.name
        ));
    };
    let cell = ledger.cell(slot);
    cell.generation.fetch_add(1, Relaxed);
    cell.prefill_tokens.store(0, Relaxed);
    cell.charged.store(0, Relaxed);
    cell.cap.store(settings.max_active.unwrap_or(0), Relaxed);
    cell.weight
        .store(fixed_weight(settings.weight, 1.0), Relaxed);
    let healthy = if trusted { STATE_HEALTHY } else { 0 };
    cell.state.store(STATE_PRESENT | healthy, Relaxed);
    let addrs = literal(&settings.host, settings.port);
    Ok(Arc::new(Backend {
        settings: settings.clone(),
        slot,
        lease: SlotLease { ledger, slot },
        authority: host_field(settings),
        addrs: ArcSwap::from_pointee(addrs.into_iter().collect()),
        resolution: Resolution::default(),
        pool_epoch: AtomicU64::new(0),
        passive: Passive::new(ledger, slot, &pool.health),
        metrics: BackendMetrics::default(),
    }))
}

/// The `Host` field for a backend: a zone id means something on this machine only and stays here (RFC 6874).
fn host_field(settings: &BackendSettings) -> String {
    let mut sent = settings.clone();
    if let Some((address, _zone)) = settings.host.split_once('%') {
        sent.host = address.to_owned();
    }
    sent.authority()
}

/// A slot that no backend has and no flow still owes to; one that was never used if there is one.
fn free_slot(ledger: Ledger) -> Option<u16> {
    let free = |slot: &u16| {
        let cell = ledger.cell(*slot);
        cell.state.load(Relaxed) == 0 && cell.active.load(Relaxed) == 0
    };
    (0..LEDGER_SLOTS as u16)
        .filter(free)
        .min_by_key(|slot| ledger.cell(*slot).generation.load(Relaxed))
}

/// `old` is the pool of this name before, and whether keys are still read as they were.
fn build_pool(
    settings: &PoolSettings,
    backends: Vec<Arc<Backend>>,
    old: Option<(&Pool, bool)>,
    all: &Settings,
) -> Pool {
    let members: Vec<Member> = backends
        .iter()
        .zip(&settings.backends)
        .map(|(backend, meant)| Member {
            slot: backend.slot,
            identity: xxh3_64(backend.settings.name.as_bytes()),
            weight: fixed_weight(meant.weight, 1.0),
        })
        .collect();
    let new_picker = || {
        let picker = Picker::new(settings, &all.key);
        picker.set_members(&members);
        Arc::new(picker)
    };
    let ratio = (all.key.bytes_per_token * 1024.0) as u32;
    // Hashes of other blocks, or an index of another size, are of no use.
    let picker = match old {
        Some((old, true)) if old.settings.cache_tokens == settings.cache_tokens => {
            if old.settings.policy != settings.policy {
                old.picker.set_policy(settings.policy.clone());
            }
            old.picker.set_panic(settings.health.panic);
            old.picker.clone()
        }
        Some((old, _)) if old.settings.policy == settings.policy => {
            let picker = new_picker();
            picker.set_policy((*old.picker.policy()).clone());
            picker
        }
        _ => new_picker(),
    };
    let old = old.map(|(old, _)| old);
    Pool {
        settings: settings.clone(),
        picker,
        waiters: old.map_or_else(Arc::default, |old| old.waiters.clone()),
        metrics: old.map_or_else(Arc::default, |old| old.metrics.clone()),
        bytes_per_token_fp: old.map_or_else(
            || Arc::new(AtomicU32::new(ratio)),
            |old| old.bytes_per_token_fp.clone(),
        ),
        backends,
        members,
    }
}
