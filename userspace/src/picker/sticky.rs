//! Sticky until saturated: the warm backend, as long as its gate holds.
//!
//! A warm backend's gate closes when its load passes the best load in the pool (`gap`) or nothing (`absolute`)
//! by more than tau. While it is closed, requests that would be warm there spill: least load, and where loads
//! are as good as equal, the rendezvous order of the key, so that a prefix spills to the same second choice,
//! which then is warm too. The gate opens again at a share of tau (hysteresis), else every ended request would
//! call one back.
//!
//! Where nobody is warm and loads are equal, as at night, the key's order decides between its first two
//! backends only as long as the second does not hold so much less that the newcomer would still leave it the
//! emptier: a few large prefixes would else share one cache by chance while others stay empty. Two choices are
//! enough for that, and two instances of prefixlb that know nothing of each other still mostly agree.
//!
//! "As good as equal" is one request of this size: to prefer the key's own order within it keeps a prefix
//! together and costs no more than waiting for one like it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use prefixlb_common::gate::{SHARE_ONE, closed, rank};
use prefixlb_common::ledger::LEDGER_SLOTS;

use super::pick::{Candidate, Choice, Field, PickReason};
use super::plain::least_load;
use crate::config::{GateKind, Scorer};

/// Which backends' gates are closed: one bit a ledger slot.
///
/// One gate a backend, not one a prefix: what closes it is the backend's load, whoever caused it.
#[derive(Debug)]
pub(super) struct Gates([AtomicU64; LEDGER_SLOTS as usize / 64]);

impl Default for Gates {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Gates {
    /// Whether the gate of `slot` is closed, now that it is `over` by so much.
    fn is_closed(&self, slot: u16, over: u64, tau: u64, reopen: u64) -> bool {
        let word = &self.0[usize::from(slot) / 64];
        let bit = 1 << (slot % 64);
        let was = word.load(Relaxed) & bit != 0;
        let is = closed(was, over, tau, reopen);
        if is != was {
            if is {
                word.fetch_or(bit, Relaxed);
            } else {
                word.fetch_and(!bit, Relaxed);
            }
        }
        is
    }
}

/// The sticky choice; without `gates`, stickiness never ends.
pub(super) fn choose<'f>(field: &'f Field<'_>, gates: Option<&Gates>) -> Choice<'f> {
    if field.blocks == 0 {
        return least_load(field, PickReason::NoKey);
    }
    let best_load = field.candidates.iter().map(|c| c.load).min().unwrap_or(0);
    let reopen = (field.policy.hysteresis * SHARE_ONE as f64) as u64;
    let holds = |candidate: &&Candidate| {
        let Some(gates) = gates else {
            return true;
        };
        let over = match field.policy.gate {
            GateKind::Gap => candidate.load - best_load,
            GateKind::Absolute => candidate.load,
        };
        let tau = field.ledger.cell(candidate.slot).tau.load(Relaxed);
        !gates.is_closed(candidate.slot, over, tau, reopen)
    };
    let warm = |candidate: &&Candidate| field.is_warm(candidate);
    if let Some(best) = best(field, field.candidates.iter().filter(warm).filter(holds)) {
        return (best, PickReason::Warm);
    }
    let was_warm = field.warm_elsewhere || field.candidates.iter().any(|c| field.is_warm(c));
    let chosen = best(field, field.candidates.iter()).unwrap_or(&field.candidates[0]);
    match (was_warm, field.is_warm(chosen)) {
        // All gates are closed and the least loaded of all is a warm one: that is no spill.
        (true, true) => (chosen, PickReason::Warm),
        (true, false) => (chosen, PickReason::Spill),
        (false, _) => (chosen, PickReason::Cold),
    }
}

/// The least of load and work to do; among those as good as equal, the first in the key's order.
fn best<'f>(
    field: &Field<'_>,
    candidates: impl Iterator<Item = &'f Candidate> + Clone,
) -> Option<&'f Candidate> {
    let cost = |candidate: &Candidate| match field.policy.scorer {
        Scorer::TokenLoad => candidate.load.saturating_add(field.uncached(candidate)),
        Scorer::ActiveRequests => candidate.load,
    };
    let least = candidates.clone().min_by_key(|c| cost(c))?;
    let slack = match field.policy.scorer {
        Scorer::TokenLoad if field.is_warm(least) => field.uncached(least),
        _ => 0,
    };
    let limit = cost(least).saturating_add(slack);
    let word = field.tie_word();
    let mut first: Option<(u64, &Candidate)> = None;
    let mut second: Option<(u64, &Candidate)> = None;
    for candidate in candidates.filter(|c| cost(c) <= limit) {
        let ranked = Some((rank(word, candidate.identity), candidate));
        if ranked.map(|r| r.0) > first.map(|r| r.0) {
            second = std::mem::replace(&mut first, ranked);
        } else if ranked.map(|r| r.0) > second.map(|r| r.0) {
            second = ranked;
        }
    }
    let (first, second) = (first?.1, second.map(|r| r.1));
    Some(match second {
        Some(second) if is_emptier(field, second, first) => second,
        _ => first,
    })
}

/// Whether a cold prompt had better go to `second`, whose cache would still hold less than that of `first`.
fn is_emptier(field: &Field<'_>, second: &Candidate, first: &Candidate) -> bool {
    let held = |candidate: &Candidate| field.index.held(candidate.slot) as usize;
    first.matched == 0 && second.matched == 0 && held(second) + field.blocks <= held(first)
}
