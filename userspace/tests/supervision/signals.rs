//! What engines tell, from their pages to the signal table.

use std::sync::Arc;
use std::time::Instant;

use prefixlb::backend::signals::Reading;
use prefixlb::picker::EngineSignal;
use prefixlb_common::ledger::STATE_HEALTHY;

use crate::support::{Engine, MS, Reply, World, eventually, pool};

const VLLM: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.0e+03
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 600.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 100.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="500"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 3.0
"#;

const OLD_VLLM: &str = r#"vllm:num_requests_running{model_name="m"} 2
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 40
vllm:gpu_prefix_cache_hits_total{model_name="m"} 10
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
"#;

const SGLANG: &str = r#"sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 7.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:prompt_tokens_total{model_name="m"} 8.0e+06
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1.0e+06
sglang:cached_tokens_total{cache_source="host",model_name="m"} 5.0e+05
sglang:max_total_num_tokens{model_name="m"} 161721.0
"#;

const LLAMA: &str = "llamacpp:prompt_tokens_total 300
llamacpp:prompt_tokens_cached_total 700
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
llamacpp:n_busy_slots_per_decode NaN
";

fn sum(series: &[(u64, f64)]) -> f64 {
    series.iter().map(|s| s.1).sum()
}

#[test]
fn the_pages_of_three_engines() {
    let table = [
        (
            VLLM,
            Some(1),
            Some(7),
            Some(0.75),
            1500.0,
            700.0,
            Some(24_000),
        ),
        (OLD_VLLM, None, Some(2), Some(0.5), 40.0, 10.0, None),
        (
            SGLANG,
            Some(7),
            Some(5),
            Some(0.28),
            8.0e6,
            1.5e6,
            Some(161_721),
        ),
        // llama.cpp counts what it computed; what it looked up is that and the hits.
        (LLAMA, Some(2), Some(1), None, 1000.0, 700.0, None),
    ];
    for (page, waiting, running, kv_use, prompt, hits, capacity) in table {
        let reading = Reading::of_page(page).expect("a known page");
        let signal = EngineSignal {
            waiting,
            running,
            kv_use,
        };
        assert_eq!(reading.signal, signal, "{page}");
        assert_eq!(sum(&reading.prompt), prompt, "{page}");
        assert_eq!(sum(&reading.hits), hits, "{page}");
        assert_eq!(reading.capacity, capacity, "{page}");
    }
}

#[test]
fn nan_and_other_pages_say_nothing() {
    assert_eq!(Reading::of_page("<html>not found</html>"), None);
    assert_eq!(Reading::of_page("go_goroutines 7\n"), None);
    let reading = Reading::of_page("sglang:num_running_reqs 1\nsglang:token_usage NaN\n").unwrap();
    assert_eq!(reading.signal.kv_use, None);
    // Without the engine's hits its prompt tokens would read as "never hit".
    let reading = Reading::of_page("llamacpp:prompt_tokens_total 5\n").unwrap();
    assert!(reading.prompt.is_empty());
}

fn scraped(engine: &Engine) -> prefixlb::config::PoolSettings {
    let mut pool = pool(vec![engine.backend()]);
    pool.signals.scrape = true;
    pool
}

#[tokio::test]
async fn signals_and_counters_follow_the_engine_through_its_restart() {
    let engine = Engine::start().await;
    engine.reply("/metrics", Reply::With(200, LLAMA.into()));
    let props = r#"{"default_generation_settings":{"n_ctx":512},"total_slots":2}"#;
    engine.reply("/props", Reply::With(200, props.into()));
    let world = World::supervised(vec![scraped(&engine)]);
    let backend = world.backend(0);
    let signal = || {
        world
            .shared
            .signals
            .load(backend.slot, world.shared.now_ms())
    };
    eventually("a signal", || signal().waiting == Some(2)).await;
    assert_eq!(signal().running, Some(1));
    // Two slots of 512 tokens, in blocks of 64: more than that the index does not believe.
    let pool = Arc::clone(&world.shared.snapshot.load().pools[0]);
    let chain: Vec<u64> = (1..=40).collect();
    eventually("its capacity in the index", || {
        pool.picker.index().insert(&chain, backend.slot);
        pool.picker.index().held(backend.slot) == 16
    })
    .await;
    assert!(engine.seen("/props") >= 1);
    let counts = || {
        (
            backend.metrics.engine_prompt_tokens.get(),
            backend.metrics.engine_hit_tokens.get(),
        )
    };
    assert_eq!(counts(), (0, 0), "counting starts with the first page");

    let page = |computed: u64, cached: u64| {
        let page = format!(
            "llamacpp:prompt_tokens_total {computed}\nllamacpp:prompt_tokens_cached_total {cached}\n"
        );
        engine.reply("/metrics", Reply::With(200, page));
    };
    page(400, 750);
    eventually("growth", || counts() == (150, 50)).await;
    assert_eq!(
        signal(),
        EngineSignal::default(),
        "what a page lacks is unknown"
    );
    // Another process: its counters began anew.
    page(10, 5);
    eventually("growth since the restart", || counts() == (165, 55)).await;
}

#[tokio::test]
async fn a_page_that_fails_is_counted_and_its_signals_grow_stale() {
    let engine = Engine::start().await;
    engine.reply("/metrics", Reply::With(200, VLLM.into()));
    let mut settings = scraped(&engine);
    settings.signals.stale_after = 300 * MS;
    let world = World::supervised(vec![settings]);
    let backend = world.backend(0);
    let signal = || {
        world
            .shared
            .signals
            .load(backend.slot, world.shared.now_ms())
    };
    eventually("a signal", || signal().kv_use == Some(0.75)).await;
    engine.reply("/metrics", Reply::status(500));
    eventually("staleness", || signal() == EngineSignal::default()).await;
    assert!(backend.metrics.scrape_failures.get() > 0);
    engine.reply("/metrics", Reply::With(200, SGLANG.into()));
    eventually("another signal", || signal().waiting == Some(7)).await;
}

#[tokio::test]
async fn a_missing_page_changes_nothing() {
    let engine = Engine::start().await;
    let mut settings = scraped(&engine);
    settings.signals.interval = 50 * MS;
    let start = Instant::now();
    let world = World::supervised(vec![settings]);
    eventually("some probes", || engine.seen("/health") >= 40).await;
    let backend = world.backend(0);
    assert!(world.has(0, STATE_HEALTHY));
    assert_eq!(backend.metrics.scrape_failures.get(), 0);
    // At once, and then once in thirty intervals, less a tenth.
    let most = 1.0 + start.elapsed().as_secs_f64() / (30.0 * 0.05 * 0.9);
    let asked = engine.seen("/metrics");
    assert!(asked as f64 <= most, "{asked} times, not {most:.1}");
    // It is found when it comes.
    engine.reply("/metrics", Reply::With(200, SGLANG.into()));
    eventually("a signal", || {
        let now = world.shared.now_ms();
        world.shared.signals.load(backend.slot, now).running == Some(5)
    })
    .await;
}

#[tokio::test]
async fn a_page_over_the_limit_is_a_failure_and_not_memory() {
    let engine = Engine::start().await;
    let page = "x 1\n".repeat((5 << 20) / 4);
    engine.reply("/metrics", Reply::With(200, page));
    let mut settings = scraped(&engine);
    settings.signals.interval = 200 * MS;
    let world = World::supervised(vec![settings]);
    let backend = world.backend(0);
    eventually("a failure", || backend.metrics.scrape_failures.get() >= 1).await;
}
