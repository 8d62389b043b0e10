//! Header fields: the few we know, and how their values are read. Strict, since requests smuggle where two
//! readers differ.

/// Longest id that is kept from a client.
const ID_BYTES: usize = 128;

/// Fields that concern one connection only (RFC 9110 §7.6.1) and are never passed on.
pub fn is_hop_by_hop(name: &str) -> bool {
    match name.len() {
        2 => name.eq_ignore_ascii_case("te"),
        7 => name.eq_ignore_ascii_case("upgrade"),
        10 => name.eq_ignore_ascii_case("connection") || name.eq_ignore_ascii_case("keep-alive"),
        14 => name.eq_ignore_ascii_case("http2-settings"),
        16 => name.eq_ignore_ascii_case("proxy-connection"),
        17 => name.eq_ignore_ascii_case("transfer-encoding"),
        _ => false,
    }
}

/// The members of a comma-separated list, white space trimmed, empty ones left out.
pub fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value
        .split(|&b| b == b',')
        .map(<[u8]>::trim_ascii)
        .filter(|member| !member.is_empty())
}

/// What `Connection` fields of a message say.
#[derive(Debug, Default)]
pub struct Connection {
    /// `close` was there.
    pub close: bool,
    /// `keep-alive` was there.
    pub keep_alive: bool,
    /// Another name was there: fields by these names must be dropped.
    pub names: bool,
}

impl Connection {
    /// Reads one `Connection` field.
    pub fn read(&mut self, value: &[u8]) {
        for member in list(value) {
            if member.eq_ignore_ascii_case(b"close") {
                self.close = true;
            } else if member.eq_ignore_ascii_case(b"keep-alive") {
                self.keep_alive = true;
            } else {
                self.names = true;
            }
        }
    }

    /// Whether any `Connection` field among `fields` names `name`.
    pub fn names_field(&self, fields: &[httparse::Header<'_>], name: &str) -> bool {
        self.names
            && fields
                .iter()
                .filter(|field| field.name.eq_ignore_ascii_case("connection"))
                .flat_map(|field| list(field.value))
                .any(|member| member.eq_ignore_ascii_case(name.as_bytes()))
    }
}

/// A `Host` value or authority that can be compared and passed on: no spaces, no path, no user info.
pub fn is_authority(value: &[u8]) -> bool {
    value
        .iter()
        .all(|&b| b.is_ascii_graphic() && !matches!(b, b'/' | b'@' | b'?' | b'#' | b',' | b'\\'))
}

/// An id that is safe to log and to pass on.
pub fn is_request_id(value: &[u8]) -> bool {
    !value.is_empty()
        && value.len() <= ID_BYTES
        && value
            .iter()
            .all(|&b| b.is_ascii_graphic() && b != b'"' && b != b'\\')
}

/// The first field called `name` in a raw head.
pub fn find<'a>(head: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let mut lines = head.split(|&b| b == b'\n').skip(1);
    lines.find_map(|line| {
        let (field, rest) = line.split_at_checked(name.len())?;
        let value = rest.strip_prefix(b":")?;
        field
            .eq_ignore_ascii_case(name.as_bytes())
            .then(|| value.trim_ascii())
    })
}

/// The cookie called `name` in a raw head.
pub fn cookie<'a>(head: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let value = find(head, "cookie")?;
    value.split(|&b| b == b';').find_map(|pair| {
        let pair = pair.trim_ascii();
        pair.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let head =
            b"GET / HTTP/1.1\r\nX-Session-Id-2: no\r\nx-session-id:  yes \r\nCookie: a=1; sid=42\r\n\r\n";
        assert_eq!(find(head, "X-Session-Id"), Some(&b"yes"[..]));
        assert_eq!(find(head, "x-session"), None);
        assert_eq!(cookie(head, "sid"), Some(&b"42"[..]));
        assert_eq!(cookie(head, "si"), None);
    }

    #[test]
    fn ids_that_could_break_a_log_line_are_not_kept() {
        assert!(is_request_id(b"7f3a-1"));
        for bad in [&b""[..], b"a b", b"a\"b", &[b'x'; 200], "ä".as_bytes()] {
            assert!(!is_request_id(bad));
        }
    }
}
