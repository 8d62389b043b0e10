//! One run of a plan against one balancer: start it, play, and sum up.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinSet;

use crate::load::{Plan, Turn, dialogue};

/// What a run showed.
#[derive(Debug)]
pub struct Outcome {
    /// Every turn that was answered.
    pub turns: Vec<Turn>,
    /// Wall time in the engines' time.
    pub elapsed: Duration,
    /// Requests that each engine got.
    pub per_engine: Vec<u64>,
    /// Share of prompt tokens that engines found cached.
    pub hit_share: f64,
}

impl Outcome {
    /// The TTFT that this share of turns did not exceed.
    #[must_use]
    pub fn ttft(&self, share: f64) -> Duration {
        let mut times: Vec<Duration> = self.turns.iter().map(|turn| turn.ttft).collect();
        times.sort();
        let at = (share * times.len() as f64).ceil() as usize;
        times.get(at.max(1) - 1).copied().unwrap_or_default()
    }

    /// Most requests of an engine over the mean.
    #[must_use]
    pub fn skew(&self) -> f64 {
        let most = self.per_engine.iter().max().copied().unwrap_or(0) as f64;
        let sum: u64 = self.per_engine.iter().sum();
        most * self.per_engine.len() as f64 / sum.max(1) as f64
    }

    /// Requests a second of the engines' time.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.turns.len() as f64 / self.elapsed.as_secs_f64()
    }

    /// A row for a Markdown table; see [`HEADER`].
    #[must_use]
    pub fn row(&self, name: &str) -> String {
        let ms = |share| self.ttft(share).as_secs_f64() * 1e3;
        format!(
            "| {name} | {:.0} | {:.0} | {:.0} | {:.2} | {:.1} % | {:.2} |",
            ms(0.5),
            ms(0.95),
            ms(0.99),
            self.rate(),
            100.0 * self.hit_share,
            self.skew()
        )
    }
}

/// The engines' own count of prompt tokens found cached, as their answers tell it.
#[must_use]
pub fn told_hit_share(turns: &[Turn]) -> f64 {
    let cached: u64 = turns.iter().map(|turn| turn.cached_tokens).sum();
    let prompt: u64 = turns.iter().map(|turn| turn.prompt_tokens).sum();
    cached as f64 / prompt.max(1) as f64
}

/// Machine, versions, date and command: what a result is worth nothing without.
#[must_use]
pub fn provenance(command: &str) -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let date = Command::new("date")
        .arg("+%Y-%m-%d")
        .output()
        .map(|o| o.stdout);
    format!(
        "Machine: {}, {cores} cores, Linux {}. Date: {}. Command: `{command}`.\n",
        model.unwrap_or("unknown CPU"),
        read("/proc/sys/kernel/osrelease").trim(),
        String::from_utf8_lossy(&date.unwrap_or_default()).trim()
    )
}

/// Prints a result and writes it to `place`.
pub fn publish(text: &str, place: &std::path::Path) -> io::Result<()> {
    println!("{text}");
    if let Some(folder) = place.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(place, text)
}

/// Head of the table that [`Outcome::row`] belongs to.
pub const HEADER: &str = "| | TTFT p50, ms | p95 | p99 | requests/s | hit by tokens | skew |\n\
| --- | --- | --- | --- | --- | --- | --- |";

/// Plays the plan; every failed turn is an error, since times of broken answers mean nothing.
pub async fn play(
    target: SocketAddr,
    plan: &Plan,
    label: &str,
) -> io::Result<(Vec<Turn>, Duration)> {
    let bar = ProgressBar::new((plan.dialogues * plan.turns) as u64);
    let style = ProgressStyle::with_template("{msg:14} {wide_bar} {pos}/{len} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(label.to_owned());
    let turns = Arc::new(Mutex::new(Vec::new()));
    let start = Instant::now();
    let mut playing = JoinSet::new();
    for number in 0..plan.dialogues {
        let (plan, turns, bar) = (plan.clone(), turns.clone(), bar.clone());
        playing.spawn(async move {
            let told = dialogue(target, &plan, number, |turn| {
                turns
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(turn);
                bar.inc(1);
            });
            told.await
        });
    }
    while let Some(ended) = playing.join_next().await {
        ended.map_err(io::Error::other)??;
    }
    bar.finish();
    let elapsed = start.elapsed().mul_f64(plan.time_scale);
    let turns = std::mem::take(&mut *turns.lock().unwrap_or_else(PoisonError::into_inner));
    Ok((turns, elapsed))
}

/// Requests per backend, by who the answers say they came from.
#[must_use]
pub fn per_backend(turns: &[Turn], backends: usize) -> Vec<u64> {
    let mut counts: HashMap<&str, u64> = HashMap::new();
    for turn in turns {
        *counts.entry(&turn.backend).or_default() += 1;
    }
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.resize(backends.max(counts.len()), 0);
    counts
}

/// A loopback port that is free now.
pub fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// A process that is killed when this is dropped.
#[derive(Debug)]
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The `prefixlb` binary that was built beside this one.
pub fn prefixlb_binary() -> io::Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name("prefixlb");
    if beside.exists() {
        return Ok(beside);
    }
    Err(io::Error::other(format!(
        "{} is missing: build it first, with `cargo build --release -p prefixlb`",
        beside.display()
    )))
}

/// Starts prefixlb with this policy in front of `engines`; returns once it is ready.
pub async fn start_prefixlb(
    engines: &[SocketAddr],
    policy: &str,
) -> io::Result<(Running, SocketAddr)> {
    let (listen, admin) = (free_address()?, free_address()?);
    let mut command = Command::new(prefixlb_binary()?);
    command.args(["run", "--policy", policy]);
    command.args([
        "--listen",
        &listen.to_string(),
        "--admin",
        &admin.to_string(),
    ]);
    for engine in engines {
        command.args(["--backend", &format!("http://{engine}")]);
    }
    let child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let running = Running(child);
    wait_for(admin, "/readyz").await?;
    Ok((running, listen))
}

/// Waits until a page answers 200, ten seconds at most.
pub async fn wait_for(target: SocketAddr, page: &str) -> io::Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let ask = format!("GET {page} HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n");
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if let Ok(mut io) = tokio::net::TcpStream::connect(target).await {
            let mut answer = Vec::new();
            io.write_all(ask.as_bytes()).await?;
            if io.read_to_end(&mut answer).await.is_ok() && answer.starts_with(b"HTTP/1.1 200") {
                return Ok(());
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(io::Error::other(format!(
        "http://{target}{page} did not answer within 10 s"
    )))
}
