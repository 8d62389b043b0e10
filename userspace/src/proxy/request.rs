//! The request head: read strictly, then written anew for the backend.
//!
//! What is not passed on is left out here, once; what the backend will be told apart from `Host` is ready
//! as text when the pick is made, so that a replay or another backend costs no second parse.

use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use prefixlb_common::framing::{Body, Framing, FramingError};

use super::fields::{self, Connection};
use super::reason::Reason;
use crate::config::{HttpSettings, KeySettings};

/// Most fields that can be configured.
pub const MAX_FIELDS: usize = 512;

/// A refusal: the reason and one sentence for the client.
pub type Refusal = (Reason, &'static str);

/// A request head that may be forwarded.
#[derive(Debug)]
pub struct RequestHead {
    /// Length of the head as received.
    pub len: usize,
    /// The method, in the received head.
    pub method: Range<usize>,
    /// The origin-form target, in the received head; empty: `/`.
    pub target: Range<usize>,
    /// The path of `target`, without its query.
    pub path: Range<usize>,
    /// How the body ends.
    pub body: Body,
    /// `HEAD`: the response has no body.
    pub is_head: bool,
    /// HTTP/1.0: no chunked coding and no interim responses to this client.
    pub http10: bool,
    /// The client will use the connection again.
    pub keep_alive: bool,
    /// The client waits for `100 Continue`.
    pub expect: bool,
    /// The body may be JSON: no content coding, and a content type that does not say otherwise.
    pub may_be_json: bool,
    /// The key field's value, in the received head.
    pub key: Option<Range<usize>>,
    /// The client asked to see the pick.
    pub debug: bool,
    /// The request id, in `fields`.
    pub id: Range<usize>,
    /// Field lines for the backend: all but `Host` and framing.
    pub fields: Vec<u8>,
    /// A body length must be stated even if it is 0.
    states_length: bool,
}

/// What the parser needs to know.
#[derive(Debug)]
pub struct Rules<'a> {
    /// Limits.
    pub http: &'a HttpSettings,
    /// The key field's name.
    pub key: &'a KeySettings,
    /// The client.
    pub peer: SocketAddr,
    /// An id for requests that bring none.
    pub fresh_id: u128,
}

/// The framing field of a chunked message.
pub const CHUNKED_FIELD: &[u8] = b"Transfer-Encoding: chunked\r\n";

const HOST_RULE: &str = "A request must have exactly one valid Host field.";

impl RequestHead {
    /// Reads a whole head: `bytes` ends with its empty line. `fields` is the memory for the outgoing lines.
    pub fn parse(bytes: &[u8], rules: &Rules<'_>, fields: Vec<u8>) -> Result<Self, Refusal> {
        let mut store = [const { MaybeUninit::uninit() }; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut []);
        let limit = rules.http.head_fields.min(MAX_FIELDS);
        request
            .parse_with_uninit_headers(bytes, &mut store[..limit])
            .map_err(|error| refusal(error, bytes))?;
        let (Some(method), Some(target), Some(version)) =
            (request.method, request.path, request.version)
        else {
            return Err((
                Reason::BadRequest,
                "The request line is not one of HTTP/1.1.",
            ));
        };
        if method == "CONNECT" {
            return Err((
                Reason::NotImplemented,
                "CONNECT is not implemented: this is no forward proxy.",
            ));
        }
        let mut reader = Reader {
            rules,
            fields: request.headers,
            seen: Seen::default(),
        };
        reader.classify()?;
        let (target, authority) = origin_form(bytes, target)?;
        let seen = reader.check(version == 0, authority)?;
        let path = &bytes[target.clone()];
        if memchr::memchr(b'#', path).is_some() {
            return Err((
                Reason::BadRequest,
                "a request target has no fragment: \"#\" must be written %23",
            ));
        }
        let path_len = memchr::memchr(b'?', path).unwrap_or(path.len());
        let mut head = Self {
            len: bytes.len(),
            method: offset(bytes, method.as_bytes()),
            path: target.start..target.start + path_len,
            target,
            body: seen.body,
            is_head: method == "HEAD",
            http10: version == 0,
            keep_alive: if version == 0 {
                seen.connection.keep_alive && !seen.connection.close
            } else {
                !seen.connection.close
            },
            expect: seen.expect && version == 1 && seen.body != Body::None,
            may_be_json: seen.may_be_json(),
            key: seen.key.map(|value| offset(bytes, value)),
            debug: seen.debug,
            id: 0..0,
            states_length: matches!(method, "POST" | "PUT" | "PATCH"),
            fields,
        };
        reader.write(&mut head, version);
        Ok(head)
    }

    /// Writes the head for a backend whose `Host` is `authority`. `received` is the head as received.
    pub fn write(&self, received: &[u8], authority: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(&received[self.method.clone()]);
        out.push(b' ');
        let target = &received[self.target.clone()];
        if target.first() != Some(&b'/') && target != b"*" {
            out.push(b'/'); // absolute form with an empty path, perhaps with a query
        }
        out.extend_from_slice(target);
        out.extend_from_slice(b" HTTP/1.1\r\nHost: ");
        out.extend_from_slice(authority.as_bytes());
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(&self.fields);
        match self.body {
            Body::Length(length) => push_length(out, length),
            Body::Chunked => out.extend_from_slice(CHUNKED_FIELD),
            Body::None | Body::UntilClose if self.states_length => push_length(out, 0),
            Body::None | Body::UntilClose => {}
        }
        out.extend_from_slice(b"\r\n");
    }

    /// The request id.
    pub fn id(&self) -> &str {
        std::str::from_utf8(&self.fields[self.id.clone()]).unwrap_or("")
    }
}

/// `Content-Length: N`, without the formatting machinery: this runs for every request.
pub fn push_length(out: &mut Vec<u8>, length: u64) {
    out.extend_from_slice(b"Content-Length: ");
    push_number(out, length);
    out.extend_from_slice(b"\r\n");
}

/// `number` in digits.
pub fn push_number(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

fn refusal(error: httparse::Error, bytes: &[u8]) -> Refusal {
    match error {
        httparse::Error::TooManyHeaders => {
            (Reason::HeadTooLarge, "The request has too many fields.")
        }
        httparse::Error::Version if names_a_version(bytes) => (
            Reason::VersionNotSupported,
            "Only HTTP/1.1 and HTTP/1.0 are spoken here.",
        ),
        _ => (
            Reason::BadRequest,
            "The request head is not well-formed HTTP/1.1.",
        ),
    }
}

/// Whether the request line ends in what is at least the shape of a version.
fn names_a_version(bytes: &[u8]) -> bool {
    let line = bytes.split(|&b| b == b'\r').next().unwrap_or_default();
    line.splitn(3, |&b| b == b' ')
        .nth(2)
        .is_some_and(|version| version.starts_with(b"HTTP/"))
}

fn framing_refusal(error: FramingError) -> Refusal {
    match error {
        FramingError::UnknownCoding => (Reason::NotImplemented, error.as_str()),
        _ => (Reason::BadRequest, error.as_str()),
    }
}

/// Where `part`, a slice of `whole`, lies in it.
fn offset(whole: &[u8], part: &[u8]) -> Range<usize> {
    let start = (part.as_ptr() as usize).saturating_sub(whole.as_ptr() as usize);
    let start = start.min(whole.len());
    start..(start + part.len()).min(whole.len())
}

/// The target in origin form, and the authority if it was in absolute form.
fn origin_form<'a>(
    bytes: &'a [u8],
    target: &'a str,
) -> Result<(Range<usize>, Option<&'a [u8]>), Refusal> {
    let whole = offset(bytes, target.as_bytes());
    if target.starts_with('/') || target == "*" {
        return Ok((whole, None));
    }
    let scheme = ["http://", "https://"].into_iter().find(|scheme| {
        target
            .get(..scheme.len())
            .is_some_and(|t| t.eq_ignore_ascii_case(scheme))
    });
    let Some(scheme) = scheme else {
        return Err((
            Reason::BadRequest,
            "The request target is neither a path nor an http URL.",
        ));
    };
    let rest = &target.as_bytes()[scheme.len()..];
    let end = rest
        .iter()
        .position(|b| matches!(b, b'/' | b'?'))
        .unwrap_or(rest.len());
    if end == 0 {
        return Err((Reason::BadRequest, "The request target names no host."));
    }
    Ok((
        whole.start + scheme.len() + end..whole.end,
        Some(&rest[..end]),
    ))
}

#[derive(Debug)]
struct Seen<'a> {
    framing: Framing,
    body: Body,
    connection: Connection,
    host: Option<&'a [u8]>,
    hosts: usize,
    coded_content: bool,
    content_type: Option<&'a [u8]>,
    expect: bool,
    key: Option<&'a [u8]>,
    debug: bool,
    id: Option<&'a [u8]>,
}

impl Default for Seen<'_> {
    fn default() -> Self {
        Self {
            framing: Framing::new(),
            body: Body::None,
            connection: Connection::default(),
            host: None,
            hosts: 0,
            coded_content: false,
            content_type: None,
            expect: false,
            key: None,
            debug: false,
            id: None,
        }
    }
}

impl Seen<'_> {
    fn may_be_json(&self) -> bool {
        !self.coded_content
            && self.content_type.is_none_or(|value| {
                value
                    .get(..16)
                    .is_some_and(|v| v.eq_ignore_ascii_case(b"application/json"))
            })
    }
}

struct Reader<'r, 'h, 'b> {
    rules: &'r Rules<'r>,
    fields: &'h [httparse::Header<'b>],
    seen: Seen<'b>,
}

impl<'b> Reader<'_, '_, 'b> {
    /// Looks at each field once.
    fn classify(&mut self) -> Result<(), Refusal> {
        for field in self.fields {
            self.look_at(field)?;
        }
        Ok(())
    }

    fn look_at(&mut self, field: &httparse::Header<'b>) -> Result<(), Refusal> {
        let name = field.name;
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        let seen = &mut self.seen;
        // By length first: most fields are none of ours, and a length tells so at once.
        match name.len() {
            4 if is("host") => {
                seen.hosts += 1;
                seen.host = Some(field.value);
            }
            // Other expectations are none that we know; they are not passed on.
            6 if is("expect") => seen.expect |= field.value.eq_ignore_ascii_case(b"100-continue"),
            10 if is("connection") => seen.connection.read(field.value),
            12 if is("content-type") => seen.content_type = Some(field.value),
            12 if is("x-request-id") && fields::is_request_id(field.value) => {
                seen.id = Some(field.value);
            }
            14 if is("content-length") => seen.framing.push_content_length(field.value),
            16 if is("content-encoding") => {
                seen.coded_content = !field.value.eq_ignore_ascii_case(b"identity");
            }
            16 if is("x-prefixlb-debug") => seen.debug = field.value == b"1",
            17 if is("transfer-encoding") => seen.framing.push_transfer_encoding(field.value),
            _ => {}
        }
        if is(&self.rules.key.header) {
            self.seen.key = Some(field.value);
        }
        Ok(())
    }

    /// What the fields say together.
    fn check(&mut self, http10: bool, authority: Option<&[u8]>) -> Result<&Seen<'b>, Refusal> {
        let seen = &mut self.seen;
        let host = seen.host.unwrap_or_default();
        if seen.hosts > 1 || (seen.hosts == 0 && !http10) || !fields::is_authority(host) {
            return Err((Reason::BadRequest, HOST_RULE));
        }
        if authority.is_some_and(|authority| {
            !fields::is_authority(authority)
                || (seen.hosts == 1 && !authority.eq_ignore_ascii_case(host))
        }) {
            return Err((
                Reason::BadRequest,
                "Host and the request target name different hosts.",
            ));
        }
        seen.body = seen.framing.request(http10).map_err(framing_refusal)?;
        if matches!(seen.body, Body::Length(length) if length > self.rules.http.body_bytes) {
            return Err((
                Reason::BodyTooLarge,
                "The body is over the configured limit.",
            ));
        }
        Ok(seen)
    }

    /// Writes the field lines that the backend gets.
    fn write(&self, head: &mut RequestHead, version: u8) {
        let Seen {
            connection,
            host,
            id,
            ..
        } = &self.seen;
        let rules = self.rules;
        let out = &mut head.fields;
        for field in self.fields {
            let name = field.name;
            let ours = match name.len() {
                4 => name.eq_ignore_ascii_case("host"),
                6 => name.eq_ignore_ascii_case("expect"),
                12 => name.eq_ignore_ascii_case("x-request-id"),
                14 => name.eq_ignore_ascii_case("content-length"),
                15 => name.eq_ignore_ascii_case("x-forwarded-for"),
                16 => name.eq_ignore_ascii_case("x-forwarded-host"),
                17 => name.eq_ignore_ascii_case("x-forwarded-proto") && !rules.http.trust_forwarded,
                _ => false,
            };
            if !ours && !fields::is_hop_by_hop(name) && !connection.names_field(self.fields, name) {
                push_field(out, name.as_bytes(), field.value);
            }
        }
        let trusted = |name: &'static str| {
            let fields = self.fields.iter().filter(|_| rules.http.trust_forwarded);
            fields.filter(move |f| f.name.eq_ignore_ascii_case(name))
        };
        // Several fields are one list (RFC 9110 §5.3): none of it may get lost.
        out.extend_from_slice(b"X-Forwarded-For: ");
        for chain in trusted("x-forwarded-for").filter(|f| !f.value.is_empty()) {
            out.extend_from_slice(chain.value);
            out.extend_from_slice(b", ");
        }
        push_ip(out, rules.peer.ip());
        out.extend_from_slice(b"\r\n");
        if trusted("x-forwarded-proto").next().is_none() {
            out.extend_from_slice(b"X-Forwarded-Proto: http\r\n");
        }
        if let Some(host) = host {
            push_field(out, b"X-Forwarded-Host", host);
        }
        if rules.http.via {
            let protocol = if version == 0 { "1.0" } else { "1.1" };
            push_field(out, b"Via", format!("{protocol} prefixlb").as_bytes());
        }
        out.extend_from_slice(b"X-Request-Id: ");
        let start = out.len();
        match id {
            Some(id) => out.extend_from_slice(id),
            None => push_hex(out, rules.fresh_id),
        }
        head.id = start..out.len();
        out.extend_from_slice(b"\r\n");
    }
}

/// One field line.
pub fn push_field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

fn push_hex(out: &mut Vec<u8>, id: u128) {
    let digit = |shift: u32| b"0123456789abcdef"[(id >> shift) as usize & 15];
    out.extend((0..32).rev().map(|nibble| digit(nibble * 4)));
}

/// An IPv4 client of an IPv6 listener is told as IPv4.
fn push_ip(out: &mut Vec<u8>, ip: IpAddr) {
    use std::io::Write;
    // Writing to memory cannot fail.
    let _ = write!(out, "{}", ip.to_canonical());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(bytes: &[u8]) -> Result<RequestHead, Refusal> {
        let (http, key) = (HttpSettings::default(), KeySettings::default());
        let rules = Rules {
            http: &http,
            key: &key,
            peer: SocketAddr::from(([127, 0, 0, 1], 5)),
            fresh_id: 7,
        };
        RequestHead::parse(bytes, &rules, Vec::new())
    }

    type Fields = Vec<(String, Vec<u8>)>;

    /// The head that a backend gets, read by another parser: target and fields.
    fn sent(bytes: &[u8]) -> Option<(String, Fields)> {
        let head = parse(bytes).ok()?;
        let mut out = Vec::new();
        head.write(bytes, "b:1", &mut out);
        let mut fields = [httparse::EMPTY_HEADER; 600];
        let mut request = httparse::Request::new(&mut fields);
        let status = request.parse(&out).expect("what is sent is well-formed");
        assert_eq!(status, httparse::Status::Complete(out.len()));
        let owned = |f: &httparse::Header<'_>| (f.name.to_ascii_lowercase(), f.value.to_vec());
        Some((
            request.path?.to_owned(),
            request.headers.iter().map(owned).collect(),
        ))
    }

    proptest! {
        /// Whatever comes, nothing panics, and what is let through says one thing only.
        #[test]
        fn what_is_accepted_is_sent_without_two_meanings(
            bends in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
            extra in prop::sample::select(vec![
                "", "Content-Length: 5\r\n", "Content-Length: 5\r\nContent-Length: 5\r\n",
                "Transfer-Encoding: chunked\r\n", "Transfer-Encoding: gzip, chunked\r\n",
                "Host: other\r\n", "Connection: host, content-length, x-a\r\nX-A: 1\r\n",
                "Upgrade: h2c\r\nHTTP2-Settings: x\r\n", "X-Forwarded-For: 1.2.3.4\r\n",
            ]),
        ) {
            let mut head =
                format!("POST /v1/chat/completions?a=1 HTTP/1.1\r\nHost: a.test\r\n{extra}X-B: 2\r\n\r\n")
                    .into_bytes();
            for (place, byte) in bends {
                let place = place.index(head.len());
                head[place] = byte;
            }
            if let Some((target, fields)) = sent(&head) {
                let count = |name: &str| fields.iter().filter(|(n, _)| n == name).count();
                prop_assert_eq!(count("host"), 1);
                prop_assert!(count("content-length") + count("transfer-encoding") <= 1);
                prop_assert_eq!(count("connection") + count("upgrade") + count("te"), 0);
                prop_assert_eq!(count("x-forwarded-for"), 1);
                prop_assert_eq!(count("x-request-id"), 1);
                prop_assert!(target.starts_with('/') || target == "*");
            }
        }

        #[test]
        fn noise_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
