//! Health, reload, shutdown, metrics: what operators and orchestrators see while clients are served.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::harness::{Client, Config, Conn, Gate, Mock, Probes, Proxy, Reply, eventually, request};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const PROBED: &str =
    "interval = \"50ms\"\ntimeout = \"200ms\"\nfall = 2\nrise = 1\nslow_start = \"0s\"";

fn healthy(proxy: &Proxy) -> f64 {
    proxy.metric("prefixlb_backend_healthy", &[])
}

fn get(target: &str) -> String {
    request("GET", target, &[], "")
}

/// Streams a chunk, then the end when told; all else is answered at once.
fn streaming(gate: &Arc<Gate>) -> Mock {
    let gate = gate.clone();
    Mock::script(move |conn: &mut Conn| {
        while let Some(request) = conn.read_request() {
            if request.target == "/stream" {
                conn.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
                if !gate.pass() {
                    return;
                }
                conn.send("1\r\nb\r\n0\r\n\r\n");
            } else {
                conn.send(OK);
            }
        }
    })
}

fn open_stream(proxy: &Proxy) -> (Client, String) {
    let mut client = proxy.client();
    client.send(get("/stream"));
    let backend = client.read_head().backend();
    client.expect("1\r\na\r\n");
    (client, backend)
}

#[track_caller]
fn ends_well(mut client: Client) {
    client.expect("1\r\nb\r\n0\r\n\r\n");
}

// H02
#[test]
fn when_every_probe_fails_all_backends_are_used() {
    let gate = Gate::new();
    let mocks: Vec<Mock> = (0..3).map(|_| streaming(&gate)).collect();
    let proxy = Config::new(&mocks.iter().collect::<Vec<_>>())
        .health(PROBED)
        .policy("kind = \"round-robin\"")
        .start();
    eventually("all are up", || healthy(&proxy) == 3.0);
    let streams: Vec<_> = (0..3).map(|_| open_stream(&proxy).0).collect();
    for mock in &mocks {
        mock.set_probes(Probes::Fail);
    }
    eventually("all are out", || healthy(&proxy) == 0.0);
    for _ in 0..6 {
        assert_eq!(proxy.exchange(get("/")).status, 200);
    }
    assert!(proxy.metric("prefixlb_pool_panic_picks_total", &[]) >= 6.0);
    // With a body to announce, too.
    let mut client = proxy.client();
    client.send(request(
        "POST",
        "/v1/completions",
        &["Expect: 100-continue", "Content-Length: 2"],
        "",
    ));
    assert_eq!(client.read_head().status, 100);
    client.send("{}");
    assert_eq!(client.read_response().status, 200);
    gate.open();
    streams.into_iter().for_each(ends_well);
    for mock in &mocks {
        mock.set_probes(Probes::Ok);
    }
    eventually("all are back", || healthy(&proxy) == 3.0);
    proxy.wait_idle();
}

// H02
#[test]
fn a_backend_that_fails_its_probes_gets_no_new_requests_and_keeps_its_streams() {
    let gate = Gate::new();
    let mocks = [streaming(&gate), streaming(&gate)];
    let proxy = Config::new(&[&mocks[0], &mocks[1]])
        .health(PROBED)
        .policy("kind = \"round-robin\"")
        .start();
    eventually("both are up", || healthy(&proxy) == 2.0);
    let streams = [open_stream(&proxy), open_stream(&proxy)];
    assert_ne!(streams[0].1, streams[1].1);
    mocks[0].set_probes(Probes::Fail);
    eventually("one is out", || healthy(&proxy) == 1.0);
    for _ in 0..6 {
        assert_eq!(proxy.exchange(get("/")).backend(), "b1");
    }
    gate.open();
    streams
        .into_iter()
        .for_each(|(client, _)| ends_well(client));
    mocks[0].set_probes(Probes::Ok);
    eventually("it is back", || healthy(&proxy) == 2.0);
    eventually("it is used", || proxy.exchange(get("/")).backend() == "b0");
}

// H02
#[test]
fn a_busy_backend_with_good_traffic_is_not_put_out_by_slow_probes() {
    let mocks = [Mock::ok("ok"), Mock::ok("ok")];
    let proxy = Config::new(&[&mocks[0], &mocks[1]])
        .health("interval = \"50ms\"\ntimeout = \"50ms\"\nfall = 2\nrise = 1\nslow_start = \"0s\"")
        .policy("kind = \"round-robin\"")
        .start();
    eventually("both are up", || healthy(&proxy) == 2.0);
    mocks[0].set_probes(Probes::Silent);
    let due = mocks[0].probes() + 8;
    let mut client = proxy.client();
    // Traffic flows all the while; it speaks louder than a slow probe.
    while mocks[0].probes() < due {
        assert_eq!(client.exchange(get("/")).status, 200);
    }
    assert_eq!(healthy(&proxy), 2.0);
}

#[test]
fn errors_in_a_row_eject_a_backend_for_a_while() {
    let bad = Mock::answer(|_| Reply::raw("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"));
    let busy = Mock::answer(|_| Reply::raw("HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n"));
    let proxy = Config::new(&[&bad, &busy])
        .health("active = false\neject_after = 3\neject_for = \"60s\"")
        .policy("kind = \"round-robin\"")
        .start();
    for _ in 0..6 {
        assert!([500, 429].contains(&proxy.exchange(get("/")).status));
    }
    eventually("the failing one is ejected", || {
        proxy.metric("prefixlb_backend_ejected", &[]) == 1.0
    });
    for _ in 0..10 {
        assert_eq!(
            proxy.exchange(get("/")).status,
            429,
            "4xx is no fault of the backend"
        );
    }
    assert_eq!(bad.requests().len(), 3);
}

// H04
#[test]
fn probes_follow_the_reload() {
    let mocks: Vec<Mock> = (0..3).map(|_| Mock::ok("ok")).collect();
    let mut proxy = Config::new(&[&mocks[0], &mocks[1]]).health(PROBED).start();
    mocks[0].wait_probes(2);
    mocks[1].wait_probes(2);
    assert_eq!(mocks[2].probes(), 0);
    let fresh = mocks[2].addr;
    proxy.reload(|config| {
        config
            .without_backend(0)
            .backend_table(&format!("name = \"new\"\nurl = \"http://{fresh}\""))
    });
    mocks[2].wait_probes(2);
    eventually("the old one is forgotten", || {
        !proxy.ledger().iter().any(|(n, ..)| n == "b0")
    });
    let (gone, kept) = (mocks[0].probes(), mocks[1].probes());
    mocks[2].wait_probes(10);
    assert!(mocks[0].probes() <= gone + 1, "one may have been under way");
    // One task a backend: both are probed at one pace.
    let kept = mocks[1].probes() - kept;
    assert!((3..=30).contains(&kept), "{kept} probes against 10");
    eventually("both are up", || healthy(&proxy) == 2.0);
}

// H04
#[test]
fn many_reloads_leave_one_probe_task_a_backend() {
    let mocks: Vec<Mock> = (0..2).map(|_| Mock::ok("ok")).collect();
    let mut proxy = Config::new(&[&mocks[0], &mocks[1]])
        .health("interval = \"200ms\"\nslow_start = \"0s\"")
        .start();
    let (threads, before) = (proxy.status_field("Threads:"), proxy.resident_kib());
    for round in 0..30 {
        let name = format!("round{round}");
        proxy.reload(|config| {
            config.without_backend(1).backend_table(&format!(
                "name = \"{name}\"\nurl = \"http://{}\"",
                mocks[1].addr
            ))
        });
        eventually("the reload is in force", || {
            proxy.ledger().iter().any(|(n, ..)| *n == name)
        });
        assert_eq!(proxy.exchange(get("/")).status, 200);
    }
    assert!(proxy.status_field("Threads:") <= threads + 1);
    let grown = proxy.resident_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB more");
    // Thirty tasks would make 300 probes while the other backend gets ten.
    let (one, other) = (mocks[0].probes(), mocks[1].probes());
    mocks[0].wait_probes(10);
    let (one, other) = (mocks[0].probes() - one, mocks[1].probes() - other);
    assert!(other <= 3 * one, "{other} probes against {one}");
}

// H04
#[test]
fn a_bad_file_leaves_the_old_one_in_force() {
    let mock = Mock::ok("ok");
    let proxy = Config::new(&[&mock]).start();
    for (n, text) in ["listen = ", "[[pool]]\nname = \"x\"\nfoo = 1\n", ""]
        .iter()
        .enumerate()
    {
        proxy.reload_text(text);
        eventually("the refusal is counted", || {
            proxy.metric("prefixlb_config_reloads_total", &["refused"]) >= (n + 1) as f64
        });
        assert_eq!(proxy.exchange(get("/")).status, 200);
        assert!(
            proxy
                .admin("GET", "/readyz")
                .is_some_and(|r| r.status == 200)
        );
    }
    assert!(proxy.output().contains("foo"), "the mistake is named");
}

// O03
#[test]
fn what_clients_send_makes_no_series() {
    let mock = Mock::answer(|request| match request.target.len() % 3 {
        0 => Reply::raw("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
        _ => Reply::ok("{}"),
    });
    let proxy = Config::new(&[&mock]).start();
    let series = || {
        proxy
            .metrics()
            .lines()
            .filter(|line| !line.starts_with('#'))
            .count()
    };
    let mut client = proxy.client();
    client.exchange(get("/warm-up"));
    let before = series();
    for i in 0..300 {
        client.exchange(get(&format!("/path/{i}")));
        let body = format!("{{\"model\":\"junk-{i}\",\"prompt\":\"x\"}}");
        client.exchange(request("POST", "/v1/completions", &[], &body));
        client.exchange(request(
            &format!("METHOD-{i}"),
            "/",
            &["Content-Length: 0"],
            "",
        ));
    }
    assert_eq!(series(), before);
    proxy.wait_idle();
    let class = |class: &str| proxy.metric("prefixlb_backend_responses_total", &[class]);
    assert!(class("2xx") > 0.0 && class("4xx") > 0.0);
    assert_eq!(class("2xx") + class("4xx"), 901.0);
    assert_eq!(proxy.metric("prefixlb_requests_active", &[]), 0.0);
}

// O03
#[test]
fn an_aborted_answer_is_no_success_and_active_is_what_is_open() {
    let gate = Gate::new();
    let mock = streaming(&gate);
    let proxy = Config::new(&[&mock])
        .http("half_close_grace = \"100ms\"")
        .start();
    let mut streams: Vec<Client> = (0..5).map(|_| open_stream(&proxy).0).collect();
    assert_eq!(proxy.metric("prefixlb_requests_active", &[]), 5.0);
    assert_eq!(proxy.metric("prefixlb_backend_active_requests", &[]), 5.0);
    streams.pop().expect("a stream").reset();
    eventually("four are left", || {
        proxy.metric("prefixlb_requests_active", &[]) == 4.0
    });
    proxy.wait_failures("client_abort", 1);
    gate.open();
    streams.into_iter().for_each(ends_well);
    proxy.wait_idle();
    eventually("four are counted as good", || {
        proxy.metric("prefixlb_backend_responses_total", &["2xx"]) == 4.0
    });
}

// O04
#[test]
fn on_sigterm_streams_finish_and_nothing_new_begins() {
    let gate = Gate::new();
    let mock = streaming(&gate);
    let mut proxy = Config::new(&[&mock]).start();
    let streams: Vec<_> = (0..20).map(|_| open_stream(&proxy).0).collect();
    let mut idle = proxy.client();
    assert_eq!(idle.exchange(get("/")).status, 200);
    proxy.signal(libc::SIGTERM);
    eventually("readiness fails", || {
        proxy
            .admin("GET", "/readyz")
            .is_none_or(|r| r.status == 503)
    });
    // An idle connection is closed, or told to go elsewhere.
    if idle.try_send(get("/late")) {
        let last = idle.read_to_end();
        let text = String::from_utf8_lossy(&last);
        assert!(
            text.is_empty() || text.starts_with("HTTP/1.1 503 "),
            "{text}"
        );
    }
    // A new one is refused, closed, or told so.
    if let Ok(stream) = std::net::TcpStream::connect(proxy.addr) {
        drop(stream);
        let mut late = Client::connect(proxy.addr);
        late.try_send(get("/late"));
        let last = late.read_to_end();
        let text = String::from_utf8_lossy(&last);
        assert!(
            text.is_empty() || text.starts_with("HTTP/1.1 503 "),
            "{text}"
        );
    }
    assert!(proxy.runs());
    gate.open();
    streams.into_iter().for_each(ends_well);
    assert_eq!(proxy.wait_exit(), Some(0));
    assert!(!mock.saw("/late"));
}

// O04
#[test]
fn the_drain_limit_ends_streams_that_do_not() {
    let gate = Gate::new();
    let mock = streaming(&gate);
    let mut proxy = Config::new(&[&mock]).top("drain_limit = \"300ms\"").start();
    let (mut client, _) = open_stream(&proxy);
    proxy.signal(libc::SIGTERM);
    let rest = client.read_to_end();
    assert!(!rest.ends_with(b"0\r\n\r\n"), "a cut stream ended cleanly");
    assert_eq!(proxy.wait_exit(), Some(0));
    gate.open();
    mock.wait_closed();
}

// O04
#[test]
fn a_second_signal_ends_at_once() {
    let gate = Gate::new();
    let mock = streaming(&gate);
    let mut proxy = Config::new(&[&mock]).start();
    let (mut client, _) = open_stream(&proxy);
    proxy.signal(libc::SIGTERM);
    eventually("it drains", || {
        proxy
            .admin("GET", "/readyz")
            .is_none_or(|r| r.status == 503)
    });
    let start = Instant::now();
    proxy.signal(libc::SIGTERM);
    let rest = client.read_to_end();
    assert!(!rest.ends_with(b"0\r\n\r\n"), "a cut stream ended cleanly");
    proxy.wait_exit();
    assert!(start.elapsed() < Duration::from_secs(10));
    gate.open();
    mock.wait_closed();
}

// O04
#[test]
fn a_removed_backend_finishes_its_streams() {
    let gate = Gate::new();
    let mocks = [streaming(&gate), streaming(&gate)];
    let mut proxy = Config::new(&[&mocks[0], &mocks[1]])
        .policy("kind = \"round-robin\"")
        .start();
    let streams: Vec<_> = (0..20).map(|_| open_stream(&proxy)).collect();
    assert!(streams.iter().any(|(_, backend)| backend == "b0"));
    proxy.reload(|config| config.without_backend(0));
    eventually("b0 gets nothing new", || {
        !proxy.ledger().iter().any(|(n, ..)| n == "b0")
    });
    for _ in 0..10 {
        assert_eq!(proxy.exchange(get("/")).backend(), "b1");
    }
    gate.open();
    streams
        .into_iter()
        .for_each(|(client, _)| ends_well(client));
    proxy.wait_idle();
    assert!(
        !proxy
            .metrics()
            .lines()
            .any(|line| { line.starts_with("prefixlb_failures_total") && !line.ends_with(" 0") })
    );
}

// O04
#[test]
fn a_drained_backend_finishes_its_streams_and_comes_back() {
    let gate = Gate::new();
    let mocks = [streaming(&gate), streaming(&gate)];
    let proxy = Config::new(&[&mocks[0], &mocks[1]])
        .policy("kind = \"round-robin\"")
        .start();
    let streams: Vec<_> = (0..4).map(|_| open_stream(&proxy)).collect();
    let ask = |verb: &str| {
        let answer = proxy.admin("POST", &format!("/backends/main/b0/{verb}"));
        answer.expect("admin answers").status
    };
    let status = ask("drain");
    assert!((200..300).contains(&status), "{status}");
    for _ in 0..10 {
        assert_eq!(proxy.exchange(get("/")).backend(), "b1");
    }
    let status = ask("undrain");
    assert!((200..300).contains(&status), "{status}");
    eventually("it is used again", || {
        proxy.exchange(get("/")).backend() == "b0"
    });
    gate.open();
    streams
        .into_iter()
        .for_each(|(client, _)| ends_well(client));
    proxy.wait_idle();
}

// O05
#[test]
fn own_pages_answer_under_load() {
    let gate = Gate::new();
    let mock = streaming(&gate);
    let proxy = Config::new(&[&mock]).start();
    let streams: Vec<Client> = (0..150).map(|_| open_stream(&proxy).0).collect();
    let long = format!(
        "{{\"model\":\"m\",\"prompt\":\"{}\"}}",
        "word ".repeat(24_000)
    );
    let mut took = Vec::new();
    for round in 0..20 {
        let mut busy = proxy.client();
        busy.send(request("POST", "/v1/completions", &[], &long));
        if round == 10 {
            // Many clients vanish at once.
            let gone: Vec<Client> = (0..30).map(|_| open_stream(&proxy).0).collect();
            gone.into_iter().for_each(Client::reset);
        }
        for page in ["/healthz", "/metrics"] {
            let start = Instant::now();
            assert!(proxy.admin("GET", page).is_some_and(|r| r.status == 200));
            took.push(start.elapsed());
        }
        assert_eq!(busy.read_response().status, 200);
    }
    took.sort();
    // 50 ms is the aim; a debug build on a busy machine gets some more, for most.
    assert!(
        took[took.len() * 3 / 4] < Duration::from_millis(250),
        "{took:?}"
    );
    gate.open();
    streams.into_iter().for_each(ends_well);
    proxy.wait_idle();
}

// A run with two workers, many clients and everything mixed ends with an empty ledger.
#[test]
fn the_ledger_is_back_to_zero_after_a_mixed_crowd() {
    let mocks: Vec<Mock> = (0..3)
        .map(|_| {
            Mock::answer(|request| match request.target.as_str() {
                "/cut" => {
                    Reply::Close(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf".to_vec())
                }
                "/reset" => Reply::Reset(Vec::new()),
                "/close" => Reply::Close(OK.into()),
                _ => Reply::ok("ok"),
            })
        })
        .collect();
    let proxy = Config::new(&mocks.iter().collect::<Vec<_>>())
        .cap(4)
        .top("workers = 2")
        .start();
    let addr = proxy.addr;
    let crowd: Vec<_> = (0..8usize)
        .map(|n| {
            std::thread::spawn(move || {
                for i in 0..40usize {
                    let target = ["/ok", "/cut", "/reset", "/close", "/leave"][(n + i) % 5];
                    let mut client = Client::connect(addr);
                    client.send(request(
                        "POST",
                        target,
                        &[],
                        &format!("{{\"prompt\":\"{n} {i}\"}}"),
                    ));
                    match target {
                        "/leave" => client.reset(),
                        "/ok" | "/close" => assert_eq!(client.read_response().text(), "ok"),
                        _ => drop(client.read_to_end_or_answer()),
                    }
                }
            })
        })
        .collect();
    for one in crowd {
        one.join().expect("a client that got its answers");
    }
    proxy.wait_idle();
    eventually("nothing is active", || {
        proxy.metric("prefixlb_requests_active", &[]) == 0.0
    });
    assert_eq!(proxy.exchange(get("/ok")).status, 200);
}

#[test]
fn who_waits_in_line_gets_the_backends_of_a_reload() {
    // The one place is taken by a stream without end; the reload brings another backend, beside it or instead.
    for instead in [false, true] {
        let gate = Gate::new();
        let held = gate.clone();
        let full = Mock::answer(move |_| {
            held.pass();
            Reply::ok("{}")
        });
        let room = Mock::ok("{}");
        let mut proxy = Config::new(&[&full])
            .cap(1)
            .pool("queue_deadline = \"600s\"")
            .start();
        let mut first = proxy.client();
        first.send(request("POST", "/first", &[], "{}"));
        full.wait_requests(1);
        let mut queued = proxy.client();
        queued.send(request("POST", "/queued", &[], "{}"));
        eventually("the second waits", || {
            proxy.metric("prefixlb_pool_waiting_requests", &[]) == 1.0
        });
        proxy.reload(|config| {
            let more = config.backend(room.addr, "");
            if instead {
                more.without_backend(0)
            } else {
                more
            }
        });
        assert_eq!(queued.read_response().status, 200, "instead: {instead}");
        assert_eq!(
            proxy.exchange(request("POST", "/third", &[], "{}")).status,
            200
        );
        gate.open();
        assert_eq!(first.read_response().status, 200);
        proxy.wait_idle();
        assert_eq!(room.requests()[0].target, "/queued");
    }
}

#[test]
fn a_refusal_says_when_to_come_back_as_its_own_pool_is_set() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .pool("models = [\"a\"]\nretry_after = \"7s\"")
        .backend_table(
            "name = \"b1\"\nurl = \"http://127.0.0.1:1\"\n\
             [[pool]]\nname = \"second\"\nretry_after = \"11s\"\n\
             [pool.health]\nactive = false\npanic = false\n[pool.signals]\nscrape = false\n\
             [[pool.backend]]\nname = \"gone\"\nurl = \"http://127.0.0.1:1\"",
        )
        .start();
    let answer = proxy.exchange(request("POST", "/v1/completions", &[], "{\"model\":\"b\"}"));
    assert_eq!(answer.status, 503, "{}", answer.head);
    assert_eq!(answer.fields.get("retry-after"), Some("11"));
}
