//! The framing verdict, as a table of heads.

use prefixlb_common::framing::{
    Body, Coding, Framing, FramingError, content_length, is_field_value, is_token,
    transfer_encoding, trim_ows,
};

type Values = &'static [&'static str];
type Verdict = Result<Body, FramingError>;

fn framing(lengths: &[&str], codings: &[&str]) -> Framing {
    let mut framing = Framing::new();
    for value in lengths {
        framing.push_content_length(value.as_bytes());
    }
    for value in codings {
        framing.push_transfer_encoding(value.as_bytes());
    }
    framing
}

#[test]
fn content_lengths() {
    for (value, expected) in [
        ("0", Some(0)),
        ("5", Some(5)),
        (" 5\t", Some(5)),
        ("0005", Some(5)),
        ("18446744073709551615", Some(u64::MAX)),
        ("18446744073709551616", None),
        ("99999999999999999999999", None),
        ("", None),
        (" ", None),
        ("+5", None),
        ("-5", None),
        ("5,", None),
        ("5, 5", None),
        ("5 5", None),
        ("0x5", None),
        ("5_0", None),
        ("5.0", None),
        ("five", None),
        ("\u{ff15}", None),
    ] {
        assert_eq!(content_length(value.as_bytes()), expected, "{value:?}");
    }
}

#[test]
fn transfer_encodings() {
    use Coding::{Bad, Chunked, Other};
    for (value, expected) in [
        ("chunked", Chunked),
        ("CHUNKED", Chunked),
        ("chunked\t", Chunked),
        (" chunked ", Chunked),
        ("chunked,", Chunked),
        (", ,chunked", Chunked),
        ("chunked, gzip", Bad),
        ("chunked, chunked", Bad),
        ("chunked chunked", Bad),
        ("identity", Bad),
        ("gzip", Bad),
        ("", Bad),
        (",", Bad),
        ("\x0bchunked", Bad),
        ("xchunked", Bad),
        ("chunked;a=b", Bad),
        ("\"chunked\"", Bad),
        ("x, chunked", Other),
        ("gzip;q=1, Chunked", Other),
        ("chunked, gzip, chunked", Bad),
    ] {
        assert_eq!(transfer_encoding(value.as_bytes()), expected, "{value:?}");
    }
}

#[test]
fn requests() {
    use FramingError::{
        BadCoding, BadLength, CodingInHttp10, LengthAndCoding, RepeatedLength, UnknownCoding,
    };
    let table: &[(Values, Values, bool, Verdict)] = &[
        (&[], &[], false, Ok(Body::None)),
        (&[], &[], true, Ok(Body::None)),
        (&["0"], &[], false, Ok(Body::Length(0))),
        (&["7"], &[], true, Ok(Body::Length(7))),
        (&[], &["chunked"], false, Ok(Body::Chunked)),
        (&[], &["chunked"], true, Err(CodingInHttp10)),
        (&["5"], &["chunked"], false, Err(LengthAndCoding)),
        (&["5"], &["identity"], false, Err(LengthAndCoding)),
        (&["x"], &["chunked"], false, Err(LengthAndCoding)),
        (&["5", "5"], &[], false, Err(RepeatedLength)),
        (&["5", "6"], &[], false, Err(RepeatedLength)),
        (&["x", "6"], &[], false, Err(BadLength)),
        (&["5, 5"], &[], false, Err(BadLength)),
        (&[""], &[], false, Err(BadLength)),
        (&[], &["chunked", "chunked"], false, Err(BadCoding)),
        (&[], &["gzip", "chunked"], false, Err(UnknownCoding)),
        (&[], &["chunked", "gzip"], false, Err(BadCoding)),
        (&[], &["chunked", ""], false, Ok(Body::Chunked)),
    ];
    for (lengths, codings, http10, expected) in table {
        let verdict = framing(lengths, codings).request(*http10);
        assert_eq!(verdict, *expected, "{lengths:?} {codings:?} {http10}");
    }
}

#[test]
fn responses() {
    let table: &[(Values, Values, u16, bool, Verdict)] = &[
        (&[], &[], 200, false, Ok(Body::UntilClose)),
        (&["2"], &[], 200, false, Ok(Body::Length(2))),
        (&[], &["chunked"], 200, false, Ok(Body::Chunked)),
        (
            &["2"],
            &["chunked"],
            200,
            false,
            Err(FramingError::LengthAndCoding),
        ),
        (&["-1"], &[], 200, false, Err(FramingError::BadLength)),
        (&["1192"], &[], 200, true, Ok(Body::None)),
        (&[], &["chunked"], 200, true, Ok(Body::None)),
        (&[], &["chunked"], 204, false, Ok(Body::None)),
        (&["9"], &[], 304, false, Ok(Body::None)),
        (&["9"], &[], 100, false, Ok(Body::None)),
        (&["9"], &[], 103, false, Ok(Body::None)),
        (&["9"], &[], 205, false, Ok(Body::Length(9))),
    ];
    for (lengths, codings, status, head, expected) in table {
        let verdict = framing(lengths, codings).response(false, *status, *head);
        assert_eq!(
            verdict, *expected,
            "{lengths:?} {codings:?} {status} {head}"
        );
    }
    assert_eq!(framing(&["1192"], &[]).length(), Some(1192));
}

#[test]
fn tokens_and_values() {
    assert!(is_token(b"X-Prefix_Hash~1"));
    for bad in [
        &b""[..],
        b"a b",
        b"a:",
        b"a\t",
        b"\xc3\xa9",
        b"a\0",
        b"(a)",
        b"a/b",
    ] {
        assert!(!is_token(bad), "{}", bad.escape_ascii());
    }
    assert!(is_field_value(b"a\tb \xc3\xa9"));
    for bad in [&b"a\nb"[..], b"a\rb", b"\0", b"\x7f", b"\x0b"] {
        assert!(!is_field_value(bad), "{}", bad.escape_ascii());
    }
    assert_eq!(trim_ows(b" \t a b\t "), b"a b");
    assert_eq!(trim_ows(b" \t "), b"");
}
