//! The decision for one request.

use crate::config::{KeySettings, PolicySettings, PoolSettings};
use crate::picker::{Ledger, PrefixKey, SignalTable};

/// A backend as picks see it.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its ledger slot: load, state, weight and cap are there.
    pub slot: u16,
    /// Hash of its name: its identity in rendezvous order and Maglev, whatever its place in the file.
    pub identity: u64,
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
    /// A random word, for `power-of-two`.
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
    /// The backend's load before this request, in the scorer's unit.
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

/// A pool's policy and index.
#[derive(Debug)]
pub struct Picker {}

impl Picker {
    /// A picker with an empty index.
    #[must_use]
    pub fn new(pool: &PoolSettings, key: &KeySettings) -> Self {
        let _ = (pool, key);
        Self {}
    }

    /// Another policy from now on; the index stays.
    pub fn set_policy(&self, policy: PolicySettings) {
        let _ = policy;
    }

    /// The policy in force.
    #[must_use]
    pub fn policy(&self) -> PolicySettings {
        PolicySettings::default()
    }

    /// The set of backends changed: tables are built anew and blocks of those that left are forgotten.
    pub fn set_members(&self, members: &[Member]) {
        let _ = members;
    }

    /// Prefix cache of `slot` as its engine tells it. Tokens.
    pub fn set_capacity(&self, slot: u16, tokens: u64) {
        let _ = (slot, tokens);
    }

    /// Decides. Changes nothing but the policy's own cursor (round robin, hysteresis).
    pub fn pick(
        &self,
        request: &PickRequest<'_>,
        members: &[Member],
        ledger: &Ledger,
        signals: &SignalTable,
    ) -> Result<Pick, NoPick> {
        let _ = (request, members, ledger, signals);
        Err(NoPick::NoneAlive)
    }

    /// `slot` now holds (or will soon hold) the blocks of `key`.
    pub fn learn(&self, key: &PrefixKey, slot: u16) {
        let _ = (key, slot);
    }
}
