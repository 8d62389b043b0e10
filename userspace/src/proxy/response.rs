//! The response head: read from the backend, written anew for the client.

use std::mem::MaybeUninit;

use prefixlb_common::framing::{Body, Framing, FramingError};

use super::fields::{self, Connection};
use super::request::{CHUNKED_FIELD, MAX_FIELDS, push_field, push_length, push_number};

/// A response head that may be forwarded, its field lines already written.
#[derive(Debug)]
pub struct ResponseHead {
    /// The status code.
    pub status: u16,
    /// How the body ends.
    pub body: Body,
    /// The backend's connection may be used again.
    pub reusable: bool,
    /// It has an `X-Request-Id`.
    pub has_id: bool,
}

/// What the writer needs to know of the request.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// It was `HEAD`.
    pub head: bool,
    /// It was HTTP/1.0.
    pub http10: bool,
}

/// How the names of our own fields begin.
const OURS: &str = "x-prefixlb-";

/// Reads the head in `bytes` (which ends with its empty line) and writes the client's version of it to
/// `out`, up to the fields that we add: the caller adds those and the empty line.
///
/// A backend that breaks HTTP is an error; nothing of such an answer can be trusted.
pub fn rewrite(
    bytes: &[u8],
    asked: Asked,
    out: &mut Vec<u8>,
) -> Result<ResponseHead, &'static str> {
    let mut store = [const { MaybeUninit::uninit() }; MAX_FIELDS];
    let mut response = httparse::Response::new(&mut []);
    httparse::ParserConfig::default()
        .parse_response_with_uninit_headers(&mut response, bytes, &mut store)
        .map_err(|_| "its head is not well-formed HTTP/1.1")?;
    let (Some(status), Some(version)) = (response.code, response.version) else {
        return Err("its status line is not one of HTTP/1.1");
    };
    let fields = &*response.headers;
    let mut framing = Framing::new();
    let mut connection = Connection::default();
    let mut has_id = false;
    for field in fields {
        match field.name.len() {
            10 if field.name.eq_ignore_ascii_case("connection") => connection.read(field.value),
            12 => has_id |= field.name.eq_ignore_ascii_case("x-request-id"),
            14 if field.name.eq_ignore_ascii_case("content-length") => {
                framing.push_content_length(field.value);
            }
            17 if field.name.eq_ignore_ascii_case("transfer-encoding") => {
                framing.push_transfer_encoding(field.value);
            }
            _ => {}
        }
    }
    let body = framing
        .response(version == 0, status, asked.head)
        .map_err(FramingError::as_str)?;
    out.extend_from_slice(b"HTTP/1.1 ");
    push_number(out, status.into());
    out.push(b' ');
    out.extend_from_slice(response.reason.unwrap_or_default().as_bytes());
    out.extend_from_slice(b"\r\n");
    for field in fields {
        let name = field.name;
        // Another prefixlb behind this one, or a backend that pretends, must not speak for us.
        let ours = name
            .get(..OURS.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(OURS));
        if !ours
            && !fields::is_hop_by_hop(name)
            && !name.eq_ignore_ascii_case("content-length")
            && !connection.names_field(fields, name)
        {
            push_field(out, name.as_bytes(), field.value);
        }
    }
    write_framing(out, &framing, body, status, asked);
    Ok(ResponseHead {
        status,
        body,
        reusable: version == 1 && !connection.close && body != Body::UntilClose,
        has_id,
    })
}

/// The framing fields are ours, generated from what was understood.
fn write_framing(out: &mut Vec<u8>, framing: &Framing, body: Body, status: u16, asked: Asked) {
    match body {
        Body::Length(length) => push_length(out, length),
        Body::Chunked if !asked.http10 => out.extend_from_slice(CHUNKED_FIELD),
        // An answer without a body may still say how long it would be; 1xx and 204 may not.
        Body::None if asked.head || status == 304 => match (framing.length(), framing.coding()) {
            (Some(length), None) => push_length(out, length),
            (None, Some(_)) if !asked.http10 => out.extend_from_slice(CHUNKED_FIELD),
            _ => {}
        },
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GET: Asked = Asked {
        head: false,
        http10: false,
    };

    fn text(bytes: &[u8], asked: Asked) -> (ResponseHead, String) {
        let mut out = Vec::new();
        let head = rewrite(bytes, asked, &mut out).expect("a good head");
        (head, String::from_utf8(out).expect("ASCII"))
    }

    #[test]
    fn hop_by_hop_fields_and_those_named_in_connection_stay_here() {
        let (head, out) = text(
            b"HTTP/1.1 200 OK\r\nConnection: x-a, keep-alive\r\nX-A: 1\r\nKeep-Alive: timeout=5\r\nX-B: 2\r\nContent-Length: 3\r\n\r\n",
            GET,
        );
        assert_eq!(out, "HTTP/1.1 200 OK\r\nX-B: 2\r\nContent-Length: 3\r\n");
        assert!(head.reusable);
        assert_eq!(head.body, Body::Length(3));
    }

    #[test]
    fn an_answer_without_body_keeps_its_length_only_where_it_may() {
        let chunked_204 = b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(text(chunked_204, GET).1, "HTTP/1.1 204 No Content\r\n");
        let of_head = b"HTTP/1.1 200 OK\r\nContent-Length: 1192\r\n\r\n";
        let (head, out) = text(of_head, Asked { head: true, ..GET });
        assert_eq!(out, "HTTP/1.1 200 OK\r\nContent-Length: 1192\r\n");
        assert_eq!(head.body, Body::None);
    }

    #[test]
    fn a_head_that_could_be_read_in_two_ways_is_an_error() {
        for bad in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
        ] {
            assert!(rewrite(bad, GET, &mut Vec::new()).is_err(), "{bad:?}");
        }
    }
}
