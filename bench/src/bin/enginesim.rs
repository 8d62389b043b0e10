//! A simulated engine on loopback: `enginesim --port 8000`.

use std::net::TcpListener;

use clap::Parser;
use prefixlb_bench::sim::engine::Limits;
use prefixlb_bench::sim::server::Sim;

#[derive(Debug, Parser)]
#[command(
    about = "A simulated LLM engine: OpenAI API, vLLM's metrics, faults by the field x-sim-fault"
)]
struct Args {
    /// Port on 127.0.0.1
    #[arg(long)]
    port: u16,
    /// Simulated seconds a real second
    #[arg(long, default_value_t = 1.0)]
    time_scale: f64,
    /// KV cache, tokens
    #[arg(long, default_value_t = 32_768)]
    cache_tokens: usize,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let args = Args::parse();
    let limits = Limits {
        cache_tokens: args.cache_tokens,
        ..Limits::default()
    };
    let listener = TcpListener::bind(("127.0.0.1", args.port))?;
    Sim::new(limits, args.time_scale).serve(listener).await
}
