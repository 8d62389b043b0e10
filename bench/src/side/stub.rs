//! The backend of side-by-side runs: as quick as it gets, so that the balancer is what is seen.

use std::io;
use std::net::TcpListener as StdListener;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// One event of a stream, 130 bytes, as its own chunk.
pub const EVENT: &[u8] = b"82\r\ndata: {\"id\":\"chatcmpl-0123456789\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"}}]}        \n\n\r\n";
/// The end of a stream.
pub const END: &[u8] = b"0\r\n\r\n";
/// The body of a small answer.
pub const SMALL: &[u8] = b"{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"ok\"},\"finish_reason\":\"stop\"}]}";

/// The target that streams `events` events, one each `ms` milliseconds; 0 events: none, and no end.
#[must_use]
pub fn stream_target(events: usize, ms: u64) -> String {
    format!("/stream/{events}/{ms}")
}

/// Serves until the process ends.
pub async fn serve(listener: StdListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    loop {
        let (io, _) = listener.accept().await?;
        io.set_nodelay(true)?;
        tokio::spawn(async move {
            // A client that goes ends its connection and nothing else.
            let _ = connection(io).await;
        });
    }
}

async fn connection(mut io: TcpStream) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(256 << 10);
    let small = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        SMALL.len()
    );
    let small = [small.as_bytes(), SMALL].concat();
    loop {
        let Some((target, taken)) = request(&mut io, &mut buffer).await? else {
            return Ok(());
        };
        buffer.drain(..taken);
        let mut parts = target.split('/').skip(1);
        if parts.next() == Some("stream") {
            let mut number = || parts.next().and_then(|n| n.parse().ok()).unwrap_or(0);
            let (events, ms) = (number(), number());
            stream(&mut io, events, ms).await?;
        } else {
            io.write_all(&small).await?;
        }
    }
}

async fn stream(io: &mut TcpStream, events: u64, ms: u64) -> io::Result<()> {
    io.write_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    )
    .await?;
    if events == 0 {
        io.write_all(EVENT).await?;
        io.read_u8().await?; // until the client goes
    }
    let mut ticks = tokio::time::interval(Duration::from_millis(ms.max(1)));
    for _ in 0..events {
        ticks.tick().await;
        io.write_all(EVENT).await?;
    }
    io.write_all(END).await
}

/// The target of the next request, once its body is there too, and the bytes that it takes up.
async fn request(io: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<(String, usize)>> {
    loop {
        if let Some(end) = memchr::memmem::find(buffer, b"\r\n\r\n") {
            let mut fields = [httparse::EMPTY_HEADER; 64];
            let mut head = httparse::Request::new(&mut fields);
            head.parse(&buffer[..end + 4]).map_err(io::Error::other)?;
            let length = head.headers.iter().find_map(|field| {
                let value = std::str::from_utf8(field.value).ok()?;
                let is_length = field.name.eq_ignore_ascii_case("content-length");
                is_length.then(|| value.parse::<usize>().ok())?
            });
            let whole = end + 4 + length.unwrap_or(0);
            let target = head.path.unwrap_or_default().to_owned();
            while buffer.len() < whole {
                if io.read_buf(buffer).await? == 0 {
                    return Ok(None);
                }
            }
            return Ok(Some((target, whole)));
        }
        if io.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_the_chunk_that_it_says() {
        use prefixlb_common::chunked::Chunked;
        let step = Chunked::new()
            .advance(&[EVENT, END].concat())
            .expect("chunked");
        assert_eq!((step.consumed, step.done), (EVENT.len() + END.len(), true));
        assert_eq!(EVENT.len(), 0x82 + 6);
    }
}
