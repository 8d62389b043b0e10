//! Where a message ends: nobody may see another end than prefixlb does.

use crate::harness::{Client, Config, Mock, Proxy, Reply, request};

/// A second request in disguise; no backend may ever see it as a request unless it is one.
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";

/// Sends `bytes` on a connection of their own: one answer with one of these statuses, then the end.
#[track_caller]
fn refused(proxy: &Proxy, bytes: &str, statuses: &[u16]) {
    let show = bytes.escape_debug();
    let mut client = proxy.client();
    client.send(bytes);
    let answer = client.read_response();
    assert!(
        statuses.contains(&answer.status),
        "{} to {show}",
        answer.status
    );
    assert_eq!(answer.fields.get("connection"), Some("close"), "{show}");
    answer.error_code();
    let rest = client.read_to_end();
    assert!(rest.is_empty(), "{show}: {}", rest.escape_ascii());
}

/// A whole exchange went well after all that, and no backend saw what was hidden, or half of a request as one.
#[track_caller]
fn nothing_got_through(proxy: &Proxy, mock: &Mock) {
    assert_eq!(proxy.exchange(request("GET", "/last", &[], "")).status, 200);
    assert!(
        !mock.saw("/smuggled"),
        "a hidden request reached the backend"
    );
    let whole: Vec<String> = mock.requests().into_iter().map(|r| r.target).collect();
    assert_eq!(whole, ["/last"]);
    proxy.wait_idle();
}

fn post(fields: &str, body: &str) -> String {
    format!("POST /v1/chat/completions HTTP/1.1\r\nHost: lb.test\r\n{fields}\r\n\r\n{body}")
}

// F01
#[test]
fn length_and_coding_together_are_refused() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let body = format!("0\r\n\r\n{SMUGGLED}");
    for fields in [
        "Content-Length: 40\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 40",
    ] {
        refused(&proxy, &post(fields, &body), &[400]);
    }
    nothing_got_through(&proxy, &mock);
    proxy.wait_failures("bad_request", 2);
}

// F02
const CODINGS: [(&str, &[u16]); 13] = [
    ("Transfer-Encoding: chunked\t", &[200]),
    ("Transfer-Encoding: chunked,", &[200, 400]),
    ("tRANSFER-eNCODING: CHUNKED", &[200]),
    ("Transfer-Encoding: chunked, gzip", &[400]),
    ("Transfer-Encoding: x, chunked", &[400, 501]),
    ("Transfer-Encoding: chunked, chunked", &[400]),
    (
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        &[400],
    ),
    ("Transfer-Encoding: identity", &[400, 501]),
    ("Transfer-Encoding: \x0bchunked", &[400]),
    (
        "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        &[400, 501],
    ),
    ("Transfer-Encoding: chunked;a=b", &[400, 501]),
    ("Transfer-Encoding : chunked", &[400]),
    ("Transfer-Encoding:", &[400]),
];

// F02
#[test]
fn odd_codings_with_a_length_are_refused() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let body = format!("0\r\n\r\n{SMUGGLED}");
    for (coding, _) in CODINGS {
        let fields = format!("Content-Length: 5\r\n{coding}");
        refused(&proxy, &post(&fields, &body), &[400]);
    }
    nothing_got_through(&proxy, &mock);
}

// F02
#[test]
fn odd_codings_alone_are_refused_and_plain_ones_are_made_anew() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    for (coding, statuses) in CODINGS
        .iter()
        .filter(|(_, statuses)| !statuses.contains(&200))
    {
        refused(
            &proxy,
            &post(coding, &format!("0\r\n\r\n{SMUGGLED}")),
            statuses,
        );
    }
    assert_eq!(mock.requests().len(), 0);
    assert!(!mock.saw("/smuggled"));
    for (coding, _) in CODINGS.iter().filter(|(_, statuses)| *statuses == [200]) {
        let answer = proxy.exchange(post(coding, "2\r\n{}\r\n0\r\n\r\n"));
        assert_eq!(answer.status, 200, "{coding:?}");
        let seen = mock.requests().pop().expect("a request");
        assert_eq!(seen.text(), "{}");
        let framing =
            seen.fields.has("content-length") as u8 + seen.fields.has("transfer-encoding") as u8;
        assert_eq!(framing, 1, "{}", seen.head);
        if let Some(coding) = seen.fields.get("transfer-encoding") {
            assert_eq!(coding, "chunked");
        }
    }
}

// F03
#[test]
fn an_http10_request_is_never_framed_by_coding_or_by_the_close() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .http("keep_alive_idle = \"1s\"")
        .start();
    let head = "POST /v1/completions HTTP/1.0\r\nHost: lb.test\r\nConnection: keep-alive\r\n";
    let coded = format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n{SMUGGLED}");
    refused(&proxy, &coded, &[400]);
    assert!(mock.requests().is_empty());

    let mut client = proxy.client();
    client.send(format!("{head}\r\n{SMUGGLED}"));
    client.read_to_end();
    let seen = mock.requests();
    assert_eq!(seen[0].target, "/v1/completions");
    assert_eq!(seen[0].fields.get("content-length"), Some("0"));
    assert!(seen[0].body.is_empty());
    // Then the GET is a request of its own, or it was dropped with the connection.
    assert!(seen.len() <= 2);
    assert!(
        seen.get(1)
            .is_none_or(|r| r.head.starts_with("GET /smuggled HTTP/1.1\r\n"))
    );
}

// F05
const SIZES: [&str; 13] = [
    "1x",
    "0x1",
    "0_0",
    "+1",
    "-1",
    " 1",
    "1 ",
    "",
    "1zzzz",
    "FFFFFFFFFFFFFFFFF",
    "1 ;x",
    "5\0",
    "\t5",
];

// F05, F06
const BROKEN_BODIES: [&str; 8] = [
    "5\nhello\r\n0\r\n\r\n",
    "5;a\nb\r\nhello\r\n0\r\n\r\n",
    "5\r\nhelloXXX\r\n0\r\n\r\n",
    "5\r\nhello0\r\n\r\n",
    "5\r\nhello\r\n0\r\n\n",
    "5\r\nhello\n0\r\n\r\n",
    "5\r\nhello\r\n0\r\nA: b\n\r\n",
    "5\r\nhello\r\n0\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
];

// F05, F06
#[test]
fn broken_chunks_of_a_request_are_refused() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let sizes = SIZES
        .iter()
        .map(|size| format!("{size}\r\nhello\r\n0\r\n\r\n"));
    for body in sizes.chain(BROKEN_BODIES.map(String::from)) {
        refused(
            &proxy,
            &post("Transfer-Encoding: chunked", &(body + SMUGGLED)),
            &[400],
        );
    }
    nothing_got_through(&proxy, &mock);
}

// F05
#[test]
fn a_chunk_over_32_bits_meets_the_body_limit_uncut() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let body = format!("100000005\r\nhello\r\n0\r\n\r\n{SMUGGLED}");
    refused(&proxy, &post("Transfer-Encoding: chunked", &body), &[413]);
    nothing_got_through(&proxy, &mock);
}

// F05, F06
#[test]
fn broken_chunks_of_a_response_never_end_cleanly() {
    let sizes = SIZES
        .iter()
        .map(|size| format!("{size}\r\nhello\r\n0\r\n\r\n"));
    let bodies: Vec<String> = sizes.chain(BROKEN_BODIES.map(String::from)).collect();
    let replies = bodies.clone();
    let mock = Mock::answer(move |request| {
        let at: usize = request.target[1..].parse().expect("a number");
        Reply::raw(format!(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{}",
            replies[at]
        ))
    });
    let proxy = Config::new(&[&mock]).start();
    for (at, body) in bodies.iter().enumerate() {
        let mut client = proxy.client();
        client.send(request("GET", &format!("/{at}"), &[], ""));
        let head = client.read_head();
        if head.status == 200 {
            let rest = client.read_to_end();
            assert!(
                !rest.ends_with(b"0\r\n\r\n"),
                "{body:?} came as {}",
                rest.escape_ascii()
            );
        } else {
            assert_eq!(head.status, 502, "{body:?}");
        }
    }
    assert_eq!(mock.requests().len(), bodies.len(), "nothing was replayed");
    proxy.wait_idle();
}

/// Heads of responses that two recipients could frame differently.
// F01, F02 for the other direction
#[test]
fn ambiguous_response_heads_are_not_relayed() {
    const HEADS: [&str; 8] = [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "HTTP/1.1 2x0 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/2 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "hello\r\n\r\n",
    ];
    let mock = Mock::answer(|request| {
        Reply::Close(HEADS[request.target[1..].parse::<usize>().expect("a number")].into())
    });
    let proxy = Config::new(&[&mock]).start();
    for (at, head) in HEADS.iter().enumerate() {
        let answer = proxy.exchange(request("POST", &format!("/{at}"), &[], "{}"));
        assert_eq!(answer.status, 502, "{head:?}");
        answer.error_code();
    }
    proxy.wait_failures("bad_response", HEADS.len());
    assert_eq!(mock.requests().len(), HEADS.len(), "nothing was replayed");
}

// F08
#[test]
fn an_upgrade_is_not_tunnelled() {
    let mock = Mock::ok("ok");
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    let upgrade = request(
        "GET",
        "/v1/models",
        &["Connection: Upgrade", "Upgrade: websocket"],
        "",
    );
    client.send(upgrade + SMUGGLED);
    assert_eq!(client.read_response().text(), "ok");
    assert_eq!(client.read_response().text(), "ok");
    let seen = mock.requests();
    assert_eq!(
        [&*seen[0].target, &*seen[1].target],
        ["/v1/models", "/smuggled"]
    );
    assert!(!seen[0].fields.has("upgrade"), "{}", seen[0].head);
    assert!(seen[0].body.is_empty());
}

// F08
#[test]
fn an_unasked_101_is_a_bad_response() {
    let mock = Mock::answer(|_| {
        Reply::raw("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
    });
    let proxy = Config::new(&[&mock]).start();
    let answer = proxy.exchange(request("GET", "/v1/models", &[], ""));
    assert_eq!(answer.status, 502);
    answer.error_code();
}

/// One answer came; what follows it is the body, and no request.
#[track_caller]
fn one_answer(client: &mut Client, status: u16) {
    let answer = client.read_response();
    assert_eq!(answer.status, status);
    let rest = client.read_to_end();
    assert!(rest.is_empty(), "{}", rest.escape_ascii());
}

// F09
#[test]
fn the_body_of_a_request_answered_here_is_no_request() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .http("body_bytes = 20")
        .http("keep_alive_idle = \"1s\"")
        .start();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: lb.test\r\nContent-Length: {}\r\n\r\n",
        SMUGGLED.len()
    );
    let mut client = proxy.client();
    client.send(head.clone() + SMUGGLED);
    one_answer(&mut client, 413);

    let mut client = proxy.client();
    client.send(&head);
    let answer = client.read_response();
    assert_eq!(answer.status, 413);
    client.try_send(SMUGGLED);
    let rest = client.read_to_end();
    assert!(rest.is_empty(), "{}", rest.escape_ascii());
    nothing_got_through(&proxy, &mock);
}

// F11
#[test]
fn host_is_one_and_agrees_with_the_target() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    refused(&proxy, "GET /v1/models HTTP/1.1\r\n\r\n", &[400]);
    refused(
        &proxy,
        "GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        &[400],
    );
    refused(
        &proxy,
        "GET /v1/models HTTP/1.1\r\nHost: a b\r\n\r\n",
        &[400],
    );
    refused(
        &proxy,
        "GET /v1/models HTTP/1.1\r\nHost: a,b\r\n\r\n",
        &[400],
    );
    assert!(mock.requests().is_empty());

    let answer =
        proxy.exchange("GET http://other.test/v1/models?a=b HTTP/1.1\r\nHost: lb.test\r\n\r\n");
    if answer.status == 200 {
        let seen = mock.requests().pop().expect("a request");
        assert_eq!(seen.target, "/v1/models?a=b");
        assert_ne!(seen.fields.get("host"), Some("lb.test"));
        assert!(seen.fields.has("host"));
    } else {
        assert_eq!(answer.status, 400);
    }

    let answer = proxy.exchange("GET /v1/models HTTP/1.0\r\n\r\n");
    assert_eq!(answer.status, 200);
    let seen = mock.requests().pop().expect("a request");
    assert!(
        seen.head.starts_with("GET /v1/models HTTP/1.1\r\n"),
        "{}",
        seen.head
    );
    assert!(seen.fields.has("host"), "{}", seen.head);
}

/// Two requests that can be told apart by their bodies.
fn pair() -> [String; 2] {
    ["one", "two"].map(|word| {
        request(
            "POST",
            "/v1/completions",
            &[],
            &format!("{{\"model\":\"m\",\"prompt\":\"{word}\"}}"),
        )
    })
}

// F12
#[test]
fn pipelined_requests_are_answered_in_order() {
    let gate = crate::harness::Gate::new();
    let hold = gate.clone();
    let mock = Mock::answer(move |request| {
        if request.text().contains("one") {
            hold.pass();
        }
        Reply::ok(&request.body)
    });
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send(pair().concat());
    mock.wait_requests(1);
    gate.open();
    assert!(client.read_response().text().contains("one"));
    assert!(client.read_response().text().contains("two"));
}

// F12
#[test]
fn a_pipelined_pair_may_be_cut_anywhere() {
    let mock = Mock::answer(|request| Reply::ok(&request.body));
    let proxy = Config::new(&[&mock]).start();
    let both = pair().concat();
    let bodies = [
        "{\"model\":\"m\",\"prompt\":\"one\"}",
        "{\"model\":\"m\",\"prompt\":\"two\"}",
    ];
    for cut in 1..both.len() {
        let mut client = proxy.client();
        client.send(&both[..cut]);
        client.send(&both[cut..]);
        for body in bodies {
            assert_eq!(client.read_response().text(), body, "cut at {cut}");
        }
    }
    for seen in mock.requests().chunks(2) {
        assert_eq!([seen[0].text(), seen[1].text()], bodies);
    }
    proxy.wait_idle();
}

// F14
#[test]
fn requests_without_a_body_stay_without() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    for (line, length) in [
        (
            "POST /reset_prefix_cache HTTP/1.1\r\nHost: lb.test\r\nContent-Length: 0",
            Some("0"),
        ),
        (
            "POST /reset_prefix_cache HTTP/1.1\r\nHost: lb.test",
            Some("0"),
        ),
        ("GET /v1/models HTTP/1.1\r\nHost: lb.test", None),
        ("DELETE /v1/files/a HTTP/1.1\r\nHost: lb.test", None),
    ] {
        assert_eq!(
            proxy.exchange(format!("{line}\r\n\r\n")).status,
            200,
            "{line}"
        );
        let seen = mock.requests().pop().expect("a request");
        assert_eq!(seen.fields.get("content-length"), length, "{}", seen.head);
        assert!(!seen.fields.has("transfer-encoding"), "{}", seen.head);
    }
}

// F16
#[test]
fn large_heads_pass_up_to_the_limit() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let with_token = |n: usize| {
        request(
            "GET",
            "/v1/models",
            &[&format!("Authorization: Bearer {}", "A".repeat(n))],
            "",
        )
    };
    assert_eq!(proxy.exchange(with_token(16384)).status, 200);
    let seen = mock.requests().pop().expect("a request");
    assert_eq!(
        seen.fields.get("authorization").map(str::len),
        Some(7 + 16384)
    );
    refused(&proxy, &with_token(65536), &[431]);
    refused(
        &proxy,
        &request("GET", &format!("/{}", "a".repeat(70_000)), &[], ""),
        &[414],
    );
    let many: Vec<String> = (0..2000).map(|i| format!("X-{i}: 1")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    refused(&proxy, &request("GET", "/v1/models", &many, ""), &[431]);
    let few: Vec<&str> = many[..97].to_vec();
    assert_eq!(
        proxy
            .exchange(request("GET", "/v1/models", &few, ""))
            .status,
        200
    );
    refused(
        &proxy,
        &request("GET", "/v1/models", &many[..101], ""),
        &[431],
    );
    assert_eq!(mock.requests().len(), 2);
}

// F16
#[test]
fn a_head_that_trickles_over_the_limit_is_refused() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).http("head_bytes = \"8KiB\"").start();
    let mut client = proxy.client();
    client.send("GET / HTTP/1.1\r\nHost: lb.test\r\nX-Long: ");
    // In small writes, and on after the answer must have been written.
    for _ in 0..100 {
        if !client.try_send("a".repeat(100)) {
            break;
        }
    }
    assert_eq!(client.read_response().status, 431);
    client.read_to_end();
    assert!(mock.requests().is_empty());
}

// F16
#[test]
fn an_oversized_response_head_is_a_bad_response() {
    let mock = Mock::answer(|_| {
        let long = "a".repeat(70_000);
        Reply::raw(format!(
            "HTTP/1.1 200 OK\r\nX-Long: {long}\r\nContent-Length: 0\r\n\r\n"
        ))
    });
    let proxy = Config::new(&[&mock]).start();
    let answer = proxy.exchange(request("GET", "/v1/models", &[], ""));
    assert_eq!(answer.status, 502);
    answer.error_code();
}

/// Line ends and bytes that some recipients take for others.
#[test]
fn malformed_heads_are_refused() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    for head in [
        "GET / HTTP/1.1\r\nHost: lb.test\r\nA: b\rc\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nA: b\r\n c\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\n A: b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nA: b\0c\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nA b: c\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\n: c\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nnocolon\r\n\r\n",
        "G{T / HTTP/1.1\r\nHost: lb.test\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: lb.test\r\n\r\n",
        "GET /\x01 HTTP/1.1\r\nHost: lb.test\r\n\r\n",
        "GET /#a HTTP/1.1\r\nHost: lb.test\r\n\r\n",
        "GET nopath HTTP/1.1\r\nHost: lb.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nContent-Length: -1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nContent-Length: 1_0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: lb.test\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n",
    ] {
        refused(&proxy, head, &[400, 413]);
    }
    for head in [
        "GET / HTTP/2.0\r\nHost: lb.test\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        refused(&proxy, head, &[400, 505]);
    }
    assert_eq!(mock.requests().len(), 0);
}
