//! Waiting for the backend's head while the request goes out: interim answers, early answers, silence.

use std::io;
use std::task::{Context, Poll, ready};

use super::exchange::{Exchange, Fail};
use super::io::{poll_append, poll_write};
use super::reason::Reason;
use super::response::{self, Asked, ResponseHead};
use super::scan::{Scan, Scanner};
use super::upload::UploadError;
use crate::state::Phase;

/// How the wait ended.
#[derive(Debug)]
pub enum HeadEnd {
    /// A final head; the client's version of it is in `down`, what followed it in `resp`.
    Head(ResponseHead),
    /// The connection ended before a byte of an answer.
    Dead,
    /// The answer breaks HTTP.
    Bad(&'static str),
    /// Something else.
    Failed(Fail),
}

impl Exchange<'_> {
    /// Sends, and reads the answer's head.
    pub(super) fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<HeadEnd> {
        match self.poll_upload(cx) {
            Poll::Ready(Err(UploadError::Client(fail))) => {
                return Poll::Ready(HeadEnd::Failed(fail));
            }
            // A backend that refuses early closes while we still send; its answer is worth waiting for.
            Poll::Ready(Err(UploadError::Backend)) => self.upload.broken = true,
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        loop {
            match self.poll_fill_resp(cx) {
                Poll::Ready(Ok(n)) if n > 0 => {}
                Poll::Ready(_) => return Poll::Ready(self.dead()),
                Poll::Pending => break,
            }
            if let Some(end) = self.scan_heads(cx) {
                return Poll::Ready(end);
            }
        }
        if self.upload.finished && self.flow.poll_gone(cx).is_ready() {
            return Poll::Ready(HeadEnd::Failed(Fail::GONE));
        }
        let held_up = self.upload.held_up.is_some();
        if self.flow.interrupted() && !(held_up && self.flow.waits_on()) {
            return Poll::Ready(HeadEnd::Failed(self.out_of_time()));
        }
        Poll::Pending
    }

    fn dead(&self) -> HeadEnd {
        if self.resp.is_empty() {
            HeadEnd::Dead
        } else {
            HeadEnd::Bad("the backend closed the connection within its head")
        }
    }

    fn out_of_time(&self) -> Fail {
        if self.flow.half_closed() {
            Fail::GONE
        } else if self.flow.worker.phase() == Phase::Aborting {
            Fail::new(Reason::ShuttingDown, "prefixlb is shutting down")
        } else if self.upload.finished {
            Fail::new(
                Reason::ResponseTimeout,
                "the backend did not answer in time",
            )
        } else if self.upload.held_up.is_some() {
            Fail::new(
                Reason::ResponseTimeout,
                "the backend does not read the request",
            )
        } else {
            Fail::new(Reason::RequestTimeout, "the body did not come in time")
        }
    }

    /// A buffer is held only once the backend has said something: a long prefill costs none.
    fn poll_fill_resp(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Some(link) = &mut self.link else {
            return Poll::Ready(Ok(0));
        };
        if self.resp.capacity() == 0 {
            ready!(link.io.poll_read_ready(cx))?;
            self.resp = self.flow.worker.buffers.take();
        } else if self.resp.capacity() - self.resp.len() < 1024 {
            self.resp.reserve(self.resp.capacity());
        }
        let read = poll_append(&mut link.io, cx, &mut self.resp);
        if self.resp.is_empty() {
            self.flow.worker.buffers.give(&mut self.resp);
        }
        read
    }

    /// Reads the heads that are complete: interim ones are passed on, a final one ends the wait.
    fn scan_heads(&mut self, cx: &mut Context<'_>) -> Option<HeadEnd> {
        loop {
            let limit = self.snapshot.settings.http.head_bytes;
            let end = match self.resp_scan.scan(&self.resp) {
                Scan::End(end) if end <= limit => end,
                Scan::BareLf => {
                    return Some(HeadEnd::Bad(
                        "a line of the backend's head ends in a bare LF",
                    ));
                }
                Scan::More if self.resp.len() < limit => return None,
                Scan::End(_) | Scan::More => {
                    return Some(HeadEnd::Bad("the backend's head is over the limit"));
                }
            };
            let asked = Asked {
                head: self.head.is_head,
                http10: self.head.http10,
            };
            if self.down.capacity() == 0 {
                self.down = self.flow.worker.buffers.take();
            }
            let start = self.down.len();
            let head = match response::rewrite(&self.resp[..end], asked, &mut self.down) {
                Ok(head) => head,
                Err(message) => return Some(HeadEnd::Bad(message)),
            };
            self.resp.drain(..end);
            self.resp_scan = Scanner::default();
            match head.status {
                200.. => return Some(HeadEnd::Head(head)),
                101 => return Some(HeadEnd::Bad("the backend switched protocols unasked")),
                // We have said so ourselves, or the client did not ask; HTTP/1.0 knows no interim answers.
                100 => self.down.truncate(start),
                _ if self.head.http10 => self.down.truncate(start),
                _ => self.pass_interim(cx),
            }
        }
    }

    fn pass_interim(&mut self, cx: &mut Context<'_>) {
        self.interim = true;
        self.down.extend_from_slice(b"\r\n");
        // What does not fit goes out before the final head; an error shows when that is written.
        let unsent = &self.down[self.down_at..];
        if let Poll::Ready(Ok(n)) = poll_write(&mut self.flow.client, cx, unsent) {
            self.down_at += n;
        }
    }
}
