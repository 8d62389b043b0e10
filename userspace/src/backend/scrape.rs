//! Asks each engine for its metrics page; the one writer of the signal table.
//!
//! A page that is missing is normal (SGLang and llama.cpp have it only if told to): it is asked for again,
//! rarely, and nothing else follows from it. A page that fails is counted, and what was known before grows
//! stale by itself.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::fetch::{self, FetchError};
use crate::backend::signals::{Growth, Reading, llama_capacity};
use crate::backend::supervise::{Watch, jitter, pause};
use crate::config::{PoolSettings, SignalSettings};

/// Largest page read. Bytes.
const PAGE_BYTES: usize = 4 << 20;
/// Largest `/props` read (it carries the chat template). Bytes.
const PROPS_BYTES: usize = 1 << 20;
/// What is missing or seldom changes is asked for again after this many intervals.
const RARELY: u32 = 30;

/// How a scrape went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scrape {
    Read,
    Failed,
    Missing,
}

/// What is remembered from page to page.
#[derive(Debug, Default)]
struct Memory {
    prompt: Growth,
    hits: Growth,
    /// The capacity that the picker was told, and the snapshot's pool for which it was.
    told: Option<(u64, usize)>,
    /// llama.cpp: the capacity by `/props`, and when that was asked for.
    props: Option<u64>,
    props_asked: Option<Instant>,
}

/// Scrapes the backend for as long as its task lives.
pub(super) async fn run(watch: &Watch) {
    let mut plan = watch.plan.clone();
    let mut memory = Memory::default();
    loop {
        let settings = plan.borrow_and_update().settings().signals.clone();
        if !settings.scrape {
            if plan.changed().await.is_err() {
                return;
            }
            continue;
        }
        let began = Instant::now();
        let went = scrape(watch, &settings, &mut memory).await;
        if went == Scrape::Failed {
            watch.backend.metrics.scrape_failures.inc();
        }
        let path = settings.path.clone();
        let times = if went == Scrape::Missing { RARELY } else { 1 };
        let interval = move |pool: &PoolSettings| pool.signals.interval * times;
        let changed = |pool: &PoolSettings| !pool.signals.scrape || pool.signals.path != path;
        pause(&mut plan, began, jitter(), interval, changed).await;
    }
}

async fn scrape(watch: &Watch, settings: &SignalSettings, memory: &mut Memory) -> Scrape {
    let backend = &watch.backend;
    let addrs = backend.addrs.load_full();
    let limit = settings.stale_after;
    let page = fetch::get(
        &addrs,
        &backend.authority,
        &settings.path,
        PAGE_BYTES,
        limit,
    )
    .await;
    let page = match page {
        Ok(page) if page.status == 200 => page.body,
        Ok(page) if matches!(page.status, 300..=499 | 501) => return Scrape::Missing,
        Ok(page) => return failed(watch, &page.status),
        Err(error) => return failed(watch, &error),
    };
    // Another page by this name (some HTML, say) is as good as none.
    let Some(reading) = Reading::of_page(&String::from_utf8_lossy(&page)) else {
        return Scrape::Missing;
    };
    if watch.cell().is_none() {
        return Scrape::Read;
    }
    let good_until = watch.shared.now_ms() + settings.stale_after.as_millis() as u64;
    let signals = &watch.shared.signals;
    signals.store(backend.slot, reading.signal, good_until);
    let restarted = memory.prompt.would_restart(&reading.prompt);
    let counted = &backend.metrics;
    counted
        .engine_prompt_tokens
        .add(memory.prompt.since_last(&reading.prompt));
    counted
        .engine_hit_tokens
        .add(memory.hits.since_last(&reading.hits));
    let capacity = if reading.is_llama {
        let every = settings.interval * RARELY;
        let due = memory
            .props_asked
            .is_none_or(|asked| asked.elapsed() >= every);
        if due || restarted {
            memory.props_asked = Some(Instant::now());
            memory.props = ask_props(watch, limit).await.or(memory.props);
        }
        memory.props
    } else {
        reading.capacity
    };
    if let Some(tokens) = capacity {
        tell_capacity(watch, tokens, memory);
    }
    Scrape::Read
}

fn failed(watch: &Watch, why: &dyn std::fmt::Display) -> Scrape {
    tracing::debug!(backend = watch.name(), %why, "scrape failed");
    Scrape::Failed
}

async fn ask_props(watch: &Watch, limit: Duration) -> Option<u64> {
    let backend = &watch.backend;
    let addrs = backend.addrs.load_full();
    let answer: Result<_, FetchError> =
        fetch::get(&addrs, &backend.authority, "/props", PROPS_BYTES, limit).await;
    answer
        .ok()
        .filter(|answer| answer.status == 200)
        .and_then(|answer| llama_capacity(&answer.body))
}

/// Tells the picker once, and once more after each reload, which may have built its tables anew.
fn tell_capacity(watch: &Watch, tokens: u64, memory: &mut Memory) {
    let pool = Arc::clone(&watch.plan.borrow().pool);
    let telling = Some((tokens, Arc::as_ptr(&pool) as usize));
    if memory.told != telling && watch.cell().is_some() {
        memory.told = telling;
        pool.picker.set_capacity(watch.backend.slot, tokens);
    }
}
