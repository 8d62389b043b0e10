//! Engines that do as told, and a configuration at work around them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use prefixlb::backend::resolve::{Answer, Lookup};
use prefixlb::backend::supervise_with;
use prefixlb::config::{BackendSettings, HealthSettings, PoolSettings, Settings, SignalSettings};
use prefixlb::generation;
use prefixlb::picker::Ledger;
use prefixlb::state::{Backend, Phase, Shared};
use prefixlb_common::ledger::STATE_HEALTHY;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Only a fault takes this long.
const DEADLINE: Duration = Duration::from_secs(20);

pub const MS: Duration = Duration::from_millis(1);
pub const HOUR: Duration = Duration::from_secs(3600);

/// Waits until `holds`.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < DEADLINE, "never came: {what}");
        tokio::time::sleep(MS).await;
    }
}

/// How an engine answers on a path.
#[derive(Clone, Debug)]
pub enum Reply {
    With(u16, String),
    /// Takes the request and says nothing, until the client leaves.
    Never,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self::With(status, String::new())
    }
}

#[derive(Default)]
struct EngineState {
    replies: Mutex<HashMap<String, Reply>>,
    /// Path and Host of every request so far.
    seen: Mutex<Vec<(String, String)>>,
    open: AtomicUsize,
    /// Called with each request, before its answer.
    hook: Mutex<Option<Box<dyn Fn() + Send>>>,
}

/// A small HTTP server; 404 where no reply was set.
#[derive(Clone)]
pub struct Engine {
    pub addr: SocketAddr,
    state: Arc<EngineState>,
}

impl Engine {
    pub async fn start() -> Self {
        Self::start_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .await
            .expect("a loopback port")
    }

    pub async fn start_on(addr: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let engine = Self {
            addr: listener.local_addr()?,
            state: Arc::default(),
        };
        engine.reply("/health", Reply::status(200));
        let served = engine.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let served = served.clone();
                tokio::spawn(async move { served.serve(stream).await });
            }
        });
        Ok(engine)
    }

    pub fn reply(&self, path: &str, reply: Reply) {
        self.state
            .replies
            .lock()
            .unwrap()
            .insert(path.into(), reply);
    }

    pub fn on_request(&self, hook: impl Fn() + Send + 'static) {
        *self.state.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// Requests so far for `path`.
    pub fn seen(&self, path: &str) -> usize {
        let seen = self.state.seen.lock().unwrap();
        seen.iter().filter(|(p, _)| p == path).count()
    }

    pub fn last_host(&self) -> String {
        let seen = self.state.seen.lock().unwrap();
        seen.last()
            .map(|(_, host)| host.clone())
            .unwrap_or_default()
    }

    /// Waits until the first verdict is in: at the process's start a backend counts as healthy before it.
    pub async fn until_judged(&self) {
        eventually("two probes", || self.seen("/health") >= 2).await;
    }

    /// Connections open now.
    pub fn open(&self) -> usize {
        self.state.open.load(SeqCst)
    }

    /// Settings for a backend here.
    pub fn backend(&self) -> BackendSettings {
        backend_at(&self.addr.ip().to_string(), self.addr.port())
    }

    async fn serve(&self, mut stream: TcpStream) {
        self.state.open.fetch_add(1, SeqCst);
        // A client that breaks off is part of the game.
        let _ = self.exchange(&mut stream).await;
        self.state.open.fetch_sub(1, SeqCst);
    }

    async fn exchange(&self, stream: &mut TcpStream) -> io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8(head).expect("a head in ASCII");
        let path = head.split(' ').nth(1).expect("a target").to_owned();
        let host = head
            .lines()
            .find_map(|line| line.strip_prefix("host: "))
            .expect("a Host field");
        let entry = (path.clone(), host.to_owned());
        self.state.seen.lock().unwrap().push(entry);
        if let Some(hook) = &*self.state.hook.lock().unwrap() {
            hook();
        }
        let reply = self.state.replies.lock().unwrap().get(&path).cloned();
        match reply.unwrap_or(Reply::status(404)) {
            Reply::With(status, body) => {
                let length = body.len();
                let answer =
                    format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).await?;
            }
            Reply::Never => while stream.read(&mut [0; 64]).await? > 0 {},
        }
        Ok(())
    }
}

pub fn backend_at(host: &str, port: u16) -> BackendSettings {
    let mut settings = BackendSettings {
        name: String::new(),
        host: host.into(),
        port,
        weight: 1.0,
        max_active: None,
    };
    settings.name = settings.authority();
    settings
}

/// A pool with quick checks and no scraping.
pub fn pool(backends: Vec<BackendSettings>) -> PoolSettings {
    let mut pool = PoolSettings::new("main", backends);
    pool.health = HealthSettings {
        interval: 5 * MS,
        timeout: DEADLINE,
        slow_start: Duration::ZERO,
        ..HealthSettings::default()
    };
    pool.signals = SignalSettings {
        scrape: false,
        interval: 5 * MS,
        stale_after: DEADLINE,
        ..SignalSettings::default()
    };
    pool.resolve_interval = HOUR;
    pool
}

/// Names and their addresses, as the test says.
#[derive(Debug, Default)]
pub struct Names(Mutex<HashMap<String, Vec<IpAddr>>>);

impl Names {
    pub fn set(&self, name: &str, addrs: &[&str]) {
        let addrs = addrs.iter().map(|a| a.parse().unwrap()).collect();
        self.0.lock().unwrap().insert(name.into(), addrs);
    }

    pub fn remove(&self, name: &str) {
        self.0.lock().unwrap().remove(name);
    }
}

impl Lookup for Names {
    fn lookup<'a>(&'a self, host: &'a str, port: u16) -> Answer<'a> {
        let found = self.0.lock().unwrap().get(host).cloned();
        Box::pin(async move {
            let addrs = found.ok_or_else(|| io::Error::other("no such name"))?;
            Ok(addrs
                .into_iter()
                .map(|a| SocketAddr::new(a, port))
                .collect())
        })
    }
}

/// A configuration at work.
pub struct World {
    pub shared: Arc<Shared>,
    pub names: Arc<Names>,
}

impl World {
    /// Builds the state of `pools`; nothing is watched yet.
    pub fn new(pools: Vec<PoolSettings>) -> Self {
        let shared = Shared::start(Settings::new(pools), Ledger::in_process());
        Self {
            shared: shared.expect("sound settings"),
            names: Arc::default(),
        }
    }

    /// Builds and supervises.
    pub fn supervised(pools: Vec<PoolSettings>) -> Self {
        let world = Self::new(pools);
        world.supervise();
        world
    }

    pub fn supervise(&self) {
        let lookup = Arc::clone(&self.names) as Arc<dyn Lookup>;
        tokio::spawn(supervise_with(Arc::clone(&self.shared), lookup));
    }

    /// Another configuration in force.
    pub fn reload(&self, pools: Vec<PoolSettings>) {
        let old = self.shared.snapshot.load_full();
        let fresh = generation::build(Settings::new(pools), Some(&old), self.shared.ledger);
        generation::install(&self.shared, fresh.expect("sound settings"));
    }

    /// The backend on place `i` of the first pool.
    pub fn backend(&self, i: usize) -> Arc<Backend> {
        Arc::clone(&self.shared.snapshot.load().pools[0].backends[i])
    }

    pub fn has(&self, i: usize, bit: u32) -> bool {
        let slot = self.backend(i).slot;
        self.shared.ledger.cell(slot).state.load(SeqCst) & bit != 0
    }

    pub fn weight(&self, i: usize) -> u32 {
        self.shared
            .ledger
            .cell(self.backend(i).slot)
            .weight
            .load(SeqCst)
    }

    pub async fn until_healthy(&self, i: usize) {
        eventually("healthy", || self.has(i, STATE_HEALTHY)).await;
    }
}

/// A request that waits in the pool's line: counts how often it was woken.
#[derive(Debug, Default)]
pub struct Waiting(AtomicUsize);

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

impl Waiting {
    pub fn in_line(world: &World) -> Arc<Self> {
        let waiting = Arc::new(Self::default());
        let waker = Waker::from(Arc::clone(&waiting));
        let pool = Arc::clone(&world.shared.snapshot.load().pools[0]);
        pool.waiters.join(10, &waker).expect("room in the line");
        waiting
    }

    pub async fn until_woken(&self) {
        eventually("a waiting request to be woken", || self.0.load(SeqCst) > 0).await;
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.shared.phase.send_replace(Phase::Aborting);
    }
}
