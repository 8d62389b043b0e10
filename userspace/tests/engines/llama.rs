//! Real llama.cpp servers on loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The top of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A Python of the environment `name`; the tests cannot run without it.
#[track_caller]
pub fn python(name: &str) -> PathBuf {
    let python = root().join(".setup").join(name).join("bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `cargo xtask setup` once, or the tests by `cargo xtask test`",
        python.display()
    );
    python
}

/// One engine, killed on drop.
pub struct Engine {
    child: Child,
    pub addr: SocketAddr,
}

impl Engine {
    /// Starts one and waits until it listens.
    #[track_caller]
    pub fn start() -> Self {
        // The port is free a moment before; another process could take it, so there are a few tries.
        (0..5)
            .find_map(|_| Self::try_start())
            .expect("no engine came up on five ports")
    }

    fn try_start() -> Option<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("an address");
        drop(listener);
        let mut child = Command::new(python("engines"))
            .arg(root().join("bench/engines/llama_server.py"))
            .arg(root().join(".setup/tiny.gguf"))
            .arg(addr.port().to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("python starts");
        let out = child.stdout.take().expect("piped");
        let ready = BufReader::new(out)
            .lines()
            .map_while(Result::ok)
            .any(|line| line.starts_with("ready"));
        if ready {
            return Some(Self { child, addr });
        }
        let _ = child.wait();
        None
    }

    /// A page of the engine itself, past prefixlb.
    pub fn page(&self, path: &str) -> String {
        let mut io = TcpStream::connect(self.addr).expect("the engine listens");
        write!(io, "GET {path} HTTP/1.0\r\nHost: e\r\n\r\n").expect("sent");
        let mut text = String::new();
        io.read_to_string(&mut text).expect("a page");
        text
    }

    /// A number of its metrics page.
    #[track_caller]
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.page("/metrics");
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.trim().parse().ok())
            .unwrap_or_else(|| panic!("no {name} in {page}"))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
