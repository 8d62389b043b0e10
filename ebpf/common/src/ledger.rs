//! The ledger: one cache line for each backend, shared by every worker and by the kernel programs.
//!
//! User space maps the array and uses atomics on it; programs use the BPF atomic instructions on the same
//! words. A flow that was charged is given back exactly once, by whoever ends it.

/// Layout version of [`LedgerEntry`]; a map of another version is refused.
pub const LEDGER_VERSION: u32 = 1;

/// Backends that can be known at once, over all pools: the length of the array.
pub const LEDGER_SLOTS: u32 = 1024;

/// What one side was compiled with, as it says it to the other: version, slots, bytes an entry.
///
/// Stands at index 0 of the map `plb_meta`, written there by the program itself; a map or program whose words
/// differ from these is refused.
pub const LEDGER_LAYOUT: [u32; 4] = [
    LEDGER_VERSION,
    LEDGER_SLOTS,
    core::mem::size_of::<LedgerEntry>() as u32,
    0,
];

/// The backend is configured: its slot is in use.
pub const STATE_PRESENT: u32 = 1 << 0;
/// Active health checks pass (or are off).
pub const STATE_HEALTHY: u32 = 1 << 1;
/// An operator asked for no new requests.
pub const STATE_DRAINING: u32 = 1 << 2;
/// Passive health took it out for a while.
pub const STATE_EJECTED: u32 = 1 << 3;
/// The backend was removed, but flows may still know it: nobody picks it, and its slot is not given away.
pub const STATE_RETIRED: u32 = 1 << 4;

/// [`LedgerEntry::weight`] of a backend with weight 1 that is not in slow start.
pub const WEIGHT_ONE: u32 = 256;

/// One backend's load in flight and the words that picks depend on.
///
/// Plain integers, so that the layout is the same for a BPF program; user space reaches them through atomics.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerEntry {
    /// Uncached prompt tokens of requests whose first body byte has not come yet. Tokens.
    pub prefill_tokens: u64,
    /// Requests picked and not ended.
    pub active: u64,
    /// The gate: tokens of prefill beyond which stickiness ends. Tokens.
    pub tau: u64,
    /// Requests ever charged to this slot.
    pub charged: u64,
    /// `STATE_*` bits.
    pub state: u32,
    /// Effective weight in 1/256: configured weight × slow-start factor; never 0 while present.
    pub weight: u32,
    /// Most requests in flight; 0 is no cap.
    pub cap: u32,
    /// Raised each time the slot is given to another backend.
    pub generation: u32,
    /// Room for what later layouts need.
    pub reserved: [u64; 2],
}

const _: () = assert!(core::mem::size_of::<LedgerEntry>() == 64);
const _: () = assert!(core::mem::align_of::<LedgerEntry>() == 64);

impl LedgerEntry {
    /// Whether `state` lets new requests in.
    #[must_use]
    pub const fn admits(state: u32) -> bool {
        state & (STATE_PRESENT | STATE_HEALTHY | STATE_DRAINING | STATE_EJECTED)
            == STATE_PRESENT | STATE_HEALTHY
    }
}
