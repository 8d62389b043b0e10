//! Connections to backends: kept, distrusted, replaced.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::harness::{Config, Conn, Gate, Mock, Proxy, Reply, eventually, request};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

fn post(body: &str) -> String {
    request("POST", "/v1/completions", &[], body)
}

#[track_caller]
fn all_good(proxy: &Proxy, n: usize) {
    let mut client = proxy.client();
    for i in 0..n {
        let answer = client.exchange(post(&format!("{{\"prompt\":\"{i}\"}}")));
        assert_eq!(
            (answer.status, answer.text().as_str()),
            (200, "ok"),
            "request {i}: {}",
            answer.head
        );
    }
    proxy.wait_idle();
}

// P01
#[test]
fn a_backend_that_closes_after_each_answer_costs_no_request() {
    for end in [Conn::fin as fn(&mut Conn), Conn::reset] {
        let mock = Mock::script(move |conn| {
            if conn.read_request().is_some() {
                conn.send(OK);
                end(conn);
            }
        });
        let proxy = Config::new(&[&mock]).start();
        all_good(&proxy, 100);
    }
}

// P01
#[test]
fn a_reused_connection_that_dies_under_the_request_is_replaced_once() {
    // The race itself: the request is there, and the backend closes without a word.
    for end in [Conn::fin as fn(&mut Conn), Conn::reset] {
        let mock = Mock::script(move |conn| {
            if conn.read_request().is_some() {
                conn.send(OK);
                if conn.read_request().is_some() {
                    end(conn);
                }
            }
        });
        let proxy = Config::new(&[&mock]).start();
        all_good(&proxy, 20);
        assert!(proxy.metric("prefixlb_backend_replays_total", &[]) >= 9.0);
    }
}

// P01
#[test]
fn a_replay_that_fails_as_well_is_the_end() {
    let seen = AtomicUsize::new(0);
    let mock = Mock::script(move |conn| {
        while conn.read_request().is_some() {
            if seen.fetch_add(1, Ordering::SeqCst) > 0 {
                return conn.reset();
            }
            conn.send(OK);
        }
    });
    let proxy = Config::new(&[&mock]).start();
    all_good(&proxy, 1);
    let answer = proxy.exchange(post("{}"));
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (502, "backend_closed")
    );
    assert_eq!(
        mock.requests().len(),
        3,
        "one answer, one failure, one replay"
    );
    proxy.wait_idle();
}

// P01
#[test]
fn a_reused_connection_that_dies_within_its_answer_is_not_replaced() {
    let mock = Mock::script(|conn| {
        if conn.read_request().is_some() {
            conn.send(OK);
            if conn.read_request().is_some() {
                conn.send("HTTP/1.1 200 OK\r\nContent-Le");
                conn.fin();
            }
        }
    });
    let proxy = Config::new(&[&mock]).start();
    all_good(&proxy, 1);
    assert_eq!(proxy.exchange(post("{}")).status, 502);
    assert_eq!(mock.requests().len(), 2);
}

// P01
#[test]
fn a_backend_that_stopped_leaves_its_requests_to_the_other() {
    let script = || Mock::ok("ok");
    let (stays, goes) = (script(), script());
    let proxy = Config::new(&[&stays, &goes])
        .policy("kind = \"round-robin\"")
        .start();
    all_good(&proxy, 4);
    assert_eq!(goes.requests().len(), 2);
    drop(goes);
    all_good(&proxy, 6);
    assert_eq!(stays.requests().len(), 8);
}

// P01
#[test]
fn an_idle_connection_is_closed_before_the_backend_would() {
    let mock = Mock::ok("ok");
    let proxy = Config::new(&[&mock]).http("pool_idle = \"200ms\"").start();
    all_good(&proxy, 1);
    mock.wait_closed();
    all_good(&proxy, 1);
    assert_eq!(mock.connections(), 2);
}

// P01
#[test]
fn connections_are_kept_where_nothing_speaks_against_it() {
    let mock = Mock::ok("ok");
    let proxy = Config::new(&[&mock]).http("pool_idle = \"60s\"").start();
    all_good(&proxy, 50);
    assert_eq!(mock.connections(), 1);
    assert_eq!(proxy.metric("prefixlb_backend_connects_total", &[]), 1.0);
    assert_eq!(
        proxy.metric("prefixlb_backend_pool_reuses_total", &[]),
        49.0
    );
}

#[test]
fn a_backend_that_announces_its_close_is_not_asked_again() {
    let mock = Mock::script(|conn| {
        while conn.read_request().is_some() {
            conn.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
        }
    });
    let proxy = Config::new(&[&mock]).start();
    all_good(&proxy, 3);
    assert_eq!(mock.connections(), 3);
    assert_eq!(proxy.metric("prefixlb_backend_replays_total", &[]), 0.0);
}

const EVIL: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL";

/// Client 2 gets an answer of its own, on another connection.
#[track_caller]
fn not_poisoned(proxy: &Proxy, mock: &Mock) {
    let mut second = proxy.client();
    for _ in 0..2 {
        let answer = second.exchange(request("GET", "/second", &[], ""));
        assert_eq!(answer.text(), "ok");
    }
    assert!(
        mock.requests()
            .iter()
            .all(|r| r.conn > 0 || r.target == "/first")
    );
}

// P03
#[test]
fn surplus_bytes_never_reach_the_next_client() {
    for surplus in [EVIL, "\r\n", "x"] {
        let mock = Mock::answer(move |request| match request.target.as_str() {
            "/first" => Reply::raw(format!("{OK}{surplus}")),
            _ => Reply::ok("ok"),
        });
        let proxy = Config::new(&[&mock]).start();
        let mut first = proxy.client();
        first.send(request("GET", "/first", &[], ""));
        assert_eq!(first.read_response().text(), "ok");
        not_poisoned(&proxy, &mock);
        assert!(proxy.metric("prefixlb_backend_pool_discards_total", &[]) >= 1.0);
        first.send(request("GET", "/third", &[], ""));
        assert_eq!(first.read_response().text(), "ok");
    }
}

// P03
#[test]
fn surplus_bytes_that_come_late_never_reach_the_next_client() {
    for surplus in [EVIL, "\r\n"] {
        let (gate, sent) = (Gate::new(), Gate::new());
        let (hold, told) = (gate.clone(), sent.clone());
        let mock = Mock::script(move |conn| {
            while let Some(request) = conn.read_request() {
                conn.send(OK);
                if request.target == "/first" {
                    hold.pass();
                    conn.send(surplus);
                    told.open();
                }
            }
        });
        let proxy = Config::new(&[&mock]).http("pool_idle = \"60s\"").start();
        assert_eq!(
            proxy.exchange(request("GET", "/first", &[], "")).text(),
            "ok"
        );
        gate.open();
        assert!(sent.pass());
        not_poisoned(&proxy, &mock);
    }
}

// P03
#[test]
fn a_head_answer_with_a_body_does_not_shift_the_next_one() {
    let mock = Mock::answer(|request| match request.method.as_str() {
        "HEAD" => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"),
        _ => Reply::ok("ok"),
    });
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send(request("HEAD", "/first", &[], ""));
    assert_eq!(client.read_head().status, 200);
    let answer = client.exchange(request("GET", "/second", &[], ""));
    assert_eq!(answer.text(), "ok");
}

// P04
#[test]
fn ipv6_addresses_work_at_both_ends() {
    if !std::path::Path::new("/proc/net/if_inet6").exists() {
        eprintln!("skipped: this kernel has no IPv6");
        return;
    }
    let mock = Mock::script_on("[::1]:0", |conn| {
        while conn.read_request().is_some() {
            conn.send(OK);
        }
    });
    let port = mock.addr.port();
    let proxy = Config::default()
        .backend_table(&format!("url = \"http://[::1]:{port}\""))
        .listen("[::]")
        .start();
    assert!(proxy.addr.is_ipv6());
    assert_eq!(proxy.exchange(request("GET", "/v6", &[], "")).text(), "ok");
    let v4 = std::net::SocketAddr::from(([127, 0, 0, 1], proxy.addr.port()));
    let answer = crate::harness::Client::connect(v4).exchange(request("GET", "/v4", &[], ""));
    assert_eq!(answer.backend(), format!("[::1]:{port}"));
    let seen = mock.requests();
    assert_eq!(
        seen[0].fields.get("host"),
        Some(format!("[::1]:{port}").as_str())
    );
    assert_eq!(seen[0].fields.get("x-forwarded-for"), Some("::1"));
    assert_eq!(seen[1].fields.get("x-forwarded-for"), Some("127.0.0.1"));
    assert!(
        proxy
            .metrics()
            .contains(&format!("backend=\"[::1]:{port}\""))
    );
}

// P04
#[test]
fn a_bad_literal_is_an_error_at_the_start() {
    let dir = std::env::temp_dir().join(format!("prefixlb-literal-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    for url in [
        "http://[::1:9001",
        "http://[::g]:9001",
        "http://::1:9001",
        "http://[127.0.0.1]:9",
    ] {
        let file = dir.join("bad.toml");
        std::fs::write(
            &file,
            format!("listen = \"127.0.0.1:0\"\n[[pool]]\nname = \"main\"\n[[pool.backend]]\nurl = \"{url}\"\n"),
        )
        .expect("a file");
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_prefixlb"))
            .args(["run", "--config"])
            .arg(&file)
            .output()
            .expect("the binary runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{url}: {said}");
        assert!(
            said.contains("bad.toml") && said.contains('5'),
            "no file and line in {said}"
        );
    }
    drop(std::fs::remove_dir_all(&dir));
}

// P05
#[test]
fn a_backend_may_have_a_name() {
    let mock = Mock::ok("ok");
    let port = mock.addr.port();
    let proxy = Config::default()
        .backend_table(&format!("url = \"http://localhost:{port}\""))
        .start();
    // The name may have an IPv6 address as well, where nobody listens: the next one is tried.
    assert_eq!(proxy.exchange(request("GET", "/", &[], "")).text(), "ok");
    let seen = mock.requests().pop().expect("a request");
    assert_eq!(
        seen.fields.get("host"),
        Some(format!("localhost:{port}").as_str())
    );
}

#[test]
fn a_silent_backend_is_a_timeout_for_the_client() {
    let mock = Mock::script(|conn| {
        if conn.read_request().is_some() {
            conn.wait_end();
        }
    });
    let proxy = Config::new(&[&mock])
        .http("response_deadline = \"200ms\"")
        .start();
    let answer = proxy.exchange(post("{}"));
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (504, "response_timeout")
    );
    mock.wait_closed();
    proxy.wait_idle();
}

#[test]
fn a_backend_silent_within_its_answer_is_cut_off() {
    let mock = Mock::script(|conn| {
        if conn.read_request().is_some() {
            conn.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
            conn.wait_end();
        }
    });
    let proxy = Config::new(&[&mock])
        .http("response_idle = \"200ms\"")
        .start();
    let mut client = proxy.client();
    client.send(post("{}"));
    assert_eq!(client.read_head().status, 200);
    let rest = client.read_to_end();
    assert!(!rest.ends_with(b"0\r\n\r\n"));
    mock.wait_closed();
    proxy.wait_failures("response_idle", 1);
    proxy.wait_idle();
}

#[test]
fn no_connection_is_kept_to_a_backend_that_left() {
    let mocks = [Mock::ok("ok"), Mock::ok("ok")];
    let mut proxy = Config::new(&[&mocks[0], &mocks[1]])
        .policy("kind = \"round-robin\"")
        .http("pool_idle = \"600s\"")
        .start();
    all_good(&proxy, 4);
    proxy.reload(|config| config.without_backend(1));
    mocks[1].wait_closed();
    assert!(mocks[0].open() > 0);
    all_good(&proxy, 2);
    eventually("only one is left", || proxy.ledger().len() == 1);
    assert_eq!(mocks[1].requests().len(), 2);
}
