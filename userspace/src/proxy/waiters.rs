//! Requests that wait for a backend below its cap: one queue a pool, first come, first served.
//!
//! The lock is taken only when somebody waits; a worker that ends a request looks at one atomic.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

#[derive(Debug)]
struct Waiting {
    ticket: u64,
    waker: Waker,
}

#[derive(Debug, Default)]
struct Queue {
    next_ticket: u64,
    line: VecDeque<Waiting>,
}

/// The queue of one pool.
#[derive(Debug, Default)]
pub struct Waiters {
    length: AtomicUsize,
    queue: Mutex<Queue>,
}

/// A place in the queue.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(u64);

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // The queue is whole between any two statements, so a panic elsewhere does not spoil it.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests waiting now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length.load(SeqCst)
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes a place at the end, unless `limit` are waiting.
    #[must_use]
    pub fn join(&self, limit: usize, waker: &Waker) -> Option<Ticket> {
        let mut queue = self.lock();
        if queue.line.len() >= limit {
            return None;
        }
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.line.push_back(Waiting {
            ticket,
            waker: waker.clone(),
        });
        self.length.store(queue.line.len(), SeqCst);
        Some(Ticket(ticket))
    }

    /// Whether it is this one's turn.
    #[must_use]
    pub fn is_first(&self, ticket: &Ticket) -> bool {
        self.lock()
            .line
            .front()
            .is_some_and(|first| first.ticket == ticket.0)
    }

    /// Gives a place up: served, or not waiting any more. The next in line is woken, since room may be left.
    pub fn leave(&self, ticket: &Ticket) {
        let mut queue = self.lock();
        if let Some(at) = queue.line.iter().position(|w| w.ticket == ticket.0) {
            queue.line.remove(at);
        }
        self.length.store(queue.line.len(), SeqCst);
        if let Some(first) = queue.line.front() {
            first.waker.wake_by_ref();
        }
    }

    /// Room was made: wakes the first in line.
    pub fn wake_first(&self) {
        if self.length.load(SeqCst) != 0
            && let Some(first) = self.lock().line.front()
        {
            first.waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_come_first_served_and_no_more_than_the_limit() {
        let waiters = Waiters::default();
        let waker = Waker::noop();
        let first = waiters.join(2, waker).expect("room");
        let second = waiters.join(2, waker).expect("room");
        assert_eq!(waiters.join(2, waker), None);
        assert!(waiters.is_first(&first) && !waiters.is_first(&second));
        waiters.leave(&first);
        assert!(waiters.is_first(&second));
        waiters.leave(&second);
        assert!(waiters.is_empty());
    }
}
