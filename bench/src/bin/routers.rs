//! prefixlb beside another LLM router (smg, its own defaults) in front of the same simulated engines.
//!
//! Both see the demo's dialogues, one after the other, on fresh engines.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use prefixlb_bench::load::Plan;
use prefixlb_bench::run::{
    HEADER, Outcome, Running, free_address, play, provenance, publish, start_prefixlb, wait_for,
};
use prefixlb_bench::side::cpu::family_on_cpu_ns;
use prefixlb_bench::sim::engine::Limits;
use prefixlb_bench::sim::server::Sim;

const ENGINES: usize = 4;

#[derive(Debug, Parser)]
struct Args {
    /// Chance in pauses
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Engine seconds a real second
    #[arg(long, default_value_t = 6.0)]
    time_scale: f64,
    /// Where the table goes
    #[arg(long, default_value = "bench/results/routers.md")]
    out: PathBuf,
}

fn main() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(compare(&Args::parse()))
}

async fn compare(args: &Args) -> io::Result<()> {
    let plan = Plan::published(args.seed, args.time_scale);
    let mut text = format!(
        "# prefixlb beside smg\n\n{}smg 1.13.0 with `--policy cache_aware` and its own defaults; prefixlb with its. The demo's four simulated engines and dialogues, times in the engines' time.\n\n{}\n",
        provenance("cargo xtask bench routers"),
        HEADER.replace("skew |", "skew | CPU a request, ms |") + " --- |"
    );
    for router in ["prefixlb", "smg"] {
        let (outcome, cpu_ms) = run(&plan, router).await?;
        text += &format!("{} {cpu_ms:.2} |\n", outcome.row(router));
    }
    publish(&text, &args.out)
}

async fn run(plan: &Plan, router: &str) -> io::Result<(Outcome, f64)> {
    let mut engines = Vec::new();
    let mut addresses: Vec<SocketAddr> = Vec::new();
    let mut serving = tokio::task::JoinSet::new();
    for _ in 0..ENGINES {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        addresses.push(listener.local_addr()?);
        let sim = Sim::new(Limits::default(), plan.time_scale);
        engines.push(Arc::clone(&sim));
        serving.spawn(sim.serve(listener));
    }
    let (process, target) = match router {
        "smg" => start_smg(&addresses).await?,
        _ => start_prefixlb(&addresses, "sticky").await?,
    };
    let before = family_on_cpu_ns(process.0.id());
    let (turns, elapsed) = play(target, plan, router).await?;
    let cpu_ns = family_on_cpu_ns(process.0.id()) - before;
    let of = |look: fn(&Sim) -> u64| engines.iter().map(|sim| look(sim)).collect::<Vec<u64>>();
    let hit: u64 = of(|sim| sim.look(|engine| engine.totals.hit)).iter().sum();
    let queried: u64 = of(|sim| sim.look(|engine| engine.totals.queried))
        .iter()
        .sum();
    let cpu_ms = cpu_ns as f64 / 1e6 / turns.len() as f64;
    let outcome = Outcome {
        // Not every router says who answered; the engines know.
        per_engine: of(|sim| sim.look(|engine| engine.totals.finished)),
        turns,
        elapsed,
        hit_share: hit as f64 / queried.max(1) as f64,
    };
    Ok((outcome, cpu_ms))
}

async fn start_smg(engines: &[SocketAddr]) -> io::Result<(Running, SocketAddr)> {
    let binary = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.setup/smg/bin/smg");
    let (listen, metrics) = (free_address()?, free_address()?);
    let mut command = Command::new(binary);
    command.args(["launch", "--host", "127.0.0.1", "--policy", "cache_aware"]);
    command.args(["--port", &listen.port().to_string(), "--worker-urls"]);
    command.args(engines.iter().map(|engine| format!("http://{engine}")));
    command.args(["--prometheus-host", "127.0.0.1"]);
    command.args(["--prometheus-port", &metrics.port().to_string()]);
    let child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let running = Running(child);
    wait_for(listen, "/health").await?;
    // It takes its workers in a moment after it listens.
    tokio::time::sleep(Duration::from_secs(3)).await;
    Ok((running, listen))
}
