//! The demo: built, then run.

use crate::shell::{self, Done, cargo};

/// Builds prefixlb and the demo, and runs it.
pub fn run(args: &[String]) -> Done {
    shell::run(cargo().args([
        "build",
        "--release",
        "-p",
        "prefixlb",
        "-p",
        "prefixlb-bench",
        "--bin",
        "prefixlb",
        "--bin",
        "demo",
    ]))?;
    let run = [
        "run",
        "--quiet",
        "--release",
        "-p",
        "prefixlb-bench",
        "--bin",
        "demo",
        "--",
    ];
    shell::run(cargo().args(run).args(args))
}
