//! The few socket operations that the data path is made of, as polls.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Appends to `buffer` what can be read now, at most its spare capacity; 0 is the end of the stream.
///
/// The caller sees to spare capacity; a full buffer would be grown.
pub fn poll_append(
    io: &mut TcpStream,
    cx: &mut Context<'_>,
    buffer: &mut Vec<u8>,
) -> Poll<io::Result<usize>> {
    pin!(io.read_buf(buffer)).poll(cx)
}

/// Reads into `room`; 0 is the end of the stream.
pub fn poll_read(
    io: &mut TcpStream,
    cx: &mut Context<'_>,
    room: &mut [u8],
) -> Poll<io::Result<usize>> {
    let mut buf = ReadBuf::new(room);
    Pin::new(io)
        .poll_read(cx, &mut buf)
        .map_ok(|()| buf.filled().len())
}

/// Writes what fits of `bytes`.
pub fn poll_write(
    io: &mut TcpStream,
    cx: &mut Context<'_>,
    bytes: &[u8],
) -> Poll<io::Result<usize>> {
    Pin::new(io).poll_write(cx, bytes)
}

/// Writes what fits of `head` and `body`, in one system call.
pub fn poll_write_two(
    io: &mut TcpStream,
    cx: &mut Context<'_>,
    head: &[u8],
    body: &[u8],
) -> Poll<io::Result<usize>> {
    if body.is_empty() {
        return poll_write(io, cx, head);
    }
    if head.is_empty() {
        return poll_write(io, cx, body);
    }
    let parts = [io::IoSlice::new(head), io::IoSlice::new(body)];
    Pin::new(io).poll_write_vectored(cx, &parts)
}

/// Closing will send RST, so that the peer cannot take what it got for a whole answer.
pub fn reset_on_close(io: &TcpStream) {
    // Failing only means that the peer sees FIN; there is nobody to tell.
    let _ = socket2::SockRef::from(io).set_linger(Some(std::time::Duration::ZERO));
}
