//! An exchange: one request and its answer. Window, pick, send, head, relay: in that order.
//!
//! The steps live in `window`, `assign`, `upload`, `await_head` and `relay`, all on one [`Exchange`]; here
//! is how they follow each other, what a failure of each means, and what is counted at the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prefixlb_common::framing::Body;

use super::assign::Assigned;
use super::await_head::HeadEnd;
use super::body::BodyReader;
use super::flow::{Flow, Next};
use super::link::{self, Link};
use super::reason::Reason;
use super::relay::RelayEnd;
use super::request::RequestHead;
use super::response::ResponseHead;
use super::scan::Scanner;
use super::upload::Upload;
use crate::backend::health::Outcome;
use crate::backend::request_resolve;
use crate::picker::PrefixKey;
use crate::reqlog::Record;
use crate::state::{Phase, Pool, Snapshot};

/// Backends that are tried when connections cannot be opened.
const CONNECT_TRIES: usize = 3;

/// A failure of the exchange: what is counted, and what the client is told.
#[derive(Clone, Copy, Debug)]
pub struct Fail {
    /// Why.
    pub reason: Reason,
    /// One sentence, for reasons that have a status.
    pub message: &'static str,
}

impl Fail {
    /// A failure that the client is told of.
    pub const fn new(reason: Reason, message: &'static str) -> Self {
        Self { reason, message }
    }

    /// The client has gone; nobody is told.
    pub const GONE: Self = Self::new(Reason::ClientAbort, "");
}

/// One request under way.
#[derive(Debug)]
pub struct Exchange<'f> {
    pub(super) flow: &'f mut Flow,
    pub(super) snapshot: &'f Snapshot,
    pub(super) head: RequestHead,
    /// Where the request's body is; what of it lies in `inbuf` ends at `prefix_end`.
    pub(super) incoming: BodyReader,
    pub(super) prefix_end: usize,
    pub(super) key: PrefixKey,
    pub(super) has_key: bool,
    pub(super) pool: Option<Arc<Pool>>,
    pub(super) tried: Vec<u16>,
    pub(super) assigned: Option<Assigned>,
    pub(super) link: Option<Link>,
    pub(super) upload: Upload,
    /// The backend's head as it comes, then nothing.
    pub(super) resp: Vec<u8>,
    pub(super) resp_scan: Scanner,
    pub(super) outgoing: BodyReader,
    /// Bytes for the client that did not fit yet, from `down_at` on.
    pub(super) down: Vec<u8>,
    pub(super) down_at: usize,
    /// An interim response was passed on: the request reached a backend, replaying is over.
    pub(super) interim: bool,
    /// The backend sent bytes beyond its answer.
    pub(super) surplus: bool,
    pub(super) decode: bool,
    /// The answer's framing broke; what was good of it still goes out.
    pub(super) bad_framing: bool,
    /// The request's length, if its answer is to teach us how many bytes a token has.
    pub(super) sampled_bytes: Option<u64>,
    pub(super) status: u16,
    pub(super) ttft: Option<Duration>,
    pub(super) bytes: u64,
    close_client: bool,
    continue_sent: bool,
    brief: Option<Brief>,
}

/// What the log says of a request whose memory went back before it ended.
#[derive(Debug)]
struct Brief {
    method: Box<str>,
    target: Box<str>,
    id: Box<str>,
}

/// Longest target that is logged. Bytes.
const LOGGED_TARGET: usize = 512;

/// Serves the request whose head is at the start of the flow's buffer.
pub async fn run(flow: &mut Flow, head: RequestHead, snapshot: &Snapshot) -> Next {
    let worker = flow.worker.clone();
    worker.shared.metrics.requests_active.add(1);
    let key = worker.keys.borrow_mut().pop().unwrap_or_default();
    let mut exchange = Exchange {
        snapshot,
        incoming: BodyReader::new(head.body),
        prefix_end: head.len,
        key,
        has_key: false,
        pool: None,
        tried: Vec::new(),
        assigned: None,
        link: None,
        upload: Upload::default(),
        resp: Vec::new(),
        resp_scan: Scanner::default(),
        outgoing: BodyReader::new(Body::None),
        down: Vec::new(),
        down_at: 0,
        interim: false,
        surplus: false,
        decode: false,
        bad_framing: false,
        sampled_bytes: None,
        status: 0,
        ttft: None,
        bytes: 0,
        close_client: false,
        continue_sent: false,
        brief: None,
        flow,
        head,
    };
    let result = exchange.serve().await;
    let next = exchange.finish(result).await;
    worker.shared.metrics.requests_active.add(-1);
    next
}

impl Exchange<'_> {
    async fn serve(&mut self) -> Result<Next, Fail> {
        if self.flow.worker.phase() != Phase::Serving {
            return Err(Fail::new(
                Reason::ShuttingDown,
                "prefixlb is shutting down; send the request to another instance",
            ));
        }
        self.read_window().await?;
        let pool = self.route()?;
        self.pool = Some(pool.clone());
        self.assign(&pool).await?;
        let head = self.request_response(&pool).await?;
        self.begin_response(&head);
        match std::future::poll_fn(|cx| self.poll_relay(cx)).await {
            RelayEnd::Done => Ok(self.keep_or_close(&head)),
            RelayEnd::Failed(reason) => Err(Fail::new(reason, "")),
        }
    }

    /// Sends the request until a final response head is there; moves on from backends that do not take it.
    async fn request_response(&mut self, pool: &Arc<Pool>) -> Result<ResponseHead, Fail> {
        let mut fresh_only = false;
        let mut replayed = false;
        loop {
            self.open_link(pool, fresh_only).await?;
            let reused = self.link.as_ref().is_some_and(|link| link.reused);
            self.prepare_upload();
            let end = std::future::poll_fn(|cx| self.poll_head(cx)).await;
            let fail = match end {
                HeadEnd::Head(head) => {
                    self.report(Outcome::Status(head.status));
                    return Ok(head);
                }
                HeadEnd::Dead if !replayed && self.may_replay(reused) => {
                    replayed = true;
                    fresh_only = true;
                    self.link = None;
                    if let Some(assigned) = &self.assigned {
                        assigned.backend.metrics.replays.inc();
                    }
                    continue;
                }
                HeadEnd::Dead => Fail::new(
                    Reason::BackendClosed,
                    "the backend closed the connection before it answered",
                ),
                HeadEnd::Bad(message) => Fail::new(Reason::BadResponse, message),
                HeadEnd::Failed(fail) => fail,
            };
            if matches!(fail.reason, Reason::BackendClosed | Reason::BadResponse) {
                self.report(Outcome::Failed);
            }
            return Err(fail);
        }
    }

    /// Nothing of the request is lost, nothing of an answer was seen.
    ///
    /// On a connection that was idle the backend most likely closed it before the request came, so even a
    /// POST is sent again (RFC 9110 §9.2.2 allows it where the proxy knows; here it is a documented guess).
    fn may_replay(&self, reused: bool) -> bool {
        let allowed = reused || self.snapshot.settings.http.replay_fresh;
        allowed && !self.upload.streamed && !self.interim
    }

    /// An idle connection to the assigned backend, or a new one; a backend that cannot be reached is left for
    /// another, since nothing was sent.
    async fn open_link(&mut self, pool: &Arc<Pool>, fresh_only: bool) -> Result<(), Fail> {
        loop {
            let Some(backend) = self.assigned.as_ref().map(|a| a.backend.clone()) else {
                return Err(Fail::new(Reason::NoBackend, "no backend was assigned"));
            };
            let worker = self.flow.worker.clone();
            let http = &self.snapshot.settings.http;
            let now = worker.timers.now_ms();
            if !fresh_only && let Some(link) = worker.links.take(&backend, now, http.pool_idle) {
                self.link = Some(link);
                return Ok(());
            }
            match link::connect(&backend, http.connect_deadline).await {
                Ok(link) => {
                    self.link = Some(link);
                    return Ok(());
                }
                Err(error) => {
                    tracing::debug!(backend = backend.settings.name, %error, "cannot connect");
                    self.report(Outcome::Failed);
                    request_resolve(&backend);
                    self.assigned = None;
                    self.tried.push(backend.slot);
                }
            }
            // Once all were tried, none is alive: that is another answer, given by `assign`.
            if (CONNECT_TRIES..pool.members.len()).contains(&self.tried.len()) {
                return Err(Fail::new(
                    Reason::ConnectFailed,
                    "no connection to any of the backends tried",
                ));
            }
            self.assign(pool).await?;
        }
    }

    fn report(&self, outcome: Outcome) {
        if let Some(assigned) = &self.assigned {
            assigned.backend.passive.report(outcome);
        }
    }

    /// The client's version of the head, and what came with it, is ready to be written.
    fn begin_response(&mut self, head: &ResponseHead) {
        let http = &self.snapshot.settings.http;
        self.status = head.status;
        self.outgoing = BodyReader::new(head.body);
        self.sampled_bytes = self.sample(head.status);
        self.decode = self.head.http10 && head.body == Body::Chunked;
        self.close_client = !self.head.keep_alive
            || self.flow.worker.phase() != Phase::Serving
            || head.body == Body::UntilClose
            || self.decode
            || !self.upload.finished;
        let out = &mut self.down;
        if let Some(assigned) = &self.assigned {
            assigned.write_fields(out, http.pick_header || self.head.debug);
        }
        if !head.has_id {
            out.extend_from_slice(b"X-Request-Id: ");
            out.extend_from_slice(&self.head.fields[self.head.id.clone()]);
            out.extend_from_slice(b"\r\n");
        }
        if http.via {
            out.extend_from_slice(b"Via: 1.1 prefixlb\r\n");
        }
        match (self.close_client, self.head.http10) {
            (true, _) => out.extend_from_slice(b"Connection: close\r\n"),
            (false, true) => out.extend_from_slice(b"Connection: keep-alive\r\n"),
            (false, false) => {}
        }
        out.extend_from_slice(b"\r\n");
        if self.upload.finished {
            self.forget_request();
        }
    }

    /// The request can not be needed again: its memory goes back.
    fn forget_request(&mut self) {
        let worker = self.flow.worker.clone();
        if worker.shared.log.enabled() {
            self.brief = Some(self.brief());
        }
        worker.buffers.give(&mut self.upload.head);
        worker.buffers.give(&mut self.head.fields);
        self.flow.consume(self.prefix_end);
        self.prefix_end = 0;
        let mut key = std::mem::take(&mut self.key);
        key.clear();
        worker.keys.borrow_mut().push(key);
    }

    fn brief(&self) -> Brief {
        let received = &self.flow.inbuf;
        let text = |range: std::ops::Range<usize>| {
            let end = range.end.min(range.start + LOGGED_TARGET);
            String::from_utf8_lossy(received.get(range.start..end).unwrap_or_default()).into()
        };
        Brief {
            method: text(self.head.method.clone()),
            target: text(self.head.target.clone()),
            id: self.head.id().into(),
        }
    }

    /// The whole answer is with the client.
    fn keep_or_close(&mut self, head: &ResponseHead) -> Next {
        let sound = head.reusable && self.upload.finished && !self.surplus;
        if let (Some(link), Some(assigned)) = (self.link.take(), &self.assigned) {
            if sound {
                let worker = &self.flow.worker;
                let now = worker.timers.now_ms();
                let limit = self.snapshot.settings.http.pool_size;
                worker.links.keep(&assigned.backend, link, now, limit);
            } else if self.surplus {
                assigned.backend.metrics.pool_discards.inc();
            }
        }
        if self.close_client {
            Next::Close
        } else {
            Next::KeepAlive
        }
    }

    /// Says what is to be said, counts, logs, and gives back what is held.
    async fn finish(&mut self, result: Result<Next, Fail>) -> Next {
        let failure = result.as_ref().err().map(|fail| fail.reason);
        if let Some(reason) = failure {
            // Before the answer: who has it in hand may look at the metrics.
            self.flow.worker.shared.metrics.failures[reason as usize].inc();
        }
        let next = match result {
            Ok(next) => next,
            Err(fail) => self.fail(fail).await,
        };
        if self.prefix_end > 0 {
            self.forget_request();
        }
        self.count(failure);
        self.log(failure);
        self.link = None;
        self.assigned = None;
        let buffers = &self.flow.worker.buffers;
        buffers.give(&mut self.resp);
        buffers.give(&mut self.down);
        buffers.give(&mut self.upload.left);
        next
    }

    async fn fail(&mut self, fail: Fail) -> Next {
        self.link = None;
        if fail.reason == Reason::ClientAbort {
            return Next::Gone;
        }
        if self.status != 0 || fail.reason.status().is_none() {
            // Where the client can count or see chunks end, FIN in the middle is plain enough, and unlike RST
            // it does not throw away what is still on its way.
            let ends_by_close = self.decode || self.outgoing.ends_with_connection();
            let stalled = fail.reason == Reason::ClientStalled;
            return if ends_by_close || stalled {
                Next::Reset
            } else {
                Next::Gone
            };
        }
        self.status = fail.reason.status().unwrap_or(0);
        let close = !self.incoming.is_done()
            || !self.head.keep_alive
            || self.flow.worker.phase() != Phase::Serving;
        let id = self.head.id().to_owned();
        let asked = Some((id.as_str(), self.head.is_head, close));
        let pool = self.pool.as_ref().or(self.snapshot.pools.first()).cloned();
        self.flow
            .answer(fail.reason, fail.message, pool.as_deref(), asked)
            .await;
        if close { Next::Close } else { Next::KeepAlive }
    }

    fn count(&self, failure: Option<Reason>) {
        let Some(assigned) = &self.assigned else {
            return;
        };
        let backend = &assigned.backend.metrics;
        match failure {
            None => {
                let class = usize::from((self.status / 100).clamp(2, 5)) - 2;
                backend.responses[class].inc();
                backend.duration.observe(self.flow.started.elapsed());
            }
            Some(Reason::ClientAbort | Reason::ClientStalled) => backend.client_aborts.inc(),
            Some(Reason::Truncated | Reason::ResponseIdle) => backend.truncated.inc(),
            Some(_) => {}
        }
        backend.response_bytes.add(self.bytes);
        if let Some(ttft) = self.ttft {
            backend.ttft.observe(ttft);
        }
    }

    fn log(&self, failure: Option<Reason>) {
        let shared = &self.flow.worker.shared;
        let Some(brief) = &self.brief else {
            return;
        };
        if !shared.log.wants(failure.is_some()) {
            return;
        }
        let pick = self.assigned.as_ref().map(|assigned| assigned.pick);
        let record = Record {
            client: self.flow.peer,
            request_id: &brief.id,
            method: &brief.method,
            target: &brief.target,
            pool: self.pool.as_ref().map(|pool| pool.settings.name.as_str()),
            backend: self
                .assigned
                .as_ref()
                .map(|assigned| assigned.backend.settings.name.as_str()),
            pick: pick.map(|pick| pick.reason.as_str()),
            prompt_tokens: pick.map_or(0, |pick| pick.matched_tokens + pick.uncached_tokens),
            matched_tokens: pick.map_or(0, |pick| pick.matched_tokens),
            status: self.status,
            failure: failure.map(Reason::as_str),
            ttft: self.ttft,
            duration: self.flow.started.elapsed(),
            bytes: self.bytes,
        };
        if !shared.log.record(&record) {
            shared.metrics.log_dropped.inc();
        }
    }

    /// The first byte of the answer's body: prefill is over.
    pub(super) fn first_byte(&mut self) {
        if self.ttft.is_none() {
            self.ttft = Some(Instant::now().duration_since(self.flow.started));
            if let Some(assigned) = &mut self.assigned {
                assigned.first_byte();
            }
        }
    }

    /// `100 Continue` goes out once, and only if a backend could take the request.
    pub(super) fn owes_continue(&mut self) -> bool {
        self.head.expect && !std::mem::replace(&mut self.continue_sent, true)
    }
}
