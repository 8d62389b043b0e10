//! Text in pieces → hashes of fixed-size blocks.
//!
//! Pieces end wherever an escape or a JSON token does; blocks do not care. Bytes are copied only to fill up a
//! block that began in an earlier piece.

use prefixlb_common::gate::mix;
use xxhash_rust::xxh3::xxh3_64;

/// A run of bytes being cut into blocks.
#[derive(Debug)]
pub struct Blocks {
    hashes: Vec<u64>,
    partial: Box<[u8]>,
    filled: usize,
    bytes: u64,
}

impl Blocks {
    /// For blocks of `block` bytes; room for `expected` of them, so that usual windows allocate nothing.
    pub fn new(block: usize, expected: usize) -> Self {
        Self {
            hashes: Vec::with_capacity(expected),
            partial: vec![0; block].into_boxed_slice(),
            filled: 0,
            bytes: 0,
        }
    }

    /// Starts anew.
    pub fn clear(&mut self) {
        self.hashes.clear();
        self.filled = 0;
        self.bytes = 0;
    }

    /// The next bytes.
    #[inline]
    pub fn push(&mut self, bytes: &[u8]) {
        let room = self.partial.len() - self.filled;
        if bytes.len() < room {
            self.partial[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
            self.filled += bytes.len();
            self.bytes += bytes.len() as u64;
        } else {
            self.push_over(bytes, room);
        }
    }

    fn push_over(&mut self, mut bytes: &[u8], room: usize) {
        self.bytes += bytes.len() as u64;
        if self.filled > 0 {
            let (head, rest) = bytes.split_at(room);
            self.partial[self.filled..].copy_from_slice(head);
            self.hashes.push(xxh3_64(&self.partial));
            bytes = rest;
        }
        let mut whole = bytes.chunks_exact(self.partial.len());
        self.hashes.extend(whole.by_ref().map(xxh3_64));
        let rest = whole.remainder();
        self.partial[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    /// Chains the blocks onto `last` and appends them to `chain`; returns the new last hash.
    ///
    /// What does not fill a block becomes one if the text is complete: equal prompts have equal ends. The end
    /// of a text that was cut says nothing.
    pub fn chain_onto(&self, mut last: u64, complete: bool, chain: &mut Vec<u64>) -> u64 {
        for hash in &self.hashes {
            last = link(last, *hash);
            chain.push(last);
        }
        if complete && self.filled > 0 {
            last = link(last, xxh3_64(&self.partial[..self.filled]));
            chain.push(last);
        }
        last
    }

    /// One hash of everything, for a value that is one piece of a prompt.
    pub fn digest(&self) -> u64 {
        let blocks = self.hashes.iter().fold(self.bytes, |h, b| mix(h, *b));
        mix(blocks, xxh3_64(&self.partial[..self.filled]))
    }
}

/// A chain's next hash. Block hashes are well mixed already; what is left to do is to tell the order.
const fn link(last: u64, hash: u64) -> u64 {
    let x = (last.rotate_left(23) ^ hash).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(pieces: &[&[u8]], complete: bool) -> Vec<u64> {
        let mut blocks = Blocks::new(8, 4);
        let mut chain = Vec::new();
        for piece in pieces {
            blocks.push(piece);
        }
        blocks.chain_onto(1, complete, &mut chain);
        chain
    }

    #[test]
    fn pieces_make_no_difference() {
        let text = b"0123456789abcdefghijklmnop";
        let whole = chain(&[text], true);
        assert_eq!(whole.len(), 4);
        for a in 0..text.len() {
            for b in a..text.len() {
                assert_eq!(chain(&[&text[..a], &text[a..b], &text[b..]], true), whole);
            }
        }
    }

    #[test]
    fn a_longer_text_has_the_full_blocks_of_the_shorter() {
        let short = chain(&[b"0123456789"], false);
        let long = chain(&[b"0123456789abcdefgh"], true);
        assert_eq!(short.len(), 1);
        assert_eq!(short[..], long[..1]);
    }
}
