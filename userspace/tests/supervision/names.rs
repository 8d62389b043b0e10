//! Name resolution (case P05) and literals (case P04).

use std::net::SocketAddr;
use std::sync::atomic::Ordering::SeqCst;

use prefixlb::backend::request_resolve;
use prefixlb_common::ledger::STATE_HEALTHY;

use crate::support::{Engine, MS, World, backend_at, eventually, pool};

/// Two engines on two loopback addresses and one port.
async fn twins() -> (Engine, Engine) {
    for _ in 0..50 {
        let first = Engine::start_on("127.0.0.2:0".parse().unwrap())
            .await
            .unwrap();
        let second = SocketAddr::new("127.0.0.3".parse().unwrap(), first.addr.port());
        if let Ok(second) = Engine::start_on(second).await {
            return (first, second);
        }
    }
    panic!("no port is free on both addresses");
}

#[tokio::test]
async fn a_backend_that_moves_is_followed() {
    let (old, new) = twins().await;
    let mut settings = pool(vec![backend_at("engine.test", old.addr.port())]);
    settings.resolve_interval = 10 * MS;
    let world = World::new(vec![settings]);
    world.names.set("engine.test", &["127.0.0.2"]);
    world.supervise();
    old.until_judged().await;
    assert!(old.seen("/health") > 0 && new.seen("/health") == 0);
    assert_eq!(old.last_host(), format!("engine.test:{}", old.addr.port()));
    let backend = world.backend(0);
    assert_eq!(backend.pool_epoch.load(SeqCst), 0);

    world.names.set("engine.test", &["127.0.0.3"]);
    eventually("the new address", || **backend.addrs.load() == [new.addr]).await;
    eventually("probes there", || new.seen("/health") >= 2).await;
    assert_eq!(
        backend.pool_epoch.load(SeqCst),
        1,
        "idle connections are dropped"
    );
    assert!(world.has(0, STATE_HEALTHY));

    world.names.remove("engine.test");
    eventually("the mark", || backend.resolution.is_failing()).await;
    assert_eq!(
        **backend.addrs.load(),
        [new.addr],
        "the last good set stays"
    );

    world
        .names
        .set("engine.test", &["127.0.0.3", "127.0.0.2", "127.0.0.3"]);
    eventually("both addresses, in order", || {
        **backend.addrs.load() == [new.addr, old.addr]
    })
    .await;
    assert!(!backend.resolution.is_failing());
    assert_eq!(backend.pool_epoch.load(SeqCst), 1, "no address was lost");
}

#[tokio::test]
async fn a_failed_connection_has_the_name_looked_up_at_once() {
    let (old, new) = twins().await;
    // Looked up once an hour, and not probed: only the data path notices.
    let mut settings = pool(vec![backend_at("engine.test", old.addr.port())]);
    settings.health.active = false;
    let world = World::new(vec![settings]);
    world.names.set("engine.test", &["127.0.0.2"]);
    world.supervise();
    let backend = world.backend(0);
    eventually("an address", || **backend.addrs.load() == [old.addr]).await;
    world.names.set("engine.test", &["127.0.0.3"]);
    request_resolve(&backend);
    eventually("the new address", || **backend.addrs.load() == [new.addr]).await;
}

#[tokio::test]
async fn a_name_that_never_resolved_is_unhealthy_and_then_comes() {
    let engine = Engine::start().await;
    let mut settings = pool(vec![backend_at("engine.test", engine.addr.port())]);
    settings.resolve_interval = 10 * MS;
    let world = World::supervised(vec![settings]);
    let backend = world.backend(0);
    eventually("failed probes", || {
        backend.metrics.probe_failures.get() >= 3
    })
    .await;
    assert!(!world.has(0, STATE_HEALTHY) && backend.resolution.is_failing());
    world.names.set("engine.test", &["127.0.0.1"]);
    world.until_healthy(0).await;
}

#[tokio::test]
async fn ipv6_literals_have_brackets_in_the_host_field() {
    let engine = Engine::start_on("[::1]:0".parse().unwrap()).await.unwrap();
    let world = World::supervised(vec![pool(vec![engine.backend()])]);
    engine.until_judged().await;
    assert!(world.has(0, STATE_HEALTHY));
    assert_eq!(engine.last_host(), format!("[::1]:{}", engine.addr.port()));
}
