//! What the operator meant: complete, checked, defaults filled in.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Everything prefixlb was told, for one generation of its configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Where clients connect.
    pub listen: Vec<SocketAddr>,
    /// Where operators look.
    pub admin: AdminSettings,
    /// Worker threads; each has its own listener. Default: one a core.
    pub workers: usize,
    /// Limits and deadlines of the HTTP path.
    pub http: HttpSettings,
    /// How the prefix key is read.
    pub key: KeySettings,
    /// Pools, in the order they are tried for a request.
    pub pools: Vec<PoolSettings>,
    /// The request log.
    pub log: LogSettings,
    /// Whether the BPF maps are used.
    pub kernel: KernelMode,
    /// How long streams may go on after SIGTERM. Default 10 minutes.
    pub drain_limit: Duration,
    /// The file this came from, if any: watched and read again on SIGHUP.
    pub source: Option<PathBuf>,
}

/// The admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSettings {
    /// Default 127.0.0.1:9090.
    pub listen: SocketAddr,
    /// Bearer token; required if `listen` is not a loopback address.
    pub token: Option<String>,
}

/// Limits and deadlines of the HTTP path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// Largest head, request or response. Bytes; default 64 KiB.
    pub head_bytes: usize,
    /// Most fields in a head; default 100.
    pub head_fields: usize,
    /// Largest request body. Bytes; default 512 MiB. Streamed, never held whole.
    pub body_bytes: u64,
    /// From the first byte of a request to the end of its head; default 30 s.
    pub head_deadline: Duration,
    /// Longest pause within a request body, or of a client that does not read; default 60 s.
    pub body_idle: Duration,
    /// How long an idle client connection is kept; default 75 s.
    pub keep_alive_idle: Duration,
    /// Connecting to a backend; default 5 s.
    pub connect_deadline: Duration,
    /// From the whole request to the response head; default 10 min (a cold prefill is slow).
    pub response_deadline: Duration,
    /// Longest silence inside a response body; default 10 min.
    pub response_idle: Duration,
    /// Idle pooled backend connections are dropped after this; default 3 s (engines on uvicorn close after 5 s).
    pub pool_idle: Duration,
    /// Idle pooled connections kept per backend and worker; default 256.
    pub pool_size: usize,
    /// A client that sent FIN may still get its answer for this long, then it counts as gone; default 1 s.
    pub half_close_grace: Duration,
    /// Add `Via` both ways; default false.
    pub via: bool,
    /// Answer with `x-prefixlb-pick` always; default false (a client asks with `x-prefixlb-debug: 1`).
    pub pick_header: bool,
    /// Replay a POST once when a FRESH connection dies before any response byte; default false.
    pub replay_fresh: bool,
    /// Trust and extend an incoming `X-Forwarded-For`; default true.
    pub trust_forwarded: bool,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            head_bytes: 64 << 10,
            head_fields: 100,
            body_bytes: 512 << 20,
            head_deadline: Duration::from_secs(30),
            body_idle: Duration::from_secs(60),
            keep_alive_idle: Duration::from_secs(75),
            connect_deadline: Duration::from_secs(5),
            response_deadline: Duration::from_secs(600),
            response_idle: Duration::from_secs(600),
            pool_idle: Duration::from_secs(3),
            pool_size: 256,
            half_close_grace: Duration::from_secs(1),
            via: false,
            pick_header: false,
            replay_fresh: false,
            trust_forwarded: true,
        }
    }
}

/// How the prefix key is read.
#[derive(Clone, Debug, PartialEq)]
pub struct KeySettings {
    /// Bytes of the request body that are looked at; default 16 KiB.
    pub window_bytes: usize,
    /// Bytes of prompt a block; default 256 (about 64 tokens).
    pub block_bytes: usize,
    /// Header that carries the key as 1–16 hex digits; lower case; default `x-prefix-hash`.
    pub header: String,
    /// Bytes of prompt a token, to start with; default 4.0; learned per pool from `usage.prompt_tokens`.
    pub bytes_per_token: f64,
}

impl Default for KeySettings {
    fn default() -> Self {
        Self {
            window_bytes: 16 << 10,
            block_bytes: 256,
            header: "x-prefix-hash".into(),
            bytes_per_token: 4.0,
        }
    }
}

/// One pool: the backends that serve one model behind the listeners.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Label in metrics and logs.
    pub name: String,
    /// Model names served; empty: any.
    pub models: Vec<String>,
    /// Path prefixes served; empty: any.
    pub paths: Vec<String>,
    /// How a backend is chosen.
    pub policy: PolicySettings,
    /// Prefix cache each backend is believed to have, where its metrics do not tell. Tokens; default 500,000.
    pub cache_tokens: u64,
    /// Requests that may wait when every backend is at its cap; default 128.
    pub queue_limit: usize,
    /// How long they may wait; default 30 s.
    pub queue_deadline: Duration,
    /// `Retry-After` of 429 and 503. Default 1 s.
    pub retry_after: Duration,
    /// Health checks of the pool's backends.
    pub health: HealthSettings,
    /// Scraping of the engines' `/metrics`.
    pub signals: SignalSettings,
    /// How often backend names are resolved again; default 10 s.
    pub resolve_interval: Duration,
    /// The backends, in the order of the file.
    pub backends: Vec<BackendSettings>,
}

/// How a pool's backend is chosen. See `picker`.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicySettings {
    /// Which policy.
    pub kind: PolicyKind,
    /// `sticky`: what the gate compares.
    pub gate: GateKind,
    /// `sticky`: what load is.
    pub scorer: Scorer,
    /// Share of a prompt's blocks a backend must hold to be warm, 0–1; default 0.8.
    pub threshold: f64,
    /// The gate, tokens (or requests under `active-requests`); `None`: `r_peak` × `t_max`.
    pub tau: Option<u64>,
    /// Prefill rate of one backend, tokens/s; default 20,480.
    pub r_peak: f64,
    /// Time to first token that stickiness may cost; default 14 s.
    pub t_max: Duration,
    /// The gate closes at tau and opens again at this share of it, 0–1; default 0.8.
    pub hysteresis: f64,
    /// `consistent-hash`: what is hashed.
    pub hash_on: HashOn,
    /// `session` and `consistent-hash` over a session: where the id is.
    pub session: SessionFrom,
    /// `weighted`: prefix : queue : KV use.
    pub weights: [f64; 3],
}

impl Default for PolicySettings {
    fn default() -> Self {
        Self {
            kind: PolicyKind::Sticky,
            gate: GateKind::Gap,
            scorer: Scorer::TokenLoad,
            threshold: 0.8,
            tau: None,
            r_peak: 20_480.0,
            t_max: Duration::from_secs(14),
            hysteresis: 0.8,
            hash_on: HashOn::Key,
            session: SessionFrom::Header("x-session-id".into()),
            weights: [3.0, 2.0, 2.0],
        }
    }
}

/// Requests in flight that end stickiness where load is counted in requests and no tau is set: a difference
/// of eight is where published routers give affinity up.
const REQUESTS_TAU: u64 = 8;

impl PolicySettings {
    /// The gate in the scorer's unit: tau if it is set, else `r_peak` × `t_max` tokens, or 8 requests.
    #[must_use]
    pub fn effective_tau(&self) -> u64 {
        let default = match self.scorer {
            Scorer::TokenLoad => (self.r_peak * self.t_max.as_secs_f64()) as u64,
            Scorer::ActiveRequests => REQUESTS_TAU,
        };
        self.tau.unwrap_or(default)
    }
}

/// The policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "the names are the documentation; `picker` argues them"
)]
pub enum PolicyKind {
    Sticky,
    RoundRobin,
    LeastLoad,
    PowerOfTwo,
    ConsistentHash,
    Session,
    AlwaysSticky,
    Weighted,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 8] = [
        Self::Sticky,
        Self::RoundRobin,
        Self::LeastLoad,
        Self::PowerOfTwo,
        Self::ConsistentHash,
        Self::Session,
        Self::AlwaysSticky,
        Self::Weighted,
    ];

    /// Its name in config, CLI, metrics and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sticky => "sticky",
            Self::RoundRobin => "round-robin",
            Self::LeastLoad => "least-load",
            Self::PowerOfTwo => "power-of-two",
            Self::ConsistentHash => "consistent-hash",
            Self::Session => "session",
            Self::AlwaysSticky => "always-sticky",
            Self::Weighted => "weighted",
        }
    }
}

/// What the gate compares with tau.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    /// Best warm load − best overall load.
    Gap,
    /// Best warm load.
    Absolute,
}

impl GateKind {
    /// Its name in config and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Absolute => "absolute",
        }
    }
}

/// What load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scorer {
    /// Uncached prefill tokens in flight.
    TokenLoad,
    /// Requests in flight.
    ActiveRequests,
}

impl Scorer {
    /// Its name in config and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TokenLoad => "token-load",
            Self::ActiveRequests => "active-requests",
        }
    }
}

/// What `consistent-hash` hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HashOn {
    /// The prefix key.
    Key,
    /// The session id.
    Session,
    /// A request header, lower case.
    Header(String),
}

/// Where a session id is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionFrom {
    /// A request header, lower case.
    Header(String),
    /// A cookie.
    Cookie(String),
}

/// Active and passive health checks.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthSettings {
    /// Active checks; default true.
    pub active: bool,
    /// Default `/health`.
    pub path: String,
    /// Default 5 s, ±10 % jitter; a fifth of it while the backend is out.
    pub interval: Duration,
    /// Default 3 s.
    pub timeout: Duration,
    /// Failures in a row that take a backend out; default 3.
    pub fall: u32,
    /// Successes in a row that bring it back; default 2.
    pub rise: u32,
    /// Connect errors or 5xx in a row that eject a backend; 0: never; default 5.
    pub eject_after: u32,
    /// First ejection, doubled each time up to 8×; default 10 s.
    pub eject_for: Duration,
    /// A backend that comes back gets its share over this time; default 10 s.
    pub slow_start: Duration,
    /// When every backend is out, use them all (else 503); default true.
    pub panic: bool,
}

impl Default for HealthSettings {
    fn default() -> Self {
        Self {
            active: true,
            path: "/health".into(),
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(3),
            fall: 3,
            rise: 2,
            eject_after: 5,
            eject_for: Duration::from_secs(10),
            slow_start: Duration::from_secs(10),
            panic: true,
        }
    }
}

/// Scraping of engine metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct SignalSettings {
    /// Default true; a missing page changes nothing but `weighted`.
    pub scrape: bool,
    /// Default `/metrics`.
    pub path: String,
    /// Default 1 s.
    pub interval: Duration,
    /// A signal older than this is unknown; default 5 s.
    pub stale_after: Duration,
}

impl Default for SignalSettings {
    fn default() -> Self {
        Self {
            scrape: true,
            path: "/metrics".into(),
            interval: Duration::from_secs(1),
            stale_after: Duration::from_secs(5),
        }
    }
}

/// One backend.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSettings {
    /// Identity: metrics label, hash identity; default `host:port` as typed.
    pub name: String,
    /// Host as typed, without brackets: a name, IPv4 or IPv6.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Share of the load relative to others, > 0; default 1.0.
    pub weight: f64,
    /// Most active requests; `None`: no cap.
    pub max_active: Option<u32>,
}

impl BackendSettings {
    /// `host:port`, an IPv6 host in brackets: the `Host` field sent to the backend.
    #[must_use]
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl PoolSettings {
    /// A pool with every default.
    #[must_use]
    pub fn new(name: &str, backends: Vec<BackendSettings>) -> Self {
        Self {
            name: name.into(),
            models: Vec::new(),
            paths: Vec::new(),
            policy: PolicySettings::default(),
            cache_tokens: 500_000,
            queue_limit: 128,
            queue_deadline: Duration::from_secs(30),
            retry_after: Duration::from_secs(1),
            health: HealthSettings::default(),
            signals: SignalSettings::default(),
            resolve_interval: Duration::from_secs(10),
            backends,
        }
    }
}

/// The request log: a line a request.
#[derive(Clone, Debug, PartialEq)]
pub struct LogSettings {
    /// Default `Json`.
    pub format: LogFormat,
    /// Share of successful requests logged, 0–1; failures are always logged. Default 1.0.
    pub sample: f64,
}

/// How a request line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum LogFormat {
    Json,
    Logfmt,
    Off,
}

/// Whether BPF is used: now for the ledger map, later for splice and steer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelMode {
    /// If the kernel and the privileges allow.
    Auto,
    /// Never.
    Off,
    /// Or do not start.
    Require,
}

impl Settings {
    /// Every default, for these pools.
    #[must_use]
    pub fn new(pools: Vec<PoolSettings>) -> Self {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self {
            listen: vec![SocketAddr::new(loopback, 8080)],
            admin: AdminSettings {
                listen: SocketAddr::new(loopback, 9090),
                token: None,
            },
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            http: HttpSettings::default(),
            key: KeySettings::default(),
            pools,
            log: LogSettings {
                format: LogFormat::Json,
                sample: 1.0,
            },
            kernel: KernelMode::Auto,
            drain_limit: Duration::from_secs(600),
            source: None,
        }
    }
}
