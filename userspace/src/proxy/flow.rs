//! A flow: one client connection, from accept to close, request after request.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::TcpStream;

use super::answer;
use super::exchange;
use super::io::{poll_append, reset_on_close};
use super::reason::Reason;
use super::request::{Refusal, RequestHead, Rules};
use super::scan::{Scan, Scanner};
use super::timers::Timer;
use super::worker::{OpenConnection, Worker};
use crate::state::{Phase, Pool, Snapshot};

/// A client that was refused is listened to for this long, so that it reads the answer before a reset.
const LINGER: Duration = Duration::from_secs(2);
/// A client that is not read from is looked at this often.
const WATCH: Duration = Duration::from_millis(500);
/// Bytes that pipelined requests may take up while one is in flight.
pub const PIPELINE_BYTES: usize = 64 << 10;

/// How a request left its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ready for another request.
    KeepAlive,
    /// Everything was said; close, and let the client read it.
    Close,
    /// The answer broke off: the client must not take it for whole.
    Reset,
    /// Nobody is there.
    Gone,
}

/// One client connection.
#[derive(Debug)]
pub struct Flow {
    /// Its worker.
    pub worker: Rc<Worker>,
    /// The client's socket.
    pub client: TcpStream,
    /// The client.
    pub peer: SocketAddr,
    /// Bytes received and not yet done with; a request's head is at the start.
    pub inbuf: Vec<u8>,
    /// The one deadline that runs now.
    timer: Timer,
    /// The client sent FIN; it may have gone altogether.
    fin: bool,
    grace: Duration,
    /// When a wait ends in which the client is not read from, on the timers' clock.
    unread_until_ms: u64,
    /// When the first byte of the current request came.
    pub started: Instant,
    _open: OpenConnection,
}

/// Why no request came.
enum NoHead {
    /// The client, or we, had nothing more to say.
    Quiet,
    Refused(Refusal),
}

impl Flow {
    /// The life of a connection.
    pub async fn serve(worker: Rc<Worker>, client: TcpStream, peer: SocketAddr) {
        let waker = std::future::poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        let mut flow = Self {
            timer: worker.timers.register(waker),
            client,
            peer,
            inbuf: Vec::new(),
            fin: false,
            grace: Duration::ZERO,
            unread_until_ms: 0,
            started: Instant::now(),
            _open: OpenConnection::new(&worker.shared),
            worker,
        };
        let next = flow.requests().await;
        match next {
            Next::Close => flow.linger().await,
            Next::Reset => reset_on_close(&flow.client),
            Next::KeepAlive | Next::Gone => {}
        }
        let mut inbuf = std::mem::take(&mut flow.inbuf);
        flow.worker.buffers.give(&mut inbuf);
    }

    async fn requests(&mut self) -> Next {
        loop {
            let snapshot = self.worker.snapshot();
            self.grace = snapshot.settings.http.half_close_grace;
            let next = match self.read_head(&snapshot).await {
                Ok(head) => {
                    self.worker.shared.metrics.requests.inc();
                    exchange::run(self, head, &snapshot).await
                }
                Err(NoHead::Quiet) => return Next::Gone,
                Err(NoHead::Refused((reason, message))) => {
                    self.worker.shared.metrics.failures[reason as usize].inc();
                    self.answer(
                        reason,
                        message,
                        snapshot.pools.first().map(Arc::as_ref),
                        None,
                    )
                    .await;
                    Next::Close
                }
            };
            if next != Next::KeepAlive {
                return next;
            }
        }
    }

    /// Waits for a whole head and reads it; its bytes stay at the start of `inbuf`.
    async fn read_head(&mut self, snapshot: &Snapshot) -> Result<RequestHead, NoHead> {
        let http = &snapshot.settings.http;
        let mut scanner = Scanner::default();
        let mut began = false;
        self.timer.set(http.keep_alive_idle);
        loop {
            self.drop_leading_lines();
            if !began && !self.inbuf.is_empty() {
                began = true;
                self.started = Instant::now();
                self.timer.set(http.head_deadline);
            }
            // A lone CR may be half of an empty line that is still to be dropped.
            let scan = match &self.inbuf[..] {
                b"\r" => Scan::More,
                bytes => scanner.scan(bytes),
            };
            match scan {
                Scan::End(end) if end <= http.head_bytes => return self.parse(end, snapshot),
                Scan::BareLf => {
                    return Err(NoHead::Refused((
                        Reason::BadRequest,
                        "a line of the head does not end in CRLF",
                    )));
                }
                Scan::End(_) => return Err(NoHead::Refused(too_large(true))),
                Scan::More if self.inbuf.len() >= http.head_bytes => {
                    return Err(NoHead::Refused(too_large(scanner.past_first_line())));
                }
                Scan::More => {}
            }
            match std::future::poll_fn(|cx| self.poll_head_bytes(cx)).await {
                Some(Ok(n)) if n > 0 => {}
                // The connection ended: between requests that is its usual end, within one it is no request.
                Some(_) => return Err(NoHead::Quiet),
                None if began && self.timer.expired() => {
                    return Err(NoHead::Refused((
                        Reason::RequestTimeout,
                        "the head did not come in time",
                    )));
                }
                None => return Err(NoHead::Quiet),
            }
        }
    }

    /// `None`: the deadline passed, or the process ends and no request has begun.
    fn poll_head_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<usize>>> {
        let read = self.poll_fill(cx);
        if read.is_ready() {
            return read.map(Some);
        }
        let over = match self.worker.phase() {
            Phase::Serving => false,
            Phase::Draining => self.inbuf.is_empty(),
            Phase::Aborting => true,
        };
        if over || self.timer.expired() {
            return Poll::Ready(None);
        }
        Poll::Pending
    }

    /// Appends to `inbuf` what the client sent. A buffer is held only once there is something to read.
    pub fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.inbuf.capacity() == 0 {
            ready!(self.client.poll_read_ready(cx))?;
            self.inbuf = self.worker.buffers.take();
        } else if self.inbuf.capacity() - self.inbuf.len() < 1024 {
            self.inbuf.reserve(self.inbuf.capacity());
        }
        let read = poll_append(&mut self.client, cx, &mut self.inbuf);
        if self.inbuf.is_empty() {
            self.give_inbuf();
        }
        read
    }

    fn give_inbuf(&mut self) {
        let worker = self.worker.clone();
        worker.buffers.give(&mut self.inbuf);
    }

    /// Empty lines before a request line are passed over (RFC 9112 §2.2).
    fn drop_leading_lines(&mut self) {
        let lines = self
            .inbuf
            .chunks_exact(2)
            .take_while(|pair| *pair == b"\r\n")
            .count();
        if lines > 0 {
            self.consume(2 * lines);
        }
    }

    /// Forgets the first `n` bytes received.
    pub fn consume(&mut self, n: usize) {
        if n >= self.inbuf.len() {
            self.give_inbuf();
        } else {
            self.inbuf.drain(..n);
        }
    }

    fn parse(&mut self, end: usize, snapshot: &Snapshot) -> Result<RequestHead, NoHead> {
        let high = u128::from(self.worker.random()) << 64;
        let rules = Rules {
            http: &snapshot.settings.http,
            key: &snapshot.settings.key,
            peer: self.peer,
            fresh_id: high | u128::from(self.worker.random()),
        };
        let fields = self.worker.buffers.take();
        RequestHead::parse(&self.inbuf[..end], &rules, fields).map_err(NoHead::Refused)
    }

    /// Sets the deadline. A client that sent FIN gets its answer only while that goes on.
    pub fn arm(&self, after: Duration) {
        self.timer.set(if self.fin {
            after.min(self.grace)
        } else {
            after
        });
    }

    /// Sets the deadline of a wait in which the client's bytes are left where they are, so that reading does
    /// not tell when it leaves: see [`Self::waits_on`].
    pub fn arm_unread(&mut self, after: Duration) {
        let ms = after.as_millis() as u64;
        self.unread_until_ms = self.worker.timers.now_ms().saturating_add(ms);
        self.arm(after.min(WATCH));
    }

    /// The timer rang in such a wait: whether it goes on, for there is time left and the client is there.
    pub fn waits_on(&mut self) -> bool {
        let now = self.worker.timers.now_ms();
        if self.fin || now >= self.unread_until_ms || self.worker.phase() == Phase::Aborting {
            return false;
        }
        let left = Duration::from_millis(self.unread_until_ms - now);
        self.arm(left.min(WATCH));
        let mut cx = Context::from_waker(Waker::noop());
        let ready = pin!(self.client.ready(Interest::READABLE | Interest::ERROR)).poll(&mut cx);
        match ready {
            Poll::Ready(Ok(ready)) if ready.is_error() => {
                self.fin = true;
                false
            }
            Poll::Ready(Ok(ready)) if ready.is_read_closed() => {
                self.fin = true;
                self.timer.set(self.grace);
                true
            }
            _ => true,
        }
    }

    /// Whether the deadline passed or the process is at its end.
    pub fn interrupted(&self) -> bool {
        self.timer.expired() || self.worker.phase() == Phase::Aborting
    }

    /// Whether the client sent FIN.
    pub fn half_closed(&self) -> bool {
        self.fin
    }

    /// Looks after the client while its request is answered: keeps what it sends next, notes FIN, and is
    /// ready if it is gone.
    pub fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.fin && self.inbuf.len() < PIPELINE_BYTES {
            match self.poll_fill(cx) {
                Poll::Ready(Ok(0)) => {
                    self.fin = true;
                    self.timer.set(self.grace);
                }
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(_)) => return Poll::Ready(()),
                Poll::Pending => break,
            }
        }
        Poll::Pending
    }

    /// Says no, in as many words.
    pub async fn answer(
        &mut self,
        reason: Reason,
        message: &str,
        pool: Option<&Pool>,
        asked: Option<(&str, bool, bool)>,
    ) {
        let (id, head_only, close) = asked.map_or((None, false, true), |(id, head, close)| {
            (Some(id), head, close)
        });
        let retry_after = pool.map_or(Duration::from_secs(1), |pool| pool.settings.retry_after);
        let mut out = self.worker.buffers.take();
        answer::write(&mut out, reason, message, retry_after, id, close, head_only);
        // Small enough for any send buffer; a client that cannot take it has gone.
        let sent = tokio::time::timeout(LINGER, self.client.write_all(&out)).await;
        if !matches!(sent, Ok(Ok(()))) {
            tracing::debug!(peer = %self.peer, "a refused client did not take its answer");
        }
        self.worker.buffers.give(&mut out);
    }

    /// Says FIN and reads on for a while: closing with unread bytes would reset the connection, and the
    /// client could lose the answer (RFC 9112 §9.6).
    async fn linger(&mut self) {
        if self.fin || self.client.shutdown().await.is_err() {
            return;
        }
        self.timer.set(LINGER);
        std::future::poll_fn(|cx| self.poll_discard(cx)).await;
    }

    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let worker = self.worker.clone();
        let mut scratch = worker.buffers.scratch.borrow_mut();
        loop {
            match super::io::poll_read(&mut self.client, cx, &mut scratch) {
                Poll::Ready(Ok(n)) if n > 0 && !self.interrupted() => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending if self.interrupted() => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

fn too_large(first_line_ended: bool) -> Refusal {
    if first_line_ended {
        (
            Reason::HeadTooLarge,
            "the request head is over the configured limit",
        )
    } else {
        (
            Reason::TargetTooLong,
            "the request target is over the configured limit",
        )
    }
}
