//! Following a body over reads: which bytes belong to this message, and has it ended.

use prefixlb_common::chunked::{ChunkError, Chunked, Piece};
use prefixlb_common::framing::Body;

#[derive(Debug)]
enum Kind {
    Length(u64),
    Chunked(Chunked),
    UntilClose,
}

/// The place within one body.
#[derive(Debug)]
pub struct BodyReader {
    kind: Kind,
}

impl BodyReader {
    /// At the start of a body that is framed so.
    pub fn new(body: Body) -> Self {
        let kind = match body {
            Body::None => Kind::Length(0),
            Body::Length(length) => Kind::Length(length),
            Body::Chunked => Kind::Chunked(Chunked::new()),
            Body::UntilClose => Kind::UntilClose,
        };
        Self { kind }
    }

    /// Whether the body has ended.
    pub fn is_done(&self) -> bool {
        match &self.kind {
            Kind::Length(left) => *left == 0,
            Kind::Chunked(machine) => machine.is_done(),
            Kind::UntilClose => false,
        }
    }

    /// The connection ended: whether the body ends well by that.
    pub fn ends_with_connection(&self) -> bool {
        matches!(self.kind, Kind::UntilClose)
    }

    /// Follows the body over `bytes`; how many of them belong to it.
    pub fn advance(&mut self, bytes: &[u8]) -> Result<usize, ChunkError> {
        match &mut self.kind {
            Kind::Length(left) => {
                let n = (*left).min(bytes.len() as u64);
                *left -= n;
                Ok(n as usize)
            }
            Kind::Chunked(machine) => Ok(machine.advance(bytes)?.consumed),
            Kind::UntilClose => Ok(bytes.len()),
        }
    }

    /// As [`Self::advance`], and hands over the data in `bytes` without its chunk framing.
    pub fn each_piece(
        &mut self,
        bytes: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> Result<usize, ChunkError> {
        let Kind::Chunked(machine) = &mut self.kind else {
            let n = self.advance(bytes)?;
            each(&bytes[..n]);
            return Ok(n);
        };
        let mut at = 0;
        loop {
            let piece = machine.next(&bytes[at..])?;
            at += piece.len();
            match piece {
                Piece::Data(data) => each(data),
                Piece::Framing(_) | Piece::Trailer(_) => {}
                Piece::More | Piece::End => return Ok(at),
            }
        }
    }

    /// Bytes that may be read without reading beyond this body, as far as that is known.
    pub fn read_limit(&self) -> usize {
        match &self.kind {
            Kind::Length(left) => usize::try_from(*left).unwrap_or(usize::MAX),
            Kind::Chunked(_) | Kind::UntilClose => usize::MAX,
        }
    }

    /// Length of the body as far as it has been declared.
    pub fn declared(&self) -> u64 {
        match &self.kind {
            Kind::Chunked(machine) => machine.declared(),
            Kind::Length(_) | Kind::UntilClose => 0,
        }
    }
}
