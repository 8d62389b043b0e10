//! The load of plain requests: small chats and large prompts, as fast as they are answered or at a rate.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::stub::{CHECK, SMALL, digest};
use super::table::Round;

/// Where chats go.
const CHAT: &str = "/v1/chat/completions";
/// Different requests that a connection sends in turn.
const REQUESTS: u64 = 16;
/// Dialogues that share a beginning, so that there is something to match.
const GROUPS: u64 = 20;

/// A chat whose beginning it shares with many others; the whole body is `bytes` long.
#[must_use]
pub fn chat(number: u64, bytes: usize) -> Vec<u8> {
    let system = "You are a careful assistant who answers in one word. ".repeat(7);
    let group = number % GROUPS;
    let fixed = format!(
        "{{\"model\":\"m\",\"messages\":[{{\"role\":\"system\",\"content\":\"group {group}: {system}\"}},{{\"role\":\"user\",\"content\":\"question {number} "
    );
    let end = "\"}],\"max_tokens\":1}";
    let filler = bytes.saturating_sub(fixed.len() + end.len());
    let words = "all work and no play makes a dull token; ".repeat(filler / 40 + 1);
    format!("{fixed}{}{end}", &words[..filler]).into_bytes()
}

/// A request as an SDK sends it; `extra` is one more field, with its line end.
#[must_use]
pub fn request(target: &str, extra: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {target} HTTP/1.1\r\nHost: bench.test\r\nContent-Type: application/json\r\nAuthorization: Bearer sk-0123456789\r\nUser-Agent: bench\r\n{extra}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// A connection on which small writes leave at once.
pub async fn connect(target: SocketAddr) -> io::Result<TcpStream> {
    let io = TcpStream::connect(target).await?;
    io.set_nodelay(true)?;
    Ok(io)
}

/// How requests follow each other.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// Each connection asks again as soon as it is answered.
    Closed,
    /// So many a second over all connections, whatever the answers do.
    Rate(u64),
}

/// Sends chats of `bytes` over so many connections for this long.
pub async fn requests(
    target: SocketAddr,
    connections: u64,
    bytes: usize,
    pace: Pace,
    lasting: Duration,
) -> io::Result<Round> {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for number in 0..connections {
        running.spawn(async move {
            let texts: Vec<Vec<u8>> = (0..REQUESTS)
                .map(|i| request(CHAT, "", &chat(number * REQUESTS + i, bytes)))
                .collect();
            let mut io = connect(target).await?;
            match pace {
                Pace::Closed => closed(&mut io, &texts, start + lasting).await,
                Pace::Rate(rate) => {
                    let every = Duration::from_secs(connections).div_f64(rate as f64);
                    let first = start + every.mul_f64(number as f64 / connections as f64);
                    paced(&mut io, &texts, first, every, start + lasting).await
                }
            }
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

async fn closed(io: &mut TcpStream, texts: &[Vec<u8>], end: Instant) -> io::Result<Vec<Duration>> {
    let mut buffer = Vec::with_capacity(4096);
    let mut times = Vec::new();
    for text in texts.iter().cycle() {
        let asked = Instant::now();
        if asked > end {
            break;
        }
        io.write_all(text).await?;
        answer(io, &mut buffer, SMALL).await?;
        times.push(asked.elapsed());
    }
    Ok(times)
}

/// A request that had to wait for the answer before it counts from when it was due: a slow balancer is not
/// excused from the requests that it held up.
async fn paced(
    io: &mut TcpStream,
    texts: &[Vec<u8>],
    first: Instant,
    every: Duration,
    end: Instant,
) -> io::Result<Vec<Duration>> {
    let mut ticks = tokio::time::interval_at(first.into(), every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut buffer = Vec::with_capacity(4096);
    let mut times = Vec::new();
    for text in texts.iter().cycle() {
        let before = Instant::now();
        let due = ticks.tick().await.into_std();
        let asked = if before > due { due } else { Instant::now() };
        if asked > end {
            break;
        }
        io.write_all(text).await?;
        answer(io, &mut buffer, SMALL).await?;
        times.push(asked.elapsed());
    }
    Ok(times)
}

/// Reads an answer, whose body must be this one.
async fn answer(io: &mut TcpStream, buffer: &mut Vec<u8>, want: &[u8]) -> io::Result<()> {
    buffer.clear();
    loop {
        if io.read_buf(buffer).await? == 0 {
            return Err(io::Error::other("the connection ended within an answer"));
        }
        if let Some(end) = memchr::memmem::find(buffer, b"\r\n\r\n")
            && buffer.len() >= end + 4 + want.len()
        {
            if buffer.starts_with(b"HTTP/1.1 200") && buffer[end + 4..] == *want {
                return Ok(());
            }
            let text = String::from_utf8_lossy(buffer);
            return Err(io::Error::other(format!("a wrong answer: {text:?}")));
        }
    }
}

/// Asks for the digests of requests of several sizes: they must reach the backend as they were sent.
pub async fn check(target: SocketAddr) -> io::Result<()> {
    let mut io = connect(target).await?;
    let mut buffer = Vec::new();
    for number in 0..GROUPS {
        for bytes in [600, 20_000, 220_000] {
            let body = chat(number, bytes);
            let text = request(CHAT, &format!("{CHECK}: 1\r\n"), &body);
            io.write_all(&text).await?;
            answer(&mut io, &mut buffer, &digest(&body)).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::side::stub;
    use std::net::TcpListener;

    #[test]
    fn chats_are_json_of_the_size_asked_for_and_share_beginnings() {
        for bytes in [600, 220_000] {
            let (one, two) = (chat(1, bytes), chat(1 + GROUPS, bytes));
            assert_eq!((one.len(), two.len()), (bytes, bytes));
            assert!(serde_json::from_slice::<serde_json::Value>(&one).is_ok());
            assert_eq!(one[..400], two[..400]);
            assert_ne!(one, two);
            assert_ne!(one[..400], chat(2, bytes)[..400]);
        }
    }

    #[tokio::test]
    async fn loads_and_checks_pass_against_the_stub_itself() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        tokio::spawn(stub::serve(vec![listener]));
        check(target).await.unwrap();
        let lasting = Duration::from_millis(50);
        for pace in [Pace::Closed, Pace::Rate(400)] {
            let round = requests(target, 4, 600, pace, lasting).await.unwrap();
            assert!(round.count >= 4, "{pace:?}: {}", round.count);
            assert_eq!(round.times.len() as u64, round.count);
        }
    }
}
