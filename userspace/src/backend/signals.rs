//! What an engine's metrics page means.
//!
//! Names differ between engines and between their versions; each signal has a list of spellings, and the
//! first that the page has is taken. A page may carry one series for each engine rank: queues, running
//! requests, counters and capacity are summed, KV use is that of the fullest rank, since that is where
//! requests begin to wait. What a page lacks is unknown, and unknown is never zero.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use crate::backend::prom_text::{Sample, samples};
use crate::picker::EngineSignal;

const WAITING: &[&str] = &[
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
];
const RUNNING: &[&str] = &[
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
];
const KV_USE: &[&str] = &[
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
];
/// Prompt tokens that were looked up in the prefix cache, all of them.
const LOOKED_UP: &[&str] = &[
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
    "sglang:prompt_tokens_total",
];
/// Prompt tokens that had to be computed: llama.cpp counts these, not those that were looked up.
const COMPUTED: &[&str] = &["llamacpp:prompt_tokens_total"];
const HITS: &[&str] = &[
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
    "sglang:cached_tokens_total",
    "llamacpp:prompt_tokens_cached_total",
    "llamacpp:prompt_tokens_cache_total",
];
const CAPACITY_INFO: &str = "vllm:cache_config_info";
const CAPACITY: &[&str] = &["sglang:max_total_num_tokens"];
const LLAMA: &str = "llamacpp:";

/// One series of a counter: a hash of its name and labels, and its value.
pub type Series = (u64, f64);

/// What one page said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// Queue, running, KV use.
    pub signal: EngineSignal,
    /// Prompt tokens by the engine's count: every series that adds to them.
    pub prompt: Vec<Series>,
    /// Of these, hits in the prefix cache.
    pub hits: Vec<Series>,
    /// Prefix cache, all ranks. Tokens.
    pub capacity: Option<u64>,
    /// The page is llama.cpp's, which tells its capacity elsewhere.
    pub is_llama: bool,
}

impl Reading {
    /// Reads a page. `None`: it has nothing that we know.
    #[must_use]
    pub fn of_page(page: &str) -> Option<Self> {
        let mut found: HashMap<&'static str, Vec<Series>> = HashMap::new();
        let mut blocks_by_size = None;
        let mut is_llama = false;
        for sample in samples(page) {
            is_llama |= sample.name.starts_with(LLAMA);
            if let Some(name) = known(sample.name) {
                if sample.value.is_finite() && sample.value >= 0.0 {
                    let series = found.entry(name).or_default();
                    series.push((identity(&sample), sample.value));
                }
            } else if sample.name == CAPACITY_INFO
                && let Some(tokens) = block_capacity(&sample)
            {
                blocks_by_size = Some(blocks_by_size.unwrap_or(0u64).saturating_add(tokens));
            }
        }
        let mut first = |names: &[&'static str]| {
            names
                .iter()
                .find_map(|name| found.remove(name))
                .unwrap_or_default()
        };
        let (waiting, running, kv) = (first(WAITING), first(RUNNING), first(KV_USE));
        let (mut prompt, computed) = (first(LOOKED_UP), first(COMPUTED));
        let hits = first(HITS);
        if prompt.is_empty() && !hits.is_empty() && !computed.is_empty() {
            prompt = computed.into_iter().chain(hits.iter().copied()).collect();
        }
        let summed = sum(&first(CAPACITY)).map(|tokens| tokens as u64);
        let reading = Self {
            signal: EngineSignal {
                waiting: sum(&waiting).map(|n| n as u32),
                running: sum(&running).map(|n| n as u32),
                kv_use: kv.iter().map(|&(_, use_)| use_ as f32).reduce(f32::max),
            },
            // A share needs both sides: tokens without hits would read as "never hit".
            prompt: if hits.is_empty() { Vec::new() } else { prompt },
            hits,
            capacity: blocks_by_size.or(summed).filter(|&tokens| tokens > 0),
            is_llama,
        };
        let knows_nothing = reading == Self::default();
        (!knows_nothing).then_some(reading)
    }
}

fn known(name: &str) -> Option<&'static str> {
    [
        WAITING, RUNNING, KV_USE, LOOKED_UP, COMPUTED, HITS, CAPACITY,
    ]
    .into_iter()
    .flatten()
    .find(|&&known| known == name)
    .copied()
}

fn identity(sample: &Sample<'_>) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one((sample.name, sample.labels))
}

fn sum(series: &[Series]) -> Option<f64> {
    series.iter().map(|&(_, value)| value).reduce(|a, b| a + b)
}

fn block_capacity(sample: &Sample<'_>) -> Option<u64> {
    let number = |label| sample.label(label)?.parse::<u64>().ok();
    number("num_gpu_blocks")?.checked_mul(number("block_size")?)
}

/// The total context of a llama.cpp server, from its `/props`: slots × context of one.
#[must_use]
pub fn llama_capacity(props: &[u8]) -> Option<u64> {
    let props: serde_json::Value = serde_json::from_slice(props).ok()?;
    let slots = props.get("total_slots")?.as_u64()?;
    let context = props
        .pointer("/default_generation_settings/n_ctx")?
        .as_u64()?;
    slots.checked_mul(context).filter(|&tokens| tokens > 0)
}

/// Makes one growing count out of counters that start anew when their engine does.
#[derive(Debug, Default)]
pub struct Growth {
    /// What each series last showed; `None` before the first page.
    last: Option<HashMap<u64, f64>>,
}

impl Growth {
    /// How much the counters grew since the last page. The first page is where counting starts; a series
    /// that shrank, or was not there before, started at zero since then.
    pub fn since_last(&mut self, series: &[Series]) -> u64 {
        let now: HashMap<u64, f64> = series.iter().copied().collect();
        let grown = match &self.last {
            None => 0.0,
            Some(last) => now
                .iter()
                .map(|(id, &value)| match last.get(id) {
                    Some(&before) if before <= value => value - before,
                    _ => value,
                })
                .sum(),
        };
        self.last = Some(now);
        grown as u64
    }

    /// Whether a series shrank or vanished: the engine is another process now.
    #[must_use]
    pub fn would_restart(&self, series: &[Series]) -> bool {
        self.last.as_ref().is_some_and(|last| {
            last.iter().any(|(id, &before)| {
                series
                    .iter()
                    .find(|(now, _)| now == id)
                    .is_none_or(|&(_, value)| value < before)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_survive_restarts_of_one_rank() {
        let mut growth = Growth::default();
        assert_eq!(growth.since_last(&[(1, 100.0), (2, 50.0)]), 0);
        assert_eq!(growth.since_last(&[(1, 130.0), (2, 50.0)]), 30);
        assert!(growth.would_restart(&[(1, 5.0), (2, 60.0)]));
        assert_eq!(growth.since_last(&[(1, 5.0), (2, 60.0)]), 15);
        assert_eq!(growth.since_last(&[(1, 5.0), (2, 60.0), (3, 7.0)]), 7);
        assert!(!growth.would_restart(&[(1, 5.0), (2, 60.0), (3, 8.0)]));
    }

    #[test]
    fn llama_capacity_is_slots_times_context() {
        let props = br#"{"default_generation_settings":{"n_ctx":4096},"total_slots":4}"#;
        assert_eq!(llama_capacity(props), Some(16_384));
        for odd in [
            "",
            "[]",
            "{}",
            r#"{"total_slots":-1}"#,
            "{\"total_slots\":1}",
        ] {
            assert_eq!(llama_capacity(odd.as_bytes()), None, "{odd}");
        }
    }
}
