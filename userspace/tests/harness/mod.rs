//! The black box: the real binary between scripted raw-TCP backends and raw-TCP clients.
//!
//! Everything here blocks on plain threads and sockets, so that a test reads top to bottom as the bytes go.
//! Every wait has a deadline and every wait is for an event; [`PATIENCE`] is how long a wait may take on a
//! machine that is busy with other things, never how long anything is expected to take.

mod client;
mod mock;
mod proxy;

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use client::{Client, Response, request};
pub use mock::{Conn, Mock, Probes, Reply, Request};
pub use proxy::{Config, Proxy, dead_address};

/// The longest wait for anything: beyond it a test fails.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A latch that scripts wait on: "hold until told".
#[derive(Debug, Default)]
pub struct Gate {
    opened: Mutex<u64>,
    changed: Condvar,
}

impl Gate {
    /// A closed gate that can be shared with scripts.
    pub fn new() -> std::sync::Arc<Self> {
        std::sync::Arc::default()
    }

    /// Lets everybody through for good.
    pub fn open(&self) {
        self.release(u64::MAX);
    }

    /// Lets `n` more through.
    pub fn release(&self, n: u64) {
        let mut opened = lock(&self.opened);
        *opened = opened.saturating_add(n);
        self.changed.notify_all();
    }

    /// Waits to be let through; `false`: nobody did in time (a script then ends, so that no thread stays).
    pub fn pass(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        let mut opened = lock(&self.opened);
        while *opened == 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            opened = self
                .changed
                .wait_timeout(opened, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        if *opened != u64::MAX {
            *opened -= 1;
        }
        true
    }
}

/// Locks even after a panic elsewhere: the test that panicked has already failed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Polls `what` until it says yes, for state that can only be asked for (an admin page, a process).
#[track_caller]
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < deadline, "not in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The fields of a head, in order, names as sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(pub Vec<(String, String)>);

impl Fields {
    /// Reads field lines, CRLF between them.
    fn parse(lines: &str) -> Self {
        Self(
            lines
                .split("\r\n")
                .filter(|line| !line.is_empty())
                .map(|line| {
                    let (name, value) = line.split_once(':').unwrap_or((line, ""));
                    (name.to_string(), value.trim().to_string())
                })
                .collect(),
        )
    }

    /// Every value of `name`.
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.0
            .iter()
            .filter(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
            .collect()
    }

    /// The value of `name`, which must not be there twice.
    #[track_caller]
    pub fn get(&self, name: &str) -> Option<&str> {
        let all = self.all(name);
        assert!(all.len() <= 1, "{name} is there {} times", all.len());
        all.first().copied()
    }

    /// Whether `name` is there.
    pub fn has(&self, name: &str) -> bool {
        !self.all(name).is_empty()
    }
}

/// Index of the byte after `\r\n\r\n`.
fn head_end(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .map(|at| at + 4)
}

/// Sets how `stream` closes: with RST at once, whatever is unread or unsent.
fn reset_on_close(stream: &std::net::TcpStream) {
    let socket = socket2::SockRef::from(stream);
    socket
        .set_linger(Some(Duration::ZERO))
        .expect("SO_LINGER can be set");
}
