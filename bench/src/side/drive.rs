//! The load of side-by-side runs: small requests, large prompts, streams.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::stub::{END, EVENT, SMALL, stream_target};

/// What a round of requests showed.
#[derive(Debug, Default)]
pub struct Round {
    /// Requests, or events, that came whole.
    pub count: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// Times of single requests.
    pub times: Vec<Duration>,
}

impl Round {
    /// The time that this share of requests did not exceed.
    pub fn quantile(&mut self, share: f64) -> Duration {
        self.times.sort();
        let at = (share * self.times.len() as f64) as usize;
        self.times
            .get(at.min(self.times.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// A chat whose beginning it shares with many others; the whole body is `bytes` long.
fn chat(number: u64, bytes: usize) -> Vec<u8> {
    let system = "You are a careful assistant who answers in one word. ".repeat(7);
    let group = number % 20;
    let fixed = format!(
        "{{\"model\":\"m\",\"messages\":[{{\"role\":\"system\",\"content\":\"group {group}: {system}\"}},{{\"role\":\"user\",\"content\":\"question {number} "
    );
    let end = "\"}],\"max_tokens\":1}";
    let filler = bytes.saturating_sub(fixed.len() + end.len());
    let words = "all work and no play makes a dull token; ".repeat(filler / 40 + 1);
    format!("{fixed}{}{end}", &words[..filler]).into_bytes()
}

fn request(target: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {target} HTTP/1.1\r\nHost: bench.test\r\nContent-Type: application/json\r\nAuthorization: Bearer sk-0123456789\r\nUser-Agent: bench\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// So many connections, each asking again as soon as it is answered.
pub async fn closed_loop(
    target: SocketAddr,
    connections: u64,
    body_bytes: usize,
    lasting: Duration,
) -> io::Result<Round> {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for number in 0..connections {
        running.spawn(async move {
            let requests: Vec<Vec<u8>> = (0..16)
                .map(|i| request("/v1/chat/completions", &chat(number * 16 + i, body_bytes)))
                .collect();
            let mut io = TcpStream::connect(target).await?;
            io.set_nodelay(true)?;
            let mut buffer = Vec::with_capacity(4096);
            let mut times = Vec::new();
            for request in requests.iter().cycle() {
                let asked = Instant::now();
                if asked - start > lasting {
                    break;
                }
                io.write_all(request).await?;
                small_answer(&mut io, &mut buffer).await?;
                times.push(asked.elapsed());
            }
            io::Result::Ok(times)
        });
    }
    let mut round = Round::default();
    while let Some(times) = running.join_next().await {
        round.times.extend(times.map_err(io::Error::other)??);
    }
    round.elapsed = start.elapsed();
    round.count = round.times.len() as u64;
    Ok(round)
}

/// Reads an answer and checks its body.
async fn small_answer(io: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<()> {
    buffer.clear();
    loop {
        if io.read_buf(buffer).await? == 0 {
            return Err(broken("the connection ended within an answer"));
        }
        if let Some(end) = memchr::memmem::find(buffer, b"\r\n\r\n")
            && buffer.len() >= end + 4 + SMALL.len()
        {
            let good = buffer.starts_with(b"HTTP/1.1 200") && buffer[end + 4..] == *SMALL;
            return if good {
                Ok(())
            } else {
                Err(broken("a wrong answer"))
            };
        }
    }
}

/// So many streams at once; `count` is of events.
pub async fn streams(
    target: SocketAddr,
    streams: usize,
    events: usize,
    ms: u64,
) -> io::Result<Round> {
    let start = Instant::now();
    let mut running = JoinSet::new();
    let want = [EVENT.repeat(events).as_slice(), END].concat();
    let want = std::sync::Arc::new(want);
    for number in 0..streams {
        let want = want.clone();
        running.spawn(async move {
            // Spread over one interval, as streams in life are.
            tokio::time::sleep(Duration::from_millis(ms).mul_f64(number as f64 / streams as f64))
                .await;
            let body = chat(number as u64, 600);
            let mut io = TcpStream::connect(target).await?;
            io.set_nodelay(true)?;
            io.write_all(&request(&stream_target(events, ms), &body))
                .await?;
            read_stream(&mut io, &want).await
        });
    }
    while let Some(done) = running.join_next().await {
        done.map_err(io::Error::other)??;
    }
    Ok(Round {
        count: (streams * events) as u64,
        elapsed: start.elapsed(),
        times: Vec::new(),
    })
}

async fn read_stream(io: &mut TcpStream, want: &[u8]) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(4096);
    let mut seen = None;
    loop {
        if io.read_buf(&mut buffer).await? == 0 {
            return Err(broken("a stream broke off"));
        }
        if seen.is_none()
            && let Some(end) = memchr::memmem::find(&buffer, b"\r\n\r\n")
        {
            buffer.drain(..end + 4);
            seen = Some(0);
        }
        let Some(at) = &mut seen else { continue };
        if !want[*at..].starts_with(&buffer) {
            return Err(broken("a stream is not what was sent"));
        }
        *at += buffer.len();
        buffer.clear();
        if *at == want.len() {
            return Ok(());
        }
    }
}

/// Opens so many streams that say one thing and then nothing; they end when this is dropped.
pub async fn quiet_streams(target: SocketAddr, streams: usize) -> io::Result<Vec<TcpStream>> {
    let mut open = Vec::new();
    for number in 0..streams {
        let mut io = TcpStream::connect(target).await?;
        io.write_all(&request(&stream_target(0, 0), &chat(number as u64, 600)))
            .await?;
        let mut buffer = Vec::new();
        while !buffer.ends_with(EVENT) {
            if io.read_buf(&mut buffer).await? == 0 {
                return Err(broken("a stream broke off"));
            }
        }
        open.push(io);
    }
    Ok(open)
}
