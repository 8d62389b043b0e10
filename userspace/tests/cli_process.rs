//! The command from outside: exit codes, the start line, and the process's life under signals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Far more than anything here takes; only a failing test waits for it.
const LIMIT: Duration = Duration::from_secs(20);

fn prefixlb(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_prefixlb"));
    command.args(arguments).env_remove("RUST_LOG");
    command
}

fn output(arguments: &[&str]) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = prefixlb(arguments).output().expect("runs");
    let said = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    (status.code(), said)
}

/// A file in the temporary directory, gone with the test.
struct File(PathBuf);

impl File {
    fn new(test: &str, text: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("prefixlb-cli-{}-{test}.toml", std::process::id()));
        std::fs::write(&path, text).expect("writable");
        Self(path)
    }
    fn path(&self) -> &str {
        self.0.to_str().expect("a plain path")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn config(ports: &[u16]) -> String {
    let head = "listen = '127.0.0.1:0'\nworkers = 2\nkernel = 'off'\n[admin]\nlisten = '127.0.0.1:0'\n\
                [[pool]]\nname = 'p'\n[pool.health]\nactive = false\n[pool.signals]\nscrape = false\n";
    let each = ports
        .iter()
        .map(|port| format!("[[pool.backend]]\nurl = 'http://127.0.0.1:{port}'\n"));
    head.to_owned() + &each.collect::<String>()
}

/// A running prefixlb, killed with the test.
struct Running {
    child: Child,
    lines: Receiver<String>,
    listen: SocketAddr,
    admin: SocketAddr,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut child = prefixlb(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        let (told, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if told.send(line).is_err() {
                    return;
                }
            }
        });
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut running = Self {
            child,
            lines,
            listen: loopback,
            admin: loopback,
        };
        let line = running.told("serving");
        running.listen = field(&line, "listen=");
        running.admin = field(&line, "admin=");
        running
    }

    /// The next line with `words` in it.
    fn told(&self, words: &str) -> String {
        let mut before = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(LIMIT) {
            if line.contains(words) {
                return line;
            }
            before.push(line);
        }
        panic!("never said {words:?}, but: {before:#?}");
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args([name, &id]).status();
        assert!(sent.expect("kill runs").success());
    }

    fn admin(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.admin).expect("admin listens");
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        answer
    }
}

fn field(line: &str, name: &str) -> SocketAddr {
    let (_, rest) = line.split_once(&format!(" {name}")).expect(line);
    let value = rest.split_whitespace().next().expect(line);
    value.parse().expect(line)
}

#[test]
fn check_says_ok_or_the_sentence() {
    let file = File::new("check", &config(&[1, 2]));
    let (code, said) = output(&["check", file.path()]);
    assert_eq!(
        (code, said),
        (
            Some(0),
            format!("{}: ok, 1 pool, 2 backends\n", file.path())
        )
    );

    std::fs::write(&file.0, "[log]\nsample = 7\n").expect("writable");
    let (code, said) = output(&["check", file.path()]);
    let sentence = format!(
        "prefixlb: {}:2:10: log.sample: 7 is out of range: from 0 to 1\n",
        file.path()
    );
    assert_eq!((code, said), (Some(2), sentence));
}

#[test]
fn bad_usage_and_bad_files_end_with_2() {
    let good = File::new("usage", &config(&[1]));
    for (arguments, says) in [
        (&["run"][..], "no backend: give --backend"),
        (
            &["run", "--config", "/nonexistent/p.toml"],
            "cannot be read",
        ),
        (
            &["run", "--config", good.path(), "--backend", "http://a:1"],
            "cannot be used with",
        ),
        (
            &["run", "--config", good.path(), "--policy", "sticky"],
            "cannot be used with",
        ),
        (
            &["run", "--backend", "https://a:1"],
            "--backend: \"https://a:1\" asks for TLS",
        ),
        (
            &["run", "--backend", "a:1", "--backend", "http://a:1"],
            "given twice",
        ),
        (
            &["run", "--backend", "a:1", "--policy", "stikcy"],
            "one of sticky, round-robin",
        ),
        (
            &["run", "--backend", "a:1", "--listen", "x"],
            "write IP:PORT",
        ),
        (&["run", "--backend", "a:1", "--workers", "0"], "1..=256"),
        (
            &["run", "--backend", "a:1", "--listen", "127.0.0.1:9090"],
            "clashes with listen",
        ),
        (
            &["run", "--backend", "a:1", "--admin", "0.0.0.0:9090"],
            "set admin.token",
        ),
        (&["fly"], "unrecognized subcommand"),
    ] {
        let (code, said) = output(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        assert!(said.contains(says), "{arguments:?}: {said}");
    }
}

#[test]
fn help_and_version_are_no_failures() {
    let (code, said) = output(&["--version"]);
    assert_eq!(
        (code, said),
        (Some(0), format!("prefixlb {}\n", env!("CARGO_PKG_VERSION")))
    );
    let (code, said) = output(&["run", "--help"]);
    assert_eq!(code, Some(0));
    assert!(
        said.contains("prefixlb run --backend http://127.0.0.1:8000"),
        "{said}"
    );
}

#[test]
fn a_port_that_is_taken_ends_with_3() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    for (listen, admin) in [(&*address, "127.0.0.1:0"), ("127.0.0.1:0", &*address)] {
        let (code, said) = output(&[
            "run",
            "--backend",
            "a:1",
            "--listen",
            listen,
            "--admin",
            admin,
        ]);
        assert_eq!(code, Some(3), "{said}");
        assert!(
            said.contains(&format!("cannot listen on {address}: ")),
            "{said}"
        );
    }
}

#[test]
fn a_start_without_a_file_needs_only_backends() {
    let running = Running::start(&[
        "run",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
        "--workers",
        "2",
        "--kernel",
        "off",
        "--policy",
        "round-robin",
        "--backend",
        "127.0.0.1:1",
        "--backend",
        "http://[::1]:1",
        "--max-active",
        "4",
    ]);
    TcpStream::connect(running.listen).expect("listens");
    assert!(running.admin("/healthz").starts_with("HTTP/1.1 200"));
    running.signal("-HUP");
    running.told("without a configuration file");
}

#[test]
fn hangup_and_a_changed_file_are_reloads_and_a_bad_file_is_refused() {
    let file = File::new("reload", &config(&[1]));
    let running = Running::start(&["run", "--config", file.path()]);

    // As editors do: write beside it, then rename.
    let beside = file.0.with_extension("new");
    std::fs::write(&beside, config(&[1, 2])).expect("writable");
    std::fs::rename(&beside, &file.0).expect("renamed");
    assert!(
        running
            .told("configuration reloaded")
            .contains("generation=2")
    );

    running.signal("-HUP");
    assert!(
        running
            .told("configuration reloaded")
            .contains("generation=3")
    );

    std::fs::write(&file.0, "nonsense = 1\n").expect("writable");
    let line = running.told("the old one stays in force");
    assert!(
        line.contains(".toml:1:1: unknown key \"nonsense\""),
        "{line}"
    );
    assert!(running.admin("/backends").contains("127.0.0.1:2"));
    let metrics = running.admin("/metrics");
    let refused = metrics
        .lines()
        .find(|line| line.contains("refused") && !line.starts_with('#'));
    assert!(
        refused.is_some_and(|line| line.ends_with(" 1")),
        "{refused:?}"
    );

    std::fs::write(
        &file.0,
        format!("{}# workers\n", config(&[3])).replace("workers = 2", "workers = 3"),
    )
    .expect("writable");
    let line = running.told("cannot change while running");
    assert!(line.contains("workers"), "{line}");
}

#[test]
fn terminate_lets_requests_finish_and_ends_with_0() {
    let engine = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = engine.local_addr().expect("bound").port();
    let file = File::new("drain", &config(&[port]));
    let mut running = Running::start(&["run", "--config", file.path()]);
    let (mut client, mut at_engine) = begin(&running, &engine);

    running.signal("-TERM");
    running.told("draining");
    assert!(running.admin("/readyz").starts_with("HTTP/1.1 503"));

    at_engine
        .write_all(b"5\r\nlater\r\n0\r\n\r\n")
        .expect("sent");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("a clean end");
    assert!(
        answer.contains("later") && answer.ends_with("0\r\n\r\n"),
        "{answer}"
    );
    assert_eq!(running.child.wait().expect("ended").code(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once_with_0() {
    let engine = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = engine.local_addr().expect("bound").port();
    let file = File::new("abort", &config(&[port]));
    let mut running = Running::start(&["run", "--config", file.path()]);
    let _held = begin(&running, &engine);
    running.signal("-INT");
    running.told("draining");
    running.signal("-TERM");
    running.told("told twice");
    assert_eq!(running.child.wait().expect("ended").code(), Some(0));
}

/// A request in mid-answer: both ends of it.
fn begin(running: &Running, engine: &TcpListener) -> (TcpStream, TcpStream) {
    let mut client = TcpStream::connect(running.listen).expect("listens");
    client.set_read_timeout(Some(LIMIT)).expect("set");
    client
        .write_all(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        .expect("sent");
    let mut at_engine = accept(engine);
    at_engine.set_read_timeout(Some(LIMIT)).expect("set");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        at_engine.read_exact(&mut byte).expect("a head");
        head.push(byte[0]);
    }
    at_engine
        .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nnow\r\n")
        .expect("sent");
    let mut seen = Vec::new();
    while !seen.ends_with(b"now\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).expect("relayed as it comes");
        seen.push(byte[0]);
    }
    (client, at_engine)
}

/// The next connection, or a panic after the limit.
fn accept(listener: &TcpListener) -> TcpStream {
    let listener = listener.try_clone().expect("another handle");
    let (came, comes) = channel();
    std::thread::spawn(move || {
        let _ = came.send(listener.accept());
    });
    let accepted = comes.recv_timeout(LIMIT).expect("forwarded in time");
    accepted.expect("forwarded").0
}
