//! What is passed on and what is not; clients of HTTP/1.0; refusals and their shape; slow and bad clients.

use std::time::{Duration, Instant};

use crate::harness::{Client, Config, Gate, Mock, Proxy, Reply, eventually, request};

// Hop-by-hop fields end here, both ways (RFC 9110 section 7.6.1).
#[test]
fn connection_fields_stay_on_their_connection() {
    let mock = Mock::answer(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nConnection: X-Resp-Hop, keep-alive\r\nKeep-Alive: timeout=5\r\nX-Resp-Hop: 1\r\n\
             Proxy-Connection: keep-alive\r\nUpgrade: h2c\r\nX-Kept: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\
             Content-Length: 2\r\n\r\nok",
        )
    });
    let proxy = Config::new(&[&mock]).start();
    let answer = proxy.exchange(request(
        "GET",
        "/",
        &[
            "Connection: x-hop , X-Other",
            "Connection: x-third",
            "X-Hop: 1",
            "x-other: 2",
            "X-Third: 3",
            "Keep-Alive: timeout=9",
            "Proxy-Connection: keep-alive",
            "TE: trailers",
            "Upgrade: websocket",
            "X-Kept: a",
            "X-Kept: b",
            "Accept: text/event-stream",
        ],
        "",
    ));
    let seen = mock.requests().pop().expect("a request");
    for gone in [
        "x-hop",
        "x-other",
        "x-third",
        "keep-alive",
        "proxy-connection",
        "te",
        "upgrade",
    ] {
        assert!(!seen.fields.has(gone), "{gone} in {}", seen.head);
    }
    assert!(
        seen.fields
            .get("connection")
            .is_none_or(|c| c == "keep-alive"),
        "{}",
        seen.head
    );
    assert_eq!(seen.fields.all("x-kept"), ["a", "b"]);
    assert_eq!(seen.fields.get("accept"), Some("text/event-stream"));
    for gone in ["x-resp-hop", "keep-alive", "proxy-connection", "upgrade"] {
        assert!(!answer.fields.has(gone), "{gone} in {}", answer.head);
    }
    assert_eq!(answer.fields.get("x-kept"), Some("2"));
    assert_eq!(answer.fields.all("set-cookie"), ["a=1", "b=2"]);
}

// Naming an end-to-end field in Connection must not take away what the exchange stands on.
#[test]
fn connection_cannot_name_away_framing_or_host() {
    let mock = Mock::answer(|request| Reply::ok(&request.body));
    let proxy = Config::new(&[&mock]).start();
    let fields = ["Connection: content-length, host, x-forwarded-for, x-request-id"];
    let answer = proxy.exchange(request("POST", "/v1/completions", &fields, "{\"a\":1}"));
    assert_eq!(answer.text(), "{\"a\":1}");
    let seen = mock.requests().pop().expect("a request");
    for kept in ["host", "content-length", "x-forwarded-for", "x-request-id"] {
        assert!(seen.fields.has(kept), "{kept} in {}", seen.head);
    }
}

#[test]
fn the_client_is_named_to_the_backend() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    proxy.exchange(request("GET", "/", &[], ""));
    proxy.exchange(request(
        "GET",
        "/",
        &[
            "X-Forwarded-For: 203.0.113.9",
            "X-Forwarded-Proto: https",
            "X-Request-Id: abc-1",
        ],
        "",
    ));
    let seen = mock.requests();
    assert_eq!(seen[0].fields.get("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(seen[0].fields.get("x-forwarded-proto"), Some("http"));
    assert!(
        seen[0]
            .fields
            .get("x-request-id")
            .is_some_and(|id| id.len() >= 16)
    );
    assert_eq!(
        seen[1].fields.all("x-forwarded-for").join(", "),
        "203.0.113.9, 127.0.0.1"
    );
    assert_eq!(seen[1].fields.get("x-forwarded-proto"), Some("https"));
    assert_eq!(seen[1].fields.get("x-request-id"), Some("abc-1"));
}

#[test]
fn untrusted_forwarding_fields_are_replaced() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .http("trust_forwarded = false")
        .start();
    proxy.exchange(request(
        "GET",
        "/",
        &["X-Forwarded-For: 203.0.113.9", "X-Forwarded-Proto: https"],
        "",
    ));
    let seen = mock.requests().pop().expect("a request");
    assert_eq!(seen.fields.get("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(seen.fields.get("x-forwarded-proto"), Some("http"));
}

// Two fields of one list are one list (RFC 9110 section 5.3): neither may get lost.
#[test]
fn a_chain_of_forwarders_in_two_fields_is_kept_whole() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    proxy.exchange(request(
        "GET",
        "/",
        &[
            "X-Forwarded-For: 203.0.113.9",
            "X-Forwarded-For: 203.0.113.10",
        ],
        "",
    ));
    let seen = mock.requests().pop().expect("a request");
    let chain = seen.fields.all("x-forwarded-for").join(", ");
    assert_eq!(chain, "203.0.113.9, 203.0.113.10, 127.0.0.1");
}

#[test]
fn the_answer_names_backend_and_request() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let plain = proxy.exchange(request("GET", "/", &[], ""));
    assert_eq!(plain.backend(), "b0");
    let sent = mock.requests().pop().expect("a request");
    assert_eq!(
        plain.fields.get("x-request-id"),
        sent.fields.get("x-request-id")
    );
    assert!(
        !plain.fields.has("x-prefixlb-pick") && !plain.fields.has("via"),
        "{}",
        plain.head
    );
    let asked = proxy.exchange(request(
        "GET",
        "/",
        &["x-prefixlb-debug: 1", "X-Request-Id: mine"],
        "",
    ));
    assert!(asked.fields.has("x-prefixlb-pick"), "{}", asked.head);
    assert_eq!(asked.fields.get("x-request-id"), Some("mine"));
}

#[test]
fn via_and_pick_are_added_by_setting() {
    let mock = Mock::answer(|_| {
        Reply::raw("HTTP/1.1 200 OK\r\nVia: 1.1 engine\r\nContent-Length: 0\r\n\r\n")
    });
    let proxy = Config::new(&[&mock])
        .http("via = true\npick_header = true")
        .start();
    let answer = proxy.exchange(request("GET", "/", &["Via: 1.0 edge"], ""));
    assert!(answer.fields.has("x-prefixlb-pick"));
    assert!(
        answer
            .fields
            .all("via")
            .join(", ")
            .starts_with("1.1 engine, 1.1 prefixlb"),
        "{}",
        answer.head
    );
    let seen = mock.requests().pop().expect("a request");
    assert!(
        seen.fields
            .all("via")
            .join(", ")
            .starts_with("1.0 edge, 1.1 prefixlb"),
        "{}",
        seen.head
    );
}

// A backend cannot forge what prefixlb says of itself.
#[test]
fn our_own_fields_from_a_backend_are_not_doubled() {
    let mock = Mock::answer(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nx-prefixlb-backend: forged\r\nX-Request-Id: engine-1\r\nContent-Length: 0\r\n\r\n",
        )
    });
    let proxy = Config::new(&[&mock]).start();
    let answer = proxy.exchange(request("GET", "/", &["X-Request-Id: mine"], ""));
    assert_eq!(answer.backend(), "b0");
    assert!(answer.fields.get("x-request-id").is_some());
}

#[test]
fn an_http10_client_gets_plain_bytes_and_a_close() {
    let mock = Mock::answer(|request| match request.target.as_str() {
        "/chunked" => Reply::raw(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nT: v\r\n\r\n",
        ),
        _ => Reply::ok("plain"),
    });
    let proxy = Config::new(&[&mock]).start();
    for (target, body) in [("/chunked", "hello!"), ("/length", "plain")] {
        let mut client = proxy.client();
        client.send(format!("GET {target} HTTP/1.0\r\n\r\n"));
        let answer = client.read_head();
        assert!(!answer.fields.has("transfer-encoding"), "{}", answer.head);
        assert!(
            !answer.head.to_lowercase().contains("keep-alive"),
            "{}",
            answer.head
        );
        assert_eq!(String::from_utf8_lossy(&client.read_to_end()), body);
        assert!(!client.was_reset);
    }
    assert_eq!(
        mock.connections(),
        1,
        "the backend's side is HTTP/1.1 all the same"
    );
}

#[test]
fn an_http10_client_may_keep_its_connection() {
    let mock = Mock::ok("ok");
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    for _ in 0..2 {
        client.send("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
        let answer = client.read_response();
        assert_eq!(answer.text(), "ok");
        assert!(
            answer
                .fields
                .get("connection")
                .is_some_and(|c| c.eq_ignore_ascii_case("keep-alive"))
        );
    }
}

// The de-chunked answer ends with the connection, so a cut one must not end like a whole one.
#[test]
fn a_cut_chunked_answer_is_broken_for_http10_too() {
    let mock = Mock::answer(|_| {
        Reply::Close(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n".to_vec(),
        )
    });
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send("GET / HTTP/1.0\r\n\r\n");
    client.read_to_end();
    assert!(client.was_reset, "a clean end of a cut answer");
}

#[test]
fn a_client_that_says_close_gets_it() {
    let mock = Mock::ok("ok");
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    let answer = client.exchange(request("GET", "/", &["Connection: close"], ""));
    assert_eq!(answer.fields.get("connection"), Some("close"));
    client.expect_end();
    let mut client = proxy.client();
    client
        .send(request("GET", "/", &["Connection: close"], "") + &request("GET", "/after", &[], ""));
    assert_eq!(client.read_response().text(), "ok");
    client.expect_end();
    assert!(!mock.saw("/after"));
}

#[test]
fn trailers_pass_both_ways() {
    let mock = Mock::answer(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 42\r\n\r\n",
        )
    });
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    for _ in 0..2 {
        let answer = client.exchange(
            "POST /v1/completions HTTP/1.1\r\nHost: lb.test\r\nTransfer-Encoding: chunked\r\n\r\n\
             2\r\n{}\r\n0\r\nX-Req-Sum: 7\r\n\r\n",
        );
        assert_eq!(answer.text(), "ok");
        assert_eq!(answer.trailers.get("x-sum"), Some("42"));
        let seen = mock.requests().pop().expect("a request");
        assert!(String::from_utf8_lossy(&seen.raw_body).ends_with("0\r\nX-Req-Sum: 7\r\n\r\n"));
    }
}

#[test]
fn every_refusal_has_its_status_and_shape() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .pool("models = [\"served\"]")
        .http("head_deadline = \"300ms\"\nbody_idle = \"300ms\"\nbody_bytes = 100")
        .start();
    let body = |model: &str| {
        request(
            "POST",
            "/v1/completions",
            &[],
            &format!("{{\"model\":\"{model}\"}}"),
        )
    };
    assert_eq!(proxy.exchange(body("served")).status, 200);
    let table: [(String, u16, &str); 9] = [
        ("GET / HTTP/1.1\r\n\r\n".into(), 400, "bad_request"),
        (body("unknown"), 404, "no_pool"),
        ("GET / HTTP/1.1\r\nHost: lb".into(), 408, "request_timeout"),
        (
            "POST / HTTP/1.1\r\nHost: lb.test\r\nContent-Length: 50\r\n\r\n{".into(),
            408,
            "request_timeout",
        ),
        (
            request("POST", "/", &[], &"a".repeat(101)),
            413,
            "body_too_large",
        ),
        (
            request("GET", &"/a".repeat(40_000), &[], ""),
            414,
            "target_too_long",
        ),
        (
            request("GET", "/", &[&format!("X: {}", "a".repeat(70_000))], ""),
            431,
            "head_too_large",
        ),
        (
            "POST / HTTP/1.1\r\nHost: lb.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n".into(),
            501,
            "not_implemented",
        ),
        (
            "GET / HTTP/3.0\r\nHost: lb.test\r\n\r\n".into(),
            505,
            "version_not_supported",
        ),
    ];
    for (bytes, status, code) in table {
        let before = proxy.failures(code);
        let answer = proxy.exchange(&bytes);
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (status, code),
            "{bytes:.60}"
        );
        eventually("it is counted", || proxy.failures(code) == before + 1.0);
    }
    assert_eq!(mock.requests().len(), 1);
    proxy.wait_idle();
}

// O02
#[test]
fn slow_heads_end_and_harm_nobody() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .http("head_deadline = \"1s\"\nbody_idle = \"1s\"\nkeep_alive_idle = \"1s\"")
        .start();
    let starts = [
        "GET / HTTP/1.1\r\nX-a: ",
        "POST /v1/completions HTTP/1.1\r\nHost: lb.test\r\nContent-Length: 1000000\r\n\r\n{\"prompt\":",
        "",
    ];
    let mut slow: Vec<Client> = Vec::new();
    for start in starts {
        for _ in 0..200 {
            let mut client = proxy.client();
            client.send(start);
            slow.push(client);
        }
    }
    // One byte now and then does not put the deadline off.
    for client in &mut slow[..200] {
        client.try_send("x");
    }
    for _ in 0..20 {
        let start = Instant::now();
        assert_eq!(
            proxy
                .exchange(request("POST", "/v1/completions", &[], "{}"))
                .status,
            200
        );
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    assert!(
        mock.requests().len() <= 20,
        "a stalled upload holds no backend"
    );
    for (i, client) in slow.iter_mut().enumerate() {
        let last = client.read_to_end();
        let text = String::from_utf8_lossy(&last);
        if i < 400 {
            assert!(
                text.is_empty() || text.starts_with("HTTP/1.1 408 "),
                "{text}"
            );
        } else {
            assert!(text.is_empty(), "{text}");
        }
    }
    eventually("their connections are gone", || {
        proxy.metric("prefixlb_client_connections_open", &[]) == 0.0
    });
    assert_eq!(mock.requests().len(), 20);
    proxy.wait_idle();
}

// O02
#[test]
fn a_head_deadline_counts_from_the_first_byte() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .http("head_deadline = \"700ms\"")
        .start();
    let mut client = proxy.client();
    let start = Instant::now();
    client.send("GET / HTTP/1.1\r\nX: ");
    while start.elapsed() < Duration::from_secs(20) && client.try_send("a") {
        if client.ends_within(Duration::from_millis(100)) {
            break;
        }
    }
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "dribbling put the deadline off"
    );
}

#[test]
fn a_stalled_upload_ends_and_frees_its_backend() {
    let mock = Mock::script(|conn| {
        if let Some(request) = conn.read_head() {
            conn.note(&request);
            conn.wait_end();
        }
    });
    let proxy = Config::new(&[&mock]).http("body_idle = \"300ms\"").start();
    let mut client = proxy.client();
    // Beyond the window, so that a backend has it already.
    let start = request("POST", "/x", &["Content-Length: 1000000"], "");
    client.send(start + &"a".repeat(100_000));
    mock.wait_requests(1);
    let answer = client.read_response();
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (408, "request_timeout")
    );
    mock.wait_closed();
    proxy.wait_idle();
}

#[test]
fn an_upload_broken_off_is_never_a_whole_request() {
    let mock = Mock::script(|conn| {
        while conn.read_request().is_some() {
            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    });
    let proxy = Config::new(&[&mock]).start();
    for framing in ["Content-Length: 200000", "Transfer-Encoding: chunked"] {
        let mut client = proxy.client();
        let start = request("POST", "/x", &[framing], "");
        let chunk = if framing.starts_with('C') {
            String::new()
        } else {
            "30d40\r\n".into()
        };
        client.send(start + &chunk + &"a".repeat(100_000));
        client.fin();
        client.read_to_end();
    }
    mock.wait_closed();
    assert!(mock.requests().is_empty());
    proxy.wait_idle();
}

/// A backend with an endless answer, and how much of it the proxy took.
fn pouring(total: usize) -> Mock {
    Mock::script(move |conn| {
        if conn.read_request().is_some() {
            conn.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {total}\r\n\r\n"
            ));
            let block = vec![b'a'; 256 << 10];
            for _ in 0..total / block.len() {
                if !conn.send(&block) {
                    return;
                }
            }
            conn.wait_end();
        }
    })
}

#[track_caller]
fn slow_reader(proxy: &Proxy) -> Client {
    let mut client = proxy.client();
    client.small_receive_buffer();
    client.send(request("GET", "/pour", &[], ""));
    assert_eq!(client.read_head().status, 200);
    client
}

// A client that does not read holds the backend up, and costs no memory here.
#[test]
fn a_slow_reader_is_backpressure_with_bounded_memory() {
    const TOTAL: usize = 200 << 20;
    let mock = pouring(TOTAL);
    let proxy = Config::new(&[&mock]).start();
    let before = proxy.resident_kib();
    let mut readers: Vec<Client> = (0..4).map(|_| slow_reader(&proxy)).collect();
    // Others are served meanwhile.
    for _ in 0..20 {
        assert_eq!(
            proxy
                .client()
                .exchange(request("GET", "/nopool", &[], "").replace("HTTP/1.1", "HTTP/3.0"))
                .status,
            505
        );
    }
    let grown = proxy.resident_kib().saturating_sub(before);
    assert!(
        grown < 16 << 10,
        "{grown} KiB more for four stalled answers"
    );
    // And the one that reads on gets every byte.
    let mut reader = readers.pop().expect("a reader");
    drop(readers);
    let mut got = 0;
    while got < TOTAL {
        got += reader.read_some().expect("more").len();
    }
    assert_eq!(got, TOTAL);
    let grown = proxy.resident_kib().saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB more");
    mock.wait_requests(4);
    drop(reader);
    proxy.wait_idle();
}

#[test]
fn a_client_that_never_reads_is_given_up() {
    let mock = pouring(200 << 20);
    let proxy = Config::new(&[&mock]).http("body_idle = \"300ms\"").start();
    let reader = slow_reader(&proxy);
    mock.wait_closed();
    proxy.wait_failures("client_stalled", 1);
    proxy.wait_idle();
    drop(reader);
}

// Chunked bodies too large for the window, with a key: the same bytes at the backend.
#[test]
fn a_chunked_upload_passes_byte_for_byte() {
    let mock = Mock::answer(|request| Reply::ok(request.body.len().to_string()));
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    let mut wire = Vec::new();
    for i in 0..3000usize {
        let data = vec![b'a' + (i % 26) as u8; i % 37 + 1];
        wire.extend(format!("{:X};n={i}\r\n", data.len()).bytes());
        wire.extend(data);
        wire.extend(b"\r\n");
    }
    wire.extend(b"0\r\nSum: 1\r\n\r\n");
    let head = request(
        "POST",
        "/v1/chat/completions",
        &["Transfer-Encoding: chunked"],
        "",
    );
    for part in [1, 7, 1000, 65_536] {
        client.send(&head);
        for piece in wire.chunks(part).take(2000) {
            client.send(piece);
        }
        let sent = (part * 2000).min(wire.len());
        client.send(&wire[sent..]);
        assert_eq!(client.read_response().status, 200);
        let seen = mock.requests().pop().expect("a request");
        assert!(seen.raw_body == wire, "the chunks changed on the way");
    }
}

#[test]
fn many_pipelined_requests_are_answered_in_order() {
    let mock = Mock::answer(|request| Reply::ok(&request.target));
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    let all: String = (0..200)
        .map(|i| request("GET", &format!("/{i}"), &[], ""))
        .collect();
    client.send(all);
    for i in 0..200 {
        assert_eq!(client.read_response().text(), format!("/{i}"));
    }
    proxy.wait_idle();
}

// A client that pipelines without end while its answer is pending is not read without end.
#[test]
fn a_pipelining_client_is_held_up_too() {
    let gate = Gate::new();
    let hold = gate.clone();
    let mock = Mock::answer(move |request| {
        if request.target == "/hold" {
            hold.pass();
        }
        Reply::ok("ok")
    });
    let proxy = Config::new(&[&mock]).start();
    let before = proxy.resident_kib();
    let mut client = proxy.client();
    client.send(request("GET", "/hold", &[], ""));
    mock.wait_requests(1);
    let sender = client.sender();
    sender.set_nonblocking(true).expect("non-blocking");
    let one = request(
        "GET",
        "/more",
        &[&format!("X-Pad: {}", "a".repeat(8000))],
        "",
    );
    let mut sent = 0usize;
    let block = one.repeat(100);
    while sent < 64 << 20 {
        match std::io::Write::write(&mut &sender, &block.as_bytes()[sent % one.len()..]) {
            Ok(n) => sent += n,
            Err(_) => break,
        }
    }
    assert!(sent < 64 << 20, "everything was taken in");
    let grown = proxy.resident_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB more");
    sender.set_nonblocking(false).expect("blocking");
    gate.open();
    let whole = sent / one.len();
    assert_eq!(client.read_response().text(), "ok");
    for _ in 0..whole {
        assert_eq!(client.read_response().text(), "ok");
    }
}
