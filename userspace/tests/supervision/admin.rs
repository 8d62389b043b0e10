//! The admin listener over its socket.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use prefixlb::admin;
use prefixlb::cli::Run;
use prefixlb::config::{GateKind, PolicyKind, Settings};
use prefixlb::control::Control;
use prefixlb::state::Phase;
use prefixlb_common::ledger::{STATE_DRAINING, STATE_HEALTHY};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Waiting, World, backend_at, pool};

/// Sends a request; status and body of the answer.
pub async fn ask(
    addr: SocketAddr,
    request: &str,
    token: Option<&str>,
    body: &str,
) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).await.expect("the admin listener");
    let token = token.map_or(String::new(), |t| format!("Authorization: Bearer {t}\r\n"));
    let length = body.len();
    let head = format!(
        "{request} HTTP/1.1\r\nHost: admin\r\nConnection: close\r\nContent-Length: {length}\r\n{token}\r\n{body}"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status").parse().unwrap();
    (status, body.to_owned())
}

/// A world with two backends that nobody probes, and its admin listener.
pub async fn world_with_admin(on: &str, token: Option<&str>) -> (World, SocketAddr) {
    let mut settings = pool(vec![backend_at("127.0.0.1", 9001), backend_at("::1", 9002)]);
    settings.health.active = false;
    let world = World::supervised(vec![settings]);
    set_token(&world, token);
    let listener = TcpListener::bind(on).await.unwrap();
    let mut addr = listener.local_addr().unwrap();
    if addr.ip().is_unspecified() {
        addr.set_ip("127.0.0.1".parse().unwrap());
    }
    let served = admin::serve(
        listener,
        Arc::clone(&world.shared),
        Control::new(Arc::clone(&world.shared), Run::default()),
    );
    tokio::spawn(served);
    world.until_healthy(0).await;
    world.until_healthy(1).await;
    (world, addr)
}

fn set_token(world: &World, token: Option<&str>) {
    let now = world.shared.snapshot.load_full();
    let mut settings: Settings = now.settings.clone();
    settings.admin.token = token.map(str::to_owned);
    world
        .shared
        .snapshot
        .store(Arc::new(prefixlb::state::Snapshot {
            generation: now.generation,
            settings,
            pools: now.pools.clone(),
        }));
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| panic!("not JSON: {text}"))
}

#[tokio::test]
async fn every_answer_has_its_status_and_errors_have_one_shape() {
    let (_world, addr) = world_with_admin("127.0.0.1:0", None).await;
    let table = [
        ("GET /", 200),
        ("GET /healthz", 200),
        ("GET /readyz", 200),
        ("GET /metrics", 200),
        ("GET /backends", 200),
        ("GET /pools/main/policy", 200),
        ("GET /nothing", 404),
        ("GET /backends/main/nobody/drain", 405),
        ("POST /backends/main/nobody/drain", 404),
        ("POST /backends/nowhere/127.0.0.1:9001/drain", 404),
        ("GET /pools/nowhere/policy", 404),
        ("PUT /pools/main/policy", 400),
        ("DELETE /pools/main/policy", 405),
        ("POST /metrics", 405),
        ("POST /healthz", 405),
        ("POST /backends/%ff/x/drain", 400),
        ("GET /reload", 405),
        ("POST /reload", 422),
    ];
    for (request, status) in table {
        let (got, body) = ask(addr, request, None, "").await;
        assert_eq!(got, status, "{request}: {body}");
        if status >= 400 {
            let error = &json(&body)["error"];
            for field in ["message", "type", "code"] {
                assert!(error[field].is_string(), "{request}: {body}");
            }
        }
    }
    let (_, body) = ask(addr, "POST /backends/main/nobody/drain", None, "").await;
    assert!(body.contains("[::1]:9002"), "names those there are: {body}");
}

#[tokio::test]
async fn the_token_guards_all_but_health_and_readiness() {
    let (_world, addr) = world_with_admin("127.0.0.1:0", Some("secret")).await;
    for open in ["GET /healthz", "GET /readyz"] {
        assert_eq!(ask(addr, open, None, "").await.0, 200, "{open}");
    }
    let guarded = [
        "GET /",
        "GET /metrics",
        "GET /backends",
        "POST /backends/main/127.0.0.1:9001/drain",
        "PUT /pools/main/policy",
        "POST /reload",
        "GET /nothing",
        "DELETE /metrics",
    ];
    for request in guarded {
        for token in [None, Some("sacred"), Some("secret2"), Some("")] {
            let (status, body) = ask(addr, request, token, "").await;
            assert_eq!(status, 401, "{request} with {token:?}: {body}");
        }
    }
    assert_eq!(ask(addr, "GET /metrics", Some("secret"), "").await.0, 200);
}

#[tokio::test]
async fn a_web_page_gives_no_orders_without_a_token() {
    let (world, addr) = world_with_admin("127.0.0.1:0", None).await;
    let order = "POST /backends/main/127.0.0.1:9001/drain HTTP/1.1\r\nHost: admin\r\nConnection: close\r\nContent-Length: 0\r\n";
    for (origin, status) in [("Origin: http://evil.example\r\n", "403"), ("", "200")] {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request = format!("{order}{origin}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer.split(' ').nth(1), Some(status), "{answer}");
        assert_eq!(world.has(0, STATE_DRAINING), status == "200");
    }
}

#[tokio::test]
async fn beyond_loopback_nothing_is_said_without_a_token() {
    let (world, addr) = world_with_admin("0.0.0.0:0", None).await;
    assert_eq!(ask(addr, "GET /healthz", None, "").await.0, 200);
    assert_eq!(ask(addr, "GET /backends", None, "").await.0, 403);
    assert_eq!(ask(addr, "POST /reload", Some("guess"), "").await.0, 403);
    set_token(&world, Some("secret"));
    assert_eq!(ask(addr, "GET /backends", Some("secret"), "").await.0, 200);
}

#[tokio::test]
async fn drain_and_undrain() {
    let (world, addr) = world_with_admin("127.0.0.1:0", None).await;
    let epoch = || world.backend(1).pool_epoch.load(SeqCst);
    let before = epoch();
    let path = "/backends/main/%5B::1%5D:9002";
    let (status, body) = ask(addr, &format!("POST {path}/drain"), None, "").await;
    assert_eq!((status, &json(&body)["state"]), (200, &json!("draining")));
    assert!(world.has(1, STATE_DRAINING) && world.has(1, STATE_HEALTHY));
    assert!(!world.has(0, STATE_DRAINING));
    assert_eq!(epoch(), before + 1, "idle connections are dropped");

    // It is an operator's word: a reload does not undo it.
    let settings = world.shared.snapshot.load().pools[0].settings.clone();
    world.reload(vec![settings]);
    let (_, body) = ask(addr, "GET /backends", None, "").await;
    let backends = &json(&body)["pools"][0]["backends"];
    assert_eq!(backends[1]["draining"], true);
    assert_eq!(backends[0]["state"], "healthy");
    assert_eq!(backends[0]["addrs"], json!(["127.0.0.1:9001"]));
    assert_eq!(backends[1]["name"], "[::1]:9002");
    assert_eq!(backends[1]["signals"]["kv_use"], Value::Null);

    let waiting = Waiting::in_line(&world);
    let (status, _) = ask(addr, &format!("POST {path}/undrain"), None, "").await;
    assert_eq!(status, 200);
    waiting.until_woken().await;
    assert!(!world.has(1, STATE_DRAINING));
}

#[tokio::test]
async fn readiness_is_about_taking_requests() {
    let (world, addr) = world_with_admin("127.0.0.1:0", None).await;
    let ready = async || ask(addr, "GET /readyz", None, "").await;
    assert_eq!(ready().await.0, 200);
    for i in [0, 1] {
        let slot = world.backend(i).slot;
        let state = &world.shared.ledger.cell(slot).state;
        state.fetch_and(!STATE_HEALTHY, SeqCst);
    }
    assert_eq!(ready().await.0, 200, "panic mode serves");
    for i in [0, 1] {
        let slot = world.backend(i).slot;
        let state = &world.shared.ledger.cell(slot).state;
        state.fetch_or(STATE_DRAINING, SeqCst);
    }
    let (status, body) = ready().await;
    assert_eq!(status, 503, "an operator's word goes before panic mode");
    assert_eq!(json(&body)["pools_without_backend"], json!(["main"]));
    for i in [0, 1] {
        let slot = world.backend(i).slot;
        let state = &world.shared.ledger.cell(slot).state;
        state.fetch_and(!STATE_DRAINING, SeqCst);
        state.fetch_or(STATE_HEALTHY, SeqCst);
    }
    assert_eq!(ready().await.0, 200);
    world.shared.phase.send_replace(Phase::Draining);
    let (status, body) = ready().await;
    assert_eq!((status, &json(&body)["draining"]), (503, &json!(true)));
    assert_eq!(ask(addr, "GET /healthz", None, "").await.0, 200);
}

#[tokio::test]
async fn a_policy_change_reaches_the_gate_in_the_ledger() {
    let (world, addr) = world_with_admin("127.0.0.1:0", None).await;
    let put = async |body| ask(addr, "PUT /pools/main/policy", None, body).await;
    let (status, body) = put(r#"{"kind":"always-stiky"}"#).await;
    assert_eq!(status, 400);
    assert!(body.contains("power-of-two"), "lists what there is: {body}");
    let (status, body) = put(r#"{"kind":"sticky","gate":"absolute","tau":12345}"#).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(tau(&world), [12_345; 2]);
    let (status, _) = put(r#"{"tau":null,"r_peak":1000,"t_max":"2s"}"#).await;
    assert_eq!(status, 200);
    assert_eq!(tau(&world), [2000; 2]);
    let picker = Arc::clone(&world.shared.snapshot.load().pools[0].picker);
    assert_eq!(
        picker.policy().gate,
        GateKind::Absolute,
        "what was not sent stays"
    );
    let (status, body) = put(r#"{"kind":"power-of-two"}"#).await;
    assert_eq!(
        (status, &json(&body)["kind"]),
        (200, &json!("power-of-two"))
    );
    assert_eq!(picker.policy().kind, PolicyKind::PowerOfTwo);
}

fn tau(world: &World) -> [u64; 2] {
    [0, 1].map(|i| {
        let slot = world.backend(i).slot;
        world.shared.ledger.cell(slot).tau.load(SeqCst)
    })
}

#[tokio::test]
async fn the_listener_outlives_draining_and_ends_with_the_process() {
    let (world, addr) = world_with_admin("127.0.0.1:0", None).await;
    world.shared.phase.send_replace(Phase::Draining);
    assert_eq!(ask(addr, "GET /metrics", None, "").await.0, 200);
    world.shared.phase.send_replace(Phase::Aborting);
    let start = std::time::Instant::now();
    while TcpStream::connect(addr).await.is_ok() {
        assert!(start.elapsed().as_secs() < 20, "still listening");
        tokio::task::yield_now().await;
    }
}
