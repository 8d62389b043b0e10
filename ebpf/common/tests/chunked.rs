//! The chunked machine against byte tables, against itself split anywhere, and against a slow reader of the
//! whole body that was written the other way round.

use proptest::prelude::*;

use prefixlb_common::chunked::{ChunkError, Chunked, EXTENSION_LIMIT, Piece, Step, TRAILER_LIMIT};

/// What a whole input came to.
#[derive(Debug, PartialEq, Eq, Clone)]
struct Read {
    data: Vec<u8>,
    trailer: Vec<u8>,
    consumed: usize,
    done: bool,
    error: Option<ChunkError>,
}

/// Reads `parts` with `next`.
fn read_pieces<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Read {
    let mut machine = Chunked::new();
    let mut read = Read {
        data: vec![],
        trailer: vec![],
        consumed: 0,
        done: false,
        error: None,
    };
    'parts: for mut part in parts {
        loop {
            let piece = match machine.next(part) {
                Ok(piece) => piece,
                Err(error) => {
                    assert_eq!(machine.next(b"0"), Err(error), "an error stays");
                    read.error = Some(error);
                    break 'parts;
                }
            };
            match piece {
                Piece::Data(bytes) => read.data.extend(bytes),
                Piece::Trailer(bytes) => read.trailer.extend(bytes),
                Piece::Framing(_) => {}
                Piece::More => break,
                Piece::End => break 'parts,
            }
            assert!(!piece.is_empty(), "progress");
            read.consumed += piece.len();
            part = &part[piece.len()..];
        }
    }
    read.done = machine.is_done();
    read
}

/// Reads `parts` with `advance`: consumed, done, error, declared, received.
fn read_steps<'a>(
    parts: impl IntoIterator<Item = &'a [u8]>,
) -> (usize, bool, Option<ChunkError>, u64, u64) {
    let mut machine = Chunked::new();
    let mut consumed = 0;
    let mut error = None;
    for part in parts {
        match machine.advance(part) {
            Ok(Step { consumed: n, done }) => {
                consumed += n;
                assert!(n == part.len() || done);
            }
            Err(e) => {
                error = Some(e);
                break;
            }
        }
    }
    let done = machine.is_done();
    (
        consumed,
        done,
        error,
        machine.declared(),
        machine.received(),
    )
}

fn whole(bytes: &[u8]) -> Read {
    read_pieces([bytes])
}

#[test]
fn well_formed_bodies() {
    let long_extension = format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(256));
    let table: &[(&[u8], &[u8], &[u8])] = &[
        (b"0\r\n\r\n", b"", b""),
        (b"000\r\n\r\n", b"", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello", b""),
        (b"0000000000000005\r\nhello\r\n0\r\n\r\n", b"hello", b""),
        (
            b"A\r\n0123456789\r\na\r\nabcdefghij\r\n0\r\n\r\n",
            b"0123456789abcdefghij",
            b"",
        ),
        (b"2\r\n\r\n\r\n0\r\n\r\n", b"\r\n", b""),
        (b"5;x\r\nhello\r\n0;y=\"z \\\" \t\"\r\n\r\n", b"hello", b""),
        (long_extension.as_bytes(), b"x", b""),
        (b"1\r\nx\r\n0\r\nA: b\r\n\r\n", b"x", b"A: b\r\n"),
        (
            b"1\r\nx\r\n0\r\nA: b\r\nC-d:\r\n\r\n",
            b"x",
            b"A: b\r\nC-d:\r\n",
        ),
        (b"0\r\nX: \xc3\xa9\t1\r\n\r\n", b"", b"X: \xc3\xa9\t1\r\n"),
    ];
    for (input, data, trailer) in table {
        let read = whole(input);
        let show = input.escape_ascii();
        assert_eq!(read.error, None, "{show}");
        assert!(read.done, "{show}");
        assert_eq!(read.consumed, input.len(), "{show}");
        assert_eq!(read.data, *data, "{show}");
        assert_eq!(read.trailer, *trailer, "{show}");
    }
}

#[test]
fn broken_bodies() {
    use ChunkError::{BadExtension, BadSize, BadTrailer, BareLf, DataOverrun, ExtensionTooLong};
    let long_extension = format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(257));
    let table: &[(&[u8], ChunkError)] = &[
        // F05: sizes.
        (b"1x\r\nhello\r\n", BadSize),
        (b"0x1\r\nh\r\n", BadSize),
        (b"0_0\r\n\r\n", BadSize),
        (b"+1\r\nh\r\n", BadSize),
        (b"-1\r\nh\r\n", BadSize),
        (b" 1\r\nh\r\n", BadSize),
        (b"\t1\r\nh\r\n", BadSize),
        (b"1 \r\nh\r\n", BadSize),
        (b"1 ;a\r\nh\r\n", BadSize),
        (b"\r\nh\r\n", BadSize),
        (b";a\r\nh\r\n", BadSize),
        (b"1zzzz\r\nh\r\n", BadSize),
        (b"FFFFFFFFFFFFFFFFF\r\nh", BadSize),
        (b"00000000000000001\r\nh", BadSize),
        (b"\xef\xbc\x91\r\nh\r\n", BadSize),
        (b"1\0\r\nh\r\n", BadSize),
        // F06: line ends and overruns.
        (b"5\nhello\r\n0\r\n\r\n", BareLf),
        (b"5\r\rhello\r\n0\r\n\r\n", BareLf),
        (b"5;a\nb\r\nhello\r\n0\r\n\r\n", BareLf),
        (b"5;a\rb\r\nhello\r\n0\r\n\r\n", BareLf),
        (b"5\r\nhelloXXX\r\n0\r\n\r\n", DataOverrun),
        (b"5\r\nhello0\r\n\r\n", DataOverrun),
        (b"5\r\nhello\n0\r\n\r\n", BareLf),
        (b"5\r\nhello\rX0\r\n\r\n", BareLf),
        (b"0\r\n\n", BareLf),
        (b"0\r\n\rX", BareLf),
        (b"0\n\r\n", BareLf),
        // Extensions.
        (b"1;a\0\r\nx", BadExtension),
        (b"1;a\x7f\r\nx", BadExtension),
        (b"1;a\x0b\r\nx", BadExtension),
        (long_extension.as_bytes(), ExtensionTooLong),
        // Trailers.
        (b"0\r\n: v\r\n\r\n", BadTrailer),
        (b"0\r\nA : v\r\n\r\n", BadTrailer),
        (b"0\r\n A: v\r\n\r\n", BadTrailer),
        (b"0\r\nA: v\r\n folded\r\n\r\n", BadTrailer),
        (b"0\r\nA\r\n\r\n", BadTrailer),
        (b"0\r\nA: v\n\r\n", BareLf),
        (b"0\r\nA: v\rB\r\n\r\n", BareLf),
        (b"0\r\nA: v\0\r\n\r\n", BadTrailer),
        (b"0\r\nGET / HTTP/1.1\r\n\r\n", BadTrailer),
    ];
    for (input, error) in table {
        let read = whole(input);
        assert_eq!(read.error, Some(*error), "{}", input.escape_ascii());
        assert!(!read.done);
    }
}

#[test]
fn sizes_add_up_without_wrapping() {
    let mut machine = Chunked::new();
    let head = b"FFFFFFFFFFFFFFFF\r\n";
    assert_eq!(
        machine.advance(head),
        Ok(Step {
            consumed: head.len(),
            done: false
        })
    );
    assert_eq!(machine.declared(), u64::MAX);
    assert_eq!(machine.data_left(), u64::MAX);
    assert_eq!(machine.received(), 0);
    machine.advance(b"abc").unwrap();
    assert_eq!(machine.received(), 3);

    let mut machine = Chunked::new();
    machine.advance(b"1\r\nx\r\n").unwrap();
    assert_eq!(machine.advance(head), Err(ChunkError::BadSize));
}

#[test]
fn a_size_over_32_bits_is_not_cut() {
    let mut machine = Chunked::new();
    machine.advance(b"100000005\r\nhello").unwrap();
    assert_eq!(machine.declared(), 0x1_0000_0005);
    assert_eq!(machine.data_left(), 0x1_0000_0000);
}

#[test]
fn trailers_are_bounded() {
    let body = |n: usize| [b"0\r\nA: ", &*vec![b'v'; n], b"\r\n\r\n"].concat();
    let limit = usize::from(TRAILER_LIMIT);
    assert!(whole(&body(limit - 5)).done);
    assert_eq!(
        whole(&body(limit - 4)).error,
        Some(ChunkError::TrailerTooLong)
    );
    assert_eq!(EXTENSION_LIMIT, 256);
}

#[test]
fn the_end_leaves_what_follows() {
    let read = whole(b"1\r\nx\r\n0\r\n\r\nGET / HTTP/1.1\r\n");
    assert!(read.done);
    assert_eq!(read.consumed, 11);
    let mut machine = Chunked::new();
    assert_eq!(
        machine.advance(b"0\r\n\r\nHTTP/1.1 200"),
        Ok(Step {
            consumed: 5,
            done: true
        })
    );
    assert_eq!(
        machine.advance(b"x"),
        Ok(Step {
            consumed: 0,
            done: true
        })
    );
}

/// A reader of a whole body by position, as unlike the machine as can be; `None`: broken or not ended.
fn reference(body: &[u8]) -> Option<(Vec<u8>, usize)> {
    let line_end = |from: usize| {
        let at = from + body[from..].iter().position(|b| *b == b'\n')?;
        (at > from && body[at - 1] == b'\r').then(|| at - 1)
    };
    let mut at = 0;
    let mut data = Vec::new();
    loop {
        let end = line_end(at)?;
        let line = &body[at..end];
        let (digits, extension) = match line.iter().position(|b| *b == b';') {
            Some(cut) => (&line[..cut], &line[cut + 1..]),
            None => (line, &b""[..]),
        };
        let plain = |bytes: &[u8]| !bytes.iter().any(|b| b.is_ascii_control() && *b != b'\t');
        if digits.is_empty()
            || digits.len() > 16
            || !digits.iter().all(u8::is_ascii_hexdigit)
            || extension.len() > 256
            || !plain(extension)
        {
            return None;
        }
        let size = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        at = end + 2;
        if size > 0 {
            let size = usize::try_from(size).ok()?;
            let end = at.checked_add(size)?;
            data.extend(body.get(at..end)?);
            (body.get(end..end + 2)? == b"\r\n").then_some(())?;
            at = end + 2;
            continue;
        }
        let start = at;
        loop {
            let end = line_end(at)?;
            if end == at {
                return (at - start <= 8192).then_some((data, at + 2));
            }
            let line = &body[at..end];
            let colon = line.iter().position(|b| *b == b':')?;
            if !prefixlb_common::framing::is_token(&line[..colon]) || !plain(&line[colon..]) {
                return None;
            }
            at = end + 2;
        }
    }
}

/// Bodies as a careful sender writes them.
fn body() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let chunk = (
        prop::collection::vec(any::<u8>(), 1..40),
        prop::option::of("[ -~\t]{0,20}"),
        any::<bool>(),
    );
    let chunks = prop::collection::vec(chunk, 0..8);
    let trailers = prop::collection::vec("[!#$%&'*+.^_`|~0-9A-Za-z-]{1,8}:[ -~\t]{0,12}", 0..3);
    (chunks, trailers).prop_map(|(chunks, trailers)| {
        let (mut wire, mut data) = (Vec::new(), Vec::new());
        for (bytes, extension, upper) in chunks {
            let size = bytes.len();
            let size = if upper {
                format!("{size:04X}")
            } else {
                format!("{size:x}")
            };
            wire.extend(size.bytes());
            if let Some(extension) = extension {
                wire.push(b';');
                wire.extend(extension.bytes());
            }
            wire.extend(b"\r\n");
            wire.extend(&bytes);
            wire.extend(b"\r\n");
            data.extend(bytes);
        }
        wire.extend(b"0\r\n");
        for trailer in trailers {
            wire.extend(trailer.bytes());
            wire.extend(b"\r\n");
        }
        wire.extend(b"\r\n");
        (wire, data)
    })
}

/// `bytes` in parts that end at `cuts`.
fn split<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    ends.push(bytes.len());
    ends.sort_unstable();
    let mut start = 0;
    ends.into_iter()
        .map(|end| {
            let part = &bytes[start..end];
            start = end;
            part
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_sent_is_what_is_read((wire, data) in body()) {
        let read = whole(&wire);
        prop_assert_eq!(read.error, None);
        prop_assert!(read.done);
        prop_assert_eq!(read.consumed, wire.len());
        prop_assert_eq!(read.data, data);
    }

    #[test]
    fn split_anywhere_is_as_unsplit(
        (wire, _) in body(),
        mutation in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut wire = wire;
        if let Some((at, byte)) = mutation {
            let at = at.index(wire.len());
            wire[at] = byte;
        }
        let unsplit = whole(&wire);
        let parts = split(&wire, &cuts);
        let mut pieces = read_pieces(parts.iter().copied());
        if unsplit.error.is_some() {
            // Pieces before the error differ by where they were cut; the verdict does not.
            pieces.consumed = unsplit.consumed;
            pieces.trailer.clone_from(&unsplit.trailer);
        }
        prop_assert_eq!(&pieces, &unsplit);
        let (consumed, done, error, declared, received) = read_steps(parts);
        prop_assert_eq!((done, error), (unsplit.done, unsplit.error));
        if error.is_none() {
            prop_assert_eq!(consumed, unsplit.consumed);
            prop_assert_eq!(received, unsplit.data.len() as u64);
            prop_assert!(declared >= received);
        }
    }

    #[test]
    fn mutated_bodies_end_where_the_reference_says(
        (wire, _) in body(),
        mutations in prop::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![
                any::<u8>(),
                prop::sample::select(&b"\r\n;:0123456789abcdefABCDEF +-_xg\t \0"[..]),
            ], 0..3u8), 0..5),
        tail in prop::collection::vec(any::<u8>(), 0..12),
    ) {
        let mut wire = wire;
        wire.extend(tail);
        for (at, byte, kind) in mutations {
            let at = at.index(wire.len());
            match kind {
                0 => wire[at] = byte,
                1 => wire.insert(at, byte),
                _ if wire.len() > 1 => { wire.remove(at); }
                _ => {}
            }
        }
        let read = whole(&wire);
        let expected = reference(&wire);
        prop_assert_eq!(read.done.then_some((read.data, read.consumed)), expected);
    }

    #[test]
    fn noise_never_panics_and_never_reads_past_its_end(
        noise in prop::collection::vec(
            prop::sample::select(&b"\r\n\r\n;:0123456789abcfF x\t\0\xff"[..]), 0..200),
    ) {
        let read = whole(&noise);
        prop_assert!(read.consumed <= noise.len());
        prop_assert_eq!(read.done.then_some((read.data, read.consumed)), reference(&noise));
    }
}
