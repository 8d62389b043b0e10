//! The policies without a gate.

use prefixlb_common::gate::{mix, rank};
use prefixlb_common::ledger::WEIGHT_ONE;
use prefixlb_common::maglev;
use xxhash_rust::xxh3::xxh3_64;

use super::pick::{Candidate, Choice, Field, PickReason};
use crate::config::HashOn;

/// In turn; with unequal weights, by turns of a low-discrepancy sequence over the weights.
pub(super) fn round_robin<'f>(field: &'f Field<'_>, turn: u64) -> Choice<'f> {
    let candidates = field.candidates;
    let equal = candidates.iter().all(|c| c.weight == candidates[0].weight);
    let chosen = if equal {
        &candidates[(turn % candidates.len() as u64) as usize]
    } else {
        // Multiples of the golden ratio cover the unit interval evenly, whatever the number of turns.
        let fraction = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        by_weight(candidates, fraction)
    };
    (chosen, PickReason::Load)
}

/// The candidate at `fraction` / 2³² of the summed weights.
fn by_weight(candidates: &[Candidate], fraction: u64) -> &Candidate {
    let sum: u64 = candidates.iter().map(|c| u64::from(c.weight)).sum();
    let mut at = ((u128::from(sum) * u128::from(fraction)) >> 32) as u64;
    for candidate in candidates {
        let weight = u64::from(candidate.weight);
        if at < weight {
            return candidate;
        }
        at -= weight;
    }
    &candidates[0]
}

/// Least load, then fewest requests; ties by the key's order or by chance, never "the first".
pub(super) fn least_load<'f>(field: &'f Field<'_>, reason: PickReason) -> Choice<'f> {
    let word = field.tie_word();
    let least = field
        .candidates
        .iter()
        .min_by_key(|c| (c.load, c.active, rank(word, c.identity)));
    (least.unwrap_or(&field.candidates[0]), reason)
}

/// The less loaded of two chosen at random.
pub(super) fn power_of_two<'f>(field: &'f Field<'_>) -> Choice<'f> {
    let candidates = field.candidates;
    let many = candidates.len() as u64;
    let first = (field.request.random % many) as usize;
    let step = 1 + (mix(field.request.random, 1) % (many - 1).max(1)) as usize;
    let second = (first + step) % candidates.len();
    let pair = [&candidates[first], &candidates[second]];
    let less = usize::from((pair[1].load, pair[1].active) < (pair[0].load, pair[0].active));
    (pair[less], PickReason::Load)
}

/// By Maglev over the key, the session or a field; without any, by load.
pub(super) fn consistent_hash<'f>(field: &'f Field<'_>) -> Choice<'f> {
    // The first block stays the same while a conversation grows.
    let hash = match field.policy.hash_on {
        HashOn::Key => field
            .request
            .key
            .and_then(|key| key.chain().first().copied()),
        HashOn::Session | HashOn::Header(_) => field.request.session.map(xxh3_64),
    };
    hash.map_or_else(
        || least_load(field, PickReason::NoKey),
        |hash| (by_place(field, hash), PickReason::Hash),
    )
}

/// By Maglev over the session id, if there is one.
pub(super) fn session<'f>(field: &'f Field<'_>) -> Option<Choice<'f>> {
    let id = field.request.session?;
    Some((by_place(field, xxh3_64(id)), PickReason::Session))
}

/// The owner of the hash's place; while it can not be had, its keys go to the owners of the places that
/// follow, and come home when it is back.
fn by_place<'f>(field: &'f Field<'_>, hash: u64) -> &'f Candidate {
    let mut at = hash;
    for _ in 0..128 {
        let owner = field.table.get(maglev::place(at));
        let member = owner.and_then(|owner| field.members.get(usize::from(*owner)));
        let candidate = member.and_then(|m| field.candidates.iter().find(|c| c.slot == m.slot));
        if let Some(candidate) = candidate {
            return candidate;
        }
        at = mix(at, 1);
    }
    // So many misses: nearly all are out. The key's own order among those that are left is as stable.
    let of = |c: &&Candidate| rank(hash, c.identity);
    field
        .candidates
        .iter()
        .max_by_key(of)
        .unwrap_or(&field.candidates[0])
}

/// The weighted sum of match, free queue and free cache (the blend of routers that know no gate).
pub(super) fn weighted_sum<'f>(field: &'f Field<'_>) -> Choice<'f> {
    let [by_match, by_queue, by_cache] = field.policy.weights;
    let queue = |c: &Candidate| {
        let signal = field.signals.load(c.slot, field.request.now_ms);
        // What the engine says lags; what we have in flight does not.
        let told = signal.waiting.map_or(0.0, f64::from);
        told.max(0.0) + c.active as f64 / f64::from(WEIGHT_ONE)
    };
    let queues = field.candidates.iter().map(queue);
    let (low, high) = queues.fold((f64::MAX, 0f64), |(l, h), q| (l.min(q), h.max(q)));
    let score = |c: &Candidate| {
        let matched = f64::from(c.matched) / field.blocks.max(1) as f64;
        let free_queue = if high > low {
            (high - queue(c)) / (high - low)
        } else {
            1.0
        };
        let used = field.signals.load(c.slot, field.request.now_ms).kv_use;
        by_match * matched + by_queue * free_queue + by_cache * (1.0 - used.map_or(0.0, f64::from))
    };
    let word = field.tie_word();
    let best = field.candidates.iter().max_by(|a, b| {
        let by_rank = || rank(word, a.identity).cmp(&rank(word, b.identity));
        score(a).total_cmp(&score(b)).then_with(by_rank)
    });
    let best = best.unwrap_or(&field.candidates[0]);
    let reason = if field.blocks == 0 {
        PickReason::NoKey
    } else if field.is_warm(best) {
        PickReason::Warm
    } else if field.warm_elsewhere || field.candidates.iter().any(|c| field.is_warm(c)) {
        PickReason::Spill
    } else {
        PickReason::Cold
    };
    (best, reason)
}
