//! The engine simulator over real sockets: answers, metrics, cancellation, faults.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prefixlb_bench::load::{Plan, dialogue};
use prefixlb_bench::sim::engine::Limits;
use prefixlb_bench::sim::server::Sim;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn start() -> (Arc<Sim>, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let sim = Sim::new(Limits::default(), 50.0);
    tokio::spawn(sim.clone().serve(listener));
    (sim, address)
}

fn chat(fault: &str, tokens: u64, stream: bool) -> String {
    let body = json!({
        "messages": [{"role": "user", "content": "x".repeat(640)}],
        "max_tokens": tokens, "stream": stream, "stream_options": {"include_usage": true},
    })
    .to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nx-sim-fault: {fault}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn open(address: SocketAddr, request: &str) -> TcpStream {
    let mut io = TcpStream::connect(address).await.expect("it listens");
    io.write_all(request.as_bytes()).await.expect("sent");
    io
}

/// Everything that comes until `enough` is in it, or the connection ends: then with `true`.
async fn read(io: &mut TcpStream, enough: &str) -> (String, bool) {
    let mut bytes = Vec::with_capacity(64 << 10);
    loop {
        let read = tokio::time::timeout(Duration::from_secs(20), io.read_buf(&mut bytes)).await;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        match read.expect("something comes within 20 s") {
            Ok(n) if n > 0 && !text.contains(enough) => {}
            Ok(n) => return (text, n == 0),
            Err(_) => return (text, true),
        }
    }
}

async fn page(address: SocketAddr, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: e\r\n\r\n");
    let mut io = open(address, &request).await;
    read(&mut io, "\r\n\r\n").await.0
}

#[tokio::test]
async fn a_dialogue_is_answered_and_hits_its_own_prefix() {
    let (sim, address) = start().await;
    let plan = Plan {
        dialogues: 1,
        turns: 3,
        think: Duration::ZERO,
        ..Plan::published(1, 50.0)
    };
    let mut turns = Vec::new();
    dialogue(address, &plan, 0, |turn| turns.push(turn))
        .await
        .expect("whole answers");
    assert_eq!(turns[0].cached_tokens, 0);
    for turn in &turns[1..] {
        assert!(turn.cached_tokens * 10 > turn.prompt_tokens * 9, "{turn:?}");
    }
    assert_eq!(sim.look(|engine| engine.totals.finished), 3);
}

#[tokio::test]
async fn the_metrics_page_has_vllms_names() {
    let (_sim, address) = start().await;
    let mut io = open(address, &chat("", 4, false)).await;
    let (answer, _) = read(&mut io, "\"usage\"").await;
    let body = answer.split("\r\n\r\n").nth(1).expect("a body");
    let value: Value = serde_json::from_str(body).expect("JSON");
    assert_eq!(value["usage"]["completion_tokens"], 4);
    let page = page(address, "/metrics").await;
    for name in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"2048\"}",
    ] {
        assert!(page.contains(name), "{name} in {page}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed() {
    let (sim, address) = start().await;
    let mut io = open(address, &chat("", 20_000, true)).await;
    read(&mut io, "data: ").await;
    drop(io);
    let deadline = Instant::now() + Duration::from_secs(20);
    while sim.look(|engine| engine.totals.aborted) == 0 {
        assert!(Instant::now() < deadline, "the request goes on for nobody");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let left = sim.look(|engine| (engine.queue(), engine.cache_pinned()));
    assert_eq!(left, ((0, 0), 0));
}

#[tokio::test]
async fn faults_are_what_they_say() {
    let (_sim, address) = start().await;
    for (fault, enough, has, has_not, ends) in [
        ("", "\r\n0\r\n\r\n", "[DONE]", "nothing", false),
        ("die-fin", "\r\n0\r\n\r\n", "data: ", "[DONE]", true),
        ("die-rst", "\r\n0\r\n\r\n", "data: ", "[DONE]", true),
        ("reset", "HTTP", "", "HTTP", true),
        ("full", "queue full", "503", "200 OK", false),
        ("bad-chunk", "hello", "0x5", "[DONE]", false),
        (
            "surplus",
            "\r\n0\r\n\r\nHTTP/1.1 200 OK",
            "[DONE]",
            "nothing",
            false,
        ),
        ("until-close", "never", "[DONE]", "Transfer-Encoding", true),
    ] {
        let mut io = open(address, &chat(fault, 6, true)).await;
        let (text, ended) = read(&mut io, enough).await;
        assert!(text.contains(has), "{fault}: {text}");
        assert!(!text.contains(has_not), "{fault}: {text}");
        assert_eq!(ended, ends, "{fault}: {text}");
    }
}

#[tokio::test]
async fn what_cannot_be_served_is_an_openai_error() {
    let (_sim, address) = start().await;
    for body in [
        "{",
        "{}",
        "{\"messages\":[{\"role\":\"user\",\"content\":7}]}",
    ] {
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut io = open(address, &request).await;
        let (text, _) = read(&mut io, "\"message\"").await;
        assert!(text.starts_with("HTTP/1.1 400"), "{body}: {text}");
        assert!(text.contains("invalid_request_error"), "{text}");
    }
}
