//! One GET on a connection of its own, for probes and scrapes.
//!
//! Never a pooled connection of the data path: a probe must show whether the backend accepts *now*, and a
//! slow page must not hold up a request.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST, USER_AGENT};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// How a GET failed.
#[derive(Debug)]
pub enum FetchError {
    /// No address is known, or none took the connection.
    Connect(io::Error),
    /// Not done within the deadline.
    Timeout,
    /// The exchange broke, or its body was over the limit.
    Broken(String),
}

impl std::fmt::Display for FetchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connect(error) => write!(f, "no connection: {error}"),
            Self::Timeout => f.write_str("no answer in time"),
            Self::Broken(what) => write!(f, "broken exchange: {what}"),
        }
    }
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// The body; empty if none was asked for.
    pub body: Bytes,
}

/// Gets `path` from the first of `addrs` that takes a connection, all within `deadline`.
///
/// With `body_limit` 0 the head is the answer and the body stays unread.
pub async fn get(
    addrs: &[SocketAddr],
    authority: &str,
    path: &str,
    body_limit: usize,
    deadline: Duration,
) -> Result<Answer, FetchError> {
    let exchange = async {
        let stream = connect(addrs, deadline).await?;
        exchange(stream, authority, path, body_limit).await
    };
    timeout(deadline, exchange)
        .await
        .unwrap_or(Err(FetchError::Timeout))
}

/// Tries the addresses in order; a black hole among them costs its share of the deadline, not all of it.
async fn connect(addrs: &[SocketAddr], deadline: Duration) -> Result<TcpStream, FetchError> {
    let share = deadline / u32::try_from(addrs.len().max(1)).unwrap_or(u32::MAX);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no address is known");
    let mut timed_out = false;
    for &addr in addrs {
        match timeout(share, TcpStream::connect(addr)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => timed_out = true,
        }
    }
    Err(if timed_out {
        FetchError::Timeout
    } else {
        FetchError::Connect(last)
    })
}

async fn exchange(
    stream: TcpStream,
    authority: &str,
    path: &str,
    body_limit: usize,
) -> Result<Answer, FetchError> {
    let broken = |error: &dyn std::fmt::Display| FetchError::Broken(error.to_string());
    let request = Request::get(path)
        .header(HOST, authority)
        .header(
            USER_AGENT,
            concat!("prefixlb/", env!("CARGO_PKG_VERSION"), " (check)"),
        )
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| broken(&error))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| broken(&error))?;
    // Dropping the set ends the connection, also where the deadline cuts this future off.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let response = sender
        .send_request(request)
        .await
        .map_err(|error| broken(&error))?;
    let status = response.status().as_u16();
    let body = if body_limit == 0 {
        Bytes::new()
    } else {
        Limited::new(response.into_body(), body_limit)
            .collect()
            .await
            .map_err(|error| broken(&error))?
            .to_bytes()
    };
    Ok(Answer { status, body })
}
