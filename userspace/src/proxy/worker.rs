//! A worker: one thread, one single-threaded runtime, its own listeners, buffers and idle connections.
//!
//! A flow never changes worker, so nothing on its path needs a lock.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpListener;
use tokio::task::LocalSet;

use super::buffers::Buffers;
use super::flow::Flow;
use super::link::Links;
use super::timers::{TICK, Timers};
use crate::picker::{KeyParser, PrefixKey};
use crate::state::{Phase, Shared, Snapshot};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// After running out of descriptors, accepting rests this long: the flows that hold them need the time.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// Whether `addr` is free. Listeners that share a port would share it with another process as well, which
/// would then get half of the connections; so the first bind is one that does not share.
pub fn probe(addr: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1)
}

/// A listener that other workers' listeners share the port with.
pub fn bind(addr: SocketAddr) -> io::Result<StdListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// A worker's hold on the configuration: its flows count references without atomics.
#[derive(Debug)]
pub struct Kept(Arc<Snapshot>);

impl std::ops::Deref for Kept {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        &self.0
    }
}

/// What the flows of one worker share.
#[derive(Debug)]
pub struct Worker {
    /// What all workers share.
    pub shared: Arc<Shared>,
    /// Deadlines.
    pub timers: Rc<Timers>,
    /// Buffers.
    pub buffers: Buffers,
    /// Idle connections to backends.
    pub links: Links,
    /// The key parser; used within one poll, never across a wait.
    pub parser: RefCell<KeyParser>,
    /// Memory of keys that no request needs now.
    pub keys: RefCell<Vec<PrefixKey>>,
    phase: Cell<Phase>,
    snapshot: RefCell<Rc<Kept>>,
    random: Cell<u64>,
}

impl Worker {
    fn new(shared: Arc<Shared>) -> Rc<Self> {
        use std::hash::{BuildHasher, RandomState};
        let snapshot = shared.snapshot.load_full();
        let phase = *shared.phase.borrow();
        Rc::new(Self {
            timers: Timers::new(),
            buffers: Buffers::new(),
            links: Links::default(),
            parser: RefCell::new(KeyParser::new(&snapshot.settings.key)),
            keys: RefCell::default(),
            phase: Cell::new(phase),
            snapshot: RefCell::new(Rc::new(Kept(snapshot))),
            random: Cell::new(RandomState::new().hash_one(0)),
            shared,
        })
    }

    /// The configuration in force. A flow keeps it for one request; no atomic count is touched.
    pub fn snapshot(&self) -> Rc<Kept> {
        let mut kept = self.snapshot.borrow_mut();
        let current = self.shared.snapshot.load();
        if !Arc::ptr_eq(&current, &kept.0) {
            if current.settings.key != kept.settings.key {
                *self.parser.borrow_mut() = KeyParser::new(&current.settings.key);
            }
            *kept = Rc::new(Kept(current.clone()));
        }
        kept.clone()
    }

    /// The stage of the process's life, as this worker knows it.
    pub fn phase(&self) -> Phase {
        self.phase.get()
    }

    /// A random word (splitmix64): for ids and ties, not for secrets.
    pub fn random(&self) -> u64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Serves on `listeners` until the process ends; blocks this thread.
pub fn run_worker(shared: Arc<Shared>, listeners: Vec<StdListener>, id: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // The sweep and accepts must not wait behind a thousand ready streams, nor poll too often.
        .event_interval(61)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(worker = id, %error, "no runtime: this worker does not serve");
            return;
        }
    };
    LocalSet::new().block_on(&runtime, serve(Worker::new(shared), listeners));
}

async fn serve(worker: Rc<Worker>, listeners: Vec<StdListener>) {
    let mut accepting = Vec::new();
    for listener in listeners {
        match TcpListener::from_std(listener) {
            Ok(listener) => {
                accepting.push(tokio::task::spawn_local(accept(worker.clone(), listener)));
            }
            Err(error) => tracing::error!(%error, "a listener cannot be used"),
        }
    }
    let mut phase = worker.shared.phase.subscribe();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => sweep(&worker),
            changed = phase.changed() => {
                worker.phase.set(if changed.is_ok() { *phase.borrow() } else { Phase::Aborting });
                accepting.drain(..).for_each(|task| task.abort());
                worker.timers.wake_all();
            }
        }
        if worker.phase() != Phase::Serving && worker.timers.len() == 0 {
            worker.links.clear();
            return;
        }
    }
}

fn sweep(worker: &Worker) {
    worker.timers.sweep();
    let snapshot = worker.snapshot();
    let max_idle = snapshot.settings.http.pool_idle;
    worker.links.sweep(worker.timers.now_ms(), max_idle);
    for pool in &snapshot.pools {
        // Room can come from elsewhere than a request's end: a backend is back, a cap was raised.
        pool.waiters.wake_first();
    }
}

async fn accept(worker: Rc<Worker>, listener: TcpListener) {
    let mut stuck = false;
    loop {
        match listener.accept().await {
            Ok((io, peer)) => {
                stuck = false;
                prepare(&io);
                tokio::task::spawn_local(Flow::serve(worker.clone(), io, peer));
            }
            Err(error) if is_passing(&error) => {}
            Err(error) => {
                // Once for each time it gets stuck: twenty lines a second help nobody.
                if !std::mem::replace(&mut stuck, true) {
                    tracing::warn!(%error, "cannot accept connections; trying on until it works again");
                }
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
}

/// Errors of the connection that was to be accepted, not of the listener.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionReset | Interrupted
    )
}

/// Events must leave at once; a host that vanished without a FIN must be noticed some day.
fn prepare(io: &tokio::net::TcpStream) {
    let socket = SockRef::from(io);
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15));
    if let Err(error) = socket
        .set_tcp_nodelay(true)
        .and_then(|()| socket.set_tcp_keepalive(&keepalive))
    {
        tracing::debug!(%error, "a client's socket options cannot be set");
    }
}

/// One connection more or less; keeps the gauge right however a flow ends.
#[derive(Debug)]
pub struct OpenConnection(Arc<Shared>);

impl OpenConnection {
    /// Counts one.
    pub fn new(shared: &Arc<Shared>) -> Self {
        shared.metrics.connections.inc();
        shared.metrics.connections_open.add(1);
        Self(shared.clone())
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.metrics.connections_open.add(-1);
    }
}

/// Whether some backend of some pool could get a request: one that lets requests in or, in panic mode, one
/// that no operator drains.
pub fn anyone_admits(worker: &Worker, snapshot: &Snapshot) -> bool {
    use prefixlb_common::ledger::{LedgerEntry, STATE_DRAINING};
    let ledger = &worker.shared.ledger;
    snapshot.pools.iter().any(|pool| {
        let panics = pool.settings.health.panic;
        pool.members.iter().any(|member| {
            let state = ledger.cell(member.slot).state.load(Relaxed);
            LedgerEntry::admits(state) || (panics && state & STATE_DRAINING == 0)
        })
    })
}
