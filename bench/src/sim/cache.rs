//! The prefix cache: blocks of [`BLOCK_TOKENS`] tokens, each named by the hash of all text up to its end.

use std::collections::{BTreeMap, HashMap};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens a block, as vLLM's default.
pub const BLOCK_TOKENS: usize = 16;
/// Bytes a token: the tokenizer cuts text into pieces of four bytes, which is about what real ones average on
/// English, and makes any common beginning of two texts a common beginning of their tokens.
pub const TOKEN_BYTES: usize = 4;

/// Tokens of a text.
#[must_use]
pub fn tokens(bytes: usize) -> usize {
    bytes.div_ceil(TOKEN_BYTES)
}

/// The names of a text's full blocks.
#[must_use]
pub fn blocks(text: &[u8]) -> Vec<u64> {
    text.chunks_exact(BLOCK_TOKENS * TOKEN_BYTES)
        .scan(0, |last, block| {
            *last = xxh3_64_with_seed(block, *last);
            Some(*last)
        })
        .collect()
}

#[derive(Debug)]
struct Block {
    /// Running requests that need it.
    pins: usize,
    /// Its place in the order of eviction, while nobody needs it.
    unused_since: u64,
}

/// The cache of one engine.
#[derive(Debug)]
pub struct Cache {
    capacity: usize,
    blocks: HashMap<u64, Block>,
    unused: BTreeMap<u64, u64>,
    clock: u64,
}

impl Cache {
    /// An empty cache for `capacity_tokens` tokens.
    #[must_use]
    pub fn new(capacity_tokens: usize) -> Self {
        Self {
            capacity: capacity_tokens / BLOCK_TOKENS,
            blocks: HashMap::new(),
            unused: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Leading blocks of `names` that are there.
    #[must_use]
    pub fn matched(&self, names: &[u64]) -> usize {
        names
            .iter()
            .take_while(|name| self.blocks.contains_key(name))
            .count()
    }

    /// Pins all of `names`, evicting what nobody needs, least recent first. `false`: there is no room now, and
    /// nothing has changed.
    pub fn pin(&mut self, names: &[u64]) -> bool {
        let new = names
            .iter()
            .filter(|name| !self.blocks.contains_key(name))
            .count();
        let reused = names
            .iter()
            .filter(|name| self.blocks.get(name).is_some_and(|block| block.pins == 0))
            .count();
        let evictable = self.unused.len() - reused;
        if self.blocks.len() + new > self.capacity + evictable {
            return false;
        }
        for name in names {
            if let Some(block) = self.blocks.get_mut(name) {
                if block.pins == 0 {
                    self.unused.remove(&block.unused_since);
                }
                block.pins += 1;
            }
        }
        for name in names {
            self.blocks.entry(*name).or_insert(Block {
                pins: 1,
                unused_since: 0,
            });
        }
        while self.blocks.len() > self.capacity {
            let Some((_, name)) = self.unused.pop_first() else {
                break;
            };
            self.blocks.remove(&name);
        }
        true
    }

    /// Gives pinned blocks back; they stay until room is needed, the end of a text going first.
    pub fn unpin(&mut self, names: &[u64]) {
        for name in names.iter().rev() {
            let Some(block) = self.blocks.get_mut(name) else {
                continue;
            };
            block.pins = block.pins.saturating_sub(1);
            if block.pins == 0 {
                self.clock += 1;
                block.unused_since = self.clock;
                self.unused.insert(self.clock, *name);
            }
        }
    }

    /// Share of the cache that running requests need.
    #[must_use]
    pub fn used(&self) -> f64 {
        (self.blocks.len() - self.unused.len()) as f64 / self.capacity.max(1) as f64
    }

    /// Blocks it has room for.
    #[must_use]
    pub fn capacity_blocks(&self) -> usize {
        self.capacity
    }

    /// Blocks that running requests need.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.blocks.len() - self.unused.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_text_keeps_its_blocks() {
        let long = "x".repeat(640);
        let (short, long) = (blocks(&long.as_bytes()[..200]), blocks(long.as_bytes()));
        assert_eq!((short.len(), long.len()), (3, 10));
        assert_eq!(short[..], long[..3]);
    }

    #[test]
    fn the_least_recent_goes_first_and_ends_before_beginnings() {
        let mut cache = Cache::new(6 * BLOCK_TOKENS);
        let (a, b) = ([1, 2, 3], [4, 5, 6]);
        for text in [&a, &b, &a] {
            assert!(cache.pin(text));
            cache.unpin(text);
        }
        assert!(cache.pin(&[7]));
        assert_eq!((cache.matched(&a), cache.matched(&b)), (3, 2));
        cache.unpin(&[7]);
        assert!(cache.pin(&[8, 9, 10]));
        assert_eq!((cache.matched(&a), cache.matched(&b)), (2, 0));
    }

    #[test]
    fn what_runs_is_never_evicted_and_a_refusal_changes_nothing() {
        let mut cache = Cache::new(4 * BLOCK_TOKENS);
        assert!(cache.pin(&[1, 2, 3]));
        assert!(!cache.pin(&[4, 5]));
        assert_eq!(cache.matched(&[1, 2, 3]), 3);
        assert!(cache.pin(&[1, 2, 9]), "shared blocks need room once");
        cache.unpin(&[1, 2, 3]);
        cache.unpin(&[1, 2, 9]);
        assert_eq!(cache.pinned(), 0);
    }
}
