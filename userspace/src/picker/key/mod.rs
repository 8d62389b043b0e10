//! Request → prefix key: one pass over the first bytes of a body, no tree, no allocation.
//!
//! What counts is the prompt as the engine will see it. `document` knows which members of a request make the
//! prompt; `json` walks the bytes; `blocks` turns decoded text into block hashes. Those are chained only at the
//! end, so that it makes no difference where in the document `model` or `tools` stand:
//!
//! ```text
//! h0 = mix(model, cache_salt)      then, in the engine's order:  tools … system … messages | prompt
//! hi = mix(hi-1, block hash i)
//! ```
//!
//! The body may be cut at the window. Then the blocks seen so far are the key: two prompts that part beyond
//! the window look the same, and a member that comes only after it is not seen.

mod blocks;
mod document;
mod json;

pub use document::KeyParser;

use prefixlb_common::hexkey;

/// Which request body is parsed; from the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/responses`.
    Responses,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/messages` (Anthropic).
    Messages,
}

impl Shape {
    /// The shape of bodies sent to `path` (query already cut off); `None`: balanced by load. What stands
    /// before the known ending is free: gateways mount engines under prefixes.
    #[must_use]
    pub fn of_path(path: &[u8]) -> Option<Self> {
        let known: [(&[u8], Self); 5] = [
            (b"/chat/completions", Self::Chat),
            (b"/completions", Self::Completions),
            (b"/responses", Self::Responses),
            (b"/embeddings", Self::Embeddings),
            (b"/v1/messages", Self::Messages),
        ];
        known
            .iter()
            .find_map(|(end, shape)| path.ends_with(end).then_some(*shape))
    }
}

/// Why a body gave no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum NoKey {
    /// Not a path, content type or coding that we read.
    NotLookedAt,
    /// Broken JSON or invalid UTF-8.
    Malformed,
    /// Nested deeper than we follow.
    TooDeep,
    /// JSON, but no prompt in the window.
    NoPrompt,
}

impl NoKey {
    /// Every reason, in index order.
    pub const ALL: [Self; 4] = [
        Self::NotLookedAt,
        Self::Malformed,
        Self::TooDeep,
        Self::NoPrompt,
    ];
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();
}

/// A prefix key: the chain of block hashes, or one hash from a header.
#[derive(Clone, Debug, Default)]
pub struct PrefixKey {
    pub(super) chain: Vec<u64>,
}

impl PrefixKey {
    /// The hashes, first block first.
    #[must_use]
    pub fn chain(&self) -> &[u64] {
        &self.chain
    }

    /// Forgets the key, keeps its memory.
    pub fn clear(&mut self) {
        self.chain.clear();
    }

    /// A key of these hashes: for simulations and tests.
    #[must_use]
    pub fn from_chain(chain: Vec<u64>) -> Self {
        Self { chain }
    }
}

/// Reads a header key, 1–16 hex digits, into `key` as a chain of one; `false`: it is malformed, and `key` is
/// as it was.
#[must_use]
pub fn from_header(value: &[u8], key: &mut PrefixKey) -> bool {
    let Some(hash) = hexkey::parse(value) else {
        return false;
    };
    key.chain.clear();
    key.chain.push(hash);
    true
}
