//! Dialogues: the load that prefix routing is about.
//!
//! Each dialogue is about one document and grows by a question and an answer a turn; its user thinks between
//! turns. Every answer is checked before its time counts.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// A small reproducible source of chance (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Even in 0–1.
    pub fn share(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.share()).ln()
    }
}

/// What the dialogues are.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How many at once.
    pub dialogues: usize,
    /// Turns of each.
    pub turns: usize,
    /// Tokens of each document; dialogue `i` is about document `i` modulo their number.
    pub documents: Vec<usize>,
    /// Tokens of a question.
    pub question_tokens: usize,
    /// Tokens of an answer.
    pub answer_tokens: usize,
    /// Mean time between an answer and the next question, in the engines' time.
    pub think: Duration,
    /// Engine seconds a real second.
    pub time_scale: f64,
    /// Chance.
    pub seed: u64,
    /// The model asked for.
    pub model: String,
}

impl Plan {
    /// The case that Red Hat published (2026-01): 11 parallel dialogues of 10 turns about documents of two kinds,
    /// with pauses. Two reports of 10,000 tokens and two pieces of code of 5,000; with what the dialogues add
    /// that is 50,000 tokens: more than one engine's cache, and little for four.
    #[must_use]
    pub fn published(seed: u64, time_scale: f64) -> Self {
        Self {
            dialogues: 11,
            turns: 10,
            documents: vec![10_000, 5_000, 10_000, 5_000],
            question_tokens: 60,
            answer_tokens: 120,
            think: Duration::from_secs(16),
            time_scale,
            seed,
            model: crate::sim::server::MODEL.into(),
        }
    }
}

/// One answered turn.
#[derive(Clone, Debug)]
pub struct Turn {
    /// To the first event with text, in the engines' time.
    pub ttft: Duration,
    /// To the end, in the engines' time.
    pub duration: Duration,
    /// Who answered.
    pub backend: String,
    /// Prompt tokens, and of these found cached, as the engine said.
    pub prompt_tokens: u64,
    /// See `prompt_tokens`.
    pub cached_tokens: u64,
}

/// A document: text of its kind that no other document begins with.
#[must_use]
pub fn document(number: usize, tokens: usize) -> String {
    let mut random = Random::new(number as u64 + 1);
    let line = |random: &mut Random| match number % 2 {
        0 => format!(
            "Section {}: revenue rose by {}.\n",
            random.word() % 997,
            random.word() % 97
        ),
        _ => format!(
            "let v{} = f({});\n",
            random.word() % 997,
            random.word() % 9973
        ),
    };
    let mut text = format!("Document {number}.\n");
    while text.len() < tokens * 4 {
        text += &line(&mut random);
    }
    text.truncate(tokens * 4);
    text
}

/// Plays one dialogue against `target`; `each` is told of every turn.
pub async fn dialogue(
    target: SocketAddr,
    plan: &Plan,
    number: usize,
    mut each: impl FnMut(Turn),
) -> io::Result<()> {
    let mut random = Random::new(plan.seed.wrapping_mul(1000) + number as u64);
    let about = number % plan.documents.len();
    let mut messages = vec![json!({
        "role": "system",
        "content": document(about, plan.documents[about]),
    })];
    // Users do not all come at once.
    pause(plan, random.exponential(1.0)).await;
    for turn in 0..plan.turns {
        let question = format!(
            "Dialogue {number}, question {turn}: {}",
            "why? ".repeat(200)
        );
        let question = &question[..plan.question_tokens * 4];
        messages.push(json!({"role": "user", "content": question}));
        let (answer, seen) = ask(target, plan, &messages).await?;
        messages.push(json!({"role": "assistant", "content": answer}));
        each(seen);
        pause(plan, random.exponential(1.0)).await;
    }
    Ok(())
}

async fn pause(plan: &Plan, times: f64) {
    tokio::time::sleep(plan.think.mul_f64(times).div_f64(plan.time_scale)).await;
}

fn broken(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// One streamed turn, checked.
async fn ask(target: SocketAddr, plan: &Plan, messages: &[Value]) -> io::Result<(String, Turn)> {
    let body = json!({
        "model": plan.model, "messages": messages, "stream": true, "max_tokens": plan.answer_tokens,
        "ignore_eos": true, "stream_options": {"include_usage": true},
    })
    .to_string();
    let mut io = TcpStream::connect(target).await?;
    io.set_nodelay(true)?;
    let start = Instant::now();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {target}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    io.write_all(head.as_bytes()).await?;
    io.write_all(body.as_bytes()).await?;
    let mut io = BufReader::new(io);
    let backend = read_head(&mut io).await?;
    let mut answer = Answer::default();
    while let Some(event) = read_event(&mut io).await? {
        answer.take(&event, start)?;
    }
    let in_engine_time = |real: Duration| real.mul_f64(plan.time_scale);
    let duration = in_engine_time(start.elapsed());
    let ttft = answer.check(plan.answer_tokens)?;
    let turn = Turn {
        ttft: in_engine_time(ttft),
        duration,
        backend,
        prompt_tokens: answer.prompt_tokens,
        cached_tokens: answer.cached_tokens,
    };
    Ok((answer.text, turn))
}

/// Reads a response head; who answered.
async fn read_head(io: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut backend = String::new();
    let mut status = None;
    loop {
        let mut line = String::new();
        if io.read_line(&mut line).await? == 0 {
            return Err(broken("the connection ended within the head"));
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if status.is_none() {
            status = Some(line.to_owned());
        } else if let Some(value) = line.strip_prefix("x-prefixlb-backend: ") {
            value.clone_into(&mut backend);
        }
    }
    match status {
        Some(line) if line.contains(" 200 ") => Ok(backend),
        other => Err(broken(format!("the answer was {other:?}"))),
    }
}

/// The next chunk of the body; the simulator and llama.cpp send one event a chunk.
async fn read_event(io: &mut BufReader<TcpStream>) -> io::Result<Option<Vec<u8>>> {
    let mut size = String::new();
    if io.read_line(&mut size).await? == 0 {
        return Err(broken("the answer broke off"));
    }
    let size = usize::from_str_radix(size.trim(), 16).map_err(|_| broken("a bad chunk size"))?;
    let mut data = vec![0; size + 2];
    io.read_exact(&mut data).await?;
    data.truncate(size);
    Ok((size > 0).then_some(data))
}

#[derive(Debug, Default)]
struct Answer {
    text: String,
    first: Option<Duration>,
    finished: bool,
    done: bool,
    made: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl Answer {
    fn take(&mut self, chunk: &[u8], start: Instant) -> io::Result<()> {
        let text = String::from_utf8_lossy(chunk);
        for data in text
            .split("\n\n")
            .filter_map(|event| event.trim().strip_prefix("data: "))
        {
            if data == "[DONE]" {
                self.done = true;
                continue;
            }
            let event: Value =
                serde_json::from_str(data).map_err(|_| broken(format!("a bad event: {data}")))?;
            let choice = &event["choices"][0];
            if let Some(text) = choice["delta"]["content"]
                .as_str()
                .filter(|t| !t.is_empty())
            {
                self.first.get_or_insert_with(|| start.elapsed());
                self.text += text;
            }
            self.finished |= choice["finish_reason"].is_string();
            let usage = &event["usage"];
            if usage.is_object() {
                self.made = usage["completion_tokens"].as_u64().unwrap_or(0);
                self.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
                let cached = &usage["prompt_tokens_details"]["cached_tokens"];
                self.cached_tokens = cached.as_u64().unwrap_or(0);
            }
        }
        Ok(())
    }

    /// The time of the first text, if all is there.
    fn check(&self, wanted: usize) -> io::Result<Duration> {
        if !self.done || !self.finished || self.made != wanted as u64 || self.prompt_tokens == 0 {
            return Err(broken(format!("not a whole answer: {self:?}")));
        }
        self.first.ok_or_else(|| broken("no text"))
    }
}
