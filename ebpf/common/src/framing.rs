//! What the fields of a head say about where its message ends: RFC 9112 section 6, read strictly.
//!
//! The values come one by one, as the head is walked, into [`Framing`]; the verdict depends on whether the
//! head is a request's or a response's. Where the RFC lets a recipient choose between repair and refusal
//! ("5, 5", two equal lengths, both length and coding), it is refusal: a message that two hops could frame
//! differently is never passed on. What is passed on carries one framing field, made anew from the verdict.

/// Whether `byte` may stand in a token (RFC 9110 section 5.6.2).
#[must_use]
pub const fn is_token_byte(byte: u8) -> bool {
    matches!(byte,
        b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`'
        | b'|' | b'~' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z')
}

/// Whether `bytes` are a token: field names and methods are.
#[must_use]
pub fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|&byte| is_token_byte(byte))
}

/// Whether `bytes` may be a field's value: no control character but HTAB.
#[must_use]
pub fn is_field_value(bytes: &[u8]) -> bool {
    bytes
        .iter()
        .all(|&byte| byte == b'\t' || (byte >= b' ' && byte != 127))
}

/// `bytes` without SP and HTAB at both ends.
#[must_use]
pub const fn trim_ows(mut bytes: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = bytes {
        bytes = rest;
    }
    while let [rest @ .., b' ' | b'\t'] = bytes {
        bytes = rest;
    }
    bytes
}

/// The value of a Content-Length field: digits and nothing else, no list, within 64 bits.
#[must_use]
pub fn content_length(value: &[u8]) -> Option<u64> {
    let digits = trim_ows(value);
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(digit.into())
    })
}

/// What the Transfer-Encoding fields of a message amount to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// `chunked` and nothing else.
    Chunked,
    /// Other codings before a final `chunked`: framed, but not a thing we do.
    Other,
    /// No end can be told: `chunked` not last, or twice, or no coding at all.
    Bad,
}

/// One Transfer-Encoding value, if it is the only one. See [`Framing::push_transfer_encoding`].
#[must_use]
pub fn transfer_encoding(value: &[u8]) -> Coding {
    let mut framing = Framing::new();
    framing.push_transfer_encoding(value);
    framing.coding().unwrap_or(Coding::Bad)
}

/// How a message's body is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// There is none: the message ends with its head.
    None,
    /// So many bytes; may be 0.
    Length(u64),
    /// By the chunked coding.
    Chunked,
    /// Until the connection closes; only a response's.
    UntilClose,
}

/// Why a message's framing is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FramingError {
    /// A Content-Length that is not one number.
    BadLength,
    /// More than one Content-Length field.
    RepeatedLength,
    /// Both Content-Length and Transfer-Encoding.
    LengthAndCoding,
    /// Transfer-Encoding whose last coding is not `chunked`, or with `chunked` twice.
    BadCoding,
    /// Transfer-Encoding in an HTTP/1.0 message.
    CodingInHttp10,
    /// A transfer coding other than `chunked`: 501 rather than 400.
    UnknownCoding,
}

impl FramingError {
    /// What is wrong, for a client to read.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BadLength => "Content-Length is not one decimal number",
            Self::RepeatedLength => "Content-Length is there more than once",
            Self::LengthAndCoding => "Content-Length and Transfer-Encoding are both there",
            Self::BadCoding => "Transfer-Encoding does not end in one chunked",
            Self::CodingInHttp10 => "Transfer-Encoding in an HTTP/1.0 message",
            Self::UnknownCoding => "a transfer coding other than chunked",
        }
    }
}

/// The framing fields of one head, as far as they have been walked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Framing {
    length: Option<u64>,
    lengths: u16,
    bad_length: bool,
    encodings: u16,
    chunked: u16,
    other: u16,
    last_is_chunked: bool,
}

impl Framing {
    /// Of a head without any.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            length: None,
            lengths: 0,
            bad_length: false,
            encodings: 0,
            chunked: 0,
            other: 0,
            last_is_chunked: false,
        }
    }

    /// Takes the value of a Content-Length field.
    pub fn push_content_length(&mut self, value: &[u8]) {
        self.lengths = self.lengths.saturating_add(1);
        self.length = content_length(value);
        self.bad_length |= self.length.is_none();
    }

    /// Takes the value of a Transfer-Encoding field. Values of several fields are one list. Empty elements
    /// are passed over (RFC 9110 section 5.6.1.2); `chunked` has no parameters, so with one it is bad.
    pub fn push_transfer_encoding(&mut self, value: &[u8]) {
        self.encodings = self.encodings.saturating_add(1);
        for element in value.split(|&byte| byte == b',') {
            let element = trim_ows(element);
            if element.is_empty() {
                continue;
            }
            self.last_is_chunked = element.eq_ignore_ascii_case(b"chunked");
            let count = if self.last_is_chunked {
                &mut self.chunked
            } else {
                &mut self.other
            };
            *count = count.saturating_add(1);
        }
    }

    /// What the Transfer-Encoding fields amount to; `None`: there are none.
    #[must_use]
    pub const fn coding(&self) -> Option<Coding> {
        if self.encodings == 0 {
            None
        } else if self.chunked != 1 || !self.last_is_chunked {
            Some(Coding::Bad)
        } else if self.other > 0 {
            Some(Coding::Other)
        } else {
            Some(Coding::Chunked)
        }
    }

    /// The one Content-Length, if there is one and it is a number: what an answer to HEAD may go on with.
    #[must_use]
    pub const fn length(&self) -> Option<u64> {
        if self.lengths == 1 { self.length } else { None }
    }

    /// How a request's body is framed. A request is never framed by the connection's end.
    pub fn request(&self, http10: bool) -> Result<Body, FramingError> {
        self.fields(http10).map(|body| body.unwrap_or(Body::None))
    }

    /// How the body of a final response with this `status` is framed; `head`: the request was a HEAD.
    /// Where there can be no body, its framing fields are not judged: they speak of another message.
    pub fn response(&self, http10: bool, status: u16, head: bool) -> Result<Body, FramingError> {
        if head || status < 200 || status == 204 || status == 304 {
            return Ok(Body::None);
        }
        self.fields(http10)
            .map(|body| body.unwrap_or(Body::UntilClose))
    }

    fn fields(&self, http10: bool) -> Result<Option<Body>, FramingError> {
        match (self.coding(), self.lengths) {
            (None, 0) => Ok(None),
            (None, _) if self.bad_length => Err(FramingError::BadLength),
            (None, 1) => Ok(self.length.map(Body::Length)),
            (None, _) => Err(FramingError::RepeatedLength),
            (Some(_), 1..) => Err(FramingError::LengthAndCoding),
            (Some(_), 0) if http10 => Err(FramingError::CodingInHttp10),
            (Some(Coding::Chunked), 0) => Ok(Some(Body::Chunked)),
            (Some(Coding::Other), 0) => Err(FramingError::UnknownCoding),
            (Some(Coding::Bad), 0) => Err(FramingError::BadCoding),
        }
    }
}
