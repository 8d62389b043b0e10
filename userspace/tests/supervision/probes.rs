//! Active health (cases H02, H04).

use std::sync::Arc;
use std::time::Duration;

use prefixlb_common::ledger::{STATE_HEALTHY, WEIGHT_ONE};

use crate::support::{Engine, HOUR, MS, Reply, Waiting, World, eventually, pool};

#[tokio::test]
async fn the_first_probe_comes_at_once_and_one_is_enough_at_start() {
    let engine = Engine::start().await;
    let mut pool = pool(vec![engine.backend()]);
    pool.health.interval = HOUR;
    pool.health.rise = 5;
    pool.health.slow_start = HOUR;
    let world = World::supervised(vec![pool]);
    eventually("a probe", || engine.seen("/health") == 1).await;
    assert!(world.has(0, STATE_HEALTHY));
    assert_eq!(engine.last_host(), engine.addr.to_string());
    assert_eq!(world.weight(0), WEIGHT_ONE, "nobody to protect it from");
}

#[tokio::test]
async fn an_engine_that_loads_its_model_is_not_healthy_until_it_has_risen() {
    let engine = Engine::start().await;
    engine.reply("/health", Reply::status(503));
    let mut settings = pool(vec![engine.backend()]);
    settings.health.interval = HOUR;
    let world = World::supervised(vec![settings.clone()]);
    // It was hoped to be healthy; its first probe says otherwise.
    eventually("unhealthy", || !world.has(0, STATE_HEALTHY)).await;
    assert_eq!(engine.seen("/health"), 1);
    settings.health.interval = 5 * MS;
    world.reload(vec![settings]);
    eventually("some probes", || engine.seen("/health") >= 4).await;
    assert!(!world.has(0, STATE_HEALTHY));
    engine.reply("/health", Reply::status(200));
    world.until_healthy(0).await;
    assert!(world.backend(0).metrics.probe_failures.get() >= 3);
}

#[tokio::test]
async fn only_failures_in_a_row_take_a_backend_out() {
    let engine = Engine::start().await;
    let world = World::supervised(vec![pool(vec![engine.backend()])]);
    engine.until_judged().await;
    let before = engine.seen("/health");
    engine.reply("/health", Reply::status(500));
    eventually("unhealthy", || !world.has(0, STATE_HEALTHY)).await;
    assert!(engine.seen("/health") >= before + 3, "fall is 3");
    let before = engine.seen("/health");
    engine.reply("/health", Reply::status(204));
    world.until_healthy(0).await;
    assert!(engine.seen("/health") > before + 1, "rise is 2");
}

#[tokio::test]
async fn redirects_and_client_errors_are_not_healthy() {
    for status in [302, 401, 404] {
        let engine = Engine::start().await;
        engine.reply("/health", Reply::status(status));
        let world = World::supervised(vec![pool(vec![engine.backend()])]);
        eventually("some probes", || engine.seen("/health") >= 3).await;
        assert!(!world.has(0, STATE_HEALTHY), "{status}");
    }
}

#[tokio::test]
async fn slow_probes_do_not_take_out_a_backend_that_serves() {
    let engine = Engine::start().await;
    let mut pool = pool(vec![engine.backend()]);
    pool.health.timeout = 400 * MS;
    let world = World::supervised(vec![pool]);
    engine.until_judged().await;
    let backend = world.backend(0);
    // While it is probed it streams: each probe meets an answer that went on.
    let streaming = Arc::clone(&backend);
    engine.on_request(move || streaming.passive.alive());
    engine.reply("/health", Reply::Never);
    eventually("slow probes", || backend.metrics.probe_failures.get() >= 4).await;
    assert!(world.has(0, STATE_HEALTHY), "fall is 3, but it serves");
    // Slow and silent is out.
    engine.on_request(|| {});
    eventually("unhealthy", || !world.has(0, STATE_HEALTHY)).await;
}

#[tokio::test]
async fn a_refused_connection_counts_even_if_traffic_was_good() {
    let engine = Engine::start().await;
    let mut gone = engine.backend();
    // A port that was free a moment ago: nobody listens.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    gone.port = free.local_addr().unwrap().port();
    drop(free);
    gone.name = "gone".into();
    let mut off = pool(vec![gone]);
    off.health.active = false;
    let mut on = off.clone();
    on.health.active = true;
    let world = World::supervised(vec![off]);
    world.until_healthy(0).await;
    world.reload(vec![on]);
    let backend = world.backend(0);
    eventually("unhealthy", || {
        backend.passive.alive();
        !world.has(0, STATE_HEALTHY)
    })
    .await;
}

#[tokio::test]
async fn probes_run_side_by_side() {
    let (silent, lively) = (Engine::start().await, Engine::start().await);
    silent.reply("/health", Reply::Never);
    let _world = World::supervised(vec![pool(vec![silent.backend(), lively.backend()])]);
    eventually("probes of the other", || lively.seen("/health") >= 5).await;
    assert_eq!(silent.seen("/health"), 1);
}

#[tokio::test]
async fn without_active_checks_a_backend_is_healthy_and_left_alone() {
    let engine = Engine::start().await;
    let mut pool = pool(vec![engine.backend()]);
    pool.health.active = false;
    let world = World::supervised(vec![pool]);
    world.until_healthy(0).await;
    assert_eq!(engine.seen("/health"), 0);
}

#[tokio::test]
async fn probes_follow_the_configuration() {
    let (b1, b2, b4) = (
        Engine::start().await,
        Engine::start().await,
        Engine::start().await,
    );
    b2.reply("/ready", Reply::status(200));
    let world = World::supervised(vec![pool(vec![b1.backend(), b2.backend()])]);
    b1.until_judged().await;
    b2.until_judged().await;

    let removed = Arc::downgrade(&world.backend(0));
    let mut next = pool(vec![b2.backend(), b4.backend()]);
    next.health.path = "/ready".into();
    b4.reply("/ready", Reply::status(200));
    world.reload(vec![next.clone()]);
    world.until_healthy(1).await;
    assert!(
        b4.seen("/ready") >= 2,
        "added by a reload: ready after its rise"
    );
    // B1's task was ended before B4's began; one probe may have been on its way.
    let (last_of_b1, b2_so_far) = (b1.seen("/health"), b2.seen("/ready"));
    eventually("probes of B2", || b2.seen("/ready") >= b2_so_far + 5).await;
    assert!(b1.seen("/health") <= last_of_b1 + 1);
    assert_eq!(b1.open(), 0);
    eventually("nothing is left of B1", || removed.strong_count() == 0).await;
    assert!(world.has(0, STATE_HEALTHY), "kept through the reload");

    // However often it is reloaded, one probe is under way at a time.
    for engine in [&b2, &b4] {
        engine.reply("/slow", Reply::Never);
    }
    next.health.path = "/slow".into();
    next.health.timeout = HOUR;
    for i in 1..=40u32 {
        for backend in &mut next.backends {
            backend.weight = f64::from(i);
        }
        world.reload(vec![next.clone()]);
        eventually("the reload to be followed", || {
            world.weight(0) == i * WEIGHT_ONE && world.weight(1) == i * WEIGHT_ONE
        })
        .await;
    }
    eventually("slow probes", || {
        b2.seen("/slow") == 1 && b4.seen("/slow") == 1
    })
    .await;
    assert_eq!((b2.open(), b4.open()), (1, 1));
}

#[tokio::test]
async fn a_backend_that_comes_back_starts_slowly() {
    let engine = Engine::start().await;
    engine.reply("/health", Reply::status(503));
    let mut settings = pool(vec![engine.backend()]);
    settings.health.slow_start = HOUR;
    let world = World::supervised(vec![settings.clone()]);
    eventually("a probe", || {
        world.backend(0).metrics.probe_failures.get() >= 1
    })
    .await;
    engine.reply("/health", Reply::status(200));
    world.until_healthy(0).await;
    let tenth = WEIGHT_ONE / 10;
    assert!((tenth..=tenth + 2).contains(&world.weight(0)));
    // The rest of an hour passes at once when the setting says so.
    settings.health.slow_start = Duration::ZERO;
    world.reload(vec![settings]);
    eventually("full weight", || world.weight(0) == WEIGHT_ONE).await;
}

#[tokio::test]
async fn slow_start_ends_and_never_goes_back() {
    let first = Engine::start().await;
    let added = Engine::start().await;
    let mut settings = pool(vec![first.backend()]);
    settings.health.slow_start = 300 * MS;
    let world = World::supervised(vec![settings.clone()]);
    first.until_judged().await;
    settings.backends.push(added.backend());
    let waiting = Waiting::in_line(&world);
    world.reload(vec![settings]);
    world.until_healthy(1).await;
    waiting.until_woken().await;
    assert!(added.seen("/health") >= 2, "it had to rise");
    let mut last = 0;
    eventually("full weight", || {
        let now = world.weight(1);
        assert!(now >= last, "{now} after {last}");
        last = now;
        now == WEIGHT_ONE
    })
    .await;
}
