//! The first part of the body, up to the window: enough to know the key and the pool.
//!
//! No backend is held while a client dribbles its body: one that stops here costs nobody else anything.

use std::sync::Arc;
use std::task::Poll;

use prefixlb_common::framing::Body;

use super::body::BodyReader;
use super::exchange::{Exchange, Fail};
use super::reason::Reason;
use super::worker::anyone_admits;
use crate::picker::key::{self, NoKey, Shape};
use crate::state::Pool;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl Exchange<'_> {
    /// Reads the body until it ends or the window is full.
    pub(super) async fn read_window(&mut self) -> Result<(), Fail> {
        if self.head.body == Body::None {
            return Ok(());
        }
        let window = self.head.len + self.snapshot.settings.key.window_bytes;
        loop {
            self.follow_buffered()?;
            if self.incoming.is_done() || self.prefix_end >= window {
                return Ok(());
            }
            if self.prefix_end == self.head.len && self.owes_continue() {
                self.send_continue().await?;
            }
            self.flow.arm(self.snapshot.settings.http.body_idle);
            self.read_more().await?;
        }
    }

    /// Takes what lies in the buffer and belongs to the body.
    fn follow_buffered(&mut self) -> Result<(), Fail> {
        let fresh = &self.flow.inbuf[self.prefix_end..];
        let took = self
            .incoming
            .advance(fresh)
            .map_err(|error| Fail::new(Reason::BadRequest, error.as_str()))?;
        self.prefix_end += took;
        self.check_size()
    }

    /// Refuses a body that has declared more than is allowed, before it comes.
    pub(super) fn check_size(&self) -> Result<(), Fail> {
        if self.incoming.declared() > self.snapshot.settings.http.body_bytes {
            return Err(Fail::new(
                Reason::BodyTooLarge,
                "the body is over the configured limit",
            ));
        }
        Ok(())
    }

    async fn read_more(&mut self) -> Result<(), Fail> {
        let read = std::future::poll_fn(|cx| match self.flow.poll_fill(cx) {
            Poll::Pending if self.flow.interrupted() => Poll::Ready(None),
            read => read.map(Some),
        });
        match read.await {
            Some(Ok(n)) if n > 0 => Ok(()),
            Some(_) => Err(Fail::GONE),
            None => Err(Fail::new(
                Reason::RequestTimeout,
                "the body did not come in time",
            )),
        }
    }

    /// We must see the body to choose, so we answer for the backend (RFC 9110 §10.1.1).
    async fn send_continue(&mut self) -> Result<(), Fail> {
        use tokio::io::AsyncWriteExt;
        if !anyone_admits(&self.flow.worker, self.snapshot) {
            return Err(Fail::new(Reason::NoBackend, "no backend is alive"));
        }
        // 25 bytes into an empty send buffer.
        let sent = self.flow.client.write_all(CONTINUE).await;
        sent.map_err(|_| Fail::GONE)
    }

    /// Reads the key from what was received, and finds the pool that serves the request.
    pub(super) fn route(&mut self) -> Result<Arc<Pool>, Fail> {
        let worker = self.flow.worker.clone();
        let metrics = &worker.shared.metrics;
        let received = &self.flow.inbuf;
        let path = &received[self.head.path.clone()];
        let mut parser = worker.parser.borrow_mut();
        parser.clear();
        let mut parsed = Err(NoKey::NotLookedAt);
        if self.head.body != Body::None {
            if let Some(shape) = Shape::of_path(path).filter(|_| self.head.may_be_json) {
                let body = &received[self.head.len..self.prefix_end];
                let whole = self.incoming.is_done();
                parsed = if self.head.body == Body::Chunked {
                    let data = unchunked(body, worker.buffers.take());
                    let parsed = parser.parse(shape, &data, whole, &mut self.key);
                    worker.buffers.give(&mut { data });
                    parsed
                } else {
                    parser.parse(shape, body, whole, &mut self.key)
                };
            }
            if let Err(why) = parsed {
                metrics.no_key[why as usize].inc();
            }
        }
        self.has_key = parsed.is_ok();
        let model = parser.model();
        let pool = find_pool(&self.snapshot.pools, model, path);
        if let Some(value) = self.head.key.clone() {
            let good = key::from_header(&received[value], &mut self.key);
            if good {
                self.has_key = true;
            } else {
                metrics.bad_header_keys.inc();
            }
        }
        pool.ok_or(Fail::new(
            Reason::NoPool,
            "no pool serves this model and path",
        ))
    }
}

/// The data of a chunked body, in `out`.
fn unchunked(body: &[u8], mut out: Vec<u8>) -> Vec<u8> {
    // The framing was found good when these bytes were taken; this walk only takes it away.
    let _ = BodyReader::new(Body::Chunked).each_piece(body, |data| out.extend_from_slice(data));
    out
}

/// The first pool that serves `model` and `path`. A request that names no model (`GET /v1/models`) may go to
/// any pool of its path.
fn find_pool(pools: &[Arc<Pool>], model: Option<&str>, path: &[u8]) -> Option<Arc<Pool>> {
    let serves = |pool: &&Arc<Pool>| {
        let settings = &pool.settings;
        let by_path = settings.paths.is_empty()
            || settings
                .paths
                .iter()
                .any(|prefix| path.starts_with(prefix.as_bytes()));
        let by_model = settings.models.is_empty()
            || model.is_none_or(|model| settings.models.iter().any(|served| served == model));
        by_path && by_model
    };
    pools.iter().find(serves).cloned()
}
