//! A client that writes the bytes it is told to and reads them as they come.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::{Fields, PATIENCE, head_end, reset_on_close};

/// The bytes of a request with a length-framed body; `fields` are whole lines without CRLF.
pub fn request(method: &str, target: &str, fields: &[&str], body: &str) -> String {
    let mut head = format!("{method} {target} HTTP/1.1\r\nHost: lb.test\r\n");
    for field in fields {
        head += field;
        head += "\r\n";
    }
    if !body.is_empty() {
        head += &format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
    }
    head + "\r\n" + body
}

/// A response as the client saw it.
#[derive(Clone, Debug, Default)]
pub struct Response {
    pub status: u16,
    /// The head as sent.
    pub head: String,
    pub fields: Fields,
    /// The body without any chunked coding.
    pub body: Vec<u8>,
    /// The trailer lines of a chunked body.
    pub trailers: Fields,
}

impl Response {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// `x-prefixlb-backend`.
    #[track_caller]
    pub fn backend(&self) -> String {
        let name = self.fields.get("x-prefixlb-backend");
        name.unwrap_or_else(|| panic!("no backend named in {}", self.head))
            .into()
    }

    /// Checks the OpenAI error shape, and returns its `code`.
    #[track_caller]
    pub fn error_code(&self) -> String {
        let body: serde_json::Value = serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e} in the body of {}{}", self.head, self.text()));
        assert_eq!(self.fields.get("content-type"), Some("application/json"));
        let error = &body["error"];
        assert!(
            error["message"].as_str().is_some_and(|m| !m.is_empty()),
            "{body}"
        );
        assert!(error["type"].is_string(), "{body}");
        assert!(error.get("param").is_some(), "{body}");
        error["code"]
            .as_str()
            .unwrap_or_else(|| panic!("{body}"))
            .into()
    }
}

/// A connection to prefixlb.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    unread: Vec<u8>,
    /// Whether the connection was seen to end with an error (RST) rather than FIN.
    pub was_reset: bool,
}

impl Client {
    /// Connects.
    #[track_caller]
    pub fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE).expect("prefixlb accepts");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a read timeout can be set");
        stream
            .set_write_timeout(Some(PATIENCE))
            .expect("a write timeout can be set");
        Self {
            stream,
            unread: Vec::new(),
            was_reset: false,
        }
    }

    /// A second handle, for a thread that sends while this one reads.
    pub fn sender(&self) -> TcpStream {
        self.stream.try_clone().expect("a descriptor can be copied")
    }

    /// Sends bytes in one write.
    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream
            .write_all(bytes.as_ref())
            .expect("prefixlb takes bytes");
    }

    /// Sends bytes if the other side still takes them.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Ends the sending side.
    pub fn fin(&mut self) {
        drop(self.stream.shutdown(Shutdown::Write));
    }

    /// Closes with RST.
    pub fn reset(self) {
        reset_on_close(&self.stream);
    }

    /// The kernel's receive buffer, for clients that shall be slow.
    pub fn small_receive_buffer(&self) {
        drop(socket2::SockRef::from(&self.stream).set_recv_buffer_size(16 << 10));
    }

    /// Reads what comes next, at least a byte; `None`: the connection ended (FIN or RST).
    #[track_caller]
    pub fn read_some(&mut self) -> Option<Vec<u8>> {
        if !self.unread.is_empty() {
            return Some(std::mem::take(&mut self.unread));
        }
        let mut buffer = [0; 64 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) => None,
            Ok(n) => Some(buffer[..n].to_vec()),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("nothing came from prefixlb in {PATIENCE:?}")
            }
            Err(_) => {
                self.was_reset = true;
                None
            }
        }
    }

    #[track_caller]
    fn fill(&mut self) -> bool {
        let kept = std::mem::take(&mut self.unread);
        let more = self.read_some();
        let ended = more.is_none();
        self.unread = [kept, more.unwrap_or_default()].concat();
        !ended
    }

    /// Reads exactly `n` bytes.
    #[track_caller]
    pub fn read_n(&mut self, n: usize) -> Vec<u8> {
        while self.unread.len() < n {
            assert!(
                self.fill(),
                "ended after {:?}, {n} bytes were due",
                String::from_utf8_lossy(&self.unread)
            );
        }
        self.unread.drain(..n).collect()
    }

    /// Reads exactly these bytes.
    #[track_caller]
    pub fn expect(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        let got = self.read_n(bytes.len());
        assert_eq!(
            got.escape_ascii().to_string(),
            bytes.escape_ascii().to_string()
        );
    }

    /// Reads everything up to the end, clean or not.
    #[track_caller]
    pub fn read_to_end(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.unread)
    }

    /// Reads one answer, whole or not: for clients that do not care.
    #[track_caller]
    pub fn read_to_end_or_answer(&mut self) -> u16 {
        let head = self.read_head();
        let length = head
            .fields
            .get("content-length")
            .and_then(|n| n.parse().ok());
        while self.unread.len() < length.unwrap_or(usize::MAX) && self.fill() {}
        head.status
    }

    /// Nothing more comes, and the connection ends.
    #[track_caller]
    pub fn expect_end(&mut self) {
        let rest = self.read_to_end();
        assert!(
            rest.is_empty(),
            "{:?} came before the end",
            String::from_utf8_lossy(&rest)
        );
    }

    /// Reads a head, interim or final.
    #[track_caller]
    pub fn read_head(&mut self) -> Response {
        loop {
            if let Some(end) = head_end(&self.unread) {
                let head: Vec<u8> = self.unread.drain(..end).collect();
                let head = String::from_utf8_lossy(&head).into_owned();
                let (line, fields) = head.split_once("\r\n").unwrap_or((&head, ""));
                let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
                return Response {
                    status: status.unwrap_or_else(|| panic!("no status in {line:?}")),
                    fields: Fields::parse(fields),
                    head: head.clone(),
                    ..Response::default()
                };
            }
            assert!(
                self.fill(),
                "ended within a head: {:?}",
                String::from_utf8_lossy(&self.unread)
            );
        }
    }

    /// Reads a final response whole. Interim ones before it are a failure.
    #[track_caller]
    pub fn read_response(&mut self) -> Response {
        let mut response = self.read_head();
        assert!(response.status >= 200, "{}", response.head);
        if response.status == 204 || response.status == 304 {
            return response;
        }
        if let Some(length) = response.fields.get("content-length") {
            response.body = self.read_n(length.parse().expect("a number"));
        } else if response.fields.has("transfer-encoding") {
            while let Some(data) = self.read_chunk() {
                response.body.extend(data);
            }
            response.trailers = self.read_trailers();
        } else {
            response.body = self.read_to_end();
        }
        response
    }

    /// Reads one chunk; `None`: it was the last one (its trailers are still to be read).
    #[track_caller]
    pub fn read_chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.read_line();
        let digits = line.trim_end().split(';').next().unwrap_or("");
        let size = usize::from_str_radix(digits, 16)
            .unwrap_or_else(|_| panic!("no chunk size in {line:?}"));
        if size == 0 {
            return None;
        }
        let data = self.read_n(size);
        self.expect("\r\n");
        Some(data)
    }

    /// Reads trailer lines up to the end of a chunked body.
    #[track_caller]
    pub fn read_trailers(&mut self) -> Fields {
        let mut lines = String::new();
        loop {
            let line = self.read_line();
            if line == "\r\n" {
                return Fields::parse(&lines);
            }
            lines += &line;
        }
    }

    #[track_caller]
    fn read_line(&mut self) -> String {
        loop {
            if let Some(at) = self.unread.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=at).collect();
                return String::from_utf8_lossy(&line).into_owned();
            }
            assert!(self.fill(), "ended within a line");
        }
    }

    /// Sends a request and reads its response.
    #[track_caller]
    pub fn exchange(&mut self, bytes: impl AsRef<[u8]>) -> Response {
        self.send(bytes);
        self.read_response()
    }

    /// Whether the connection ends within `limit`; bytes that come are kept.
    pub fn ends_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut buffer = [0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            drop(self.stream.set_read_timeout(Some(left)));
            let read = self.stream.read(&mut buffer);
            drop(self.stream.set_read_timeout(Some(PATIENCE)));
            match read {
                Ok(0) => return true,
                Ok(n) => self.unread.extend(&buffer[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return true,
            }
        }
    }
}
