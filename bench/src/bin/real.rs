//! The demo's question put to real engines: four llama.cpp servers with a tiny random model on this machine's
//! CPU. Whatever it shows is printed.

use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Parser;
use prefixlb_bench::load::Plan;
use prefixlb_bench::run::{
    HEADER, Outcome, Running, free_address, per_backend, play, provenance, publish, start_prefixlb,
    told_hit_share,
};

const ENGINES: usize = 4;

#[derive(Debug, Parser)]
struct Args {
    /// Chance in pauses
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the table goes
    #[arg(long, default_value = "bench/results/real.md")]
    out: PathBuf,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<()> {
    let args = Args::parse();
    let plan = Plan {
        dialogues: 8,
        turns: 6,
        // The tokenizer of the tiny model makes about twice as many tokens of these texts.
        documents: vec![900, 600, 900, 600],
        question_tokens: 30,
        answer_tokens: 12,
        think: Duration::from_secs(3),
        time_scale: 1.0,
        seed: args.seed,
        model: "tiny".into(),
    };
    let mut text = format!(
        "# Four real llama.cpp engines\n\n{}Tiny random model on the CPU, {ENGINES} engines on the same cores; {} dialogues × {} turns. Hits are the engines' own.\n\n{HEADER}\n",
        provenance("cargo xtask bench real"),
        plan.dialogues,
        plan.turns
    );
    for policy in ["round-robin", "sticky"] {
        text += &outcome(&plan, policy).await?.row(policy);
        text += "\n";
    }
    publish(&text, &args.out)
}

async fn outcome(plan: &Plan, policy: &str) -> io::Result<Outcome> {
    let mut engines = Vec::new();
    let mut addresses = Vec::new();
    for _ in 0..ENGINES {
        let (engine, address) = start_engine()?;
        engines.push(engine);
        addresses.push(address);
    }
    let (_prefixlb, target) = start_prefixlb(&addresses, policy).await?;
    let (turns, elapsed) = play(target, plan, policy).await?;
    Ok(Outcome {
        per_engine: per_backend(&turns, ENGINES),
        hit_share: told_hit_share(&turns),
        turns,
        elapsed,
    })
}

fn start_engine() -> io::Result<(Running, SocketAddr)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = root.join(".setup/engines/bin/python");
    if !python.exists() {
        return Err(io::Error::other("no engines: run `cargo xtask setup`"));
    }
    let address = free_address()?;
    let mut child = Command::new(python)
        .arg(root.join("bench/engines/llama_server.py"))
        .arg(root.join(".setup/tiny.gguf"))
        .arg(address.port().to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let out = child.stdout.take();
    let running = Running(child);
    let mut line = String::new();
    if let Some(out) = out {
        BufReader::new(out).read_line(&mut line)?;
    }
    if line.starts_with("ready") {
        return Ok((running, address));
    }
    Err(io::Error::other("an engine did not start"))
}
