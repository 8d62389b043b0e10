//! Which backend a request goes to, seen from outside: by prompt, by session, by load.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::harness::{Client, Config, Gate, Mock, Proxy, Reply, Response, dead_address, request};

/// Text that shares no block with that of another `seed`.
pub fn text(seed: &str, bytes: usize) -> String {
    let word = format!("{seed} block ");
    word.repeat(bytes / word.len() + 1)[..bytes].into()
}

pub fn post(target: &str, body: &str) -> String {
    request("POST", target, &["x-prefixlb-debug: 1"], body)
}

fn completion(prompt: impl Into<Value>) -> String {
    json!({"model": "m", "prompt": prompt.into(), "max_tokens": 1}).to_string()
}

fn ask(client: &mut Client, target: &str, body: &str) -> Response {
    let answer = client.exchange(post(target, body));
    assert_eq!(answer.status, 200, "{}{}", answer.head, answer.text());
    answer
}

fn reason(answer: &Response) -> String {
    let pick = answer.fields.get("x-prefixlb-pick").expect("asked for");
    let (_, rest) = pick.split_once("reason=").expect("a reason");
    rest.split(';').next().unwrap_or("").into()
}

fn mocks(n: usize) -> Vec<Mock> {
    (0..n).map(|_| Mock::ok("{}")).collect()
}

fn over(mocks: &[Mock]) -> Config {
    Config::new(&mocks.iter().collect::<Vec<_>>())
}

// A01
#[test]
fn prompts_of_token_ids_have_keys() {
    let mocks = mocks(4);
    let proxy = over(&mocks).start();
    let mut client = proxy.client();
    for prompt in [
        json!([1, 2, 3, 4]),
        json!([[1, 2], [3]]),
        json!(["a", "b"]),
        json!([]),
        json!([[]]),
        json!({"odd": true}),
        json!(null),
        json!(7),
    ] {
        ask(&mut client, "/v1/completions", &completion(prompt));
    }
    let shared: Vec<u32> = (0..4096).map(|i| i * 31 % 50_000).collect();
    let mut owners = BTreeSet::new();
    for tail in 0..10 {
        let ids: Vec<u32> = shared.iter().copied().chain([tail, tail + 1]).collect();
        owners.insert(ask(&mut client, "/v1/completions", &completion(ids)).backend());
    }
    assert_eq!(owners.len(), 1, "{owners:?}");
    // The same digits in other tokens are another prompt.
    let ids = |pair: [u32; 2]| completion(pair.repeat(600));
    ask(&mut client, "/v1/completions", &ids([12, 3]));
    assert_eq!(
        reason(&ask(&mut client, "/v1/completions", &ids([12, 3]))),
        "warm"
    );
    assert_ne!(
        reason(&ask(&mut client, "/v1/completions", &ids([1, 23]))),
        "warm"
    );
}

/// Eight conversations of five turns over one system prompt; each stays where it began, and they spread.
fn conversations(target: &str, body: impl Fn(&str, &[(String, String)]) -> Value) {
    let gate = Gate::new();
    let mocks: Vec<Mock> = (0..4)
        .map(|_| {
            let gate = gate.clone();
            Mock::answer(move |_| {
                gate.pass();
                Reply::ok("{}")
            })
        })
        .collect();
    let proxy = over(&mocks).start();
    let system = text("be helpful", 2048);
    let mut homes: Vec<BTreeSet<String>> = vec![BTreeSet::new(); 8];
    let mut turns: Vec<Vec<(String, String)>> = vec![Vec::new(); 8];
    // The first questions are under way together: idle backends would leave all to the one that has the system
    // prompt, and rightly so.
    let mut first = Vec::new();
    for (i, turns) in turns.iter_mut().enumerate() {
        turns.push((text(&format!("q{i}"), 3000), text("answer", 100)));
        first.push(place(&proxy, &mocks, target, &body(&system, turns).to_string()).0);
    }
    gate.open();
    for (client, homes) in first.iter_mut().zip(&mut homes) {
        homes.insert(client.read_response().backend());
    }
    let mut client = proxy.client();
    for turn in 1..5 {
        for ((i, turns), homes) in turns.iter_mut().enumerate().zip(&mut homes) {
            turns.push((text(&format!("q{i} {turn}"), 200), text("answer", 100)));
            let answer = ask(&mut client, target, &body(&system, turns).to_string());
            homes.insert(answer.backend());
        }
    }
    assert!(homes.iter().all(|homes| homes.len() == 1), "{homes:?}");
    let spread: BTreeSet<_> = homes.iter().flatten().collect();
    assert!(spread.len() >= 3, "{homes:?}");
}

fn messages(turns: &[(String, String)]) -> Vec<Value> {
    let mut messages = Vec::new();
    for (i, (question, answer)) in turns.iter().enumerate() {
        messages.push(json!({"role": "user", "content": question}));
        if i + 1 < turns.len() {
            messages.push(json!({"role": "assistant", "content": answer}));
        }
    }
    messages
}

// A02
#[test]
fn chat_conversations_stay_and_spread() {
    conversations("/v1/chat/completions", |system, turns| {
        let mut all = vec![json!({"role": "system", "content": system})];
        all.extend(messages(turns));
        json!({"model": "m", "messages": all})
    });
}

// A02
#[test]
fn anthropic_conversations_stay_and_spread() {
    conversations(
        "/v1/messages",
        |system, turns| json!({"model": "m", "system": system, "messages": messages(turns)}),
    );
}

// A02
#[test]
fn responses_conversations_stay_and_spread() {
    conversations(
        "/v1/responses",
        |system, turns| json!({"model": "m", "instructions": system, "input": messages(turns)}),
    );
}

// A02
#[test]
fn other_tools_are_another_prefix() {
    let mocks = mocks(4);
    let proxy = over(&mocks).start();
    let mut client = proxy.client();
    let body = |tool: &str| {
        json!({
            "model": "m",
            "messages": [{"role": "user", "content": text("same", 3000)}],
            "tools": [{"type": "function", "function": {"name": tool, "description": text(tool, 600)}}],
        })
        .to_string()
    };
    ask(&mut client, "/v1/chat/completions", &body("search"));
    assert_eq!(
        reason(&ask(&mut client, "/v1/chat/completions", &body("search"))),
        "warm"
    );
    assert_ne!(
        reason(&ask(&mut client, "/v1/chat/completions", &body("weather"))),
        "warm"
    );
}

// A04
#[test]
fn one_conversation_in_any_writing_is_one_prefix() {
    let mocks = mocks(4);
    let proxy = over(&mocks).start();
    let mut client = proxy.client();
    let long = text("caf\u{e9} a/b", 3000);
    let escaped = long.replace('\u{e9}', "\\u00e9").replace('/', "\\/");
    let variants = [
        format!("{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"{long}\"}}]}}"),
        format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"{long}\"}}],\"model\":\"m\"}}"),
        format!(
            "{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"{escaped}\"}}]}}"
        ),
        format!("{{\"model\":\"m\",\"messages\":[{{\"content\":\"{long}\",\"role\":\"user\"}}]}}"),
        format!(
            "{{\n  \"model\" : \"m\",\n\t\"messages\" : [ {{ \"role\" : \"user\" ,\r\n \"content\" : \"{long}\" }} ]\n}}"
        ),
        format!(
            "{{\"stream\":true,\"temperature\":0.3,\"max_tokens\":7,\"user\":\"u1\",\"model\":\"m\",\
             \"messages\":[{{\"role\":\"user\",\"content\":\"{long}\"}}]}}"
        ),
    ];
    let home = ask(&mut client, "/v1/chat/completions", &variants[0]).backend();
    for body in &variants {
        let answer = ask(&mut client, "/v1/chat/completions", body);
        assert_eq!(
            (reason(&answer).as_str(), answer.backend()),
            ("warm", home.clone()),
            "{body:.60}"
        );
    }
    // The body itself is not touched.
    let seen: Vec<String> = mocks
        .iter()
        .flat_map(Mock::requests)
        .map(|r| r.text())
        .collect();
    assert!(variants.iter().all(|body| seen.contains(body)));
    // Another model is another prefix.
    let other = variants[0].replace("\"m\"", "\"n\"");
    assert_ne!(
        reason(&ask(&mut client, "/v1/chat/completions", &other)),
        "warm"
    );
}

// A04
#[test]
fn bodies_that_are_no_json_are_forwarded() {
    let mock = Mock::answer(|request| Reply::ok(&request.body));
    let proxy = Config::new(&[&mock]).start();
    let mut client = proxy.client();
    let deep = "[".repeat(5000);
    for body in [
        "{\"model\":\"m\",\"messages\":[",
        "not json",
        "{\"prompt\":\"\\ud800\"}",
        "{\"model\":1,\"model\":2,\"messages\":7}",
        &format!("{{\"messages\":{deep}"),
    ] {
        let answer = ask(&mut client, "/v1/chat/completions", body);
        assert_eq!(answer.text(), body);
    }
    assert!(proxy.metric("prefixlb_keyless_requests_total", &[]) >= 5.0);
}

// A06
#[test]
fn cold_requests_spread_evenly_over_idle_backends() {
    let mocks = mocks(4);
    let proxy = over(&mocks).start();
    let mut client = proxy.client();
    for i in 0..40 {
        ask(
            &mut client,
            "/v1/completions",
            &completion(text(&format!("cold {i}"), 1200)),
        );
    }
    for mock in &mocks {
        assert!(
            (2..=20).contains(&mock.requests().len()),
            "{}",
            mock.requests().len()
        );
    }
}

/// A backend that holds requests whose body has `hold` until told.
fn holding(gate: &Arc<Gate>) -> Mock {
    let gate = gate.clone();
    Mock::answer(move |request| {
        if request.text().contains("hold") {
            gate.pass();
        }
        Reply::ok("{}")
    })
}

fn holdings(gate: &Arc<Gate>, n: usize) -> Vec<Mock> {
    (0..n).map(|_| holding(gate)).collect()
}

fn seen(mocks: &[Mock]) -> Vec<usize> {
    mocks.iter().map(|mock| mock.requests().len()).collect()
}

/// Sends a request and waits until a backend has it; which one.
fn place(proxy: &Proxy, mocks: &[Mock], target: &str, body: &str) -> (Client, usize) {
    let before = seen(mocks);
    let mut client = proxy.client();
    client.send(post(target, body));
    let mut at = 0;
    crate::harness::eventually("a backend has the request", || {
        let moved = seen(mocks)
            .iter()
            .zip(&before)
            .position(|(now, then)| now > then);
        at = moved.unwrap_or(at);
        moved.is_some()
    });
    (client, at)
}

// A06
#[test]
fn a_backend_at_its_cap_gets_no_cold_requests() {
    let gate = Gate::new();
    let mocks = holdings(&gate, 4);
    let proxy = over(&mocks).cap(8).start();
    let body = completion(text("hold", 2000));
    let (clients, places): (Vec<_>, Vec<_>) = (0..8)
        .map(|_| place(&proxy, &mocks, "/v1/completions", &body))
        .unzip();
    let full = places[0];
    assert_eq!(places, [full; 8]);
    for i in 0..40 {
        let cold = completion(text(&format!("cold {i}"), 1200));
        assert_ne!(
            proxy.exchange(post("/v1/completions", &cold)).backend(),
            format!("b{full}")
        );
    }
    gate.open();
    for mut client in clients {
        assert_eq!(client.read_response().status, 200);
    }
    proxy.wait_idle();
}

// A07
#[test]
fn a_burst_of_one_new_prefix_lands_on_one_backend() {
    let gate = Gate::new();
    let mocks = holdings(&gate, 4);
    let proxy = over(&mocks).cap(8).top("workers = 2").start();
    let mut clients: Vec<Client> = (0..12).map(|_| proxy.client()).collect();
    for (i, client) in clients[..8].iter_mut().enumerate() {
        let prompt = text("hold", 8192) + &format!("tail {i}");
        client.send(post("/v1/completions", &completion(prompt)));
    }
    crate::harness::eventually("the burst has arrived", || {
        seen(&mocks).iter().sum::<usize>() == 8
    });
    let first = seen(&mocks);
    assert!(first.contains(&8), "{first:?}");
    for (i, client) in clients[8..].iter_mut().enumerate() {
        let prompt = text("hold", 8192) + &format!("late {i}");
        client.send(post("/v1/completions", &completion(prompt)));
    }
    crate::harness::eventually("the rest has arrived", || {
        seen(&mocks).iter().sum::<usize>() == 12
    });
    let mut all = seen(&mocks);
    all.sort_unstable();
    assert_eq!(all, [0, 0, 4, 8], "spill goes in a stable order");
    gate.open();
    for client in &mut clients {
        assert_eq!(client.read_response().status, 200);
    }
    proxy.wait_idle();
}

// A08
#[test]
fn a_hot_prefix_fills_its_owner_then_the_same_next_ones() {
    let gate = Gate::new();
    let mocks = holdings(&gate, 4);
    let proxy = over(&mocks).cap(4).start();
    let body = completion(text("hold", 3000));
    let mut order = Vec::new();
    for _ in 0..2 {
        let (clients, places): (Vec<_>, Vec<_>) = (0..12)
            .map(|_| place(&proxy, &mocks, "/v1/completions", &body))
            .unzip();
        for four in places.chunks(4) {
            assert!(four.iter().all(|at| *at == four[0]), "{places:?}");
        }
        let this: Vec<usize> = places.chunks(4).map(|four| four[0]).collect();
        assert_eq!(this.iter().collect::<BTreeSet<_>>().len(), 3, "{places:?}");
        order.push(this);
        gate.release(12);
        for mut client in clients {
            assert_eq!(client.read_response().status, 200);
        }
        proxy.wait_idle();
    }
    assert_eq!(order[0][0], order[1][0], "back to the owner: {order:?}");
    // The first to reach each next one is a spill; after that it is warm itself.
    assert!(proxy.metric("prefixlb_backend_picks_total", &["reason=\"spill\""]) >= 2.0);
}

// A09
#[test]
fn sessions_are_told_apart_exactly() {
    let mocks = mocks(4);
    let proxy = over(&mocks)
        .policy("kind = \"session\"\nsession = \"header:X-Session-Id\"")
        .start();
    let mut client = proxy.client();
    let ids: Vec<String> = (10..20)
        .chain(1..3)
        .map(|i| format!("session-{i}"))
        .collect();
    let mut homes: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for _ in 0..5 {
        for id in &ids {
            let field = format!("X-Session-Id: {id}");
            let answer = client.exchange(request("POST", "/v1/completions", &[&field], "{}"));
            homes.entry(id).or_default().insert(answer.backend());
        }
    }
    assert!(homes.values().all(|homes| homes.len() == 1), "{homes:?}");
    assert!(
        homes.values().flatten().collect::<BTreeSet<_>>().len() >= 3,
        "{homes:?}"
    );
    let long = format!("X-Session-Id: {}", "x".repeat(4096));
    for fields in [
        &[][..],
        &["X-Session-Id:"],
        &[&long],
        &["X-Session-Id: a", "X-Session-Id: b"],
    ] {
        let answer = client.exchange(request("POST", "/v1/completions", fields, "{}"));
        assert_eq!(answer.status, 200, "{fields:?}");
    }
    // Without an id the prefix decides.
    let body = completion(text("no session", 2000));
    let owners: BTreeSet<String> = (0..6)
        .map(|_| ask(&mut client, "/v1/completions", &body).backend())
        .collect();
    assert_eq!(owners.len(), 1, "{owners:?}");
}

/// Where each of 300 keys goes.
fn owners(proxy: &Proxy) -> Vec<String> {
    let mut client = proxy.client();
    (0..300)
        .map(|i| {
            let answer = client.exchange(request("GET", "/x", &[&format!("X-Key: key {i}")], ""));
            assert_eq!(answer.status, 200);
            answer.backend()
        })
        .collect()
}

// A10
#[test]
fn the_hash_moves_only_what_it_must() {
    let mocks = mocks(10);
    let config = over(&mocks).policy("kind = \"consistent-hash\"\nhash_on = \"header:X-Key\"");
    let mut proxy = config.clone().start();
    let all = owners(&proxy);
    assert!(all.iter().collect::<BTreeSet<_>>().len() == 10);

    let reloaded = |proxy: &Proxy, n: f64| {
        crate::harness::eventually("the reload is in force", || {
            proxy.metric("prefixlb_config_reloads_total", &["result=\"ok\""]) >= n
                || proxy.metric("prefixlb_config_generation", &[]) > n
        });
    };
    proxy.reload(|config| config.without_backend(4));
    crate::harness::eventually("b4 is gone", || {
        !proxy.ledger().iter().any(|(n, ..)| n == "b4")
    });
    let fewer = owners(&proxy);
    let moved = all.iter().zip(&fewer).filter(|(then, now)| then != now);
    let moved_needlessly = moved.clone().filter(|(then, _)| *then != "b4").count();
    assert!(
        moved_needlessly <= 30,
        "{moved_needlessly} of 300 moved that need not"
    );
    assert!(!fewer.contains(&"b4".to_string()));

    proxy.reload(|_| config.clone());
    crate::harness::eventually("b4 is back", || {
        proxy.ledger().iter().any(|(n, ..)| n == "b4")
    });
    assert_eq!(owners(&proxy), all, "back to the former mapping");

    proxy.reload(|_| config.clone().reversed());
    reloaded(&proxy, 3.0);
    assert_eq!(owners(&proxy), all, "the order in the file is nothing");

    let second = config.reversed().start();
    assert_eq!(owners(&second), all, "nor is the instance");
}

// A12
#[test]
fn compressed_bodies_pass_untouched() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).start();
    let body: Vec<u8> = (0..65_536u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    for coding in ["gzip", "zstd", "br2", "gzip, gzip"] {
        let mut bytes = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: lb.test\r\nContent-Type: application/json\r\n\
             Content-Encoding: {coding}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend(&body);
        assert_eq!(proxy.exchange(bytes).status, 200, "{coding}");
        let seen = mock.requests().pop().expect("a request");
        assert_eq!(seen.fields.get("content-encoding"), Some(coding));
        assert!(seen.body == body, "{coding}: the body changed");
    }
    assert!(proxy.metric("prefixlb_keyless_requests_total", &[]) >= 4.0);
}

/// A backend that counts a body's bytes and forgets them; the sum is the answer.
fn counting() -> Mock {
    Mock::script(|conn| {
        while let Some(mut request) = conn.read_head() {
            let counted = if let Some(length) = request.fields.get("content-length") {
                conn.discard(length.parse().expect("a number"))
            } else if conn.read_body(&mut request).is_some() {
                request.body.len()
            } else {
                return;
            };
            conn.note(&crate::harness::Request {
                body: Vec::new(),
                raw_body: Vec::new(),
                ..request
            });
            let text = counted.to_string();
            conn.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}",
                text.len()
            ));
        }
    })
}

/// Sends a chat body of `length` bytes, by length or in chunks.
fn upload(client: &mut Client, length: usize, chunked: bool) {
    let start = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"";
    let framing = if chunked {
        "Transfer-Encoding: chunked".into()
    } else {
        format!("Content-Length: {length}")
    };
    client.send(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: lb.test\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
    ));
    let mut left = length;
    let block = vec![b'a'; 256 << 10];
    while left > 0 {
        let n = left.min(block.len());
        let mut data = block[..n].to_vec();
        if left == length {
            data[..start.len()].copy_from_slice(start.as_bytes());
        }
        let sent = if chunked {
            client.try_send([format!("{n:x}\r\n").as_bytes(), &data, b"\r\n"].concat())
        } else {
            client.try_send(&data)
        };
        if !sent {
            return;
        }
        left -= n;
    }
    if chunked {
        client.try_send("0\r\n\r\n");
    }
}

// A13
#[test]
fn large_bodies_stream_through_without_being_held() {
    let mock = counting();
    let proxy = Config::new(&[&mock]).start();
    let before = proxy.resident_kib();
    for length in [1_998_718, 2_097_152, 3_145_728, 52_428_800] {
        for chunked in [false, true] {
            let mut client = proxy.client();
            upload(&mut client, length, chunked);
            assert_eq!(
                client.read_response().text(),
                length.to_string(),
                "chunked: {chunked}"
            );
        }
    }
    let grown = proxy.resident_kib().saturating_sub(before);
    assert!(grown < 24 << 10, "{grown} KiB more");
    proxy.wait_idle();
}

// A13
#[test]
fn bodies_over_the_limit_are_refused_by_either_framing() {
    let mock = counting();
    let proxy = Config::new(&[&mock]).http("body_bytes = \"4MiB\"").start();
    for (n, chunked) in [false, true].into_iter().enumerate() {
        let mut client = proxy.client();
        upload(&mut client, 5 << 20, chunked);
        let answer = client.read_response();
        assert_eq!(answer.status, 413);
        assert_eq!(answer.error_code(), "body_too_large");
        proxy.wait_failures("body_too_large", n + 1);
    }
    let mut client = proxy.client();
    upload(&mut client, 4 << 20, true);
    assert_eq!(client.read_response().status, 200);
    proxy.wait_idle();
}

// A14
#[test]
fn no_backend_and_full_backends_are_told_apart() {
    let down = super::interim::no_backend();
    let answer = down.exchange(post("/v1/completions", "{}"));
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "no_backend")
    );
    assert!(answer.fields.has("retry-after"));

    for (lines, code) in [
        ("queue_limit = 0", "queue_full"),
        ("queue_deadline = \"100ms\"", "queue_timeout"),
    ] {
        let gate = Gate::new();
        let mocks = holdings(&gate, 2);
        let proxy = over(&mocks)
            .cap(1)
            .pool(lines)
            .pool("retry_after = \"7s\"")
            .start();
        let held: Vec<Client> = (0..2)
            .map(|i| {
                place(
                    &proxy,
                    &mocks,
                    "/v1/completions",
                    &completion(format!("hold {i}")),
                )
                .0
            })
            .collect();
        let answer = proxy.exchange(post("/v1/completions", "{}"));
        assert_eq!((answer.status, answer.error_code().as_str()), (429, code));
        assert_eq!(answer.fields.get("retry-after"), Some("7"));
        gate.open();
        for mut client in held {
            assert_eq!(client.read_response().status, 200);
        }
        assert_eq!(proxy.exchange(post("/v1/completions", "{}")).status, 200);
        proxy.wait_failures(code, 1);
        proxy.wait_idle();
    }
}

// A14
#[test]
fn a_refusal_of_the_engine_is_relayed_or_tried_elsewhere() {
    let full = Mock::answer(|_| {
        Reply::raw("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 10\r\n\r\nqueue full")
    });
    let idle = Mock::ok("{}");
    let proxy = Config::new(&[&full, &idle])
        .policy("kind = \"round-robin\"")
        .start();
    for _ in 0..4 {
        let answer = proxy.exchange(post("/v1/completions", "{}"));
        assert!(
            answer.status == 200 || (answer.status == 503 && answer.text() == "queue full"),
            "{}{}",
            answer.head,
            answer.text()
        );
    }
    assert!(idle.requests().len() + full.requests().len() <= 6);
}

// A14
#[test]
fn queued_requests_are_served_in_their_turn() {
    let gate = Gate::new();
    let mock = holding(&gate);
    let proxy = Config::new(&[&mock]).cap(1).start();
    let mut clients = vec![place(&proxy, std::slice::from_ref(&mock), "/first", "hold").0];
    for i in 0..4 {
        let mut client = proxy.client();
        client.send(post(&format!("/{i}"), "hold"));
        clients.push(client);
        crate::harness::eventually("it waits", || {
            proxy.metric("prefixlb_pool_waiting_requests", &[]) == f64::from(i + 1)
        });
    }
    gate.open();
    for client in &mut clients {
        assert_eq!(client.read_response().status, 200);
    }
    let targets: Vec<String> = mock.requests().into_iter().map(|r| r.target).collect();
    assert_eq!(targets, ["/first", "/0", "/1", "/2", "/3"]);
}

// A15
#[test]
fn a_block_counts_only_after_what_precedes_it() {
    let mocks = mocks(4);
    let proxy = over(&mocks).policy("threshold = 0.4").start();
    let mut client = proxy.client();
    // Two prompts of whole blocks with different owners.
    let mut found: Vec<(String, String)> = Vec::new();
    for i in 0.. {
        let prompt = text(&format!("seed{i}"), 4096);
        let home = ask(&mut client, "/v1/completions", &completion(prompt.clone())).backend();
        if found.iter().all(|(_, other)| *other != home) {
            found.push((prompt, home));
        }
        if found.len() == 2 {
            break;
        }
        assert!(i < 100, "every prompt went to one backend");
    }
    let joined = found[1].0.clone() + &found[0].0;
    let answer = ask(&mut client, "/v1/completions", &completion(joined));
    assert_eq!(
        (reason(&answer).as_str(), &answer.backend()),
        ("warm", &found[1].1)
    );
}

// L01
#[test]
fn a_stream_is_load_until_its_last_byte() {
    let gate = Gate::new();
    let script = {
        let gate = gate.clone();
        move |conn: &mut crate::harness::Conn| {
            while let Some(request) = conn.read_request() {
                if request.text().contains("stream") {
                    conn.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
                    gate.pass();
                    conn.send("0\r\n\r\n");
                } else {
                    conn.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
                }
            }
        }
    };
    let mocks = vec![Mock::script(script.clone()), Mock::script(script)];
    let proxy = over(&mocks)
        .policy("scorer = \"active-requests\"\ntau = 100")
        .start();
    let body = completion(text("stream", 2000));
    let mut streams = Vec::new();
    let mut homes = BTreeSet::new();
    for _ in 0..4 {
        let mut client = proxy.client();
        client.send(post("/v1/completions", &body));
        homes.insert(client.read_head().backend());
        client.expect("1\r\na\r\n");
        streams.push(client);
    }
    assert_eq!(homes.len(), 1, "{homes:?}");
    let home = homes.pop_first().expect("one");
    assert_eq!(proxy.active(&home), 4);
    for i in 0..4 {
        let answer = proxy.exchange(post(
            "/v1/completions",
            &completion(text(&format!("cold {i}"), 1000)),
        ));
        assert_ne!(answer.backend(), home);
    }
    assert_eq!(proxy.active(&home), 4);
    streams.pop().expect("a stream").reset();
    crate::harness::eventually("three are left", || proxy.active(&home) == 3);
    gate.open();
    for mut client in streams {
        client.expect("0\r\n\r\n");
    }
    proxy.wait_idle();
}

// L03
#[test]
fn every_path_counts_as_load() {
    for path in [
        "/inference/v1/generate",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/unknown/path",
    ] {
        let gate = Gate::new();
        let running: Vec<Arc<AtomicUsize>> = (0..4).map(|_| Arc::default()).collect();
        let most: Arc<AtomicUsize> = Arc::default();
        let mocks: Vec<Mock> = running
            .iter()
            .map(|running| {
                let (running, most, gate) = (running.clone(), most.clone(), gate.clone());
                Mock::answer(move |_| {
                    let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    gate.pass();
                    running.fetch_sub(1, Ordering::SeqCst);
                    Reply::ok("{}")
                })
            })
            .collect();
        let proxy = over(&mocks).cap(4).top("workers = 2").start();
        let body =
            json!({"model": "m", "prompt": text("p", 2000), "input": text("p", 2000)}).to_string();
        let mut clients: Vec<Client> = (0..32).map(|_| proxy.client()).collect();
        for client in &mut clients {
            client.send(post(path, &body));
        }
        crate::harness::eventually("every backend is at its cap", || seen(&mocks) == [4; 4]);
        gate.open();
        for client in &mut clients {
            assert_eq!(client.read_response().status, 200, "{path}");
        }
        assert_eq!(most.load(Ordering::SeqCst), 4, "{path}");
        proxy.wait_idle();
    }
}

// A14
#[test]
fn a_dead_backend_is_passed_over_for_its_own_prefix() {
    let mock = Mock::ok("{}");
    let proxy = Config::new(&[&mock]).backend(dead_address(), "").start();
    let mut client = proxy.client();
    for i in 0..10 {
        let answer = ask(
            &mut client,
            "/v1/completions",
            &completion(text(&format!("p{i}"), 600)),
        );
        assert_eq!(answer.backend(), "b0");
    }
    proxy.wait_idle();
}
