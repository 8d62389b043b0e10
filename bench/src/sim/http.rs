//! As much HTTP/1.1 as a server needs that must also be able to break it: that is why no library serves here.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::fault::Fault;

/// A request, whole.
#[derive(Debug, Default)]
pub struct Request {
    /// `GET`, `POST`, …
    pub method: String,
    /// The target without its query.
    pub path: String,
    /// The body.
    pub body: Vec<u8>,
    /// What is to go wrong.
    pub fault: Option<Fault>,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    read: OwnedReadHalf,
    write: OwnedWriteHalf,
    buffer: Vec<u8>,
}

impl Connection {
    /// Over this socket.
    #[must_use]
    pub fn new(io: TcpStream) -> Self {
        let (read, write) = io.into_split();
        Self {
            read,
            write,
            buffer: Vec::new(),
        }
    }

    /// The next request; `None`: the client has no more.
    pub async fn request(&mut self) -> io::Result<Option<Request>> {
        loop {
            if let Some((request, taken)) = parse(&self.buffer)? {
                self.buffer.drain(..taken);
                return Ok(Some(request));
            }
            if self.read.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// Ends when the client is gone. What it sends meanwhile is kept for the next request.
    pub async fn gone(&mut self) {
        while matches!(self.read.read_buf(&mut self.buffer).await, Ok(n) if n > 0) {}
    }

    /// Sends bytes as they are.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write.write_all(bytes).await
    }

    /// Sends one chunk of a chunked body.
    pub async fn send_chunk(&mut self, data: &[u8]) -> io::Result<()> {
        let mut chunk = format!("{:x}\r\n", data.len()).into_bytes();
        chunk.extend_from_slice(data);
        chunk.extend_from_slice(b"\r\n");
        self.send(&chunk).await
    }

    /// Sends a whole answer.
    pub async fn answer(&mut self, status: &str, kind: &str, body: &str) -> io::Result<()> {
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        self.send((head + body).as_bytes()).await
    }

    /// Ends the connection with RST.
    pub fn reset(self) {
        let socket: &TcpStream = self.write.as_ref();
        let linger = Some(std::time::Duration::ZERO);
        // If it fails the client sees FIN, which is a fault too.
        let _ = socket2::SockRef::from(socket).set_linger(linger);
    }
}

/// A whole request at the start of `bytes`, and how many they are.
fn parse(bytes: &[u8]) -> io::Result<Option<(Request, usize)>> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut fields = [httparse::EMPTY_HEADER; 100];
    let mut head = httparse::Request::new(&mut fields);
    let httparse::Status::Complete(end) = head.parse(bytes).map_err(|_| invalid("bad head"))?
    else {
        return Ok(None);
    };
    let mut request = Request {
        method: head.method.unwrap_or_default().to_owned(),
        ..Request::default()
    };
    let target = head.path.unwrap_or_default();
    request.path = target.split('?').next().unwrap_or_default().to_owned();
    let mut length = 0;
    let mut chunked = false;
    for field in head.headers {
        let value = std::str::from_utf8(field.value).unwrap_or_default();
        if field.name.eq_ignore_ascii_case("content-length") {
            length = value.parse().map_err(|_| invalid("bad length"))?;
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = true;
        } else if field.name.eq_ignore_ascii_case("x-sim-fault") {
            request.fault = Fault::named(value);
        }
    }
    if chunked {
        return parse_chunked(&bytes[end..], request, end);
    }
    if bytes.len() < end + length {
        return Ok(None);
    }
    request.body = bytes[end..end + length].to_vec();
    Ok(Some((request, end + length)))
}

fn parse_chunked(
    bytes: &[u8],
    mut request: Request,
    end: usize,
) -> io::Result<Option<(Request, usize)>> {
    use prefixlb_common::chunked::{Chunked, Piece};
    let mut machine = Chunked::new();
    let mut at = 0;
    loop {
        let piece = machine
            .next(&bytes[at..])
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.as_str()))?;
        at += piece.len();
        match piece {
            Piece::Data(data) => request.body.extend_from_slice(data),
            Piece::Framing(_) | Piece::Trailer(_) => {}
            Piece::More if machine.is_done() => return Ok(Some((request, end + at))),
            Piece::More => return Ok(None),
            Piece::End => return Ok(Some((request, end + at))),
        }
    }
}
