//! The response on its way to the client: each read is written on at once, and nothing is held while all is
//! quiet. Where the client does not keep up, one read's worth is kept and the backend waits.
//!
//! This is the user-space way of moving a response's body. The kernel's way, splice, takes its place between
//! [`Exchange::poll_relay`]'s flush of the head and its end: it needs the bound pair of sockets and the
//! framing's state, both of which are fields here, and hands back to this relay when its credit is used up.

use std::task::{Context, Poll, ready};

use super::exchange::Exchange;
use super::io::{poll_read, poll_write};
use super::reason::Reason;
use super::upload::UploadError;
use crate::state::Phase;

/// How the answer ended.
#[derive(Debug)]
pub enum RelayEnd {
    /// Whole and with the client.
    Done,
    /// Not.
    Failed(Reason),
}

impl Exchange<'_> {
    /// Moves the answer on; ready when it ended one way or the other.
    pub(super) fn poll_relay(&mut self, cx: &mut Context<'_>) -> Poll<RelayEnd> {
        if let Poll::Ready(end) = self.poll_down(cx) {
            return Poll::Ready(end);
        }
        if !self.upload.finished
            && let Poll::Ready(Err(error)) = self.poll_upload(cx)
        {
            match error {
                UploadError::Backend => self.upload.broken = true,
                UploadError::Client(fail) => return Poll::Ready(RelayEnd::Failed(fail.reason)),
            }
        }
        if self.upload.finished && self.flow.poll_gone(cx).is_ready() {
            return Poll::Ready(RelayEnd::Failed(Reason::ClientAbort));
        }
        if self.flow.interrupted() {
            return Poll::Ready(RelayEnd::Failed(self.silence()));
        }
        Poll::Pending
    }

    /// Who kept us waiting.
    fn silence(&self) -> Reason {
        if self.flow.worker.phase() == Phase::Aborting {
            Reason::ShuttingDown
        } else if self.flow.half_closed() {
            Reason::ClientAbort
        } else if self.down_at < self.down.len() {
            Reason::ClientStalled
        } else {
            Reason::ResponseIdle
        }
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<RelayEnd> {
        if !self.resp.is_empty() {
            self.take_first_bytes();
        }
        loop {
            if ready!(self.poll_flush(cx)).is_err() {
                return Poll::Ready(RelayEnd::Failed(Reason::ClientAbort));
            }
            if self.outgoing.is_done() {
                self.first_byte();
                return Poll::Ready(RelayEnd::Done);
            }
            if self.bad_framing {
                return Poll::Ready(RelayEnd::Failed(Reason::Truncated));
            }
            if let Err(end) = ready!(self.poll_read_on(cx)) {
                return Poll::Ready(end);
            }
        }
    }

    /// What came with the head goes out with the head.
    fn take_first_bytes(&mut self) {
        let mut resp = std::mem::take(&mut self.resp);
        self.bad_framing = !self.follow(&resp);
        self.flow.worker.buffers.give(&mut resp);
    }

    /// Follows the framing over `bytes` and queues what belongs to the answer. `false`: broken framing.
    fn follow(&mut self, bytes: &[u8]) -> bool {
        let down = &mut self.down;
        let took = if self.decode {
            self.outgoing
                .each_piece(bytes, |data| down.extend_from_slice(data))
        } else {
            let took = self.outgoing.advance(bytes);
            if let Ok(n) = took {
                down.extend_from_slice(&bytes[..n]);
            }
            took
        };
        let Ok(took) = took else {
            return false;
        };
        self.saw(took, bytes.len());
        self.learn_ratio(bytes);
        true
    }

    fn saw(&mut self, took: usize, of: usize) {
        self.bytes += took as u64;
        self.surplus |= took < of;
        if took > 0 {
            self.first_byte();
            // A stream that goes on outweighs health probes that come late.
            if self.status < 400
                && let Some(assigned) = &self.assigned
            {
                assigned.backend.passive.alive();
            }
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        if self.down.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let http = &self.snapshot.settings.http;
        while self.down_at < self.down.len() {
            let unsent = &self.down[self.down_at..];
            self.down_at += ready!(poll_write(&mut self.flow.client, cx, unsent))?;
            self.flow.arm(http.body_idle);
        }
        self.down_at = 0;
        self.flow.worker.buffers.give(&mut self.down);
        self.flow.arm(http.response_idle);
        Poll::Ready(Ok(()))
    }

    /// One read from the backend, written on at once; what does not fit is queued.
    fn poll_read_on(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RelayEnd>> {
        let Some(link) = &mut self.link else {
            return Poll::Ready(Err(RelayEnd::Failed(Reason::Truncated)));
        };
        let worker = self.flow.worker.clone();
        let mut scratch = worker.buffers.scratch.borrow_mut();
        let n = match ready!(poll_read(&mut link.io, cx, &mut scratch)) {
            Ok(n) => n,
            Err(_) => return Poll::Ready(Err(RelayEnd::Failed(Reason::Truncated))),
        };
        if n == 0 {
            return Poll::Ready(Err(if self.outgoing.ends_with_connection() {
                self.first_byte();
                RelayEnd::Done
            } else {
                RelayEnd::Failed(Reason::Truncated)
            }));
        }
        let http = &self.snapshot.settings.http;
        self.flow.arm(http.response_idle);
        if self.decode {
            self.bad_framing = !self.follow(&scratch[..n]);
            return Poll::Ready(Ok(()));
        }
        let Ok(took) = self.outgoing.advance(&scratch[..n]) else {
            return Poll::Ready(Err(RelayEnd::Failed(Reason::Truncated)));
        };
        self.saw(took, n);
        self.learn_ratio(&scratch[..took]);
        let sent = match poll_write(&mut self.flow.client, cx, &scratch[..took]) {
            Poll::Ready(Ok(sent)) => sent,
            Poll::Ready(Err(_)) => {
                return Poll::Ready(Err(RelayEnd::Failed(Reason::ClientAbort)));
            }
            Poll::Pending => 0,
        };
        if sent < took {
            if self.down.capacity() == 0 {
                self.down = worker.buffers.take();
            }
            self.down.extend_from_slice(&scratch[sent..took]);
            self.flow.arm(http.body_idle);
        }
        Poll::Ready(Ok(()))
    }
}
