//! Requests that wait for a backend below its cap.

/// The queue of one pool.
#[derive(Debug, Default)]
pub struct Waiters {}
