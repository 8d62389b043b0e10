//! The key that a client sends in a header: 1 to 16 hex digits.

/// The number that `value` writes, or nothing if it is anything else than 1 to 16 hex digits.
#[must_use]
pub fn parse(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > 16 {
        return None;
    }
    let mut key = 0;
    for byte in value {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ => return None,
        };
        key = key << 4 | digit as u64;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn only_hex_digits_and_no_more_than_fit() {
        assert_eq!(parse(b"0"), Some(0));
        assert_eq!(parse(b"00fF"), Some(255));
        assert_eq!(parse(b"ffffffffffffffff"), Some(u64::MAX));
        for bad in [
            &b""[..],
            b"0x1",
            b"g",
            b" 1",
            b"1 ",
            b"-1",
            b"+1",
            b"00000000000000000",
        ] {
            assert_eq!(parse(bad), None);
        }
    }
}
