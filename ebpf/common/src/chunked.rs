//! The chunked coding, as a machine that never touches the data: RFC 9112 section 7.1, read strictly.
//!
//! A relay passes the coding on as it came, so all it must know is where a message ends and that nobody
//! downstream can see another end: hence digits only (no `0x`, sign, underscore or space), at most sixteen of
//! them, CRLF exactly, bounded extensions and trailers. Every one of these was a smuggling hole in a public
//! proxy. Data is skipped by arithmetic; only framing bytes are looked at, one by one, so that a read may end
//! anywhere. No allocation, no recursion, 24 bytes of state: a kernel program can hold it in a map.

use crate::framing::is_token_byte;

/// Most bytes of extensions that one chunk-size line may carry.
pub const EXTENSION_LIMIT: u16 = 256;
/// Most bytes of the trailer section.
pub const TRAILER_LIMIT: u16 = 8 << 10;
/// Most digits of a chunk size: what 64 bits hold.
pub const SIZE_DIGITS: u16 = 16;

/// Where in the coding the next byte falls.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// First digit of a chunk size.
    SizeStart,
    /// Later digits.
    Size,
    /// After a `;`.
    Extension,
    /// The LF of the chunk-size line.
    SizeLf,
    /// Inside chunk data; `left` bytes of it.
    Data,
    /// The CR after chunk data.
    DataCr,
    /// The LF after chunk data.
    DataLf,
    /// Start of a trailer line, or of the CRLF that ends the message.
    TrailerStart,
    /// Inside a trailer's name.
    TrailerName,
    /// Inside a trailer's value.
    TrailerValue,
    /// The LF of a trailer line.
    TrailerLf,
    /// The LF that ends the message.
    EndLf,
    /// The message ended.
    Done,
    /// It broke; `error` says how.
    Failed,
}

/// How a chunked body breaks the coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkError {
    /// The size is missing, has a byte that is no hex digit, or does not fit in 64 bits.
    BadSize,
    /// A CR without LF or an LF without CR where the coding wants CRLF.
    BareLf,
    /// A control character in a chunk extension.
    BadExtension,
    /// The extensions of one chunk are over [`EXTENSION_LIMIT`].
    ExtensionTooLong,
    /// Chunk data goes on beyond its declared size.
    DataOverrun,
    /// A trailer line that is no field.
    BadTrailer,
    /// The trailer section is over [`TRAILER_LIMIT`].
    TrailerTooLong,
}

impl ChunkError {
    /// What is wrong, for a client to read.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BadSize => "a chunk size is not 1 to 16 hex digits or does not fit in 64 bits",
            Self::BareLf => "a chunk line does not end in CRLF",
            Self::BadExtension => "a chunk extension holds a control character",
            Self::ExtensionTooLong => "the extensions of a chunk are over 256 bytes",
            Self::DataOverrun => "chunk data is longer than its size says",
            Self::BadTrailer => "a trailer is not a field line",
            Self::TrailerTooLong => "the trailers are over 8 KiB",
        }
    }
}

/// What [`Chunked::advance`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bytes that belong to this message; less than what was given only if it ended.
    pub consumed: usize,
    /// The message ended with the last of them.
    pub done: bool,
}

/// One run of like bytes, from [`Chunked::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Chunk data.
    Data(&'a [u8]),
    /// So many bytes of chunk framing.
    Framing(usize),
    /// Bytes of trailer lines, as sent, CRLFs included; a line may come in several pieces.
    Trailer(&'a [u8]),
    /// Nothing to look at: feed more.
    More,
    /// The message has ended; what is given is not part of it.
    End,
}

impl Piece<'_> {
    /// Bytes it took.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Data(bytes) | Self::Trailer(bytes) => bytes.len(),
            Self::Framing(n) => *n,
            Self::More | Self::End => 0,
        }
    }

    /// Whether it took none: feed more, or stop.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The machine; one per message.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunked {
    /// The size being read, then the data bytes of the current chunk that have not come yet.
    left: u64,
    /// Data bytes of all chunks whose size line has been read.
    declared: u64,
    /// Digits, extension bytes or trailer bytes so far, by state.
    run: u16,
    state: State,
    error: Option<ChunkError>,
    reserved: [u8; 4],
}

const _: () = assert!(core::mem::size_of::<Chunked>() == 24);

impl Default for Chunked {
    fn default() -> Self {
        Self::new()
    }
}

impl Chunked {
    /// At the start of a body.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            left: 0,
            declared: 0,
            run: 0,
            state: State::SizeStart,
            error: None,
            reserved: [0; 4],
        }
    }

    /// Whether the message has ended.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Length of the body as far as its size lines have been read: what a body limit is held against, before
    /// the data itself comes.
    #[must_use]
    pub const fn declared(&self) -> u64 {
        self.declared
    }

    /// Data bytes of the current chunk that are still to come.
    #[must_use]
    pub const fn data_left(&self) -> u64 {
        if matches!(self.state, State::Data) {
            self.left
        } else {
            0
        }
    }

    /// Data bytes seen so far.
    #[must_use]
    pub const fn received(&self) -> u64 {
        self.declared - self.data_left()
    }

    /// Follows the coding over `bytes`, as far as the message goes.
    pub fn advance(&mut self, bytes: &[u8]) -> Result<Step, ChunkError> {
        let mut at = 0;
        while at < bytes.len() && !self.is_done() {
            if self.state == State::Data {
                at += self.skip_data(bytes.len() - at);
            } else {
                self.framing_byte(bytes[at])?;
                at += 1;
            }
        }
        Ok(Step {
            consumed: at,
            done: self.is_done(),
        })
    }

    /// The next run of like bytes at the start of `bytes`: [`Piece::len`] says how many to drop before the
    /// next call.
    pub fn next<'a>(&mut self, bytes: &'a [u8]) -> Result<Piece<'a>, ChunkError> {
        let Some(&first) = bytes.first() else {
            return Ok(if self.is_done() {
                Piece::End
            } else {
                Piece::More
            });
        };
        match self.state {
            State::Done => Ok(Piece::End),
            State::Data => Ok(Piece::Data(&bytes[..self.skip_data(bytes.len())])),
            _ if self.in_trailer(first) => {
                let mut at = 0;
                while at < bytes.len() && self.in_trailer(bytes[at]) {
                    self.framing_byte(bytes[at])?;
                    at += 1;
                }
                Ok(Piece::Trailer(&bytes[..at]))
            }
            _ => {
                let mut at = 0;
                while at < bytes.len()
                    && !matches!(self.state, State::Data | State::Done)
                    && !self.in_trailer(bytes[at])
                {
                    self.framing_byte(bytes[at])?;
                    at += 1;
                }
                Ok(Piece::Framing(at))
            }
        }
    }

    /// Passes over chunk data, at most `available` bytes of it.
    fn skip_data(&mut self, available: usize) -> usize {
        let n = self.left.min(available as u64);
        self.left -= n;
        if self.left == 0 {
            self.state = State::DataCr;
        }
        n as usize // no more than `available`
    }

    /// Whether `byte` belongs to a trailer line rather than to the message's end.
    const fn in_trailer(&self, byte: u8) -> bool {
        match self.state {
            State::TrailerName | State::TrailerValue | State::TrailerLf => true,
            State::TrailerStart => byte != b'\r',
            _ => false,
        }
    }

    /// One byte that is not data.
    fn framing_byte(&mut self, byte: u8) -> Result<(), ChunkError> {
        let next = match self.state {
            State::SizeStart | State::Size => self.size_byte(byte),
            State::Extension => self.extension_byte(byte),
            State::SizeLf => self.size_end(byte),
            State::DataCr if byte == b'\r' => Ok(State::DataLf),
            State::DataCr if byte == b'\n' => Err(ChunkError::BareLf),
            State::DataCr => Err(ChunkError::DataOverrun),
            State::DataLf if byte == b'\n' => Ok(State::SizeStart),
            State::EndLf if byte == b'\n' => Ok(State::Done),
            State::DataLf | State::EndLf => Err(ChunkError::BareLf),
            State::TrailerStart if byte == b'\r' => Ok(State::EndLf),
            State::TrailerStart | State::TrailerName | State::TrailerValue | State::TrailerLf => {
                self.trailer_byte(byte)
            }
            State::Failed => Err(self.error.unwrap_or(ChunkError::BadSize)),
            // Neither is reached: callers take data and the end themselves.
            State::Data | State::Done => Ok(self.state),
        };
        match next {
            Ok(state) => {
                self.state = state;
                Ok(())
            }
            Err(error) => {
                self.state = State::Failed;
                self.error = Some(error);
                Err(error)
            }
        }
    }

    fn size_byte(&mut self, byte: u8) -> Result<State, ChunkError> {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            b'\r' | b';' if self.state == State::Size => {
                self.run = 0;
                return Ok(if byte == b'\r' {
                    State::SizeLf
                } else {
                    State::Extension
                });
            }
            b'\n' => return Err(ChunkError::BareLf),
            _ => return Err(ChunkError::BadSize),
        };
        if self.state == State::SizeStart {
            self.left = 0;
            self.run = 0;
        }
        self.run += 1;
        if self.run > SIZE_DIGITS {
            return Err(ChunkError::BadSize);
        }
        self.left = self.left << 4 | digit as u64;
        Ok(State::Size)
    }

    fn extension_byte(&mut self, byte: u8) -> Result<State, ChunkError> {
        match byte {
            b'\r' => Ok(State::SizeLf),
            b'\n' => Err(ChunkError::BareLf),
            0..=8 | 11..=31 | 127 => Err(ChunkError::BadExtension),
            _ if self.run == EXTENSION_LIMIT => Err(ChunkError::ExtensionTooLong),
            _ => {
                self.run += 1;
                Ok(State::Extension)
            }
        }
    }

    fn size_end(&mut self, byte: u8) -> Result<State, ChunkError> {
        if byte != b'\n' {
            return Err(ChunkError::BareLf);
        }
        self.run = 0;
        if self.left == 0 {
            return Ok(State::TrailerStart);
        }
        self.declared = self
            .declared
            .checked_add(self.left)
            .ok_or(ChunkError::BadSize)?;
        Ok(State::Data)
    }

    fn trailer_byte(&mut self, byte: u8) -> Result<State, ChunkError> {
        if self.run == TRAILER_LIMIT {
            return Err(ChunkError::TrailerTooLong);
        }
        self.run += 1;
        match (self.state, byte) {
            (State::TrailerLf, b'\n') => Ok(State::TrailerStart),
            (State::TrailerLf, _) | (_, b'\n') => Err(ChunkError::BareLf),
            (State::TrailerValue, b'\r') => Ok(State::TrailerLf),
            (State::TrailerValue, 0..=8 | 11..=31 | 127) => Err(ChunkError::BadTrailer),
            (State::TrailerValue, _) => Ok(State::TrailerValue),
            (State::TrailerName, b':') => Ok(State::TrailerValue),
            (_, byte) if is_token_byte(byte) => Ok(State::TrailerName),
            _ => Err(ChunkError::BadTrailer),
        }
    }
}
