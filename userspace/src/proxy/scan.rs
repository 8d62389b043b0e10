//! Finding the end of a head in bytes that dribble in, each byte looked at once.

/// What the bytes so far are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// No end yet.
    More,
    /// The head is this long, empty line included.
    End(usize),
    /// A line ends with LF alone.
    BareLf,
}

/// The scanner of one head.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scanner {
    seen: usize,
    line: usize,
}

impl Scanner {
    /// Looks at what was appended since the last call. `bytes` starts at the head's first byte.
    ///
    /// The field lines' LF may be bare by RFC 9112 §2.2; we may refuse it and do, since the next hop may
    /// read it otherwise.
    pub fn scan(&mut self, bytes: &[u8]) -> Scan {
        for at in memchr::memchr_iter(b'\n', &bytes[self.seen..]) {
            let at = self.seen + at;
            if at == 0 || bytes[at - 1] != b'\r' {
                return Scan::BareLf;
            }
            if at == self.line + 1 {
                return Scan::End(at + 1);
            }
            self.line = at + 1;
        }
        self.seen = bytes.len();
        Scan::More
    }

    /// Whether the first line is complete.
    pub fn past_first_line(&self) -> bool {
        self.line > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_found_wherever_the_head_is_split() {
        let head = b"GET / HTTP/1.1\r\nHost: a\r\n\r\nbody";
        for split in 0..head.len() {
            let mut scanner = Scanner::default();
            let first = scanner.scan(&head[..split]);
            let end = if first == Scan::More {
                scanner.scan(head)
            } else {
                first
            };
            assert_eq!(end, Scan::End(head.len() - 4), "split at {split}");
        }
    }

    #[test]
    fn a_bare_lf_is_told() {
        assert_eq!(
            Scanner::default().scan(b"GET / HTTP/1.1\nHost: a\r\n\r\n"),
            Scan::BareLf
        );
        assert_eq!(
            Scanner::default().scan(b"GET / HTTP/1.1\r\n\nX"),
            Scan::BareLf
        );
    }
}
