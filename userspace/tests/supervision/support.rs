//! Engines that do as told, and a configuration at work around them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use prefixlb::backend::health::Passive;
use prefixlb::backend::resolve::{Answer, Lookup, literal};
use prefixlb::backend::supervise_with;
use prefixlb::config::{BackendSettings, HealthSettings, PoolSettings, Settings, SignalSettings};
use prefixlb::metrics::{BackendMetrics, PoolMetrics, ProxyMetrics};
use prefixlb::picker::{Ledger, Member, Picker, SignalTable};
use prefixlb::proxy::Waiters;
use prefixlb::reqlog::RequestLog;
use prefixlb::state::{Backend, Phase, Pool, Shared, Snapshot};
use prefixlb_common::ledger::{STATE_HEALTHY, STATE_PRESENT, WEIGHT_ONE};
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
        let ledger = Ledger::in_process();
        let snapshot = build(1, pools, ledger, None);
        let shared = Shared {
            snapshot: ArcSwap::from_pointee(snapshot),
            ledger,
            signals: SignalTable::default(),
            metrics: ProxyMetrics::default(),
            epoch: Instant::now(),
            phase: tokio::sync::watch::Sender::new(Phase::Serving),
            log: RequestLog::default(),
        };
        Self {
            shared: Arc::new(shared),
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
        let fresh = build(old.generation + 1, pools, self.shared.ledger, Some(&old));
        self.shared.snapshot.store(Arc::new(fresh));
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

impl Drop for World {
    fn drop(&mut self) {
        self.shared.phase.send_replace(Phase::Aborting);
    }
}

fn build(
    generation: u64,
    pools: Vec<PoolSettings>,
    ledger: Ledger,
    old: Option<&Snapshot>,
) -> Snapshot {
    let settings = Settings::new(pools.clone());
    let taken = old
        .iter()
        .flat_map(|old| &old.pools)
        .flat_map(|pool| &pool.backends);
    let mut next_slot = taken.map(|backend| backend.slot + 1).max().unwrap_or(0);
    let pools = pools
        .into_iter()
        .map(|settings| {
            let before = old.and_then(|old| {
                let same = |pool: &&Arc<Pool>| pool.settings.name == settings.name;
                old.pools.iter().find(same)
            });
            Arc::new(build_pool(settings, ledger, before, &mut next_slot))
        })
        .collect();
    Snapshot {
        generation,
        settings,
        pools,
    }
}

fn build_pool(
    settings: PoolSettings,
    ledger: Ledger,
    old: Option<&Arc<Pool>>,
    next_slot: &mut u16,
) -> Pool {
    let backends: Vec<Arc<Backend>> = settings
        .backends
        .iter()
        .map(|wanted| {
            let same = |b: &&Arc<Backend>| {
                b.settings.name == wanted.name && b.settings.port == wanted.port
            };
            if let Some(kept) = old.and_then(|pool| pool.backends.iter().find(same)) {
                return Arc::clone(kept);
            }
            let slot = *next_slot;
            *next_slot += 1;
            Arc::new(build_backend(wanted, slot, ledger, &settings.health))
        })
        .collect();
    Pool {
        members: backends
            .iter()
            .map(|backend| Member {
                slot: backend.slot,
                identity: u64::from(backend.slot),
            })
            .collect(),
        picker: match old {
            Some(old) => Arc::clone(&old.picker),
            None => Arc::new(Picker::new(
                &settings,
                &prefixlb::config::KeySettings::default(),
            )),
        },
        waiters: Arc::new(Waiters::default()),
        metrics: Arc::new(PoolMetrics::default()),
        bytes_per_token_fp: Arc::new(AtomicU32::new(4096)),
        settings,
        backends,
    }
}

fn build_backend(
    settings: &BackendSettings,
    slot: u16,
    ledger: Ledger,
    health: &HealthSettings,
) -> Backend {
    let cell = ledger.cell(slot);
    cell.state.store(STATE_PRESENT, SeqCst);
    cell.weight.store(WEIGHT_ONE, SeqCst);
    cell.generation.fetch_add(1, SeqCst);
    Backend {
        settings: settings.clone(),
        slot,
        authority: settings.authority(),
        addrs: ArcSwap::from_pointee(literal(&settings.host, settings.port).into_iter().collect()),
        resolution: Default::default(),
        pool_epoch: AtomicU64::new(0),
        passive: Passive::new(ledger, slot, health),
        metrics: BackendMetrics::default(),
    }
}
