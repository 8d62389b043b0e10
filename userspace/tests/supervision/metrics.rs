//! The metrics page.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use prefixlb::backend::prom_text::samples;
use prefixlb::config::PoolSettings;
use prefixlb::metrics::expose;
use prefixlb::picker::EngineSignal;
use prefixlb_common::ledger::STATE_HEALTHY;

use crate::admin::{ask, world_with_admin};
use crate::support::{World, backend_at, pool};

fn two_pools() -> Vec<PoolSettings> {
    let mut odd = pool(vec![backend_at("127.0.0.1", 9003)]);
    odd.name = "odd \"name\"\\".into();
    vec![
        pool(vec![backend_at("127.0.0.1", 9001), backend_at("::1", 9002)]),
        odd,
    ]
}

/// A world in which something has happened.
fn busy_world() -> World {
    let world = World::new(two_pools());
    let backend = world.backend(0);
    let counted = &backend.metrics;
    counted.ttft.observe(Duration::from_millis(120));
    counted.duration.observe(Duration::from_secs(1000));
    counted.picks[1].inc();
    counted.prompt_tokens.add(1000);
    counted.matched_tokens.add(750);
    let cell = world.shared.ledger.cell(backend.slot);
    cell.charged
        .fetch_add(3, std::sync::atomic::Ordering::SeqCst);
    cell.state
        .fetch_or(STATE_HEALTHY, std::sync::atomic::Ordering::SeqCst);
    let signal = EngineSignal {
        waiting: Some(4),
        running: None,
        kv_use: Some(0.5),
    };
    world.shared.signals.store(backend.slot, signal, u64::MAX);
    world
}

fn family(name: &str, known: &HashMap<&str, &str>) -> String {
    for suffix in ["_bucket", "_sum", "_count"] {
        if let Some(stem) = name.strip_suffix(suffix)
            && known.get(stem) == Some(&"histogram")
        {
            return stem.to_owned();
        }
    }
    name.to_owned()
}

#[test]
fn each_family_has_help_and_type_and_stands_in_one_piece() {
    let page = expose::render(&busy_world().shared);
    let mut types = HashMap::new();
    let mut helped = HashSet::new();
    let mut current = "";
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a help text");
            assert!(help.len() > 10 && help.ends_with('.'), "{line}");
            assert!(helped.insert(name), "{name} comes twice");
            current = name;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert_eq!(name, current);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            types.insert(name, kind);
        } else {
            let sample = samples(line)
                .next()
                .unwrap_or_else(|| panic!("unread: {line}"));
            assert_eq!(family(sample.name, &types), current);
            assert!(sample.name.starts_with("prefixlb_"), "{line}");
        }
    }
    assert_eq!(types.len(), helped.len());
    assert!(types.len() > 50, "{}", types.len());
}

#[test]
fn no_series_comes_twice_and_labels_are_read_back() {
    let page = expose::render(&busy_world().shared);
    let mut seen = HashSet::new();
    for sample in samples(&page) {
        assert!(seen.insert((sample.name, sample.labels)), "{sample:?}");
    }
    assert!(samples(&page).any(|s| s.label("pool").as_deref() == Some("odd \"name\"\\")));
    assert!(samples(&page).any(|s| s.label("backend").as_deref() == Some("[::1]:9002")));
}

#[test]
fn values_are_those_of_the_data_path() {
    let page = expose::render(&busy_world().shared);
    let of = |name: &str, backend: &str| -> Vec<f64> {
        samples(&page)
            .filter(|s| s.name == name && s.label("backend").is_none_or(|b| b == backend))
            .map(|s| s.value)
            .collect()
    };
    let first = "127.0.0.1:9001";
    assert_eq!(of("prefixlb_backend_healthy", first), [1.0]);
    assert_eq!(of("prefixlb_backend_weight", first), [1.0]);
    assert_eq!(of("prefixlb_backend_hit_share_ratio", first), [0.75]);
    assert_eq!(of("prefixlb_engine_waiting_requests", first), [4.0]);
    assert_eq!(of("prefixlb_engine_kv_use_ratio", first), [0.5]);
    // What an engine does not tell has no series.
    assert!(of("prefixlb_engine_running_requests", first).is_empty());
    assert!(of("prefixlb_engine_waiting_requests", "[::1]:9002").is_empty());
    assert!(of("prefixlb_engine_hit_share_ratio", first)[0].is_nan());
    // Three requests on one of two backends: twice the mean. The other pool has had none.
    let skew = of("prefixlb_pool_charged_skew_ratio", "");
    assert_eq!(skew[0], 2.0);
    assert!(skew[1].is_nan());
    let spills: f64 = samples(&page)
        .filter(|s| s.label("reason").as_deref() == Some("spill"))
        .map(|s| s.value)
        .sum();
    assert_eq!(spills, 1.0);
    let resident = of("prefixlb_process_resident_memory_bytes", "")[0];
    assert!(resident > 1e5, "{resident}");
    let started = of("prefixlb_process_start_time_seconds", "")[0];
    assert!(started > 1.7e9, "{started}");
}

#[test]
fn buckets_are_cumulative() {
    let page = expose::render(&busy_world().shared);
    let mut last: HashMap<(String, String), f64> = HashMap::new();
    let mut histograms = 0;
    for sample in samples(&page).filter(|s| s.name.ends_with("_bucket")) {
        let backend = sample.label("backend").expect("a backend").into_owned();
        let pool = sample.label("pool").expect("a pool").into_owned();
        let so_far = last
            .entry((sample.name.to_owned(), pool + &backend))
            .or_insert(0.0);
        assert!(sample.value >= *so_far, "{sample:?}");
        *so_far = sample.value;
        if sample.label("le").as_deref() == Some("+Inf") {
            histograms += 1;
        }
    }
    assert_eq!(histograms, 6, "two for each of three backends");
    assert!(last.values().any(|&count| count == 1.0));
}

#[tokio::test]
async fn the_listener_serves_the_page_quickly() {
    let (_world, addr) = world_with_admin("127.0.0.1:0", None).await;
    let (status, page) = ask(addr, "GET /metrics", None, "").await;
    assert_eq!(status, 200);
    assert!(samples(&page).count() > 100);
}

#[test]
fn promtool_has_nothing_to_say() {
    let mut promtool = match Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    {
        Ok(child) => child,
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
            eprintln!("promtool is not installed: its opinion on the page was not asked");
            return;
        }
    };
    let page = expose::render(&busy_world().shared);
    let mut stdin = promtool.stdin.take().expect("a pipe");
    stdin.write_all(page.as_bytes()).unwrap();
    drop(stdin);
    let said = promtool.wait_with_output().unwrap();
    let text =
        String::from_utf8_lossy(&said.stderr).into_owned() + &String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success() && text.trim().is_empty(), "{text}");
}
