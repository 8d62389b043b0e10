//! Why a request did not get a backend's full answer: one short label each, for metrics, logs and clients.

/// A failure, by its one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Reason {
    /// 400: the request's framing or syntax is not what RFC 9112 allows.
    BadRequest,
    /// 408: head or body did not come in time.
    RequestTimeout,
    /// 413: the body is over the limit.
    BodyTooLarge,
    /// 414: the request target is over the limit.
    TargetTooLong,
    /// 431: the head is over the limit.
    HeadTooLarge,
    /// 501: a transfer coding or method we do not do.
    NotImplemented,
    /// 505: not HTTP/1.
    VersionNotSupported,
    /// 404: no pool serves this model and path.
    NoPool,
    /// 502: no connection to the backend.
    ConnectFailed,
    /// 502: the backend's answer breaks HTTP.
    BadResponse,
    /// 502: the backend closed before its answer.
    BackendClosed,
    /// 503: no backend is alive.
    NoBackend,
    /// 503: prefixlb is shutting down.
    ShuttingDown,
    /// 429: every backend is at its cap and the queue is full.
    QueueFull,
    /// 429: every backend stayed at its cap for the queue's deadline.
    QueueTimeout,
    /// 504: no response head in time.
    ResponseTimeout,
    /// The backend broke off its answer: the client's connection is aborted.
    Truncated,
    /// The backend was silent inside its answer for too long: aborted.
    ResponseIdle,
    /// The client left.
    ClientAbort,
    /// The client did not read for too long.
    ClientStalled,
}

impl Reason {
    /// Every reason, in index order.
    pub const ALL: [Self; 20] = [
        Self::BadRequest,
        Self::RequestTimeout,
        Self::BodyTooLarge,
        Self::TargetTooLong,
        Self::HeadTooLarge,
        Self::NotImplemented,
        Self::VersionNotSupported,
        Self::NoPool,
        Self::ConnectFailed,
        Self::BadResponse,
        Self::BackendClosed,
        Self::NoBackend,
        Self::ShuttingDown,
        Self::QueueFull,
        Self::QueueTimeout,
        Self::ResponseTimeout,
        Self::Truncated,
        Self::ResponseIdle,
        Self::ClientAbort,
        Self::ClientStalled,
    ];
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// The label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BadRequest => "bad_request",
            Self::RequestTimeout => "request_timeout",
            Self::BodyTooLarge => "body_too_large",
            Self::TargetTooLong => "target_too_long",
            Self::HeadTooLarge => "head_too_large",
            Self::NotImplemented => "not_implemented",
            Self::VersionNotSupported => "version_not_supported",
            Self::NoPool => "no_pool",
            Self::ConnectFailed => "connect_failed",
            Self::BadResponse => "bad_response",
            Self::BackendClosed => "backend_closed",
            Self::NoBackend => "no_backend",
            Self::ShuttingDown => "shutting_down",
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
            Self::ResponseTimeout => "response_timeout",
            Self::Truncated => "upstream_truncated",
            Self::ResponseIdle => "response_idle",
            Self::ClientAbort => "client_abort",
            Self::ClientStalled => "client_stalled",
        }
    }

    /// The status the client gets; `None` where nothing can be said any more.
    #[must_use]
    pub const fn status(self) -> Option<u16> {
        Some(match self {
            Self::BadRequest => 400,
            Self::NoPool => 404,
            Self::RequestTimeout => 408,
            Self::BodyTooLarge => 413,
            Self::TargetTooLong => 414,
            Self::QueueFull | Self::QueueTimeout => 429,
            Self::HeadTooLarge => 431,
            Self::NotImplemented => 501,
            Self::ConnectFailed | Self::BadResponse | Self::BackendClosed => 502,
            Self::NoBackend | Self::ShuttingDown => 503,
            Self::ResponseTimeout => 504,
            Self::VersionNotSupported => 505,
            Self::Truncated | Self::ResponseIdle | Self::ClientAbort | Self::ClientStalled => {
                return None;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_and_label_are_one() {
        for (i, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, i);
        }
    }
}
