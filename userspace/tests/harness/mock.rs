//! A backend by script: it records what it was sent, byte for byte, and answers as the test says.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Fields, PATIENCE, head_end, lock, reset_on_close};

/// A request as a backend saw it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Which connection it came on, from 0.
    pub conn: usize,
    /// Head, as sent.
    pub head: String,
    pub method: String,
    pub target: String,
    pub fields: Fields,
    /// The body with any chunked coding taken off.
    pub body: Vec<u8>,
    /// The body as it was on the wire.
    pub raw_body: Vec<u8>,
}

impl Request {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// What a simple script does with a request.
#[derive(Clone, Debug)]
pub enum Reply {
    /// These bytes, and the connection lives on.
    Bytes(Vec<u8>),
    /// These bytes, then FIN.
    Close(Vec<u8>),
    /// These bytes, then RST.
    Reset(Vec<u8>),
}

impl Reply {
    /// A 200 with this body and a length.
    pub fn ok(body: impl AsRef<[u8]>) -> Self {
        let body = body.as_ref();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        Self::Bytes([head.as_bytes(), body].concat())
    }

    /// Bytes as they stand.
    pub fn raw(bytes: impl AsRef<[u8]>) -> Self {
        Self::Bytes(bytes.as_ref().to_vec())
    }
}

#[derive(Debug, Default)]
struct Seen {
    requests: Mutex<Vec<Request>>,
    bytes: Mutex<Vec<Vec<u8>>>,
    changed: Condvar,
    conns: AtomicUsize,
    open: AtomicUsize,
    probes: AtomicUsize,
    probe_mode: AtomicU8,
}

/// How probes are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Probes {
    /// With 200.
    Ok,
    /// With 500.
    Fail,
    /// Not at all.
    Silent,
}

/// A listening backend. Its threads end with it.
#[derive(Debug)]
pub struct Mock {
    pub addr: SocketAddr,
    seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    live: Arc<Mutex<Vec<TcpStream>>>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl Mock {
    /// Runs `script` for each connection. It returns when it is done with it, which closes it (FIN).
    pub fn script(script: impl Fn(&mut Conn) + Send + Sync + 'static) -> Self {
        Self::script_on("127.0.0.1:0", script)
    }

    /// The same at an address of the caller's choice.
    pub fn script_on(addr: &str, script: impl Fn(&mut Conn) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(addr).expect("a mock's address can be bound");
        let addr = listener
            .local_addr()
            .expect("a bound socket has an address");
        let seen = Arc::new(Seen::default());
        let stop = Arc::new(AtomicBool::new(false));
        let live = Arc::new(Mutex::new(Vec::new()));
        let script = Arc::new(script);
        let acceptor = {
            let (seen, stop, live) = (seen.clone(), stop.clone(), live.clone());
            std::thread::spawn(move || accept(&listener, &seen, &stop, &live, &script))
        };
        Self {
            addr,
            seen,
            stop,
            live,
            acceptor: Some(acceptor),
        }
    }

    /// Answers each request by `answer`, connections kept alive.
    pub fn answer(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::script(move |conn| {
            while let Some(request) = conn.read_request() {
                match answer(&request) {
                    Reply::Bytes(bytes) => {
                        if !conn.send(bytes) {
                            return;
                        }
                    }
                    Reply::Close(bytes) => {
                        conn.send(bytes);
                        return conn.fin();
                    }
                    Reply::Reset(bytes) => {
                        conn.send(bytes);
                        return conn.reset();
                    }
                }
            }
        })
    }

    /// Answers every request with 200 and this body.
    pub fn ok(body: &'static str) -> Self {
        Self::answer(move |_| Reply::ok(body))
    }

    /// The requests seen so far, in the order they were complete.
    pub fn requests(&self) -> Vec<Request> {
        lock(&self.seen.requests).clone()
    }

    /// Waits until at least `n` requests were seen, and returns them.
    #[track_caller]
    pub fn wait_requests(&self, n: usize) -> Vec<Request> {
        self.wait(&format!("{n} requests at a backend"), |mock| {
            lock(&mock.seen.requests).len() >= n
        });
        self.requests()
    }

    /// Everything that came on each connection, byte for byte.
    pub fn bytes(&self) -> Vec<Vec<u8>> {
        lock(&self.seen.bytes).clone()
    }

    /// Whether `needle` came on any connection.
    pub fn saw(&self, needle: &str) -> bool {
        let needle = needle.as_bytes();
        self.bytes()
            .iter()
            .any(|bytes| bytes.windows(needle.len()).any(|w| w == needle))
    }

    /// Connections accepted that carried more than probes.
    pub fn connections(&self) -> usize {
        self.seen.conns.load(Ordering::SeqCst)
    }

    /// Connections whose script has not ended.
    pub fn open(&self) -> usize {
        self.seen.open.load(Ordering::SeqCst)
    }

    /// Health and metrics requests answered.
    pub fn probes(&self) -> usize {
        self.seen.probes.load(Ordering::SeqCst)
    }

    /// Answers probes in this way from now on.
    pub fn set_probes(&self, probes: Probes) {
        self.seen.probe_mode.store(probes as u8, Ordering::SeqCst);
    }

    /// Waits until `n` more probes have come.
    #[track_caller]
    pub fn wait_probes(&self, n: usize) {
        let due = self.probes() + n;
        self.wait(&format!("{n} more probes"), |mock| mock.probes() >= due);
    }

    /// Waits until no connection's script runs any more.
    #[track_caller]
    pub fn wait_closed(&self) {
        self.wait("every backend connection closed", |mock| mock.open() == 0);
    }

    #[track_caller]
    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "not in {PATIENCE:?}: {what}");
            let guard = lock(&self.seen.requests);
            // Woken by each request; the short timeout covers what is counted without the lock.
            drop(
                self.seen
                    .changed
                    .wait_timeout(guard, Duration::from_millis(5))
                    .unwrap_or_else(PoisonError::into_inner),
            );
        }
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.addr));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
        for stream in lock(&self.live).drain(..) {
            drop(stream.shutdown(Shutdown::Both));
        }
    }
}

fn accept<F: Fn(&mut Conn) + Send + Sync + 'static>(
    listener: &TcpListener,
    seen: &Arc<Seen>,
    stop: &AtomicBool,
    live: &Mutex<Vec<TcpStream>>,
    script: &Arc<F>,
) {
    while let Ok((stream, _)) = listener.accept() {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        drop(stream.set_nodelay(true));
        drop(stream.set_read_timeout(Some(PATIENCE)));
        drop(stream.set_write_timeout(Some(PATIENCE)));
        if let Ok(copy) = stream.try_clone() {
            lock(live).push(copy);
        }
        let (seen, script) = (seen.clone(), script.clone());
        seen.open.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            let mut conn = Conn {
                index: usize::MAX,
                stream,
                unread: Vec::new(),
                seen,
                slot: None,
                ended: false,
            };
            script(&mut conn);
            conn.fin();
        });
    }
}

/// A connection in the hands of a script.
#[derive(Debug)]
pub struct Conn {
    /// Which one it is, from 0, among those that carried requests; `usize::MAX` before the first byte.
    pub index: usize,
    stream: TcpStream,
    unread: Vec<u8>,
    seen: Arc<Seen>,
    /// Where its bytes are recorded.
    slot: Option<usize>,
    ended: bool,
}

impl Drop for Conn {
    fn drop(&mut self) {
        // `live` holds a copy of the descriptor, so closing this one would not send the FIN.
        if !self.ended {
            drop(self.stream.shutdown(Shutdown::Both));
        }
        self.seen.open.fetch_sub(1, Ordering::SeqCst);
        self.seen.changed.notify_all();
    }
}

impl Conn {
    /// Sends bytes in one write; `false`: the other side is gone.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Ends the sending side; the script may go on to read.
    pub fn fin(&mut self) {
        drop(self.stream.shutdown(Shutdown::Write));
    }

    /// Breaks the connection with RST.
    pub fn reset(&mut self) {
        // SO_LINGER 0 and a close would do, but `live` holds a copy: disconnecting sends the RST at once.
        reset_on_close(&self.stream);
        abort(&self.stream);
        self.ended = true;
    }

    /// Waits for the other side's end; `true` if it came.
    pub fn wait_end(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(n) => self.record(&buffer[..n]),
                Err(error) => {
                    return !matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    );
                }
            }
        }
    }

    /// Reads exactly `n` bytes of what was sent, as they are.
    pub fn read_raw(&mut self, n: usize) -> Option<Vec<u8>> {
        while self.unread.len() < n {
            self.fill()?;
        }
        Some(self.unread.drain(..n).collect())
    }

    /// Reads and forgets up to `n` bytes of what was sent; how many came before the end.
    pub fn discard(&mut self, n: usize) -> usize {
        let mut got = self.unread.len().min(n);
        self.unread.drain(..got);
        let mut buffer = vec![0; 256 << 10];
        while got < n {
            let most = buffer.len().min(n - got);
            match self.stream.read(&mut buffer[..most]) {
                Ok(0) | Err(_) => break,
                Ok(read) => got += read,
            }
        }
        got
    }

    /// Reads a head; `None`: the connection ended first.
    pub fn read_head(&mut self) -> Option<Request> {
        loop {
            if let Some(end) = head_end(&self.unread) {
                let head: Vec<u8> = self.unread.drain(..end).collect();
                let head = String::from_utf8_lossy(&head).into_owned();
                let (line, fields) = head.split_once("\r\n").unwrap_or((&head, ""));
                let mut words = line.split(' ');
                let request = Request {
                    method: words.next().unwrap_or("").into(),
                    target: words.next().unwrap_or("").into(),
                    fields: Fields::parse(fields),
                    head: head.clone(),
                    conn: self.index,
                    ..Request::default()
                };
                if !self.answer_probe(&request) {
                    self.begin();
                    return Some(Request {
                        conn: self.index,
                        ..request
                    });
                }
                continue;
            }
            self.fill()?;
        }
    }

    /// Reads a whole request and records it; `None`: the connection ended first.
    pub fn read_request(&mut self) -> Option<Request> {
        let mut request = self.read_head()?;
        self.read_body(&mut request)?;
        self.note(&request);
        Some(request)
    }

    /// Records a request that a script read by hand.
    pub fn note(&self, request: &Request) {
        lock(&self.seen.requests).push(request.clone());
        self.seen.changed.notify_all();
    }

    /// Reads the body that `request`'s head announces.
    pub fn read_body(&mut self, request: &mut Request) -> Option<()> {
        if let Some(length) = request.fields.get("content-length") {
            let length = length.parse().expect("prefixlb sends a number");
            request.body = self.read_raw(length)?;
            request.raw_body = request.body.clone();
        } else if request.fields.has("transfer-encoding") {
            loop {
                let line = self.read_line()?;
                request.raw_body.extend(&line);
                let digits = String::from_utf8_lossy(&line);
                let digits = digits.trim_end().split(';').next().unwrap_or("");
                let size = usize::from_str_radix(digits, 16).expect("prefixlb sends a chunk size");
                if size == 0 {
                    break;
                }
                let data = self.read_raw(size)?;
                request.body.extend(&data);
                request.raw_body.extend(&data);
                let end = self.read_raw(2)?;
                request.raw_body.extend(&end);
            }
            loop {
                let line = self.read_line()?;
                request.raw_body.extend(&line);
                if line == b"\r\n" {
                    break;
                }
            }
        }
        Some(())
    }

    fn read_line(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.unread.iter().position(|b| *b == b'\n') {
                return Some(self.unread.drain(..=at).collect());
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> Option<()> {
        let mut buffer = [0; 64 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) | Err(_) => None,
            Ok(n) => {
                self.unread.extend(&buffer[..n]);
                self.record(&buffer[..n]);
                Some(())
            }
        }
    }

    /// A probe is answered here and leaves no trace but its count.
    fn answer_probe(&mut self, request: &Request) -> bool {
        let mode = self.seen.probe_mode.load(Ordering::SeqCst);
        let status = match request.target.as_str() {
            "/health" if mode == Probes::Fail as u8 => "500 Internal Server Error",
            "/health" => "200 OK",
            "/metrics" => "404 Not Found",
            _ => return false,
        };
        if request.method != "GET" || request.fields.has("x-forwarded-for") {
            return false;
        }
        self.seen.probes.fetch_add(1, Ordering::SeqCst);
        self.seen.changed.notify_all();
        if mode == Probes::Silent as u8 && request.target == "/health" {
            self.wait_end();
            return true;
        }
        self.send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n"));
        true
    }

    fn begin(&mut self) {
        if self.index == usize::MAX {
            self.index = self.seen.conns.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn record(&mut self, bytes: &[u8]) {
        let mut all = lock(&self.seen.bytes);
        let slot = *self.slot.get_or_insert_with(|| {
            all.push(Vec::new());
            all.len() - 1
        });
        all[slot].extend(bytes);
    }
}

/// Breaks a connection with RST although its descriptor has copies.
fn abort(stream: &TcpStream) {
    use std::os::fd::AsRawFd;
    // SAFETY: `connect` with AF_UNSPEC reads the given family word only, and `address` outlives the call.
    unsafe {
        let mut address: libc::sockaddr = std::mem::zeroed();
        address.sa_family = libc::AF_UNSPEC as libc::sa_family_t;
        libc::connect(
            stream.as_raw_fd(),
            &raw const address,
            size_of::<libc::sockaddr>() as libc::socklen_t,
        );
    }
}
