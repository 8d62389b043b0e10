//! Interim answers, early answers, answers without a body, and methods nobody thought of.

use std::io::Write;

use crate::harness::{
    Client, Config, Mock, PATIENCE, Proxy, Reply, dead_address, eventually, request,
};

const CHAT: &str = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";

fn expecting(version: &str) -> String {
    format!(
        "POST /v1/chat/completions HTTP/{version}\r\nHost: lb.test\r\nContent-Type: application/json\r\n\
         Expect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        CHAT.len()
    )
}

/// A backend that says 100 to everybody, asked or not, as some do.
fn eager() -> Mock {
    Mock::script(|conn| {
        while let Some(mut request) = conn.read_head() {
            conn.send("HTTP/1.1 100 Continue\r\n\r\n");
            if conn.read_body(&mut request).is_none() {
                return;
            }
            conn.note(&request);
            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    })
}

#[track_caller]
fn sent_on_without_expect(mock: &Mock) {
    let seen = mock.requests().pop().expect("a request");
    assert!(!seen.fields.has("expect"), "{}", seen.head);
    assert_eq!(seen.text(), CHAT);
}

// I01
#[test]
fn a_client_that_waits_for_100_gets_exactly_one() {
    let mock = eager();
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    for _ in 0..2 {
        client.send(expecting("1.1"));
        assert_eq!(client.read_head().status, 100);
        client.send(CHAT);
        let answer = client.read_response();
        assert_eq!((answer.status, answer.text().as_str()), (200, "ok"));
        sent_on_without_expect(&mock);
    }
}

// I01
#[test]
fn a_client_that_does_not_wait_for_100_gets_at_most_one() {
    let mock = eager();
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send(expecting("1.1") + CHAT);
    let mut answer = client.read_head();
    if answer.status == 100 {
        answer = client.read_head();
    }
    assert_eq!(answer.status, 200);
    client.expect("ok");
    sent_on_without_expect(&mock);
}

// I01
#[test]
fn an_http10_client_gets_no_100() {
    let mock = eager();
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send(expecting("1.0") + CHAT);
    assert_eq!(client.read_response().text(), "ok");
    sent_on_without_expect(&mock);
}

// I01
#[test]
fn without_a_backend_the_answer_is_final_at_once() {
    let proxy = no_backend();
    let mut client = proxy.client();
    client.send(expecting("1.1"));
    let answer = client.read_response();
    assert_eq!(answer.status, 503);
    assert!(answer.fields.has("retry-after"), "{}", answer.head);
    answer.error_code();
}

// A14, I01
/// A pool whose only backend is known to be down.
pub fn no_backend() -> Proxy {
    let proxy = Config::default()
        .backend(dead_address(), "")
        .health("interval = \"50ms\"\nfall = 1\npanic = false")
        .launch();
    eventually("the backend is out", || {
        proxy.metric("prefixlb_backend_healthy", &[]) == 0.0
    });
    proxy
}

// I01
#[test]
fn an_unknown_expectation_is_answered_or_ignored_but_never_hangs() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let answer = proxy.exchange(request("POST", "/x", &["Expect: miracles"], "{}"));
    assert!([200, 400, 417].contains(&answer.status), "{}", answer.head);
}

#[test]
fn early_hints_pass_to_http11_clients_only() {
    let mock = Mock::answer(|_| {
        Reply::raw(
            "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        )
    });
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send(request("GET", "/", &[], ""));
    let hints = client.read_head();
    assert_eq!(
        (hints.status, hints.fields.get("link")),
        (103, Some("</a>"))
    );
    assert_eq!(client.read_response().text(), "ok");

    let mut old = proxy.client();
    old.send("GET / HTTP/1.0\r\n\r\n");
    assert_eq!(old.read_response().text(), "ok");
}

// I02
#[test]
fn an_early_answer_to_an_upload_reaches_the_client() {
    const BODY: usize = 20 << 20;
    let mock = Mock::script(|conn| {
        let Some(request) = conn.read_head() else {
            return;
        };
        conn.note(&request);
        if request.method == "GET" {
            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            conn.wait_end();
            return;
        }
        conn.discard(64 << 10);
        conn.send("HTTP/1.1 413 Content Too Large\r\nContent-Length: 7\r\nConnection: close\r\n\r\ntoo big");
        // Closing with unread data sends a RST right behind the answer.
        conn.reset();
    });
    let proxy = Config::new(&[&mock]).start();
    for _ in 0..3 {
        let mut client = proxy.client();
        let mut sender = client.sender();
        let upload = std::thread::spawn(move || {
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nHost: lb.test\r\nContent-Type: application/json\r\n\
                 Content-Length: {BODY}\r\n\r\n{{\"model\":\"m\",\"x\":\""
            );
            let mut sent = sender.write_all(head.as_bytes()).is_ok();
            for _ in 0..BODY / (64 << 10) {
                sent = sent && sender.write_all(&[b'a'; 64 << 10]).is_ok();
            }
        });
        let answer = client.read_response();
        assert_eq!((answer.status, answer.text().as_str()), (413, "too big"));
        drop(client);
        upload.join().expect("the upload ends");
    }
    assert_eq!(proxy.exchange(request("GET", "/", &[], "")).text(), "ok");
    assert_eq!(
        mock.connections(),
        4,
        "a connection with half an upload was used again"
    );
    assert_eq!(
        proxy.failures("connect_failed") + proxy.failures("backend_closed"),
        0.0
    );
    proxy.wait_idle();
}

/// Two exchanges on one connection: the second shows that the first one's end was seen right.
#[track_caller]
fn reused_cleanly(client: &mut Client) {
    client.send(request("GET", "/after", &[], ""));
    let after = client.read_response();
    assert_eq!((after.status, after.text().as_str()), (200, "after"));
}

// I04
#[test]
fn answers_without_a_body_end_at_their_head() {
    let mock = Mock::answer(|request| match request.target.as_str() {
        "/length" => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 1192\r\n\r\n"),
        "/chunked" => Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        "/204" => Reply::raw("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n"),
        "/304" => Reply::raw("HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"),
        _ => Reply::ok("after"),
    });
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    for (method, target, status, length) in [
        ("HEAD", "/length", 200, Some("1192")),
        ("HEAD", "/chunked", 200, None),
        ("GET", "/204", 204, None),
        ("GET", "/304", 304, Some("9")),
    ] {
        client.send(request(method, target, &[], ""));
        let answer = client.read_head();
        assert_eq!(answer.status, status, "{target}");
        if target == "/304" {
            assert!([None, length].contains(&answer.fields.get("content-length")));
        } else {
            assert_eq!(answer.fields.get("content-length"), length, "{target}");
        }
        if status == 204 {
            assert!(!answer.fields.has("transfer-encoding"), "{}", answer.head);
        }
        reused_cleanly(&mut client);
    }
    assert_eq!(
        mock.connections(),
        1,
        "the backend's connection was kept as well"
    );
}

// I04
#[test]
fn a_failure_answered_to_head_has_no_body() {
    let proxy = no_backend();
    let mut client = proxy.client();
    client.send(request("HEAD", "/v1/models", &["Connection: close"], ""));
    assert_eq!(client.read_head().status, 503);
    client.expect_end();
}

// I06
#[test]
fn any_method_and_target_passes_byte_for_byte() {
    let mock = Mock::answer(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: http://a.test\r\n\
             Access-Control-Allow-Methods: POST, GET\r\nContent-Length: 0\r\n\r\n",
        )
    });
    let proxy = Config::new(&[&mock]).start();
    let preflight = [
        "Origin: http://a.test",
        "Access-Control-Request-Method: POST",
    ];
    let answer = proxy.exchange(request("OPTIONS", "/v1/chat/completions", &preflight, ""));
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.fields.get("access-control-allow-origin"),
        Some("http://a.test")
    );
    assert_eq!(
        answer.fields.get("access-control-allow-methods"),
        Some("POST, GET")
    );
    for (method, target) in [
        ("PATCH", "/anything?x=1&y=%2F"),
        ("PUT", "//a//../b/./%2e%2E/;p=1?q[]=%00&r='\"|{}"),
        ("PROPFIND", "/x?"),
        ("M-SEARCH", "/?a=b?c=d"),
    ] {
        let answer = proxy.exchange(request(method, target, &["Content-Length: 0"], ""));
        assert_eq!(answer.status, 200, "{method} {target}");
        let seen = mock.requests().pop().expect("a request");
        assert_eq!(
            (seen.method.as_str(), seen.target.as_str()),
            (method, target)
        );
    }
    let answer = proxy.exchange(request("OPTIONS", "*", &[], ""));
    assert!((200..300).contains(&answer.status), "{}", answer.head);
}

// I02
#[test]
fn a_client_may_end_its_side_after_the_request() {
    let mock = Mock::answer(|request| Reply::ok(&request.body));
    let proxy = Config::new(&[&mock])
        .http(&format!("half_close_grace = \"{}s\"", PATIENCE.as_secs()))
        .start();
    let mut client = proxy.client();
    client.send(request(
        "POST",
        "/v1/completions",
        &[],
        "{\"prompt\":\"x\"}",
    ));
    client.fin();
    assert_eq!(client.read_response().text(), "{\"prompt\":\"x\"}");
    client.expect_end();
}
