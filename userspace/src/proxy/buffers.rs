//! Buffers, lent for as long as there are bytes in them: an open stream that is quiet holds none.

use std::cell::RefCell;

/// What a lent buffer can hold at first: a usual head and the window of the key.
pub const BUFFER_BYTES: usize = 32 << 10;
/// Larger ones (a huge head came) are given back to the allocator.
const KEEP_BYTES: usize = 96 << 10;
/// How many are kept for the next flow.
const KEEP: usize = 64;
/// The read buffer that all relays of a worker share.
pub const SCRATCH_BYTES: usize = 256 << 10;

/// One worker's buffers.
#[derive(Debug)]
pub struct Buffers {
    free: RefCell<Vec<Vec<u8>>>,
    /// For bytes that are read and written on within one poll, never across a wait.
    pub scratch: RefCell<Box<[u8]>>,
}

impl Buffers {
    /// An empty store.
    pub fn new() -> Self {
        Self {
            free: RefCell::default(),
            scratch: RefCell::new(vec![0; SCRATCH_BYTES].into_boxed_slice()),
        }
    }

    /// An empty buffer with room for [`BUFFER_BYTES`].
    pub fn take(&self) -> Vec<u8> {
        let kept = self.free.borrow_mut().pop();
        kept.unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES))
    }

    /// Takes a buffer's memory back, whatever is in it.
    pub fn give(&self, buffer: &mut Vec<u8>) {
        let mut buffer = std::mem::take(buffer);
        let mut free = self.free.borrow_mut();
        if buffer.capacity() >= BUFFER_BYTES && buffer.capacity() <= KEEP_BYTES && free.len() < KEEP
        {
            buffer.clear();
            free.push(buffer);
        }
    }
}
