//! The project's own commands, one file a verb: `cargo xtask VERB`.

mod bench;
mod demo;
mod dist;
mod ebpf;
mod lint;
mod setup;
mod shell;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The project's own commands")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Build everything, start four simulated engines and prefixlb, and show what prefix routing does
    Demo {
        /// Passed on to the demo
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Install what the tests need and run them all; ends with `N passed, N failed`
    Test {
        /// Passed on to `cargo test`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Format, clippy, docs without a warning; and the BPF object is what its sources give
    Lint,
    /// Side-by-side benches; without a name, all of them
    Bench {
        /// picker, relay, real or routers
        name: Option<bench::Name>,
        /// Passed on to the bench
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Build the BPF programs and renew the committed object
    Ebpf,
    /// Pack a release: binary, licences, example config, unit file, checksum
    Dist,
    /// Install everything that the other verbs need
    Setup,
}

fn main() -> ExitCode {
    let done = match Cli::parse().verb {
        Verb::Demo { args } => demo::run(&args),
        Verb::Test { args } => test::run(&args),
        Verb::Lint => lint::run(),
        Verb::Bench { name, args } => bench::run(name, &args),
        Verb::Ebpf => ebpf::renew(),
        Verb::Dist => dist::run(),
        Verb::Setup => setup::all(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            if message != shell::TOLD {
                eprintln!("xtask: {message}");
            }
            ExitCode::FAILURE
        }
    }
}
