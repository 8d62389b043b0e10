//! The demo: what prefix routing does to time to first token, on this machine, in a minute.
//!
//! Four simulated engines, 11 dialogues of 10 turns about four documents, once under round-robin and once under
//! sticky. Engines are fresh for each; everything else is the same, so the difference is the policy's.

use clap::Parser;
use prefixlb_bench::load::Plan;
use prefixlb_bench::run::{Fleet, HEADER, Outcome, play, start_prefixlb};
use prefixlb_bench::sim::engine::Limits;

const ENGINES: usize = 4;

#[derive(Debug, Parser)]
#[command(about = "Four simulated engines under round-robin and under sticky")]
struct Args {
    /// Chance in pauses
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Engine seconds a real second
    #[arg(long, default_value_t = 6.0)]
    time_scale: f64,
    /// Policies to compare, the first is the reference
    #[arg(long, value_delimiter = ',', default_value = "round-robin,sticky")]
    policies: Vec<String>,
}

fn main() -> std::process::ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let done = runtime.and_then(|runtime| runtime.block_on(demo(&Args::parse())));
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

async fn demo(args: &Args) -> std::io::Result<()> {
    let plan = Plan::published(args.seed, args.time_scale);
    let limits = Limits::default();
    println!(
        "{ENGINES} simulated engines: {:.0} prompt tokens/s each (Qwen3-32B on 2×H100, from llm-d's published \
figures) and {} tokens of KV cache (chosen).\n{} dialogues × {} turns about documents of {:?} tokens; times are the engines', {}x as \
fast as the clock.\n",
        limits.prefill_rate,
        limits.cache_tokens,
        plan.dialogues,
        plan.turns,
        plan.documents,
        args.time_scale
    );
    let mut outcomes: Vec<(&str, Outcome)> = Vec::new();
    for policy in &args.policies {
        outcomes.push((policy, run(&plan, policy).await?));
    }
    println!("\n{HEADER}");
    for (policy, outcome) in &outcomes {
        println!("{}", outcome.row(policy));
    }
    println!(
        "\nskew: most requests of an engine over the mean. hit: by the engines' own counters."
    );
    if let [(reference, a), .., (policy, b)] = &outcomes[..] {
        let ratio = a.ttft(0.95).as_secs_f64() / b.ttft(0.95).as_secs_f64();
        println!("p95 TTFT, {reference} / {policy}: {ratio:.1}x");
    }
    Ok(())
}

async fn run(plan: &Plan, policy: &str) -> std::io::Result<Outcome> {
    let fleet = Fleet::start(ENGINES, &Limits::default(), plan.time_scale)?;
    let (_prefixlb, target) = start_prefixlb(&fleet.addresses, policy).await?;
    let (turns, elapsed) = play(target, plan, policy).await?;
    Ok(Outcome {
        per_engine: fleet.finished(),
        hit_share: fleet.hit_share(),
        turns,
        elapsed,
    })
}
