//! One streamed event: what the stub sends, and the check of what the client got.
//!
//! Every event has the same 130 bytes but for the time at which it was sent, so that a client can tell both
//! that nothing was lost or altered and how long the event was under way. Wall-clock time serves, since stub and
//! client share a machine and a run lasts seconds.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of an event without its chunk's framing.
pub const EVENT_BYTES: usize = 130;
const SIZE_LINE: &[u8] = b"82\r\n";
const BEFORE: &[u8] = b"data: {\"object\":\"chat.completion.chunk\",\"at\":";
const DIGITS: usize = 19;
const AFTER: &[u8] =
    b",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"}}]}          \n\n";
const _: () = assert!(BEFORE.len() + DIGITS + AFTER.len() == EVENT_BYTES);

/// The chunk that ends a stream.
pub const END: &[u8] = b"0\r\n\r\n";

/// An event as its own chunk, stamped with the present time.
#[must_use]
pub fn chunk() -> Vec<u8> {
    let stamp = format!("{:019}", now_ns());
    [SIZE_LINE, BEFORE, stamp.as_bytes(), AFTER, b"\r\n"].concat()
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

/// How long this event was under way; an error if it is not what [`chunk`] made.
pub fn check(event: &[u8]) -> io::Result<Duration> {
    let wrong = || {
        let text = String::from_utf8_lossy(event);
        io::Error::other(format!("an event is not what was sent: {text:?}"))
    };
    let rest = event.strip_prefix(BEFORE).ok_or_else(wrong)?;
    let (stamp, after) = rest.split_at_checked(DIGITS).ok_or_else(wrong)?;
    let stamp = std::str::from_utf8(stamp).map_err(|_| wrong())?;
    let stamp: u64 = stamp.parse().map_err(|_| wrong())?;
    if after != AFTER {
        return Err(wrong());
    }
    Ok(Duration::from_nanos(now_ns().saturating_sub(stamp)))
}

/// Takes the chunked coding off a stream and hands out its events, wherever the reads and the chunks end:
/// a balancer may cut chunks anew.
#[derive(Debug, Default)]
pub struct Events {
    held: Vec<u8>,
    left: usize,
    data: Vec<u8>,
    /// The last chunk has come.
    pub ended: bool,
}

impl Events {
    /// Takes what was read; `each` gets every event that it completes.
    pub fn take(
        &mut self,
        read: &[u8],
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.held.extend_from_slice(read);
        let mut at = 0;
        while let Some(used) = self.step(at)? {
            at += used;
        }
        self.held.drain(..at);
        let whole = self.data.len() / EVENT_BYTES * EVENT_BYTES;
        for event in self.data[..whole].chunks_exact(EVENT_BYTES) {
            each(event)?;
        }
        self.data.drain(..whole);
        if self.ended && !self.data.is_empty() {
            return Err(io::Error::other("a stream ended within an event"));
        }
        Ok(())
    }

    /// One chunk-size line, piece of data or line end from `at`; `None`: more must be read.
    fn step(&mut self, at: usize) -> io::Result<Option<usize>> {
        let rest = &self.held[at..];
        if self.ended || rest.is_empty() {
            return Ok(None);
        }
        if self.left > 2 {
            let piece = rest.len().min(self.left - 2);
            self.data.extend_from_slice(&rest[..piece]);
            self.left -= piece;
            return Ok(Some(piece));
        }
        if self.left > 0 {
            if rest.len() < 2 {
                return Ok(None);
            }
            if !rest.starts_with(b"\r\n") {
                return Err(io::Error::other("a chunk does not end in CRLF"));
            }
            self.left = 0;
            return Ok(Some(2));
        }
        let Some(end) = memchr::memmem::find(rest, b"\r\n") else {
            return Ok(None);
        };
        let line = std::str::from_utf8(&rest[..end]).unwrap_or("?");
        let size = usize::from_str_radix(line, 16)
            .map_err(|_| io::Error::other(format!("{line:?} is no chunk size")))?;
        if size == 0 {
            if rest.len() < end + 4 {
                return Ok(None);
            }
            self.ended = true;
            return Ok(Some(end + 4));
        }
        self.left = size + 2;
        Ok(Some(end + 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_the_chunk_that_it_says() {
        let chunk = chunk();
        assert_eq!(chunk.len(), SIZE_LINE.len() + EVENT_BYTES + 2);
        assert_eq!(usize::from_str_radix("82", 16).unwrap(), EVENT_BYTES);
        assert!(check(&chunk[4..4 + EVENT_BYTES]).is_ok());
        assert!(check(&chunk[3..3 + EVENT_BYTES]).is_err());
    }

    #[test]
    fn events_come_out_however_the_bytes_are_cut() {
        let stream = [chunk(), chunk(), chunk(), END.to_vec()].concat();
        for size in 1..stream.len() {
            let (mut events, mut seen) = (Events::default(), 0);
            for read in stream.chunks(size) {
                let each = |event: &[u8]| {
                    seen += 1;
                    check(event).map(drop)
                };
                events.take(read, each).unwrap();
            }
            assert_eq!((seen, events.ended), (3, true), "reads of {size}");
        }
    }

    #[test]
    fn chunks_cut_anew_are_the_same_events() {
        let (one, two) = (chunk(), chunk());
        let data = [&one[4..134], &two[4..134]].concat();
        let merged = [b"104\r\n".as_slice(), &data, b"\r\n", END].concat();
        let mut seen = 0;
        let each = |event: &[u8]| {
            seen += 1;
            check(event).map(drop)
        };
        Events::default().take(&merged, each).unwrap();
        assert_eq!(seen, 2);
    }

    #[test]
    fn broken_framing_and_torn_events_are_errors() {
        let none = |_: &[u8]| Ok(());
        assert!(Events::default().take(b"zz\r\n", none).is_err());
        assert!(Events::default().take(b"1\r\naXX", none).is_err());
        assert!(
            Events::default()
                .take(b"1\r\na\r\n0\r\n\r\n", none)
                .is_err()
        );
    }
}
