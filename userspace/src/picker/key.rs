//! Request → prefix key: one pass over the bytes of a body as they arrive.

use crate::config::KeySettings;

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
    /// The shape of bodies sent to `path` (query already cut off); `None`: balanced by load.
    #[must_use]
    pub fn of_path(path: &[u8]) -> Option<Self> {
        let _ = path;
        None
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
    chain: Vec<u64>,
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
}

/// Whether the parser wants more of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Push more, or finish if the body ended.
    More,
    /// The window is full, the document ended, or it can give no key: more bytes change nothing.
    Done,
}

/// The incremental parser; one a worker, reused, of fixed size.
#[derive(Debug)]
pub struct KeyParser {}

impl KeyParser {
    /// A parser for these settings.
    #[must_use]
    pub fn new(settings: &KeySettings) -> Self {
        let _ = settings;
        Self {}
    }

    /// Starts a body of this shape.
    pub fn begin(&mut self, shape: Shape) {
        let _ = shape;
    }

    /// Feeds the next bytes of the body.
    pub fn push(&mut self, bytes: &[u8]) -> Progress {
        let _ = bytes;
        Progress::Done
    }

    /// Ends the body (or the window) and writes the key into `key`, reusing its memory.
    pub fn finish(&mut self, key: &mut PrefixKey) -> Result<(), NoKey> {
        key.chain.clear();
        Err(NoKey::NotLookedAt)
    }

    /// The model's name, if it was seen so far.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        None
    }
}

/// Reads a header key, 1–16 hex digits, into `key` as a chain of one.
#[must_use]
pub fn from_header(value: &[u8], key: &mut PrefixKey) -> bool {
    let _ = (value, key);
    false
}
