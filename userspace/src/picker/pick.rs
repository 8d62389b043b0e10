//! The decision for one request: who may have it, who is warm, which policy decides.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use prefixlb_common::gate::weighted;
use prefixlb_common::ledger::{
    LEDGER_SLOTS, LedgerEntry, STATE_DRAINING, STATE_PRESENT, WEIGHT_ONE,
};
use prefixlb_common::maglev;

use super::index::{INDEX_NODES, Index};
use super::sticky::Gates;
use super::{Ledger, PrefixKey, SignalTable};
use crate::config::{KeySettings, PolicyKind, PolicySettings, PoolSettings, Scorer};

/// A chain is followed as far as its matches can be counted.
const MAX_CHAIN: usize = u16::MAX as usize - 1;

/// A backend as picks see it.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its ledger slot: load, state, weight and cap are there.
    pub slot: u16,
    /// Hash of its name: its identity in rendezvous order and Maglev, whatever its place in the file.
    pub identity: u64,
    /// Its configured weight (1/256): its share of Maglev's places. Loads use the ledger's, which knows slow
    /// start.
    pub weight: u32,
}

/// What a pick depends on besides the pool.
#[derive(Clone, Copy, Debug)]
pub struct PickRequest<'a> {
    /// The prefix key, if there is one.
    pub key: Option<&'a PrefixKey>,
    /// The session id or the field that `consistent-hash` hashes, if the policy wants one and it was sent.
    pub session: Option<&'a [u8]>,
    /// The whole prompt, estimated. Tokens.
    pub prompt_tokens: u64,
    /// Slots already tried for this request.
    pub tried: &'a [u16],
    /// The caller's millisecond clock.
    pub now_ms: u64,
    /// A random word, for `power-of-two` and for ties without a key.
    pub random: u64,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The backend's ledger slot.
    pub slot: u16,
    /// Why.
    pub reason: PickReason,
    /// Tokens of the prompt believed to be cached there.
    pub matched_tokens: u64,
    /// Tokens to charge: the rest.
    pub uncached_tokens: u64,
    /// The backend's load before this request, in the scorer's unit, over its weight.
    pub load: u64,
    /// No backend was alive and panic mode picked among all.
    pub panic: bool,
}

/// Why no backend was picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPick {
    /// None is alive (or none is left that was not tried).
    NoneAlive,
    /// All that are alive are at their caps.
    AllFull,
}

/// Why this backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum PickReason {
    /// Warm for the key, and the gate held.
    Warm,
    /// A warm backend was left because of the gate (or its cap).
    Spill,
    /// Nobody was warm: least load, ties by rendezvous.
    Cold,
    /// No key: least load.
    NoKey,
    /// The policy does not look at keys or sessions.
    Load,
    /// By hash (Maglev).
    Hash,
    /// By session id.
    Session,
}

impl PickReason {
    /// Every reason, in index order.
    pub const ALL: [Self; 7] = [
        Self::Warm,
        Self::Spill,
        Self::Cold,
        Self::NoKey,
        Self::Load,
        Self::Hash,
        Self::Session,
    ];
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// The label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Spill => "spill",
            Self::Cold => "cold",
            Self::NoKey => "no_key",
            Self::Load => "load",
            Self::Hash => "hash",
            Self::Session => "session",
        }
    }
}

/// A member that may get the request, and what speaks for and against it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub slot: u16,
    pub identity: u64,
    pub weight: u32,
    /// In the scorer's unit, over the weight.
    pub load: u64,
    /// Requests in flight, over the weight, in 1/256.
    pub active: u64,
    /// Leading blocks of the chain that it is believed to hold.
    pub matched: u16,
}

/// Everything a policy decides from.
#[derive(Debug)]
pub(super) struct Field<'a> {
    pub request: &'a PickRequest<'a>,
    pub policy: &'a PolicySettings,
    pub candidates: &'a [Candidate],
    pub members: &'a [Member],
    pub ledger: &'a Ledger,
    pub signals: &'a SignalTable,
    pub table: &'a [u16],
    pub index: &'a Index,
    pub blocks: usize,
    /// Matched blocks from which a backend is warm.
    pub warm_from: u16,
    /// A backend that is warm is alive but full, or was tried.
    pub warm_elsewhere: bool,
}

impl Field<'_> {
    /// Tokens that the candidate would have to compute.
    pub fn uncached(&self, candidate: &Candidate) -> u64 {
        let tokens = self.request.prompt_tokens;
        if self.blocks == 0 {
            return tokens;
        }
        tokens - tokens * u64::from(candidate.matched) / self.blocks as u64
    }

    pub fn is_warm(&self, candidate: &Candidate) -> bool {
        self.blocks > 0 && candidate.matched >= self.warm_from
    }

    /// What orders backends that are otherwise equal: the key, or chance if there is none.
    pub fn tie_word(&self) -> u64 {
        let first = self.request.key.and_then(|key| key.chain().first());
        first.copied().unwrap_or(self.request.random)
    }
}

/// A policy's choice.
pub(super) type Choice<'a> = (&'a Candidate, PickReason);

/// What a pick needs room for; kept by each thread, so that no pick allocates.
struct Scratch {
    candidates: Vec<Candidate>,
    matched: Vec<u16>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        candidates: Vec::new(),
        matched: vec![0; LEDGER_SLOTS as usize],
    });
}

/// A pool's policy and index.
#[derive(Debug)]
pub struct Picker {
    policy: ArcSwap<PolicySettings>,
    index: Index,
    /// Maglev places → index into the members that were set; built off the path, swapped whole.
    table: ArcSwap<Vec<u16>>,
    known: std::sync::Mutex<Vec<u16>>,
    gates: Gates,
    cursor: AtomicU64,
    panic: std::sync::atomic::AtomicBool,
    block_tokens: f64,
}

impl Picker {
    /// A picker with an empty index.
    #[must_use]
    pub fn new(pool: &PoolSettings, key: &KeySettings) -> Self {
        let block_tokens = key.block_bytes as f64 / key.bytes_per_token;
        let blocks = (pool.cache_tokens as f64 / block_tokens) as u32;
        Self {
            policy: ArcSwap::from_pointee(pool.policy.clone()),
            index: Index::new(INDEX_NODES, blocks.max(1)),
            table: ArcSwap::default(),
            known: std::sync::Mutex::default(),
            gates: Gates::default(),
            cursor: AtomicU64::new(0),
            panic: pool.health.panic.into(),
            block_tokens,
        }
    }

    /// Another policy from now on; the index stays.
    pub fn set_policy(&self, policy: PolicySettings) {
        self.policy.store(Arc::new(policy));
    }

    /// Whether all backends are used when none is alive.
    pub fn set_panic(&self, panic: bool) {
        self.panic.store(panic, Relaxed);
    }

    /// The policy in force.
    #[must_use]
    pub fn policy(&self) -> Arc<PolicySettings> {
        self.policy.load_full()
    }

    /// The set of backends changed: the table is built anew and blocks of those that left are forgotten.
    pub fn set_members(&self, members: &[Member]) {
        // Sorted by identity, so that the order in the file makes no difference.
        let mut order: Vec<usize> = (0..members.len()).collect();
        order.sort_by_key(|i| members[*i].identity);
        let identities: Vec<u64> = order.iter().map(|i| members[*i].identity).collect();
        let weights: Vec<u32> = order.iter().map(|i| members[*i].weight).collect();
        let mut table = vec![0; maglev::PLACES];
        maglev::build(&mut table, &identities, &weights, &mut vec![0; order.len()]);
        for place in &mut table {
            *place = order.get(usize::from(*place)).map_or(*place, |i| *i as u16);
        }
        let now: Vec<u16> = members.iter().map(|member| member.slot).collect();
        let mut known = self
            .known
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        for gone in known.iter().filter(|slot| !now.contains(slot)) {
            self.index.remove(*gone);
        }
        *known = now;
        self.table.store(Arc::new(table));
    }

    /// Prefix cache of `slot` as its engine tells it. Tokens.
    pub fn set_capacity(&self, slot: u16, tokens: u64) {
        let blocks = (tokens as f64 / self.block_tokens) as u32;
        self.index.set_capacity(slot, blocks);
    }

    /// The index, to be looked at.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// `slot` now holds (or will soon hold) the blocks of `key`.
    pub fn learn(&self, key: &PrefixKey, slot: u16) {
        let chain = key.chain();
        self.index
            .insert(&chain[..chain.len().min(MAX_CHAIN)], slot);
    }

    /// Decides. Changes nothing but the policy's own cursor and gates.
    pub fn pick(
        &self,
        request: &PickRequest<'_>,
        members: &[Member],
        ledger: &Ledger,
        signals: &SignalTable,
    ) -> Result<Pick, NoPick> {
        SCRATCH
            .with_borrow_mut(|scratch| self.pick_with(scratch, request, members, ledger, signals))
    }

    fn pick_with(
        &self,
        scratch: &mut Scratch,
        request: &PickRequest<'_>,
        members: &[Member],
        ledger: &Ledger,
        signals: &SignalTable,
    ) -> Result<Pick, NoPick> {
        let policy = self.policy.load();
        let chain = request.key.map_or(&[][..], PrefixKey::chain);
        let chain = &chain[..chain.len().min(MAX_CHAIN)];
        for member in members {
            scratch.matched[usize::from(member.slot)] = 0;
        }
        if !chain.is_empty() {
            self.index.look_up(chain, &mut scratch.matched);
        }
        // At least one block: a threshold of 0 makes everybody warm who holds anything.
        let warm_from = ((policy.threshold * chain.len() as f64).ceil() as u16).max(1);
        let mut survey = Survey {
            request,
            scorer: policy.scorer,
            panic: false,
            full: 0,
            warm_from,
            warm_elsewhere: false,
        };
        survey.gather(scratch, members, ledger);
        if survey.full == 0 && scratch.candidates.is_empty() && self.panic.load(Relaxed) {
            survey.panic = true;
            survey.gather(scratch, members, ledger);
        }
        if scratch.candidates.is_empty() {
            return Err(if survey.full > 0 {
                NoPick::AllFull
            } else {
                NoPick::NoneAlive
            });
        }
        let table = self.table.load();
        let field = Field {
            request,
            policy: &policy,
            candidates: &scratch.candidates,
            members,
            ledger,
            signals,
            table: &table,
            index: &self.index,
            blocks: chain.len(),
            warm_from,
            warm_elsewhere: survey.warm_elsewhere,
        };
        let (chosen, reason) = self.choose(&field);
        let uncached_tokens = field.uncached(chosen);
        Ok(Pick {
            slot: chosen.slot,
            reason,
            matched_tokens: request.prompt_tokens - uncached_tokens,
            uncached_tokens,
            load: chosen.load,
            panic: survey.panic,
        })
    }

    fn choose<'f>(&self, field: &'f Field<'_>) -> Choice<'f> {
        let sticky = |gates| super::sticky::choose(field, gates);
        match field.policy.kind {
            PolicyKind::Sticky => sticky(Some(&self.gates)),
            PolicyKind::AlwaysSticky => sticky(None),
            PolicyKind::RoundRobin => {
                super::plain::round_robin(field, self.cursor.fetch_add(1, Relaxed))
            }
            PolicyKind::LeastLoad => super::plain::least_load(field, PickReason::Load),
            PolicyKind::PowerOfTwo => super::plain::power_of_two(field),
            PolicyKind::Weighted => super::plain::weighted_sum(field),
            PolicyKind::ConsistentHash => super::plain::consistent_hash(field),
            // A request without an id is routed as if sessions were not asked for.
            PolicyKind::Session => {
                super::plain::session(field).unwrap_or_else(|| sticky(Some(&self.gates)))
            }
        }
    }
}

/// Who may have the request.
struct Survey<'a> {
    request: &'a PickRequest<'a>,
    scorer: Scorer,
    panic: bool,
    full: usize,
    warm_from: u16,
    warm_elsewhere: bool,
}

impl Survey<'_> {
    fn gather(&mut self, scratch: &mut Scratch, members: &[Member], ledger: &Ledger) {
        scratch.candidates.clear();
        for member in members {
            let cell = ledger.cell(member.slot);
            let state = cell.state.load(Relaxed);
            let admitted = if self.panic {
                state & (STATE_PRESENT | STATE_DRAINING) == STATE_PRESENT
            } else {
                LedgerEntry::admits(state)
            };
            if !admitted {
                continue;
            }
            let matched = scratch.matched[usize::from(member.slot)];
            let active = cell.active.load(Relaxed);
            let cap = u64::from(cell.cap.load(Relaxed));
            let tried = self.request.tried.contains(&member.slot);
            if tried || (cap != 0 && active >= cap) {
                self.full += usize::from(!tried);
                self.warm_elsewhere |= matched >= self.warm_from;
                continue;
            }
            let weight = cell.weight.load(Relaxed);
            let load = match self.scorer {
                Scorer::TokenLoad => cell.prefill_tokens.load(Relaxed),
                Scorer::ActiveRequests => active,
            };
            scratch.candidates.push(Candidate {
                slot: member.slot,
                identity: member.identity,
                weight,
                load: weighted(load, weight),
                active: weighted(active * u64::from(WEIGHT_ONE), weight),
                matched,
            });
        }
    }
}
