//! The load of streams: many at once, each an event every so often, timed when all of them flow.
//!
//! Opening a stream costs a balancer what a dozen events do, so the account begins only after the last one
//! has had its first event, and ends before the first is closed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::drive::{chat, connect, request};
use super::event::{Events, check as check_event};
use super::stub::Streamed;
use super::table::Round;

/// More events than any round lasts.
const ENDLESS: u64 = 1_000_000_000;
/// A stream that has not begun by then never will.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);

// 0: streams are being opened.
const TIMED: u8 = 1;
const OVER: u8 = 2;

#[derive(Debug, Default)]
struct Gauge {
    /// Streams that had their first event.
    begun: AtomicU64,
    /// One of the three below.
    phase: AtomicU8,
    events: AtomicU64,
    reads: AtomicU64,
}

/// So many streams at once; `account` is called at the begin and the end of the timed part.
pub async fn streams(
    target: SocketAddr,
    count: usize,
    ms: u64,
    lasting: Duration,
    mut account: impl FnMut() -> u64,
) -> io::Result<(Round, u64)> {
    let gauge = Arc::new(Gauge::default());
    let mut running = JoinSet::new();
    for number in 0..count {
        let gauge = gauge.clone();
        let streamed = Streamed {
            events: ENDLESS,
            ms,
            // Spread over one interval, as streams in life are.
            phase: number as u64 * ms / count as u64,
        };
        running.spawn(async move { one(target, number, streamed, &gauge).await });
    }
    let opened = Instant::now();
    while gauge.begun.load(Ordering::Relaxed) < count as u64 {
        ended_early(&mut running)?;
        if opened.elapsed() > BEGIN_LIMIT {
            let begun = gauge.begun.load(Ordering::Relaxed);
            let text = format!("only {begun} of {count} streams began within {BEGIN_LIMIT:?}");
            return Err(io::Error::other(text));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(2 * ms)).await;
    ended_early(&mut running)?;
    let (start, before) = (Instant::now(), account());
    gauge.phase.store(TIMED, Ordering::Relaxed);
    tokio::time::sleep(lasting).await;
    gauge.phase.store(OVER, Ordering::Relaxed);
    let (elapsed, spent) = (start.elapsed(), account() - before);
    let mut round = Round {
        count: gauge.events.load(Ordering::Relaxed),
        reads: gauge.reads.load(Ordering::Relaxed),
        elapsed,
        times: Vec::new(),
    };
    while let Some(ended) = running.join_next().await {
        round.times.extend(ended.map_err(io::Error::other)??);
    }
    Ok((round, spent))
}

/// A stream that ends before the round does is an error, and the reason is in it.
fn ended_early(running: &mut JoinSet<io::Result<Vec<Duration>>>) -> io::Result<()> {
    match running.try_join_next() {
        None => Ok(()),
        Some(ended) => {
            ended.map_err(io::Error::other)??;
            Err(io::Error::other("a stream ended before its time"))
        }
    }
}

async fn open(target: SocketAddr, number: usize, streamed: Streamed) -> io::Result<TcpStream> {
    let mut io = connect(target).await?;
    let body = chat(number as u64, 600);
    io.write_all(&request(&streamed.target(), "", &body))
        .await?;
    Ok(io)
}

/// Reads one stream until the round is over; the times that its events were under way.
async fn one(
    target: SocketAddr,
    number: usize,
    streamed: Streamed,
    gauge: &Gauge,
) -> io::Result<Vec<Duration>> {
    let mut io = open(target, number, streamed).await?;
    let (mut events, mut times) = (Events::default(), Vec::new());
    let mut buffer = Vec::with_capacity(4096);
    head(&mut io, &mut buffer).await?;
    let mut begun = false;
    loop {
        let phase = gauge.phase.load(Ordering::Relaxed);
        let mut seen = 0;
        let each = |event: &[u8]| {
            let time = check_event(event)?;
            seen += 1;
            if phase == TIMED {
                times.push(time);
            }
            Ok(())
        };
        events.take(&buffer, each)?;
        if events.ended {
            return Err(io::Error::other("an endless stream ended"));
        }
        if seen > 0 && !begun {
            begun = true;
            gauge.begun.fetch_add(1, Ordering::Relaxed);
        }
        match phase {
            TIMED => {
                gauge.events.fetch_add(seen, Ordering::Relaxed);
                gauge.reads.fetch_add(1, Ordering::Relaxed);
            }
            OVER => return Ok(times),
            _ => (),
        }
        buffer.clear();
        if io.read_buf(&mut buffer).await? == 0 {
            return Err(io::Error::other("a stream broke off"));
        }
    }
}

/// Reads up to the end of the head; what came after it stays in the buffer.
async fn head(io: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<()> {
    loop {
        if io.read_buf(buffer).await? == 0 {
            return Err(io::Error::other("the connection ended before a stream"));
        }
        if let Some(end) = memchr::memmem::find(buffer, b"\r\n\r\n") {
            if !buffer.starts_with(b"HTTP/1.1 200") {
                let text = String::from_utf8_lossy(buffer);
                return Err(io::Error::other(format!("no stream, but {text:?}")));
            }
            buffer.drain(..end + 4);
            return Ok(());
        }
    }
}

/// One stream of known length, from its head to its clean end.
pub async fn check(target: SocketAddr) -> io::Result<()> {
    const EVENTS: u64 = 50;
    let streamed = Streamed {
        events: EVENTS,
        ms: 1,
        phase: 0,
    };
    let mut io = open(target, 0, streamed).await?;
    let (mut events, mut seen) = (Events::default(), 0);
    let mut buffer = Vec::with_capacity(4096);
    head(&mut io, &mut buffer).await?;
    loop {
        let each = |event: &[u8]| {
            seen += 1;
            check_event(event).map(drop)
        };
        events.take(&buffer, each)?;
        if events.ended {
            break;
        }
        buffer.clear();
        if io.read_buf(&mut buffer).await? == 0 {
            return Err(io::Error::other("a stream broke off"));
        }
    }
    if seen == EVENTS {
        return Ok(());
    }
    let text = format!("a stream of {EVENTS} events had {seen}");
    Err(io::Error::other(text))
}

/// Opens so many streams that say one thing and then nothing; they end when this is dropped.
pub async fn quiet(target: SocketAddr, count: usize) -> io::Result<Vec<TcpStream>> {
    let mut open_streams = Vec::new();
    for number in 0..count {
        let mut io = open(target, number, Streamed::default()).await?;
        let (mut events, mut seen) = (Events::default(), 0);
        let mut buffer = Vec::new();
        head(&mut io, &mut buffer).await?;
        loop {
            let each = |event: &[u8]| {
                seen += 1;
                check_event(event).map(drop)
            };
            events.take(&buffer, each)?;
            if seen > 0 {
                break;
            }
            buffer.clear();
            if io.read_buf(&mut buffer).await? == 0 {
                return Err(io::Error::other("a stream broke off"));
            }
        }
        open_streams.push(io);
    }
    Ok(open_streams)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::side::stub;
    use std::net::TcpListener;

    #[tokio::test]
    async fn streams_flow_are_timed_and_checked_against_the_stub_itself() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        tokio::spawn(stub::serve(vec![listener]));
        check(target).await.unwrap();
        let mut spent = 0;
        let account = || {
            spent += 7;
            spent
        };
        let lasting = Duration::from_millis(100);
        let (round, spent) = streams(target, 5, 1, lasting, account).await.unwrap();
        assert_eq!(spent, 7);
        assert!(round.count > 5 && round.reads > 0, "{round:?}");
        assert_eq!(quiet(target, 3).await.unwrap().len(), 3);
    }
}
