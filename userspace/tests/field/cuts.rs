//! Messages cut into reads at every place there is: where bytes are split over segments changes nothing.

use crate::harness::{Config, Mock, Reply, request};

/// Answers in every framing, with the body that a client must see.
const ANSWERS: [(&str, &str); 4] = [
    (
        "HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 5\r\n\r\nhello",
        "hello",
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n5;e=1\r\nhello\r\nb\r\n, and more.\r\n0\r\nX: 1\r\n\r\n",
        "hello, and more.",
    ),
    (
        "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "ok",
    ),
    ("HTTP/1.1 204 No Content\r\nX-Kept: yes\r\n\r\n", ""),
];

/// A backend that cuts answer `/A/AT` at byte AT, the second part only once the first one was written.
fn cutting() -> Mock {
    Mock::script(|conn| {
        while let Some(request) = conn.read_request() {
            let mut numbers = request
                .target
                .split('/')
                .skip(1)
                .map(|n| n.parse::<usize>());
            let (Some(Ok(answer)), Some(Ok(at))) = (numbers.next(), numbers.next()) else {
                return;
            };
            let bytes = ANSWERS[answer].0.as_bytes();
            if !conn.send(&bytes[..at]) {
                return;
            }
            // Lets the other side read; whether it did changes nothing about what must come out.
            std::thread::yield_now();
            if !conn.send(&bytes[at..]) {
                return;
            }
        }
    })
}

#[test]
fn answers_may_be_cut_anywhere() {
    let mock = cutting();
    let proxy = Config::new(&[&mock]).start();
    for http10 in [false, true] {
        for (n, (wire, body)) in ANSWERS.iter().enumerate() {
            let mut client = proxy.client();
            for at in 1..wire.len() {
                let mut asked = request(
                    "GET",
                    &format!("/{n}/{at}"),
                    &["Connection: keep-alive"],
                    "",
                );
                if http10 {
                    asked = asked.replace("HTTP/1.1", "HTTP/1.0");
                    client = proxy.client();
                }
                client.send(asked);
                let mut answer = client.read_head();
                while answer.status < 200 {
                    assert!(!http10 && answer.status == 103, "{}", answer.head);
                    answer = client.read_head();
                }
                let text = if answer.fields.has("transfer-encoding") {
                    let mut all = Vec::new();
                    while let Some(data) = client.read_chunk() {
                        all.extend(data);
                    }
                    assert_eq!(client.read_trailers().get("x"), Some("1"));
                    all
                } else if let Some(length) = answer.fields.get("content-length") {
                    client.read_n(length.parse().expect("a number"))
                } else if answer.status == 204 {
                    Vec::new()
                } else {
                    client.read_to_end()
                };
                assert_eq!(
                    String::from_utf8_lossy(&text),
                    *body,
                    "answer {n} cut at {at}"
                );
            }
        }
    }
    assert!(proxy.failures("bad_response") + proxy.failures("upstream_truncated") == 0.0);
    proxy.wait_idle();
}

#[test]
fn a_broken_answer_is_broken_wherever_it_is_cut() {
    const BROKEN: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5x\r\nworld\r\n0\r\n\r\n";
    let mock = Mock::script(|conn| {
        while let Some(request) = conn.read_request() {
            let at: usize = request.target[1..].parse().expect("a number");
            conn.send(&BROKEN[..at]);
            std::thread::yield_now();
            conn.send(&BROKEN[at..]);
        }
    });
    let proxy = Config::new(&[&mock]).start();
    for at in 1..BROKEN.len() {
        let mut client = proxy.client();
        client.send(request("GET", &format!("/{at}"), &[], ""));
        let all = client.read_to_end();
        let text = String::from_utf8_lossy(&all);
        assert!(
            !text.contains("world") && !text.ends_with("\r\n0\r\n\r\n"),
            "cut at {at}: {text}"
        );
    }
    proxy.wait_idle();
}

#[test]
fn chunked_requests_may_be_cut_anywhere() {
    let mock = Mock::answer(|request| Reply::ok(&request.body));
    let proxy = Config::new(&[&mock]).start();
    let chunked = "POST /v1/completions HTTP/1.1\r\nHost: lb.test\r\nContent-Type: application/json\r\n\
                   Transfer-Encoding: chunked\r\n\r\n8;a=\"b\"\r\n{\"prompt\r\n6\r\n\":\"x\"}\r\n0\r\nX: 1\r\n\r\n";
    let both = chunked.to_string() + &request("GET", "/second", &[], "");
    let mut client = proxy.client();
    for at in 1..both.len() {
        client.send(&both[..at]);
        std::thread::yield_now();
        client.send(&both[at..]);
        assert_eq!(
            client.read_response().text(),
            "{\"prompt\":\"x\"}",
            "cut at {at}"
        );
        assert_eq!(client.read_response().text(), "", "cut at {at}");
    }
    let raw: Vec<String> = mock
        .requests()
        .iter()
        .filter(|r| r.method == "POST")
        .map(|r| String::from_utf8_lossy(&r.raw_body).into_owned())
        .collect();
    let sent = &chunked[chunked.find("\r\n\r\n").expect("a head") + 4..];
    assert!(raw.iter().all(|body| body == sent), "{raw:?}");
    proxy.wait_idle();
}

// A small chunk of a large body every time: what is kept of one read must not get lost before the next.
#[test]
fn a_long_upload_and_a_long_answer_keep_every_byte() {
    let mock = Mock::script(|conn| {
        while let Some(mut request) = conn.read_head() {
            // Reads late, so that the proxy must hold bytes back, and answers with what it got.
            std::thread::yield_now();
            if conn.read_body(&mut request).is_none() {
                return;
            }
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                request.body.len()
            );
            conn.send(head);
            for part in request.body.chunks(1013) {
                conn.send(part);
            }
        }
    });
    let proxy = Config::new(&[&mock]).start();
    let body: String = (0..400_000u32)
        .map(|i| char::from(b'a' + (i.wrapping_mul(i) / 7 % 26) as u8))
        .collect();
    let mut client = proxy.client();
    for _ in 0..3 {
        let mut sender = client.sender();
        let whole = request("POST", "/echo", &[], &body);
        let upload = std::thread::spawn(move || {
            for part in whole.as_bytes().chunks(4099) {
                std::io::Write::write_all(&mut sender, part).expect("prefixlb takes bytes");
            }
        });
        assert!(
            client.read_response().text() == body,
            "bytes changed on the way"
        );
        upload.join().expect("the upload ends");
    }
    proxy.wait_idle();
}
