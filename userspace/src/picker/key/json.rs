//! A walk over JSON bytes: strings are handed over in pieces, nothing is kept.
//!
//! Text is handed over in one canonical spelling: what must be escaped stays as its short escape (`\n`, `\"`),
//! everything else is plain. Every serializer in wide use writes the short escapes alike; they differ in `\/`
//! and `\u…`. So where a document has neither, which is told in one pass over it, strings are canonical as they
//! are: their end is found from quote to quote, and they are hashed in place. Only the others are taken apart.
//!
//! Not a validator: it is strict about structure, and passes over the rest as fast as it can.

use std::sync::LazyLock;

use memchr::memmem::Finder;

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
    /// No `\u` and no `\/` is in the bytes.
    canonical: bool,
}

impl<'b> Walk<'b> {
    /// At the start of `bytes`. Invalid UTF-8 is refused for the whole of them, but for a last character
    /// that is cut off.
    pub fn new(bytes: &'b [u8]) -> Step<Self> {
        let bytes = valid(bytes)?;
        let canonical = !has_other_escapes(bytes);
        Ok(Self {
            bytes,
            at: 0,
            canonical,
        })
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

    /// Takes a string and hands it over in its canonical spelling, in pieces; what was cut off too.
    pub fn string(&mut self, mut piece: impl FnMut(&[u8])) -> Step<()> {
        self.expect(b'"')?;
        if !self.canonical {
            return self.respelt_string(piece);
        }
        let rest = &self.bytes[self.at..];
        let end = string_end(rest);
        let text = &rest[..end.unwrap_or(rest.len())];
        if !text.is_empty() {
            piece(text);
        }
        self.at += text.len() + 1;
        end.map(|_| ()).ok_or(Stop::Cut)
    }

    /// As [`Self::string`], where some escapes must be written otherwise.
    fn respelt_string(&mut self, mut piece: impl FnMut(&[u8])) -> Step<()> {
        loop {
            let rest = &self.bytes[self.at..];
            let run = memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
            if run > 0 {
                piece(&rest[..run]);
                self.at += run;
            }
            match rest.get(run) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(_) => self.escape(&mut piece)?,
                None => return Err(Stop::Cut),
            }
        }
    }

    fn escape(&mut self, piece: &mut impl FnMut(&[u8])) -> Step<()> {
        let letter = *self.bytes.get(self.at + 1).ok_or(Stop::Cut)?;
        self.at += 2;
        match letter {
            b'"' | b'\\' | b'n' | b't' | b'r' | b'b' | b'f' => piece(&[b'\\', letter]),
            b'/' => piece(b"/"),
            b'u' => spell(self.unicode()?, piece),
            _ => return Err(MALFORMED),
        }
        Ok(())
    }

    fn unicode(&mut self) -> Step<char> {
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
        char::from_u32(code).ok_or(MALFORMED)
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
        let end = string_end(&self.bytes[self.at..]).ok_or(Stop::Cut)?;
        self.at += end + 1;
        Ok(())
    }
}

/// Where the quote is that ends the string: the first one with an even number of backslashes before it.
fn string_end(rest: &[u8]) -> Option<usize> {
    memchr::memchr_iter(b'"', rest).find(|at| match &rest[..*at] {
        [.., b'\\', b'\\'] => {
            let escapes = rest[..*at].iter().rev().take_while(|b| **b == b'\\');
            escapes.count() % 2 == 0
        }
        [.., b'\\'] => false,
        _ => true,
    })
}

/// Whether a backslash is followed by `u` or `/` anywhere. Pairs like the `\u` within `\\\\u` are taken for an
/// escape, which costs time and nothing else.
fn has_other_escapes(bytes: &[u8]) -> bool {
    static UNICODE: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\\u"));
    static SLASH: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\\/"));
    UNICODE.find(bytes).is_some() || SLASH.find(bytes).is_some()
}

/// Hands over the canonical spelling of a character that was written as `\u…`.
fn spell(decoded: char, piece: &mut impl FnMut(&[u8])) {
    let short: &[u8] = match decoded {
        '"' => b"\\\"",
        '\\' => b"\\\\",
        '\n' => b"\\n",
        '\t' => b"\\t",
        '\r' => b"\\r",
        '\u{8}' => b"\\b",
        '\u{c}' => b"\\f",
        '\0'..' ' => {
            // Controls without a short escape: a spelling that only they have.
            return piece(&[b'\\', b'u', decoded as u8]);
        }
        _ => return piece(decoded.encode_utf8(&mut [0; 4]).as_bytes()),
    };
    piece(short);
}

fn deeper(depth: u32) -> Step<u32> {
    if depth >= DEPTH {
        return Err(Stop::Bad(NoKey::TooDeep));
    }
    Ok(depth + 1)
}

/// The bytes as far as they are valid UTF-8: at the end, the last character may be cut off.
fn valid(bytes: &[u8]) -> Step<&[u8]> {
    if simdutf8::basic::from_utf8(bytes).is_ok() {
        return Ok(bytes);
    }
    // Where and how it is wrong, only the slow way tells.
    match std::str::from_utf8(bytes) {
        Ok(_) => Ok(bytes),
        Err(error) if error.error_len().is_none() => Ok(&bytes[..error.valid_up_to()]),
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
