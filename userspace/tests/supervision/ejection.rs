//! Passive ejection.

use std::time::Instant;

use prefixlb::backend::health::Outcome;
use prefixlb_common::ledger::{STATE_EJECTED, STATE_HEALTHY};

use crate::support::{Engine, HOUR, MS, Waiting, World, eventually, pool};

async fn two_backends(eject_for: std::time::Duration) -> (World, [Engine; 2]) {
    let engines = [Engine::start().await, Engine::start().await];
    let mut pool = pool(engines.iter().map(Engine::backend).collect());
    pool.health.eject_after = 3;
    pool.health.eject_for = eject_for;
    let world = World::supervised(vec![pool]);
    world.until_healthy(0).await;
    world.until_healthy(1).await;
    (world, engines)
}

fn report(world: &World, i: usize, outcome: Outcome, times: u32) {
    for _ in 0..times {
        world.backend(i).passive.report(outcome);
    }
}

#[tokio::test]
async fn failures_in_a_row_eject_and_time_brings_back() {
    let (world, _engines) = two_backends(30 * MS).await;
    let waiting = Waiting::in_line(&world);
    report(&world, 0, Outcome::Status(503), 2);
    report(&world, 0, Outcome::Failed, 1);
    eventually("ejected", || world.backend(0).metrics.ejections.get() == 1).await;
    eventually("back", || !world.has(0, STATE_EJECTED)).await;
    waiting.until_woken().await;
    assert!(
        world.has(0, STATE_HEALTHY),
        "probes were content all the time"
    );
}

#[tokio::test]
async fn each_ejection_is_longer_up_to_eight_times_until_it_serves_well() {
    let first = 20 * MS;
    let (world, _engines) = two_backends(first).await;
    let backend = world.backend(0);
    for (round, times) in [1, 2, 4, 8, 8].into_iter().enumerate() {
        let before = Instant::now();
        report(&world, 0, Outcome::Failed, 3);
        eventually("ejected", || {
            backend.metrics.ejections.get() == round as u64 + 1
        })
        .await;
        eventually("back", || !world.has(0, STATE_EJECTED)).await;
        assert!(before.elapsed() >= first * times, "round {round}");
    }
    report(&world, 0, Outcome::Status(200), 3);
    report(&world, 0, Outcome::Failed, 3);
    eventually("ejected", || backend.metrics.ejections.get() == 6).await;
    eventually("back", || !world.has(0, STATE_EJECTED)).await;
}

#[tokio::test]
async fn the_last_backend_that_admits_stays() {
    let (world, _engines) = two_backends(100 * MS).await;
    report(&world, 0, Outcome::Failed, 3);
    eventually("ejected", || world.backend(0).metrics.ejections.get() == 1).await;
    eventually("the first one's return", || {
        report(&world, 1, Outcome::Failed, 1);
        let out = [0, 1].map(|i| world.has(i, STATE_EJECTED));
        assert_ne!(out, [true, true]);
        !out[0]
    })
    .await;
    // Now somebody else is there.
    eventually("the second one's turn", || {
        report(&world, 1, Outcome::Failed, 1);
        world.backend(1).metrics.ejections.get() == 1
    })
    .await;
}

#[tokio::test]
async fn an_ejected_backend_comes_back_slowly() {
    let (world, engines) = two_backends(HOUR).await;
    let mut settings = world.shared.snapshot.load().pools[0].settings.clone();
    settings.health.slow_start = HOUR;
    settings.health.eject_for = 20 * MS;
    world.reload(vec![settings]);
    let probes = engines[0].seen("/health");
    eventually("the reload to be followed", || {
        engines[0].seen("/health") >= probes + 20
    })
    .await;
    report(&world, 0, Outcome::Failed, 3);
    eventually("ejected", || world.backend(0).metrics.ejections.get() == 1).await;
    eventually("back", || !world.has(0, STATE_EJECTED)).await;
    let share = f64::from(world.weight(0)) / f64::from(world.weight(1));
    assert!((0.09..0.12).contains(&share), "{share}");
}
