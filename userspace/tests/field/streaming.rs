//! Streams: at once, byte for byte, and visibly broken where they broke; and clients that leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::harness::{
    Client, Config, Conn, Gate, Mock, Proxy, Reply, dead_address, eventually, request,
};

const CHUNKED: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
const BODY: &str =
    "{\"model\":\"m\",\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";

fn chat() -> String {
    request("POST", "/v1/chat/completions", &[], BODY)
}

/// Chunks one by one, each when the gate lets it through.
fn chunks_on_demand(gate: Arc<Gate>, chunks: Vec<Vec<u8>>) -> Mock {
    Mock::script(move |conn| {
        while conn.read_request().is_some() {
            conn.send(CHUNKED);
            for chunk in &chunks {
                if !gate.pass() || !conn.send(chunk) {
                    return;
                }
            }
            if !gate.pass() || !conn.send("0\r\n\r\n") {
                return;
            }
        }
    })
}

fn chunk(data: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}

// S01
#[test]
fn head_and_each_event_arrive_before_the_next_is_made() {
    let event = chunk(b"data: {\"id\":\"x\",\"choices\":[{\"delta\":{\"content\":\"tok\"}}]}\n\n");
    let gate = Gate::new();
    let mock = chunks_on_demand(gate.clone(), vec![event.clone(); 60]);
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send(chat());
    let head = client.read_head();
    assert_eq!(head.status, 200);
    assert_eq!(head.fields.get("content-type"), Some("text/event-stream"));
    let mut delays = Vec::new();
    for _ in 0..60 {
        let start = Instant::now();
        gate.release(1);
        let read = client.read_some().expect("an event");
        assert_eq!(
            read.escape_ascii().to_string(),
            event.escape_ascii().to_string(),
            "one read an event"
        );
        delays.push(start.elapsed());
    }
    gate.release(1);
    client.expect("0\r\n\r\n");
    // Nagle against delayed acknowledgements would be 40 ms each; a busy machine may hold up a few.
    delays.sort();
    assert!(delays[30] < Duration::from_millis(30), "{delays:?}");
}

/// Runs a script that answers by `reply` and breaks off by `end`; the client must not see a clean end.
#[track_caller]
fn visibly_broken(reply: &'static str, end: fn(&mut Conn), visible: &str) {
    let mock = Mock::script(move |conn| {
        if conn.read_request().is_some() {
            conn.send(reply);
            end(conn);
        }
    });
    let proxy = Config::new(&[&mock]).start();
    for _ in 0..2 {
        let mut client = proxy.client();
        client.send(request("GET", "/stream", &[], ""));
        let head = client.read_head();
        assert_eq!(head.status, 200);
        let body = client.read_to_end();
        let text = String::from_utf8_lossy(&body);
        assert!(
            !text.contains("0\r\n\r\n"),
            "a clean end after {reply:?}: {text:?}"
        );
        if !client.was_reset {
            let length: Option<usize> = head
                .fields
                .get("content-length")
                .map(|n| n.parse().unwrap());
            assert!(
                head.fields.has("transfer-encoding") || length.is_some_and(|n| body.len() < n),
                "nothing shows that {text:?} is not all"
            );
            // A RST may overtake bytes, a FIN may not.
            assert!(text.contains(visible), "{text:?}");
        }
    }
    assert_eq!(mock.connections(), 2, "a broken connection was used again");
    proxy.wait_failures("upstream_truncated", 2);
    proxy.wait_idle();
}

// S02
#[test]
fn a_chunked_answer_cut_by_fin_is_broken() {
    const REPLY: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
    visibly_broken(REPLY, Conn::fin, "hello");
}

// S02
#[test]
fn a_chunked_answer_cut_by_rst_is_broken() {
    const REPLY: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
    visibly_broken(REPLY, Conn::reset, "");
}

// S02
#[test]
fn a_chunk_cut_in_its_middle_is_broken() {
    const REPLY: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel";
    visibly_broken(REPLY, Conn::fin, "hel");
}

// S02
#[test]
fn an_answer_shorter_than_its_length_is_broken() {
    const REPLY: &str = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello";
    visibly_broken(REPLY, Conn::fin, "hello");
}

// S02
#[test]
fn an_answer_without_framing_cut_by_rst_is_broken() {
    const REPLY: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello";
    visibly_broken(REPLY, Conn::reset, "");
}

// S02
#[test]
fn an_answer_without_framing_ends_at_fin() {
    let mock = Mock::answer(|_| {
        Reply::Close(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello".to_vec())
    });
    let proxy = Config::new(&[&mock]).start();
    for _ in 0..2 {
        let answer = proxy.exchange(request("GET", "/stream", &[], ""));
        assert_eq!(answer.text(), "hello");
    }
    let mut old = proxy.client();
    old.send("GET /stream HTTP/1.0\r\n\r\n");
    let answer = old.read_response();
    assert!(!answer.fields.has("transfer-encoding"), "{}", answer.head);
    assert_eq!(answer.text(), "hello");
    assert!(!old.was_reset);
    assert_eq!(proxy.failures("upstream_truncated"), 0.0);
}

// S04
#[test]
fn streams_are_relayed_byte_for_byte() {
    let mut chunks = vec![
        chunk(b"data: \xe4\xbd"),
        chunk(b"\xa0\n\n"),
        chunk(b"data: crlf\r\n\r\n"),
        chunk(b": ping\n\n"),
        chunk(b"\n"),
        b"0000A;ext=\"1\"\r\n0123456789\r\n".to_vec(),
    ];
    chunks.extend("data: byte by byte\n\n".bytes().map(|b| chunk(&[b])));
    for cut in 1..4 {
        let emoji = "data: \u{1f600}\n\n".as_bytes();
        chunks.push(chunk(&emoji[..6 + cut]));
        chunks.push(chunk(&emoji[6 + cut..]));
    }
    let sent = chunks.concat();
    let gate = Gate::new();
    let mock = chunks_on_demand(gate.clone(), chunks.clone());
    let proxy = Config::new(&[&mock]).start();

    // Each by itself, so that every cut is one between reads.
    let mut client = proxy.client();
    client.send(chat());
    client.read_head();
    for chunk in &chunks {
        gate.release(1);
        client.expect(chunk);
    }
    gate.release(1);
    client.expect("0\r\n\r\n");

    // And all at once.
    gate.open();
    client.send(chat());
    client.read_head();
    client.expect(&sent);
    client.expect("0\r\n\r\n");
}

/// Two backends with one script: whichever is picked, it behaves so.
fn two(script: impl Fn(&mut Conn) + Send + Sync + Clone + 'static) -> [Mock; 2] {
    [Mock::script(script.clone()), Mock::script(script)]
}

fn seen(mocks: &[Mock; 2]) -> usize {
    mocks.iter().map(|mock| mock.requests().len()).sum()
}

// S06
#[test]
fn nothing_is_replayed_after_a_response_byte() {
    let mocks = two(|conn| {
        if conn.read_request().is_some() {
            conn.send(CHUNKED);
            conn.send(chunk(b"data: 1\n\n"));
            conn.send(chunk(b"data: 2\n\n"));
            conn.reset();
        }
    });
    let proxy = Config::new(&[&mocks[0], &mocks[1]]).start();
    let mut client = proxy.client();
    client.send(chat());
    let all = client.read_to_end();
    assert!(!all.ends_with(b"\r\n0\r\n\r\n"));
    assert!(String::from_utf8_lossy(&all).matches("HTTP/1.1").count() <= 1);
    proxy.wait_idle();
    assert_eq!(seen(&mocks), 1);
}

fn dies_unanswered() -> [Mock; 2] {
    two(|conn| {
        if conn.read_request().is_some() {
            conn.reset();
        }
    })
}

// S06
#[test]
fn a_post_is_not_replayed_when_a_fresh_connection_dies() {
    let mocks = dies_unanswered();
    let proxy = Config::new(&[&mocks[0], &mocks[1]]).start();
    let answer = proxy.exchange(chat());
    assert_eq!(answer.status, 502);
    answer.error_code();
    assert_eq!(seen(&mocks), 1);
    proxy.wait_failures("backend_closed", 1);
    proxy.wait_idle();
}

// S06
#[test]
fn a_post_is_replayed_once_when_asked_for() {
    let mocks = dies_unanswered();
    let proxy = Config::new(&[&mocks[0], &mocks[1]])
        .http("replay_fresh = true")
        .start();
    assert_eq!(proxy.exchange(chat()).status, 502);
    assert_eq!(seen(&mocks), 2);
    proxy.wait_idle();
}

// S06
#[test]
fn a_refused_connection_costs_one_try_elsewhere() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock])
        .backend(dead_address(), "")
        .policy("kind = \"round-robin\"")
        .start();
    for _ in 0..6 {
        let answer = proxy.exchange(chat());
        assert_eq!((answer.status, answer.backend().as_str()), (200, "b0"));
    }
    assert_eq!(mock.requests().len(), 6);
    proxy.wait_idle();
}

// S06
#[test]
fn when_all_refuse_the_client_is_told() {
    let proxy = Config::default()
        .backend(dead_address(), "")
        .backend(dead_address(), "")
        .backend(dead_address(), "")
        .start();
    let answer = proxy.exchange(chat());
    assert!([502, 503].contains(&answer.status), "{}", answer.head);
    answer.error_code();
    eventually("the failure is counted", || {
        proxy.failures("connect_failed") + proxy.failures("no_backend") == 1.0
    });
    proxy.wait_idle();
}

/// Counts the connections that the proxy closed while a script waited.
fn waits_for_the_end(first: &'static str) -> (Mock, Arc<AtomicUsize>) {
    let ended = Arc::new(AtomicUsize::new(0));
    let count = ended.clone();
    let mock = Mock::script(move |conn| {
        if conn.read_request().is_some() {
            conn.send(first);
            if conn.wait_end() {
                count.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    (mock, ended)
}

#[track_caller]
fn the_backend_is_told(proxy: &Proxy, ended: &AtomicUsize, n: usize) {
    let start = Instant::now();
    eventually("the backend's connection is closed", || {
        ended.load(Ordering::SeqCst) == n
    });
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    proxy.wait_idle();
    proxy.wait_failures("client_abort", n);
}

// D01
#[test]
fn a_client_that_resets_before_any_answer_stops_the_engine() {
    let (mock, ended) = waits_for_the_end("");
    let proxy = Config::new(&[&mock])
        .http("half_close_grace = \"200ms\"")
        .start();
    for n in 1..=2 {
        let mut client = proxy.client();
        client.send(if n == 1 {
            chat()
        } else {
            request("POST", "/v1/completions", &[], "{}")
        });
        mock.wait_requests(n);
        client.reset();
        the_backend_is_told(&proxy, &ended, n);
    }
    assert_eq!(proxy.failures("backend_closed"), 0.0);
}

// D01
#[test]
fn a_client_that_closes_before_any_answer_stops_the_engine() {
    let (mock, ended) = waits_for_the_end("");
    let proxy = Config::new(&[&mock])
        .http("half_close_grace = \"200ms\"")
        .start();
    let mut client = proxy.client();
    client.send(chat());
    mock.wait_requests(1);
    drop(client);
    the_backend_is_told(&proxy, &ended, 1);
}

// D01
#[test]
fn a_client_that_leaves_a_silent_stream_stops_the_engine() {
    let (mock, ended) =
        waits_for_the_end("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
    let proxy = Config::new(&[&mock])
        .http("half_close_grace = \"200ms\"")
        .start();
    for n in 1..=2 {
        let mut client = proxy.client();
        client.send(chat());
        client.read_head();
        client.expect("5\r\nhello\r\n");
        if n == 1 {
            client.reset();
        } else {
            drop(client);
        }
        the_backend_is_told(&proxy, &ended, n);
    }
}

// D01
#[test]
fn a_queued_request_of_a_client_that_left_is_never_sent() {
    let gate = Gate::new();
    let hold = gate.clone();
    let mock = Mock::answer(move |request| {
        if request.target == "/first" {
            hold.pass();
        }
        Reply::ok("{}")
    });
    let proxy = Config::new(&[&mock])
        .cap(1)
        .http("half_close_grace = \"100ms\"")
        .start();
    let mut first = proxy.client();
    first.send(request("POST", "/first", &[], "{}"));
    mock.wait_requests(1);
    let mut queued = proxy.client();
    queued.send(request("POST", "/queued", &[], "{}"));
    eventually("the second waits", || {
        proxy.metric("prefixlb_pool_waiting_requests", &[]) == 1.0
    });
    queued.reset();
    eventually("the second is gone", || {
        proxy.metric("prefixlb_pool_waiting_requests", &[]) == 0.0
    });
    gate.open();
    assert_eq!(first.read_response().status, 200);
    assert_eq!(
        proxy.exchange(request("POST", "/third", &[], "{}")).status,
        200
    );
    let targets: Vec<String> = mock.requests().into_iter().map(|r| r.target).collect();
    assert_eq!(targets, ["/first", "/third"]);
    proxy.wait_idle();
}

/// A request whose body is far larger than what is looked at, without its last byte.
fn large(target: &str, bytes: usize) -> String {
    let fields = [format!("Content-Length: {bytes}")];
    let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
    request("POST", target, &fields, "") + &"a".repeat(bytes)
}

// D01: the same with the long prompts that are the rule, of which the proxy holds only the beginning. (A FIN
// behind more bytes than the socket takes in cannot be seen by anybody who does not read them.)
#[test]
fn a_queued_long_prompt_of_a_client_that_left_is_never_sent() {
    for leave in [Client::reset as fn(Client), drop] {
        let gate = Gate::new();
        let hold = gate.clone();
        let mock = Mock::answer(move |request| {
            if request.target == "/first" {
                hold.pass();
            }
            Reply::ok("{}")
        });
        let proxy = Config::new(&[&mock])
            .cap(1)
            .http("half_close_grace = \"100ms\"\nbody_idle = \"600s\"")
            .pool("queue_deadline = \"600s\"")
            .start();
        let mut first = proxy.client();
        first.send(large("/first", 50_000));
        mock.wait_requests(1);
        let waiting = || proxy.metric("prefixlb_pool_waiting_requests", &[]);
        // One that is first in line, one that is not.
        for _ in 0..2 {
            let mut queued = proxy.client();
            queued.send(large("/queued", 50_000));
            let before = waiting();
            eventually("it waits", || waiting() >= before.max(1.0));
            leave(queued);
        }
        eventually("both are gone", || waiting() == 0.0);
        gate.open();
        assert_eq!(first.read_response().status, 200);
        assert_eq!(proxy.exchange(large("/third", 50_000)).status, 200);
        assert!(!mock.saw("/queued"));
        proxy.wait_idle();
    }
}

/// A backend that reads a request's head and no more.
fn never_reads(ended: &Arc<AtomicUsize>, gate: &Arc<Gate>) -> Mock {
    let (ended, gate) = (ended.clone(), gate.clone());
    Mock::script(move |conn| {
        if let Some(request) = conn.read_head() {
            conn.note(&request);
            gate.pass();
            if conn.wait_end() {
                ended.fetch_add(1, Ordering::SeqCst);
            }
        }
    })
}

/// Sends a long body until nobody takes more of it for now; how much was taken.
fn fill(client: &Client) -> usize {
    let sender = client.sender();
    sender.set_nonblocking(true).expect("non-blocking");
    let block = [b'a'; 64 << 10];
    let (mut idle, mut sent) = (0, 0);
    while idle < 100 {
        match std::io::Write::write(&mut &sender, &block) {
            Ok(n) => (idle, sent) = (0, sent + n),
            Err(_) => {
                idle += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
    sender.set_nonblocking(false).expect("blocking");
    sent
}

// D01: nobody reads anybody here, and yet it must be seen that the client is gone.
#[test]
fn a_client_that_leaves_an_upload_the_engine_does_not_read_frees_it() {
    let (gate, ended) = (Gate::new(), Arc::default());
    let mock = never_reads(&ended, &gate);
    let proxy = Config::new(&[&mock]).http("body_idle = \"600s\"").start();
    let mut client = proxy.client();
    client.send(request("POST", "/x", &["Content-Length: 500000000"], ""));
    fill(&client);
    mock.wait_requests(1);
    client.reset();
    proxy.wait_idle();
    gate.open();
    eventually("the backend's connection is closed", || {
        ended.load(Ordering::SeqCst) == 1
    });
    proxy.wait_failures("client_abort", 1);
}

#[test]
fn a_backend_that_does_not_read_is_to_blame_itself() {
    let (gate, ended) = (Gate::new(), Arc::default());
    let mock = never_reads(&ended, &gate);
    let proxy = Config::new(&[&mock]).http("body_idle = \"1s\"").start();
    let mut client = proxy.client();
    client.send(request("POST", "/x", &["Content-Length: 500000000"], ""));
    fill(&client);
    let answer = client.read_response();
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (504, "response_timeout")
    );
    gate.open();
    proxy.wait_idle();
}

// The watch on a client that is not read from must not become a deadline for one that is.
#[test]
fn an_upload_may_pause_after_the_engine_held_it_up() {
    const LENGTH: usize = 64 << 20;
    let gate = Gate::new();
    let (hold, taken) = (gate.clone(), Arc::new(AtomicUsize::new(0)));
    let count = taken.clone();
    let mock = Mock::script(move |conn| {
        let Some(request) = conn.read_head() else {
            return;
        };
        conn.note(&request);
        hold.pass();
        while count.load(Ordering::SeqCst) < LENGTH {
            match conn.discard(4096) {
                0 => return,
                n => count.fetch_add(n, Ordering::SeqCst),
            };
        }
        conn.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    });
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    client.send(request(
        "POST",
        "/x",
        &[&format!("Content-Length: {LENGTH}")],
        "",
    ));
    let sent = fill(&client);
    assert!(sent < LENGTH);
    mock.wait_requests(1);
    gate.open();
    eventually("the engine has caught up", || {
        taken.load(Ordering::SeqCst) + 4096 > sent
    });
    // Here time is what is tested: longer than the watch's pace, far shorter than the deadline.
    std::thread::sleep(Duration::from_millis(1200));
    client.send(vec![b'a'; LENGTH - sent]);
    assert_eq!(client.read_response().text(), "ok");
    proxy.wait_idle();
}
