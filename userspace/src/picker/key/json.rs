//! A walk over JSON bytes: strings are handed over decoded and in pieces, nothing is kept.
//!
//! Not a validator: it is strict where two readings would differ (structure, escapes, UTF-8 of what is handed
//! over) and passes over the rest as fast as it can.

use super::NoKey;

/// Deepest nesting that is followed. Real requests stay below 20; engines' own parsers stop at about 1,000.
pub const DEPTH: u32 = 64;

/// Why the walk stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The bytes end here.
    Cut,
    /// This is no JSON, or deeper than we go.
    Bad(NoKey),
}

/// The result of a step.
pub type Step<T> = Result<T, Stop>;

const MALFORMED: Stop = Stop::Bad(NoKey::Malformed);

/// A place in the bytes.
#[derive(Debug)]
pub struct Walk<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Walk<'b> {
    /// At the start of `bytes`.
    pub fn new(bytes: &'b [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes walked over.
    pub fn position(&self) -> usize {
        self.at
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.bytes.get(self.at) {
            self.at += 1;
        }
    }

    /// The next byte that is not white space, not yet taken.
    pub fn peek(&mut self) -> Step<u8> {
        self.skip_space();
        self.bytes.get(self.at).copied().ok_or(Stop::Cut)
    }

    /// Takes `byte`, which must be next.
    pub fn expect(&mut self, byte: u8) -> Step<()> {
        if self.peek()? != byte {
            return Err(MALFORMED);
        }
        self.at += 1;
        Ok(())
    }

    /// Takes `byte` if it is next.
    pub fn accept(&mut self, byte: u8) -> Step<bool> {
        let is_next = self.peek()? == byte;
        self.at += usize::from(is_next);
        Ok(is_next)
    }

    /// Whether only white space is left.
    pub fn at_end(&mut self) -> bool {
        self.skip_space();
        self.at == self.bytes.len()
    }

    /// Walks an object: `each` is called at each member's value, with its name, and must take the value.
    pub fn object(
        &mut self,
        depth: u32,
        mut each: impl FnMut(&mut Self, &[u8], u32) -> Step<()>,
    ) -> Step<()> {
        let depth = deeper(depth)?;
        self.expect(b'{')?;
        if self.accept(b'}')? {
            return Ok(());
        }
        loop {
            let mut name = Name::default();
            self.string(|piece| name.push(piece))?;
            self.expect(b':')?;
            each(self, name.as_bytes(), depth)?;
            if !self.accept(b',')? {
                return self.expect(b'}');
            }
        }
    }

    /// Walks an array: `each` is called at each element and must take it.
    pub fn array(
        &mut self,
        depth: u32,
        mut each: impl FnMut(&mut Self, u32) -> Step<()>,
    ) -> Step<()> {
        let depth = deeper(depth)?;
        self.expect(b'[')?;
        if self.accept(b']')? {
            return Ok(());
        }
        loop {
            each(self, depth)?;
            if !self.accept(b',')? {
                return self.expect(b']');
            }
        }
    }

    /// Takes a string and hands it over, decoded, in pieces. What was cut off is handed over too.
    pub fn string(&mut self, mut piece: impl FnMut(&[u8])) -> Step<()> {
        self.expect(b'"')?;
        loop {
            let rest = &self.bytes[self.at..];
            let run = memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
            if run > 0 {
                let cut = run == rest.len();
                piece(valid(&rest[..run], cut)?);
                self.at += run;
            }
            match rest.get(run) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(_) => {
                    let mut utf8 = [0; 4];
                    piece(self.escape(&mut utf8)?);
                }
                None => return Err(Stop::Cut),
            }
        }
    }

    fn escape<'u>(&mut self, utf8: &'u mut [u8; 4]) -> Step<&'u [u8]> {
        let letter = *self.bytes.get(self.at + 1).ok_or(Stop::Cut)?;
        self.at += 2;
        let byte = match letter {
            b'n' => b'\n',
            b'"' | b'\\' | b'/' => letter,
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 8,
            b'f' => 12,
            b'u' => return self.unicode(utf8),
            _ => return Err(MALFORMED),
        };
        utf8[0] = byte;
        Ok(&utf8[..1])
    }

    fn unicode<'u>(&mut self, utf8: &'u mut [u8; 4]) -> Step<&'u [u8]> {
        let first = self.hex4()?;
        let code = match first {
            0xd800..0xdc00 => {
                if self.bytes.len() < self.at + 2 {
                    return Err(Stop::Cut);
                }
                if self.bytes[self.at..self.at + 2] != *b"\\u" {
                    return Err(MALFORMED);
                }
                self.at += 2;
                let second = self.hex4()?;
                if !(0xdc00..0xe000).contains(&second) {
                    return Err(MALFORMED);
                }
                0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
            }
            _ => first,
        };
        let decoded = char::from_u32(code).ok_or(MALFORMED)?;
        Ok(decoded.encode_utf8(utf8).as_bytes())
    }

    fn hex4(&mut self) -> Step<u32> {
        let digits = self.bytes.get(self.at..self.at + 4).ok_or(Stop::Cut)?;
        self.at += 4;
        digits.iter().try_fold(0, |code, byte| {
            let digit = char::from(*byte).to_digit(16).ok_or(MALFORMED)?;
            Ok(code << 4 | digit)
        })
    }

    /// Takes a number or literal; its bytes. One that is followed by nothing may go on, and counts as cut.
    pub fn scalar(&mut self) -> Step<&'b [u8]> {
        self.skip_space();
        let rest = &self.bytes[self.at..];
        let length = rest
            .iter()
            .position(|b| !(b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.')));
        let length = length.ok_or(Stop::Cut)?;
        self.at += length;
        let text = &rest[..length];
        match text.first() {
            Some(b'-' | b'0'..=b'9') => Ok(text),
            _ if matches!(text, b"true" | b"false" | b"null") => Ok(text),
            _ => Err(MALFORMED),
        }
    }

    /// Passes over any value.
    pub fn skip(&mut self, depth: u32) -> Step<()> {
        match self.peek()? {
            b'"' => self.skip_string(),
            b'{' => self.object(depth, |walk, _, depth| walk.skip(depth)),
            b'[' => self.array(depth, Self::skip),
            _ => self.scalar().map(|_| ()),
        }
    }

    fn skip_string(&mut self) -> Step<()> {
        self.at += 1;
        loop {
            let rest = &self.bytes[self.at..];
            let run = memchr::memchr2(b'"', b'\\', rest).ok_or(Stop::Cut)?;
            if rest[run] == b'"' {
                self.at += run + 1;
                return Ok(());
            }
            self.at += run + 2;
            if self.at > self.bytes.len() {
                return Err(Stop::Cut);
            }
        }
    }
}

fn deeper(depth: u32) -> Step<u32> {
    if depth >= DEPTH {
        return Err(Stop::Bad(NoKey::TooDeep));
    }
    Ok(depth + 1)
}

/// The run as far as it is valid UTF-8: at a cut, the last character may be incomplete.
#[inline]
fn valid(run: &[u8], cut: bool) -> Step<&[u8]> {
    if run.is_ascii() {
        return Ok(run);
    }
    match std::str::from_utf8(run) {
        Ok(_) => Ok(run),
        Err(error) if cut && error.error_len().is_none() => Ok(&run[..error.valid_up_to()]),
        Err(_) => Err(MALFORMED),
    }
}

/// A member's name, as far as it can be one that we know.
#[derive(Debug, Default)]
struct Name {
    bytes: [u8; 32],
    length: usize,
}

impl Name {
    fn push(&mut self, piece: &[u8]) {
        for byte in piece {
            // A name that is too long keeps its first bytes and a mark of its length: no known name has that.
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = *byte;
                self.length += 1;
            } else {
                self.bytes[31] ^= byte.rotate_left(1) | 0x80;
            }
        }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
