//! The binary under test: a configuration, a process, its admin pages.

use std::fmt::Write as _;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Client, Mock, PATIENCE, Response, eventually, lock};

/// What a test wants set; everything else is quiet: one worker, no probes, no scrapes, no ejection.
#[derive(Clone, Debug, Default)]
pub struct Config {
    top: Vec<String>,
    http: Vec<String>,
    pool: Vec<String>,
    policy: Vec<String>,
    health: Vec<String>,
    backends: Vec<String>,
    listen: Option<String>,
}

impl Config {
    /// A pool of these backends, named `b0`, `b1`, … in order.
    pub fn new(mocks: &[&Mock]) -> Self {
        mocks.iter().fold(Self::default(), |config, mock| {
            config.backend(mock.addr, "")
        })
    }

    /// One more backend at `addr`; `extra` are further keys, as `max_active = 1`.
    pub fn backend(mut self, addr: SocketAddr, extra: &str) -> Self {
        let name = format!("b{}", self.backends.len());
        self.backends.push(format!(
            "name = \"{name}\"\nurl = \"http://{addr}\"\n{extra}"
        ));
        self
    }

    /// The same cap for every backend.
    pub fn cap(mut self, cap: u32) -> Self {
        for backend in &mut self.backends {
            write!(backend, "\nmax_active = {cap}").expect("a string takes text");
        }
        self
    }

    /// A backend by its whole table.
    pub fn backend_table(mut self, table: &str) -> Self {
        self.backends.push(table.into());
        self
    }

    /// Drops backend `at`, the others keep their names.
    pub fn without_backend(mut self, at: usize) -> Self {
        self.backends.remove(at);
        self
    }

    /// Turns the backends' order round.
    pub fn reversed(mut self) -> Self {
        self.backends.reverse();
        self
    }

    /// Where clients connect, instead of a loopback port.
    pub fn listen(mut self, host: &str) -> Self {
        self.listen = Some(host.into());
        self
    }

    /// A top-level line.
    pub fn top(mut self, line: &str) -> Self {
        self.top.push(line.into());
        self
    }

    /// A line of `[http]`.
    pub fn http(mut self, line: &str) -> Self {
        self.http.push(line.into());
        self
    }

    /// A line of the pool.
    pub fn pool(mut self, line: &str) -> Self {
        self.pool.push(line.into());
        self
    }

    /// A line of the pool's policy.
    pub fn policy(mut self, line: &str) -> Self {
        self.policy.push(line.into());
        self
    }

    /// A line of the pool's health checks; the first turns probes on.
    pub fn health(mut self, line: &str) -> Self {
        self.health.push(line.into());
        self
    }

    fn text(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        let mut text = format!("listen = \"{listen}\"\nkernel = \"off\"\n");
        let mut put = |header: &str, lines: &[String]| {
            if !lines.is_empty() {
                text += header;
                text += "\n";
                for line in lines {
                    text += line;
                    text += "\n";
                }
            }
        };
        let mut top = self.top.clone();
        if !top.iter().any(|line| line.starts_with("workers")) {
            top.push("workers = 1".into());
        }
        put("", &top);
        put("[admin]", &[format!("listen = \"{admin}\"")]);
        put("[http]", &self.http);
        put("[[pool]]\nname = \"main\"", &["# pool".into()]);
        put("", &self.pool);
        put("[pool.policy]", &self.policy);
        let off = [
            "active = false".to_string(),
            "eject_after = 0".into(),
            "slow_start = \"0s\"".into(),
        ];
        put(
            "[pool.health]",
            if self.health.is_empty() {
                &off
            } else {
                &self.health
            },
        );
        put("[pool.signals]", &["scrape = false".into()]);
        for backend in &self.backends {
            put("[[pool.backend]]", std::slice::from_ref(backend));
        }
        text
    }

    /// Writes the file, starts the binary, waits until it is ready.
    #[track_caller]
    pub fn start(self) -> Proxy {
        let proxy = self.launch();
        eventually("prefixlb is ready", || {
            proxy
                .admin("GET", "/readyz")
                .is_some_and(|r| r.status == 200)
        });
        proxy
    }

    /// The same, but only waits until it serves: for pools that are not ready.
    #[track_caller]
    pub fn launch(self) -> Proxy {
        for _ in 0..5 {
            if let Some(proxy) = Proxy::spawn(self.clone()) {
                return proxy;
            }
        }
        panic!("prefixlb did not start at five pairs of ports");
    }
}

/// A running prefixlb, killed on drop.
#[derive(Debug)]
pub struct Proxy {
    pub addr: SocketAddr,
    pub admin: SocketAddr,
    child: Child,
    dir: PathBuf,
    config: Config,
    output: Arc<Mutex<String>>,
}

impl Proxy {
    fn spawn(config: Config) -> Option<Self> {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let host = config.listen.clone().unwrap_or("127.0.0.1".into());
        let addr = free_address(&host);
        let admin = free_address("127.0.0.1");
        let run = RUNS.fetch_add(1, Ordering::SeqCst);
        let dir = std::env::temp_dir().join(format!("prefixlb-test-{}-{run}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a temporary directory can be made");
        let file = dir.join("prefixlb.toml");
        std::fs::write(&file, config.text(addr, admin)).expect("the configuration can be written");
        let mut child = Command::new(env!("CARGO_BIN_EXE_prefixlb"))
            .args(["run", "--config"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary can be run");
        let output = Arc::new(Mutex::new(String::new()));
        collect(child.stdout.take(), &output);
        collect(child.stderr.take(), &output);
        let mut proxy = Self {
            addr: loopback_of(addr),
            admin,
            child,
            dir,
            config,
            output,
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = proxy.child.try_wait().expect("a child can be asked") {
                let output = proxy.output();
                assert!(
                    output.to_lowercase().contains("in use"),
                    "prefixlb ended with {status}:\n{output}"
                );
                return None;
            }
            if proxy
                .admin("GET", "/healthz")
                .is_some_and(|r| r.status == 200)
            {
                return Some(proxy);
            }
            assert!(
                Instant::now() < deadline,
                "prefixlb does not serve:\n{}",
                proxy.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A connection to its front.
    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(self.addr)
    }

    /// Sends one request on a connection of its own and reads the response.
    #[track_caller]
    pub fn exchange(&self, bytes: impl AsRef<[u8]>) -> Response {
        self.client().exchange(bytes)
    }

    /// Asks an admin page; `None`: nobody answers there.
    pub fn admin(&self, method: &str, target: &str) -> Option<Response> {
        std::net::TcpStream::connect_timeout(&self.admin, PATIENCE).ok()?;
        let mut client = Client::connect(self.admin);
        let length = if method == "GET" {
            ""
        } else {
            "Content-Length: 0\r\n"
        };
        client
            .try_send(format!(
                "{method} {target} HTTP/1.1\r\nHost: admin\r\n{length}Connection: close\r\n\r\n"
            ))
            .then(|| client.read_response())
    }

    /// The metrics page.
    #[track_caller]
    pub fn metrics(&self) -> String {
        self.admin("GET", "/metrics").expect("admin answers").text()
    }

    /// Sum over the series of `name` that have every one of `labels` (`reason="x"`).
    #[track_caller]
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        self.metrics()
            .lines()
            .filter(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with(['{', ' ']))
                    && labels.iter().all(|label| line.contains(label))
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Sum of failures with this reason label.
    #[track_caller]
    pub fn failures(&self, reason: &str) -> f64 {
        let label = format!("reason=\"{reason}\"");
        self.metrics()
            .lines()
            .filter(|line| !line.starts_with('#') && line.contains("fail") && line.contains(&label))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Waits until failures with this reason are counted so often: the count follows the answer.
    #[track_caller]
    pub fn wait_failures(&self, reason: &str, n: usize) {
        eventually(&format!("{n} failures as {reason}"), || {
            self.failures(reason) >= n as f64
        });
        assert_eq!(self.failures(reason), n as f64, "{reason}");
    }

    /// The ledger as `/backends` shows it: name, active requests, prefill tokens.
    #[track_caller]
    pub fn ledger(&self) -> Vec<(String, u64, u64)> {
        let page = self.admin("GET", "/backends").expect("admin answers");
        let page: serde_json::Value = serde_json::from_slice(&page.body).expect("JSON");
        let mut found = Vec::new();
        collect_ledger(&page, &mut found);
        assert!(!found.is_empty(), "no backend in {page}");
        found
    }

    /// Active requests on the backend of this name.
    #[track_caller]
    pub fn active(&self, name: &str) -> u64 {
        let ledger = self.ledger();
        let entry = ledger.iter().find(|(n, ..)| n == name);
        entry.unwrap_or_else(|| panic!("no {name} in {ledger:?}")).1
    }

    /// Waits until nothing is charged any more.
    #[track_caller]
    pub fn wait_idle(&self) {
        eventually("the ledger is back to 0", || {
            self.ledger()
                .iter()
                .all(|(_, active, tokens)| *active == 0 && *tokens == 0)
        });
    }

    /// Writes another configuration in place of the running one, same ports, and sends SIGHUP.
    pub fn reload(&mut self, change: impl FnOnce(Config) -> Config) {
        self.config = change(self.config.clone());
        self.write(&self.config.text(self.addr, self.admin));
        self.signal(libc::SIGHUP);
    }

    /// Writes this text as the configuration and sends SIGHUP.
    pub fn reload_text(&self, text: &str) {
        self.write(text);
        self.signal(libc::SIGHUP);
    }

    fn write(&self, text: &str) {
        // Renamed into place: a reader never sees half a file.
        let (file, fresh) = (self.dir.join("prefixlb.toml"), self.dir.join("fresh"));
        std::fs::write(&fresh, text).expect("the configuration can be written");
        std::fs::rename(fresh, file).expect("the configuration can be replaced");
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: kill(2) touches no memory of ours; the child is ours and not yet waited for.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }

    /// Waits for the process to end and returns its exit code.
    #[track_caller]
    pub fn wait_exit(&mut self) -> Option<i32> {
        let mut status = None;
        eventually("prefixlb ends", || {
            status = self.child.try_wait().expect("a child can be asked");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Resident memory, KiB.
    #[track_caller]
    pub fn resident_kib(&self) -> u64 {
        self.status_field("VmRSS:")
    }

    /// A numeric line of `/proc/PID/status`.
    #[track_caller]
    pub fn status_field(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("the process runs");
        let line = status.lines().find(|line| line.starts_with(field));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
            .expect("the kernel tells")
    }

    /// What it wrote to stdout and stderr so far.
    pub fn output(&self) -> String {
        lock(&self.output).clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let output = self.output();
            let from = output.len().saturating_sub(4000);
            let from = (from..output.len()).find(|at| output.is_char_boundary(*at));
            eprintln!("--- prefixlb wrote:\n{}", &output[from.unwrap_or(0)..]);
        }
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

fn collect_ledger(value: &serde_json::Value, found: &mut Vec<(String, u64, u64)>) {
    match value {
        serde_json::Value::Array(values) => values.iter().for_each(|v| collect_ledger(v, found)),
        serde_json::Value::Object(map) => {
            if let (Some(active), Some(tokens)) = (
                map.get("active").and_then(serde_json::Value::as_u64),
                map.get("prefill_tokens")
                    .and_then(serde_json::Value::as_u64),
            ) {
                let name = map.get("name").and_then(|n| n.as_str()).unwrap_or("");
                found.push((name.into(), active, tokens));
            }
            map.values().for_each(|v| collect_ledger(v, found));
        }
        _ => {}
    }
}

fn collect(stream: Option<impl Read + Send + 'static>, output: &Arc<Mutex<String>>) {
    let (Some(mut stream), output) = (stream, output.clone()) else {
        return;
    };
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = stream.read(&mut buffer) {
            lock(&output).push_str(&String::from_utf8_lossy(&buffer[..n]));
        }
    });
}

/// An address nobody listens on, below the range that outgoing connections take theirs from, so that none of
/// those is in the way later. SO_REUSEPORT would let two instances share one, so the bind is exclusive here.
fn free_address(host: &str) -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = (std::process::id() % 2000) as u16 * 10;
    loop {
        let port = 10_000 + (start + NEXT.fetch_add(1, Ordering::SeqCst)) % 22_000;
        let host = host.trim_matches(['[', ']']);
        let ip: std::net::IpAddr = host.parse().expect("an address");
        if let Ok(listener) = TcpListener::bind((ip, port)) {
            return listener
                .local_addr()
                .expect("a bound socket has an address");
        }
    }
}

/// An address where connections are refused.
pub fn dead_address() -> SocketAddr {
    free_address("127.0.0.1")
}

/// The address to connect to for one that is listened on.
fn loopback_of(addr: SocketAddr) -> SocketAddr {
    if addr.ip().is_unspecified() {
        let ip = if addr.is_ipv4() {
            std::net::Ipv4Addr::LOCALHOST.into()
        } else {
            std::net::IpAddr::from(std::net::Ipv6Addr::LOCALHOST)
        };
        SocketAddr::new(ip, addr.port())
    } else {
        addr
    }
}
