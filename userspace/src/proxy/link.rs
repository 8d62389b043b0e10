//! Connections to backends: opened, kept idle for the next request, thrown away at the first doubt.
//!
//! Each worker has its own; a connection never changes worker. Newest first, so that a quiet backend's
//! connections age out together instead of being kept alive in turn.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::net::TcpStream;

use crate::state::Backend;

/// A connection to a backend that serves one request.
#[derive(Debug)]
pub struct Link {
    /// The socket.
    pub io: TcpStream,
    /// It served a request before: its death before the first response byte may be replayed.
    pub reused: bool,
    epoch: u64,
}

#[derive(Debug)]
struct Idle {
    link: Link,
    since_ms: u64,
}

#[derive(Debug)]
struct Shelf {
    backend: Arc<Backend>,
    idle: Vec<Idle>,
}

/// One worker's idle connections.
#[derive(Debug, Default)]
pub struct Links {
    shelves: RefCell<HashMap<usize, Shelf>>,
}

/// The same backend object is the same backend; a slot may be given to another one later.
fn identity(backend: &Arc<Backend>) -> usize {
    Arc::as_ptr(backend) as usize
}

impl Links {
    /// An idle connection that looks sound.
    pub fn take(&self, backend: &Arc<Backend>, now_ms: u64, max_idle: Duration) -> Option<Link> {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelves.get_mut(&identity(backend))?;
        let epoch = backend.pool_epoch.load(Relaxed);
        while let Some(idle) = shelf.idle.pop() {
            backend.metrics.pool_idle.add(-1);
            if is_sound(&idle, epoch, now_ms, max_idle) {
                backend.metrics.pool_reuses.inc();
                return Some(idle.link);
            }
            backend.metrics.pool_discards.inc();
        }
        None
    }

    /// Keeps a connection whose response ended exactly where it should.
    pub fn keep(&self, backend: &Arc<Backend>, mut link: Link, now_ms: u64, limit: usize) {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelves.entry(identity(backend)).or_insert_with(|| Shelf {
            backend: backend.clone(),
            idle: Vec::new(),
        });
        if shelf.idle.len() < limit && link.epoch == backend.pool_epoch.load(Relaxed) {
            link.reused = true;
            backend.metrics.pool_idle.add(1);
            shelf.idle.push(Idle {
                link,
                since_ms: now_ms,
            });
        }
    }

    /// Drops what is too old, closed by its backend or has bytes nobody asked for; forgets empty shelves.
    pub fn sweep(&self, now_ms: u64, max_idle: Duration) {
        self.shelves.borrow_mut().retain(|_, shelf| {
            let backend = &shelf.backend;
            let epoch = backend.pool_epoch.load(Relaxed);
            shelf.idle.retain(|idle| {
                let sound = is_sound(idle, epoch, now_ms, max_idle);
                if !sound {
                    backend.metrics.pool_idle.add(-1);
                    if idle.since_ms + max_idle.as_millis() as u64 > now_ms {
                        backend.metrics.pool_discards.inc();
                    }
                }
                sound
            });
            !shelf.idle.is_empty()
        });
    }

    /// Drops all: the worker ends.
    pub fn clear(&self) {
        self.sweep(u64::MAX, Duration::ZERO);
    }
}

/// Young enough, of this epoch, and quiet: an idle connection with anything to read is closed or has surplus
/// bytes, which must not become the answer to another request.
fn is_sound(idle: &Idle, epoch: u64, now_ms: u64, max_idle: Duration) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    idle.link.epoch == epoch
        && now_ms.saturating_sub(idle.since_ms) < max_idle.as_millis() as u64
        && (idle.link.io.poll_read_ready(&mut cx).is_pending() || nothing_to_read(&idle.link.io))
}

/// Readiness can outlive the bytes that caused it; the socket itself decides.
fn nothing_to_read(io: &TcpStream) -> bool {
    matches!(io.try_read(&mut [0; 1]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Opens a connection to the first address that takes it.
pub async fn connect(backend: &Arc<Backend>, deadline: Duration) -> io::Result<Link> {
    let epoch = backend.pool_epoch.load(Relaxed);
    let addrs = backend.addrs.load_full();
    let connected = tokio::time::timeout(deadline, connect_any(&addrs)).await;
    match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(io) => {
            io.set_nodelay(true)?;
            backend.metrics.connects.inc();
            Ok(Link {
                io,
                reused: false,
                epoch,
            })
        }
        Err(error) => {
            backend.metrics.connect_errors.inc();
            Err(error)
        }
    }
}

async fn connect_any(addrs: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for addr in addrs {
        match TcpStream::connect(addr).await {
            Ok(io) => return Ok(io),
            Err(error) => last = error,
        }
    }
    Err(last)
}
