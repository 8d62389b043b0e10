//! The backend of side-by-side runs: as quick as it gets, so that the balancer is what is seen.

use std::io;
use std::net::TcpListener as StdListener;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, MissedTickBehavior};
use xxhash_rust::xxh3::xxh3_64;

use super::event::{END, chunk};

/// The body of an answer.
pub const SMALL: &[u8] = b"{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"ok\"},\"finish_reason\":\"stop\"}]}";
/// A request with this header is answered with the digest of the body that came.
pub const CHECK: &str = "x-bench-check";
/// Room for a request: a prompt of 220 KB is read in one go if it is there.
const ROOM: usize = 256 << 10;

/// What a stream is to be.
#[derive(Clone, Copy, Debug, Default)]
pub struct Streamed {
    /// So many events; 0: one, and no end.
    pub events: u64,
    /// One each so many milliseconds.
    pub ms: u64,
    /// So many milliseconds after the beat that all streams of one `ms` share. Set by the client, so that events
    /// leave in the same small groups whatever the order in which a balancer opened the streams.
    pub phase: u64,
}

impl Streamed {
    /// The target that asks for it.
    #[must_use]
    pub fn target(self) -> String {
        format!("/stream/{}/{}/{}", self.events, self.ms, self.phase)
    }

    fn read(target: &str) -> Option<Self> {
        let mut numbers = target.strip_prefix("/stream/")?.split('/');
        let mut number = || numbers.next()?.parse().ok();
        Some(Self {
            events: number()?,
            ms: number()?,
            phase: number()?,
        })
    }

    /// The first beat of this stream from now on.
    fn begin(self, epoch: Instant) -> Instant {
        let phase = epoch + Duration::from_millis(self.phase);
        let past = Instant::now().saturating_duration_since(phase).as_millis() as u64;
        phase + Duration::from_millis((past / self.ms.max(1) + 1) * self.ms)
    }
}

/// What a checked request with this body is answered.
#[must_use]
pub fn digest(body: &[u8]) -> Vec<u8> {
    format!(
        "{{\"bytes\":{},\"xxh3\":\"{:016x}\"}}",
        body.len(),
        xxh3_64(body)
    )
    .into_bytes()
}

/// Serves on all of these until the process ends.
pub async fn serve(listeners: Vec<StdListener>) -> io::Result<()> {
    let epoch = Instant::now();
    let mut serving = tokio::task::JoinSet::new();
    for listener in listeners {
        listener.set_nonblocking(true)?;
        serving.spawn(accept(TcpListener::from_std(listener)?, epoch));
    }
    match serving.join_next().await {
        Some(ended) => ended.map_err(io::Error::other)?,
        None => Ok(()),
    }
}

async fn accept(listener: TcpListener, epoch: Instant) -> io::Result<()> {
    loop {
        let (io, _) = listener.accept().await?;
        io.set_nodelay(true)?;
        tokio::spawn(async move {
            // A client that goes ends its connection and nothing else.
            let _ = connection(io, epoch).await;
        });
    }
}

struct Asked {
    target: String,
    checked: bool,
    /// Where the body begins and ends in the buffer.
    body: std::ops::Range<usize>,
}

async fn connection(mut io: TcpStream, epoch: Instant) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(ROOM);
    let small = answer(SMALL);
    while let Some(asked) = request(&mut io, &mut buffer).await? {
        if let Some(streamed) = Streamed::read(&asked.target) {
            stream(&mut io, streamed, epoch).await?;
        } else if asked.checked {
            let digest = digest(&buffer[asked.body.clone()]);
            io.write_all(&answer(&digest)).await?;
        } else {
            io.write_all(&small).await?;
        }
        buffer.drain(..asked.body.end);
    }
    Ok(())
}

fn answer(body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

async fn stream(io: &mut TcpStream, streamed: Streamed, epoch: Instant) -> io::Result<()> {
    io.write_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    )
    .await?;
    if streamed.events == 0 {
        io.write_all(&chunk()).await?;
        io.read_u8().await?; // until the client goes
    }
    let every = Duration::from_millis(streamed.ms.max(1));
    let mut ticks = tokio::time::interval_at(streamed.begin(epoch), every);
    // An event that is late is not followed by another at once: two would be relayed as one.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    for _ in 0..streamed.events {
        ticks.tick().await;
        io.write_all(&chunk()).await?;
    }
    io.write_all(END).await
}

/// The next request, once its body is there too; `None`: the client has gone.
async fn request(io: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<Asked>> {
    loop {
        if let Some(end) = memchr::memmem::find(buffer, b"\r\n\r\n") {
            let mut fields = [httparse::EMPTY_HEADER; 64];
            let mut head = httparse::Request::new(&mut fields);
            head.parse(&buffer[..end + 4]).map_err(io::Error::other)?;
            let field = |name: &str| {
                let mut fields = head.headers.iter();
                let found = fields.find(|field| field.name.eq_ignore_ascii_case(name))?;
                std::str::from_utf8(found.value).ok()
            };
            let length = field("content-length").and_then(|value| value.parse().ok());
            let asked = Asked {
                target: head.path.unwrap_or_default().to_owned(),
                checked: field(CHECK).is_some(),
                body: end + 4..end + 4 + length.unwrap_or(0),
            };
            while buffer.len() < asked.body.end {
                if io.read_buf(buffer).await? == 0 {
                    return Ok(None);
                }
            }
            return Ok(Some(asked));
        }
        if io.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}
