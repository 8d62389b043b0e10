//! The request on its way to the backend: head and window first, then the rest as it comes.

use std::task::{Context, Poll, ready};

use super::exchange::{Exchange, Fail};
use super::io::{poll_read, poll_write, poll_write_two};
use super::reason::Reason;

/// Where a request's upload is.
#[derive(Debug, Default)]
pub struct Upload {
    /// The head for the backend.
    pub head: Vec<u8>,
    head_at: usize,
    /// Within `inbuf`.
    prefix_at: usize,
    /// Body bytes that were read and did not fit, from `left_at` on.
    pub left: Vec<u8>,
    left_at: usize,
    /// Bytes beyond the prefix were sent: they are gone, so the request cannot be sent again.
    pub streamed: bool,
    /// Everything was sent.
    pub finished: bool,
    /// The backend does not read on, with so many bytes left of what we hold.
    pub held_up: Option<usize>,
    /// The backend takes no more; its answer may still be on the way.
    pub broken: bool,
}

/// How a step of the upload failed.
#[derive(Debug)]
pub enum UploadError {
    /// The backend does not take it.
    Backend,
    /// The client broke off, or its body is not to be forwarded.
    Client(Fail),
}

impl Exchange<'_> {
    /// Writes the head for the assigned backend; whatever was sent to another is sent again.
    pub(super) fn prepare_upload(&mut self) {
        let mut head = std::mem::take(&mut self.upload.head);
        if head.capacity() == 0 {
            head = self.flow.worker.buffers.take();
        }
        head.clear();
        if let Some(assigned) = &self.assigned {
            let received = &self.flow.inbuf[..self.head.len];
            self.head
                .write(received, &assigned.backend.authority, &mut head);
        }
        self.upload = Upload {
            head,
            prefix_at: self.head.len,
            ..Upload::default()
        };
        self.flow.arm(self.snapshot.settings.http.body_idle);
    }

    /// Sends on what can be sent now; ready when all was.
    pub(super) fn poll_upload(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UploadError>> {
        if self.upload.finished || self.upload.broken {
            return Poll::Ready(Ok(()));
        }
        loop {
            match self.poll_flush_upload(cx) {
                Poll::Pending => {
                    self.hold_up();
                    return Poll::Pending;
                }
                Poll::Ready(flushed) => flushed?,
            }
            if self.upload.held_up.take().is_some() {
                self.flow.arm(self.snapshot.settings.http.body_idle);
            }
            if self.incoming.is_done() {
                self.upload.finished = true;
                self.flow.arm(self.snapshot.settings.http.response_deadline);
                if let Some(assigned) = &self.assigned {
                    let sent = (self.prefix_end - self.head.len) as u64;
                    assigned.backend.metrics.request_bytes.add(sent);
                }
                return Poll::Ready(Ok(()));
            }
            ready!(self.poll_pump(cx))?;
            self.flow.arm(self.snapshot.settings.http.body_idle);
        }
    }

    /// The backend does not read, so the client is not read from either: its leaving must be seen otherwise.
    fn hold_up(&mut self) {
        let up = &self.upload;
        let head = up.head.len() - up.head_at;
        let unsent = head + (self.prefix_end - up.prefix_at) + (up.left.len() - up.left_at);
        if up.held_up != Some(unsent) {
            self.upload.held_up = Some(unsent);
            self.flow.arm_unread(self.snapshot.settings.http.body_idle);
        }
    }

    /// Head, window and leftovers.
    fn poll_flush_upload(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UploadError>> {
        let Some(link) = &mut self.link else {
            return Poll::Ready(Err(UploadError::Backend));
        };
        let up = &mut self.upload;
        loop {
            let head = &up.head[up.head_at..];
            let prefix = &self.flow.inbuf[up.prefix_at..self.prefix_end];
            if head.is_empty() && prefix.is_empty() {
                break;
            }
            let n = ready!(poll_write_two(&mut link.io, cx, head, prefix));
            let n = n.map_err(|_| UploadError::Backend)?;
            let of_head = n.min(head.len());
            up.head_at += of_head;
            up.prefix_at += n - of_head;
        }
        while up.left_at < up.left.len() {
            let n = ready!(poll_write(&mut link.io, cx, &up.left[up.left_at..]));
            up.left_at += n.map_err(|_| UploadError::Backend)?;
        }
        up.left_at = 0;
        self.flow.worker.buffers.give(&mut up.left);
        Poll::Ready(Ok(()))
    }

    /// One read from the client, written on at once; what does not fit is kept.
    fn poll_pump(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UploadError>> {
        let worker = self.flow.worker.clone();
        let mut scratch = worker.buffers.scratch.borrow_mut();
        let room = self.incoming.read_limit().min(scratch.len());
        let read = ready!(poll_read(&mut self.flow.client, cx, &mut scratch[..room]));
        let n = match read {
            Ok(n) if n > 0 => n,
            _ => return Poll::Ready(Err(UploadError::Client(Fail::GONE))),
        };
        let took = self
            .incoming
            .advance(&scratch[..n])
            .map_err(|error| UploadError::Client(Fail::new(Reason::BadRequest, error.as_str())))?;
        self.check_size().map_err(UploadError::Client)?;
        self.upload.streamed = true;
        if took < n {
            self.flow.inbuf.extend_from_slice(&scratch[took..n]);
        }
        let Some(link) = &mut self.link else {
            return Poll::Ready(Err(UploadError::Backend));
        };
        let sent = match poll_write(&mut link.io, cx, &scratch[..took]) {
            Poll::Ready(sent) => sent.map_err(|_| UploadError::Backend)?,
            Poll::Pending => 0,
        };
        if sent < took {
            if self.upload.left.capacity() == 0 {
                self.upload.left = worker.buffers.take();
            }
            self.upload.left.extend_from_slice(&scratch[sent..took]);
        }
        if let Some(assigned) = &self.assigned {
            assigned.backend.metrics.request_bytes.add(took as u64);
        }
        Poll::Ready(Ok(()))
    }
}
