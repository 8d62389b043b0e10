//! The request log: one structured line a request, written off the data path.
//!
//! A worker formats its line into a shared buffer; a thread of its own writes that to stdout, at most ten times
//! a second. It is not woken for each line: that would cost a worker two system calls a request. If the writer falls
//! behind, lines are dropped and counted: a full disk or a slow pipe must never hold up a token.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::config::{LogFormat, LogSettings};

/// Room for a usual line, so that writing one is a single allocation.
const LINE: usize = 384;

/// Bytes of lines that may wait for the writer.
const WAITING: usize = 4 << 20;
/// How often the writer looks for lines.
const INTERVAL: Duration = Duration::from_millis(100);

/// What is known of a request when it has ended.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    /// Client address.
    pub client: SocketAddr,
    /// `X-Request-Id`, kept or given.
    pub request_id: &'a str,
    /// Method as sent.
    pub method: &'a str,
    /// Target as sent.
    pub target: &'a str,
    /// Pool name, if one was found.
    pub pool: Option<&'a str>,
    /// Backend name, if one was picked.
    pub backend: Option<&'a str>,
    /// Pick reason, if one was picked.
    pub pick: Option<&'static str>,
    /// Tokens of the prompt (estimated), and matched.
    pub prompt_tokens: u64,
    /// See `prompt_tokens`.
    pub matched_tokens: u64,
    /// Status sent; 0 if none was.
    pub status: u16,
    /// Failure label, if it failed.
    pub failure: Option<&'static str>,
    /// To the first response body byte.
    pub ttft: Option<Duration>,
    /// Whole time.
    pub duration: Duration,
    /// Response body bytes.
    pub bytes: u64,
}

const OFF: u32 = 0;
const JSON: u32 = 1;
const LOGFMT: u32 = 2;
/// A share of 1 in the sampling counter's fixed point.
const WHOLE: u64 = 1 << 32;

/// Handle on the log's writer.
#[derive(Debug)]
pub struct RequestLog {
    format: AtomicU32,
    /// Share of successful requests that are logged, in 1/2³².
    share: AtomicU64,
    /// Grows by `share` a request; a carry over a whole is a line. Exact for every share, and no clock of chance.
    turn: AtomicU64,
    lines: Arc<Lines>,
}

/// What the workers and the writer share.
#[derive(Debug, Default)]
struct Lines {
    waiting: Mutex<Waiting>,
    /// The writer is told to hurry, or tells that all is written.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    text: String,
    closing: bool,
    written: bool,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Half a line at worst, if a worker panicked in between.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'l>(
        &'l self,
        held: MutexGuard<'l, Waiting>,
        time: Duration,
    ) -> MutexGuard<'l, Waiting> {
        let woken = self.changed.wait_timeout(held, time);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl RequestLog {
    /// Starts the writer.
    #[must_use]
    pub fn start(settings: &LogSettings) -> Self {
        let lines = Arc::new(Lines::default());
        let of_writer = lines.clone();
        let writer = std::thread::Builder::new()
            .name("prefixlb-log".into())
            .spawn(move || write_lines(&of_writer));
        if let Err(error) = writer {
            tracing::error!(%error, "no thread for the request log: requests are not logged");
        }
        let log = Self {
            format: AtomicU32::new(OFF),
            share: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            lines,
        };
        log.configure(settings);
        log
    }

    /// Other settings from now on.
    pub fn configure(&self, settings: &LogSettings) {
        let format = match settings.format {
            LogFormat::Off => OFF,
            LogFormat::Json => JSON,
            LogFormat::Logfmt => LOGFMT,
        };
        self.format.store(format, Relaxed);
        let share = (settings.sample.clamp(0.0, 1.0) * WHOLE as f64) as u64;
        self.share.store(share, Relaxed);
    }

    /// Whether requests are logged at all.
    #[must_use]
    pub fn enabled(&self) -> bool {
        self.format.load(Relaxed) != OFF
    }

    /// Whether a request that ended so is to be logged: failures always, others by the sampled share.
    #[must_use]
    pub fn wants(&self, failed: bool) -> bool {
        if failed {
            return true;
        }
        let share = self.share.load(Relaxed);
        let before = self.turn.fetch_add(share, Relaxed);
        before / WHOLE != before.wrapping_add(share) / WHOLE
    }

    /// Logs a request; never blocks: if the writer is behind, the line is dropped and `false` comes back so
    /// that the caller can count it.
    pub fn record(&self, record: &Record<'_>) -> bool {
        let now = humantime::format_rfc3339_millis(SystemTime::now());
        let line = match self.format.load(Relaxed) {
            OFF => return true,
            LOGFMT => logfmt(record, now),
            _ => json(record, now),
        };
        let mut waiting = self.lines.lock();
        let room = waiting.text.len() + line.len() <= WAITING;
        if room {
            if waiting.text.is_empty() {
                // The first since the last write: ten wake-ups a second at most, and none while nothing happens.
                self.lines.changed.notify_all();
            }
            waiting.text.push_str(&line);
        }
        room
    }

    /// Waits until what was recorded is written, or a second at most.
    pub fn close(&self) {
        let mut waiting = self.lines.lock();
        waiting.closing = true;
        self.lines.changed.notify_all();
        let deadline = Instant::now() + Duration::from_secs(1);
        while !waiting.written && Instant::now() < deadline {
            waiting = self.lines.wait(waiting, INTERVAL);
        }
    }
}

fn write_lines(lines: &Lines) {
    let mut out = std::io::stdout();
    let mut text = String::new();
    loop {
        let mut waiting = lines.lock();
        while waiting.text.is_empty() && !waiting.closing {
            waiting = lines
                .changed
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if !waiting.closing {
            waiting = lines.wait(waiting, INTERVAL); // others may follow
        }
        std::mem::swap(&mut waiting.text, &mut text);
        let closing = waiting.closing;
        drop(waiting);
        // Nobody is left to tell if stdout is gone; the balancer goes on.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        text.clear();
        if closing {
            lines.lock().written = true;
            lines.changed.notify_all();
            return;
        }
    }
}

/// Milliseconds, to the microsecond.
struct Ms(Duration);

impl fmt::Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_micros();
        write!(f, "{}.{:03}", us / 1000, us % 1000)
    }
}

/// How the two formats write a field; the fields and their order are `fields`'s.
trait Shape {
    fn text(line: &mut String, name: &str, value: &str);
    fn bare(line: &mut String, name: &str, value: impl fmt::Display);
    /// Nothing is known; `null` keeps the columns of JSON the same in every line.
    fn none(line: &mut String, name: &str);
}

struct JsonShape;

impl Shape for JsonShape {
    fn text(line: &mut String, name: &str, value: &str) {
        let _ = write!(line, ",\"{name}\":");
        quote(line, value);
    }
    fn bare(line: &mut String, name: &str, value: impl fmt::Display) {
        let _ = write!(line, ",\"{name}\":{value}");
    }
    fn none(line: &mut String, name: &str) {
        let _ = write!(line, ",\"{name}\":null");
    }
}

struct LogfmtShape;

impl Shape for LogfmtShape {
    fn text(line: &mut String, name: &str, value: &str) {
        let _ = write!(line, " {name}=");
        let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'=' | b'\\');
        if !value.is_empty() && value.bytes().all(plain) {
            line.push_str(value);
        } else {
            quote(line, value);
        }
    }
    fn bare(line: &mut String, name: &str, value: impl fmt::Display) {
        let _ = write!(line, " {name}={value}");
    }
    fn none(_: &mut String, _: &str) {}
}

/// `value` between quotes, as JSON has it; control characters of every kind are escaped, so that a terminal
/// that shows the log does not obey a client.
fn quote(line: &mut String, value: &str) {
    line.push('"');
    for c in value.chars() {
        match c {
            '"' | '\\' => line.extend(['\\', c]),
            '\n' => line.push_str("\\n"),
            '\r' => line.push_str("\\r"),
            '\t' => line.push_str("\\t"),
            c if c.is_control() => {
                let _ = write!(line, "\\u{:04x}", u32::from(c));
            }
            c => line.push(c),
        }
    }
    line.push('"');
}

fn fields<S: Shape>(line: &mut String, record: &Record<'_>) {
    let optional = |line: &mut String, name, value: Option<&str>| match value {
        Some(value) => S::text(line, name, value),
        None => S::none(line, name),
    };
    S::text(line, "request_id", record.request_id);
    S::text(line, "method", record.method);
    S::text(line, "target", record.target);
    optional(line, "pool", record.pool);
    optional(line, "backend", record.backend);
    optional(line, "pick", record.pick);
    S::bare(line, "prompt_tokens", record.prompt_tokens);
    S::bare(line, "matched_tokens", record.matched_tokens);
    S::bare(line, "status", record.status);
    optional(line, "failure", record.failure);
    match record.ttft {
        Some(ttft) => S::bare(line, "ttft_ms", Ms(ttft)),
        None => S::none(line, "ttft_ms"),
    }
    S::bare(line, "duration_ms", Ms(record.duration));
    S::bare(line, "bytes", record.bytes);
}

fn json(record: &Record<'_>, at: impl fmt::Display) -> String {
    let mut line = String::with_capacity(LINE);
    let _ = write!(line, "{{\"time\":\"{at}\",\"client\":\"{}\"", record.client);
    fields::<JsonShape>(&mut line, record);
    line.push_str("}\n");
    line
}

fn logfmt(record: &Record<'_>, at: impl fmt::Display) -> String {
    let mut line = String::with_capacity(LINE);
    let _ = write!(line, "time={at} client={}", record.client);
    fields::<LogfmtShape>(&mut line, record);
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record<'static> {
        Record {
            client: "127.0.0.1:5".parse().expect("an address"),
            request_id: "id",
            method: "GET",
            target: "/a\"b\n",
            pool: None,
            backend: Some("b1"),
            pick: Some("warm"),
            prompt_tokens: 9,
            matched_tokens: 8,
            status: 200,
            failure: None,
            ttft: Some(Duration::from_micros(1500)),
            duration: Duration::from_millis(2),
            bytes: 10,
        }
    }

    #[test]
    fn what_a_client_sent_cannot_break_a_line() {
        for line in [json(&record(), "t"), logfmt(&record(), "t")] {
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(line.ends_with('\n'));
        }
        let value: serde_json::Value =
            serde_json::from_str(&json(&record(), "t")).expect("a line of JSON");
        assert_eq!(value["target"], "/a\"b\n");
        assert_eq!(value["ttft_ms"], 1.5);
        assert_eq!(
            (&value["time"], &value["client"]),
            (&"t".into(), &"127.0.0.1:5".into())
        );
        assert!(value["pool"].is_null() && value["failure"].is_null());
        assert_eq!(value.as_object().map(serde_json::Map::len), Some(15));
        let line = logfmt(&record(), "t");
        assert!(line.starts_with("time=t client=127.0.0.1:5 request_id=id method=GET target=\"/a\\\"b\\n\" backend=b1"), "{line}");
        assert!(
            line.ends_with(" ttft_ms=1.500 duration_ms=2.000 bytes=10\n"),
            "{line}"
        );
    }

    #[test]
    fn every_character_survives_json_and_none_reaches_a_terminal_raw() {
        for c in (0..=0x2ff).filter_map(char::from_u32) {
            let target = format!("a{c}b");
            let record = Record {
                target: &target,
                ..record()
            };
            let line = json(&record, "t");
            let value: serde_json::Value = serde_json::from_str(&line).expect("a line of JSON");
            assert_eq!(value["target"], *target);
            let both = line.clone() + &logfmt(&record, "t");
            let controls = both.chars();
            assert_eq!(controls.filter(|c| c.is_control()).count(), 2, "{c:?}");
        }
    }

    #[test]
    fn a_share_is_kept_exactly_and_failures_are_always_logged() {
        let log = RequestLog::start(&LogSettings {
            format: LogFormat::Json,
            sample: 0.25,
        });
        assert_eq!((0..1000).filter(|_| log.wants(false)).count(), 250);
        assert!((0..10).all(|_| log.wants(true)));
        log.configure(&LogSettings {
            format: LogFormat::Off,
            sample: 0.0,
        });
        assert!(!log.enabled() && !log.wants(false));
    }
}
