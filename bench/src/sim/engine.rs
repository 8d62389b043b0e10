//! The step model: what an engine does with its time.
//!
//! Each step has a budget of tokens. Running requests that decode take one each; what is left goes to prefill,
//! first come first served, in chunks. A step lasts a fixed time and a time a token. So a long prefill slows
//! everybody's decode, and a prompt that is cached costs next to nothing: the two facts that prefix routing
//! lives on.

use std::collections::VecDeque;
use std::time::Duration;

use super::cache::{BLOCK_TOKENS, Cache, blocks, tokens};

/// What an engine can do.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Tokens a step at most: chunked prefill and decode together.
    pub step_tokens: usize,
    /// Requests that run at once.
    pub sequences: usize,
    /// KV cache. Tokens.
    pub cache_tokens: usize,
    /// Longest prompt and answer together. Tokens.
    pub context_tokens: usize,
    /// Time of a step without any token.
    pub step_time: Duration,
    /// Tokens of prefill a second.
    pub prefill_rate: f64,
}

impl Default for Limits {
    /// Qwen3-32B on two H100 under vLLM, as the write-up of llm-d's sticky-until-saturated router has it
    /// (2026-08-17): 8,192 tokens take 0.40 s, that is 20,480 tokens/s. Its KV cache has 262,144 bytes a token
    /// (64 layers, 8 KV heads, head dimension 128, bf16); 8 GiB of it are left for prefixes here, 32,768 tokens.
    /// The fixed 20 ms a step are an assumption; they weigh on every policy alike.
    fn default() -> Self {
        Self {
            step_tokens: 8192,
            sequences: 256,
            cache_tokens: 32_768,
            context_tokens: 32_768,
            step_time: Duration::from_millis(20),
            prefill_rate: 8192.0 / 0.40,
        }
    }
}

/// One request within the engine.
#[derive(Debug)]
struct Sequence {
    id: u64,
    /// Prompt and, as far as it is made, answer.
    text: Vec<u8>,
    prompt_tokens: usize,
    /// Prompt tokens found in the cache.
    cached: usize,
    /// Prompt tokens that need no more work.
    computed: usize,
    wanted: usize,
    made: usize,
    pinned: Vec<u64>,
}

/// What a step brought for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Prefill began: so many prompt tokens were in the cache.
    Admitted {
        /// See the variant.
        cached: usize,
    },
    /// One token of answer; `last`: there will be no more.
    Token {
        /// See the variant.
        last: bool,
    },
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Prompt tokens looked up in the cache.
    pub queried: u64,
    /// Prompt tokens found there.
    pub hit: u64,
    /// Tokens of answers.
    pub generated: u64,
    /// Requests that ended whole.
    pub finished: u64,
    /// Requests whose client left.
    pub aborted: u64,
}

/// One engine.
#[derive(Debug)]
pub struct Engine {
    limits: Limits,
    cache: Cache,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Totals since the start.
    pub totals: Totals,
}

/// The text of token number `n` of an answer: four bytes, so that an answer in the next prompt is the same
/// tokens again.
#[must_use]
pub fn token_text(n: usize) -> String {
    let letter = |i: usize| char::from(b'a' + (i % 26) as u8);
    [letter(n), letter(n / 26 + n), letter(n * 7), ' ']
        .iter()
        .collect()
}

impl Engine {
    /// An idle engine.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            cache: Cache::new(limits.cache_tokens),
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            totals: Totals::default(),
        }
    }

    /// Its limits.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Queues a request. `false`: it could never run.
    pub fn submit(&mut self, id: u64, prompt: Vec<u8>, wanted: usize) -> bool {
        let prompt_tokens = tokens(prompt.len()).max(1);
        let room = self.limits.context_tokens.min(self.limits.cache_tokens);
        if prompt_tokens + wanted > room {
            return false;
        }
        self.waiting.push_back(Sequence {
            id,
            text: prompt,
            prompt_tokens,
            cached: 0,
            computed: 0,
            wanted: wanted.max(1),
            made: 0,
            pinned: Vec::new(),
        });
        true
    }

    /// Its client left.
    pub fn abort(&mut self, id: u64) {
        let before = self.waiting.len() + self.running.len();
        self.waiting.retain(|sequence| sequence.id != id);
        if let Some(at) = self.running.iter().position(|s| s.id == id) {
            let sequence = self.running.remove(at);
            self.cache.unpin(&sequence.pinned);
        }
        if self.waiting.len() + self.running.len() < before {
            self.totals.aborted += 1;
        }
    }

    /// Requests that run, and that wait.
    #[must_use]
    pub fn queue(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Share of the cache in use.
    #[must_use]
    pub fn cache_used(&self) -> f64 {
        self.cache.used()
    }

    /// Blocks of the cache.
    #[must_use]
    pub fn cache_blocks(&self) -> usize {
        self.cache.capacity_blocks()
    }

    /// Blocks that running requests hold.
    #[must_use]
    pub fn cache_pinned(&self) -> usize {
        self.cache.pinned()
    }

    /// One step: how long it took, and what it brought. Nothing to do: no time.
    pub fn step(&mut self) -> (Duration, Vec<(u64, Event)>) {
        let mut events = Vec::new();
        self.admit(&mut events);
        if self.running.is_empty() {
            return (Duration::ZERO, events);
        }
        let decoding = |s: &Sequence| s.computed == s.prompt_tokens;
        let decodes = self.running.iter().filter(|s| decoding(s)).count();
        let mut left = self.limits.step_tokens.saturating_sub(decodes);
        let mut worked = decodes;
        for sequence in &mut self.running {
            if decoding(sequence) {
                sequence.make_token(&mut events);
                continue;
            }
            let chunk = (sequence.prompt_tokens - sequence.computed).min(left);
            sequence.computed += chunk;
            left -= chunk;
            worked += chunk;
            if decoding(sequence) {
                sequence.make_token(&mut events); // the last chunk yields the first token
            }
        }
        self.totals.generated += events
            .iter()
            .filter(|(_, event)| matches!(event, Event::Token { .. }))
            .count() as u64;
        self.retire();
        let time = Duration::from_secs_f64(worked as f64 / self.limits.prefill_rate);
        (self.limits.step_time + time, events)
    }

    fn admit(&mut self, events: &mut Vec<(u64, Event)>) {
        while self.running.len() < self.limits.sequences
            && let Some(mut next) = self.waiting.pop_front()
        {
            let names = blocks(&next.text);
            let matched = self.cache.matched(&names) * BLOCK_TOKENS;
            if !self.cache.pin(&names) {
                self.waiting.push_front(next); // until somebody ends
                return;
            }
            // The last token is always computed: its output is what is asked for.
            next.cached = matched.min(next.prompt_tokens - 1);
            next.computed = next.cached;
            next.pinned = names;
            self.totals.queried += next.prompt_tokens as u64;
            self.totals.hit += next.cached as u64;
            events.push((
                next.id,
                Event::Admitted {
                    cached: next.cached,
                },
            ));
            self.running.push(next);
        }
    }

    /// Ends what is done; its answer stays in the cache with its prompt.
    fn retire(&mut self) {
        let (done, running) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|s| s.made >= s.wanted);
        self.running = running;
        for sequence in done {
            self.cache.unpin(&sequence.pinned);
            let names = blocks(&sequence.text);
            if self.cache.pin(&names) {
                self.cache.unpin(&names);
            }
            self.totals.finished += 1;
        }
    }
}

impl Sequence {
    fn make_token(&mut self, events: &mut Vec<(u64, Event)>) {
        self.text
            .extend_from_slice(token_text(self.made).as_bytes());
        self.made += 1;
        let last = self.made >= self.wanted;
        events.push((self.id, Event::Token { last }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs until `id` has its first token; the simulated time it took.
    fn first_token(engine: &mut Engine, id: u64) -> Duration {
        let mut time = Duration::ZERO;
        loop {
            let (took, events) = engine.step();
            time += took;
            assert!(took > Duration::ZERO, "{id} never runs");
            if events
                .iter()
                .any(|(i, e)| *i == id && matches!(e, Event::Token { .. }))
            {
                return time;
            }
        }
    }

    fn run_dry(engine: &mut Engine) {
        while engine.queue() != (0, 0) {
            engine.step();
        }
    }

    #[test]
    fn a_growing_dialogue_computes_only_what_is_new() {
        let mut engine = Engine::new(Limits::default());
        let mut text = "d".repeat(40_000);
        assert!(engine.submit(1, text.clone().into_bytes(), 10));
        run_dry(&mut engine);
        assert_eq!(engine.totals.hit, 0);
        text += &(0..10).map(token_text).collect::<String>();
        let before = tokens(text.len());
        text += &"q".repeat(400);
        assert!(engine.submit(2, text.into_bytes(), 10));
        run_dry(&mut engine);
        let hit = engine.totals.hit as usize;
        assert_eq!(
            hit,
            before / BLOCK_TOKENS * BLOCK_TOKENS,
            "prompt and answer"
        );
    }

    #[test]
    fn a_cold_prompt_takes_its_tokens_at_the_prefill_rate() {
        let mut engine = Engine::new(Limits::default());
        assert!(engine.submit(1, vec![b'x'; 4 * 20_480], 1));
        let time = first_token(&mut engine, 1).as_secs_f64();
        assert!((1.0..1.1).contains(&time), "{time}: 1 s and three steps");
    }

    #[test]
    fn a_long_prefill_slows_others_decode() {
        let mut engine = Engine::new(Limits::default());
        assert!(engine.submit(1, vec![b'x'; 400], 50));
        engine.step();
        let (alone, _) = engine.step();
        assert!(engine.submit(2, vec![b'y'; 4 * 16_384], 1));
        let (beside, events) = engine.step();
        assert!(beside > 10 * alone, "{alone:?} {beside:?}");
        assert!(
            events.contains(&(1, Event::Token { last: false })),
            "decode goes on"
        );
        assert_eq!(engine.queue(), (2, 0), "in chunks of the budget");
    }

    #[test]
    fn an_abort_frees_its_blocks() {
        let mut engine = Engine::new(Limits::default());
        assert!(engine.submit(1, vec![b'x'; 40_000], 500));
        engine.step();
        assert!(engine.cache_pinned() > 600);
        engine.abort(1);
        assert_eq!((engine.cache_pinned(), engine.queue()), (0, (0, 0)));
        assert_eq!(engine.totals.aborted, 1);
    }

    #[test]
    fn what_can_never_fit_is_refused_and_what_does_not_fit_now_waits() {
        let mut engine = Engine::new(Limits::default());
        assert!(!engine.submit(1, vec![b'x'; 4 * 40_000], 1));
        assert!(engine.submit(2, vec![b'x'; 4 * 20_000], 5));
        assert!(engine.submit(3, vec![b'y'; 4 * 20_000], 5));
        engine.step();
        assert_eq!(engine.queue(), (1, 1));
        run_dry(&mut engine);
        assert_eq!(engine.totals.finished, 2);
    }
}
