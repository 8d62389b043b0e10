//! The index: which backend is believed to hold which prefix blocks.
//!
//! A node is one block on one backend: in a hash chain to be found, and in its backend's recency list to be
//! evicted. All memory is laid out when the index is made (and touched only as it fills); an endless key space
//! turns old nodes into new ones.
//!
//! Sharded by **run**: `RUN` consecutive blocks of a chain live in the shard that the first of them names.
//! Two chains that share a block share the whole run up to it, so a look-up takes one lock a run instead of
//! one a block, and a run's blocks leave leaf first. A backend's capacity is counted over all shards; what
//! makes room is the oldest of its nodes in the shard that needs it, which over evenly spread runs is close
//! to the oldest of all.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use prefixlb_common::ledger::LEDGER_SLOTS;

/// Blocks of a chain that share a shard and a lock.
const RUN: usize = 16;
const SHARDS: usize = 16;
const NONE: u32 = u32::MAX;

/// Nodes of an index: block × backend pairs that can be believed at once. 24 bytes each, and 4 for its place
/// in the hash: 28 MiB, of which only what is used becomes resident.
pub const INDEX_NODES: usize = 1 << 20;

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    hash: u64,
    /// Next in the hash chain, or in the free list.
    below: u32,
    newer: u32,
    older: u32,
    slot: u16,
}

/// A backend's nodes in one shard, by recency.
#[derive(Clone, Copy, Debug)]
struct Recency {
    newest: u32,
    oldest: u32,
}

const EMPTY: Recency = Recency {
    newest: NONE,
    oldest: NONE,
};

#[derive(Debug)]
struct Shard {
    heads: Vec<u32>,
    nodes: Vec<Node>,
    free: u32,
    recency: Vec<Recency>,
}

/// The index of one pool.
#[derive(Debug)]
pub struct Index {
    shards: Vec<Mutex<Shard>>,
    counts: Vec<AtomicU32>,
    capacities: Vec<AtomicU32>,
    evictions: AtomicU64,
}

impl Index {
    /// An empty index for at most `nodes` block × backend pairs; each backend may hold `capacity` blocks.
    #[must_use]
    pub fn new(nodes: usize, capacity: u32) -> Self {
        let each = (nodes / SHARDS).max(RUN);
        let slots = LEDGER_SLOTS as usize;
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::new(each))).collect(),
            counts: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            capacities: (0..slots).map(|_| AtomicU32::new(capacity)).collect(),
            evictions: AtomicU64::new(0),
        }
    }

    fn shard(&self, run: &[u64]) -> MutexGuard<'_, Shard> {
        let which = (spread(run[0]) >> 60) as usize % SHARDS;
        // A panic elsewhere cannot leave a shard half changed: nothing in here calls out.
        self.shards[which]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// How many leading blocks of `chain` each backend holds, written to `matched` by slot. The caller has
    /// zeroed the places that it will read.
    pub fn look_up(&self, chain: &[u64], matched: &mut [u16]) {
        let mut start = 0;
        for run in chain.chunks(RUN) {
            let shard = self.shard(run);
            let mut alive = 0;
            shard.each_holder(run[0], |slot| {
                if let Some(count) = matched.get_mut(usize::from(slot))
                    && usize::from(*count) == start
                {
                    *count += 1;
                    alive += 1;
                }
            });
            if alive == 0 {
                return;
            }
            if !shard.match_rest(run, start, alive, matched) {
                return;
            }
            start += run.len();
        }
    }

    /// `slot` holds all of `chain` now; its least recent blocks make room.
    pub fn insert(&self, chain: &[u64], slot: u16) {
        let place = usize::from(slot);
        let (Some(count), Some(capacity)) = (self.counts.get(place), self.capacities.get(place))
        else {
            return;
        };
        let capacity = capacity.load(Relaxed) as usize;
        let mut evicted = 0;
        // A chain longer than the cache keeps its beginning. Last run first, last block first: what is
        // touched last is evicted last, and that must be the beginning.
        let kept = &chain[..chain.len().min(capacity)];
        for run in kept.chunks(RUN).rev() {
            let mut shard = self.shard(run);
            for hash in run.iter().rev() {
                if shard.touch(*hash, slot) {
                    continue;
                }
                while count.load(Relaxed) as usize >= capacity || shard.is_full() {
                    if !shard.evict_oldest(slot) {
                        break; // its other nodes are in other shards
                    }
                    count.fetch_sub(1, Relaxed);
                    evicted += 1;
                }
                if shard.add(*hash, slot) {
                    count.fetch_add(1, Relaxed);
                }
            }
            drop(shard);
            if count.load(Relaxed) as usize > capacity {
                evicted += self.shrink(slot, capacity as u32);
            }
        }
        if evicted > 0 {
            self.evictions.fetch_add(evicted, Relaxed);
        }
    }

    /// Evicts from whichever shards hold anything of `slot`: rare, since runs are spread evenly.
    fn shrink(&self, slot: u16, capacity: u32) -> u64 {
        let count = &self.counts[usize::from(slot)];
        let mut evicted = 0;
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            while count.load(Relaxed) > capacity && shard.evict_oldest(slot) {
                count.fetch_sub(1, Relaxed);
                evicted += 1;
            }
        }
        evicted
    }

    /// Forgets everything that `slot` is believed to hold.
    pub fn remove(&self, slot: u16) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            while shard.evict_oldest(slot) {}
        }
        if let Some(count) = self.counts.get(usize::from(slot)) {
            count.store(0, Relaxed);
        }
    }

    /// Blocks that `slot` may hold; what is over is evicted as new ones come.
    pub fn set_capacity(&self, slot: u16, blocks: u32) {
        if let Some(capacity) = self.capacities.get(usize::from(slot)) {
            capacity.store(blocks.max(1), Relaxed);
        }
    }

    /// Blocks that `slot` is believed to hold.
    #[must_use]
    pub fn held(&self, slot: u16) -> u32 {
        self.counts
            .get(usize::from(slot))
            .map_or(0, |count| count.load(Relaxed))
    }

    /// Blocks evicted for room since the start.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions.load(Relaxed)
    }

    /// Memory of nodes and hash places. Bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let of = |shard: &Mutex<Shard>| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.nodes.capacity() * size_of::<Node>()
                + shard.heads.len() * size_of::<u32>()
                + shard.recency.len() * size_of::<Recency>()
        };
        self.shards.iter().map(of).sum()
    }
}

/// Keys from headers need not be hashes; the high bits of the product are even for any keys.
const fn spread(hash: u64) -> u64 {
    hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Shard {
    fn new(nodes: usize) -> Self {
        let mut shard = Self {
            heads: vec![0; nodes.next_power_of_two()],
            nodes: Vec::with_capacity(nodes + 1),
            free: NONE,
            recency: vec![EMPTY; LEDGER_SLOTS as usize],
        };
        // Nobody's: a hash chain ends with 0, so that fresh heads, all zero, need not be touched.
        shard.nodes.push(Node::default());
        shard
    }

    fn is_full(&self) -> bool {
        self.free == NONE && self.nodes.len() == self.nodes.capacity()
    }

    fn bucket(&self, hash: u64) -> usize {
        (spread(hash) >> 24) as usize & (self.heads.len() - 1)
    }

    fn each_holder(&self, hash: u64, mut each: impl FnMut(u16)) {
        let mut at = self.heads[self.bucket(hash)];
        while at != 0 {
            let node = &self.nodes[at as usize];
            if node.hash == hash {
                each(node.slot);
            }
            at = node.below;
        }
    }

    /// Follows `alive` backends that hold the first block of `run` through the rest of it; whether any holds
    /// all. `start` is where the run begins in its chain.
    fn match_rest(&self, run: &[u64], start: usize, alive: usize, matched: &mut [u16]) -> bool {
        if run.len() == 1 {
            return true;
        }
        // Blocks of a run leave leaf first: who holds the last block holds all of it.
        let last = run.len() - 1;
        let mut whole = 0;
        self.each_holder(run[last], |slot| {
            if let Some(count) = matched.get_mut(usize::from(slot))
                && usize::from(*count) == start + 1
            {
                *count = (start + run.len()) as u16;
                whole += 1;
            }
        });
        if whole < alive {
            for (i, hash) in run.iter().enumerate().take(last).skip(1) {
                let mut more = 0;
                self.each_holder(*hash, |slot| {
                    if let Some(count) = matched.get_mut(usize::from(slot))
                        && usize::from(*count) == start + i
                    {
                        *count += 1;
                        more += 1;
                    }
                });
                if more == 0 {
                    break;
                }
            }
        }
        whole > 0
    }

    fn find(&self, hash: u64, slot: u16) -> Option<u32> {
        let mut at = self.heads[self.bucket(hash)];
        while at != 0 {
            let node = &self.nodes[at as usize];
            if node.hash == hash && node.slot == slot {
                return Some(at);
            }
            at = node.below;
        }
        None
    }

    /// Makes the node the newest of its backend; `false`: there is none.
    fn touch(&mut self, hash: u64, slot: u16) -> bool {
        let Some(at) = self.find(hash, slot) else {
            return false;
        };
        if self.recency[usize::from(slot)].newest != at {
            self.unlink(at);
            self.link_newest(at);
        }
        true
    }

    fn add(&mut self, hash: u64, slot: u16) -> bool {
        if self.is_full() {
            return false;
        }
        let bucket = self.bucket(hash);
        let node = Node {
            hash,
            below: self.heads[bucket],
            newer: NONE,
            older: NONE,
            slot,
        };
        let at = self.free;
        let at = if at == NONE {
            self.nodes.push(node); // within the capacity: no memory moves
            (self.nodes.len() - 1) as u32
        } else {
            self.free = self.nodes[at as usize].below;
            self.nodes[at as usize] = node;
            at
        };
        self.heads[bucket] = at;
        self.link_newest(at);
        true
    }

    fn evict_oldest(&mut self, slot: u16) -> bool {
        let at = self.recency[usize::from(slot)].oldest;
        if at == NONE {
            return false;
        }
        self.unlink(at);
        let bucket = self.bucket(self.nodes[at as usize].hash);
        let below = self.nodes[at as usize].below;
        if self.heads[bucket] == at {
            self.heads[bucket] = below;
        } else {
            let mut above = self.heads[bucket];
            while self.nodes[above as usize].below != at {
                above = self.nodes[above as usize].below;
            }
            self.nodes[above as usize].below = below;
        }
        self.nodes[at as usize] = Node {
            below: self.free,
            ..Node::default()
        };
        self.free = at;
        true
    }

    fn unlink(&mut self, at: u32) {
        let Node {
            newer, older, slot, ..
        } = self.nodes[at as usize];
        let recency = &mut self.recency[usize::from(slot)];
        if newer == NONE {
            recency.newest = older;
        }
        if older == NONE {
            recency.oldest = newer;
        }
        if newer != NONE {
            self.nodes[newer as usize].older = older;
        }
        if older != NONE {
            self.nodes[older as usize].newer = newer;
        }
    }

    fn link_newest(&mut self, at: u32) {
        let slot = usize::from(self.nodes[at as usize].slot);
        let was = self.recency[slot].newest;
        let node = &mut self.nodes[at as usize];
        (node.newer, node.older) = (NONE, was);
        if was == NONE {
            self.recency[slot].oldest = at;
        } else {
            self.nodes[was as usize].newer = at;
        }
        self.recency[slot].newest = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prefixlb_common::gate::mix;

    fn chain(seed: u64, length: usize) -> Vec<u64> {
        (0..length as u64)
            .scan(seed, |h, i| {
                *h = mix(*h, i);
                Some(*h)
            })
            .collect()
    }

    fn matched(index: &Index, chain: &[u64], slot: u16) -> u16 {
        let mut all = vec![0; LEDGER_SLOTS as usize];
        index.look_up(chain, &mut all);
        all[usize::from(slot)]
    }

    #[test]
    fn each_backend_matches_as_far_as_it_holds() {
        let index = Index::new(4096, 1000);
        let long = chain(1, 70);
        index.insert(&long, 3);
        index.insert(&long[..20], 5);
        index.insert(&long[..1], 7);
        assert_eq!(matched(&index, &long, 3), 70);
        assert_eq!(matched(&index, &long, 5), 20);
        assert_eq!(matched(&index, &long, 7), 1);
        assert_eq!(matched(&index, &long, 9), 0);
        let mut parted = long.clone();
        parted.truncate(33);
        parted.extend(chain(2, 30));
        assert_eq!(matched(&index, &parted, 3), 33);
    }

    #[test]
    fn a_backend_never_holds_more_than_its_capacity_and_the_least_recent_go() {
        let index = Index::new(1 << 14, 320);
        let hot = chain(1, 32);
        index.insert(&hot, 0);
        for seed in 2..500 {
            index.insert(&hot, 0);
            index.insert(&chain(seed, 16), 0);
            assert!(index.held(0) <= 320);
        }
        assert_eq!(matched(&index, &hot, 0), 32, "what is used stays");
        assert_eq!(matched(&index, &chain(2, 16), 0), 0, "what is not goes");
        assert!(index.evictions() > 7000);
    }

    #[test]
    fn beginnings_outlive_ends() {
        let mut shard = Shard::new(64);
        let run = chain(1, 16);
        for hash in run.iter().rev() {
            assert!(shard.add(*hash, 0));
        }
        for _ in 0..4 {
            assert!(shard.evict_oldest(0));
        }
        let held: Vec<bool> = run.iter().map(|h| shard.find(*h, 0).is_some()).collect();
        assert_eq!(held, [[true; 12].as_slice(), &[false; 4]].concat());
    }

    #[test]
    fn removal_is_exact() {
        let index = Index::new(1 << 12, 1000);
        for seed in 0..10 {
            index.insert(&chain(seed, 40), 1);
            index.insert(&chain(seed, 40), 2);
        }
        index.remove(1);
        assert_eq!((index.held(1), index.held(2)), (0, 400));
        for seed in 0..10 {
            assert_eq!(matched(&index, &chain(seed, 40), 1), 0);
            assert_eq!(matched(&index, &chain(seed, 40), 2), 40);
        }
    }

    #[test]
    fn an_endless_key_space_does_not_grow_it() {
        let index = Index::new(1 << 10, 1 << 20);
        let before = index.bytes();
        for seed in 0..3000 {
            index.insert(&chain(seed, 20), (seed % 7) as u16);
        }
        assert_eq!(index.bytes(), before);
        let held: u32 = (0..7).map(|slot| index.held(slot)).sum();
        assert!(held <= 1 << 10, "{held}");
    }

    #[test]
    fn a_million_blocks_fit_in_64_mib() {
        assert!(Index::new(INDEX_NODES, 1).bytes() <= 64 << 20);
    }
}
