//! Everything that must be without a warning.

use crate::ebpf;
use crate::shell::{self, Done, cargo, root};

/// Runs the checks, the quick ones first.
pub fn run_checks() -> Done {
    shell::run(cargo().args(["fmt", "--all", "--check"]))?;
    shell::run(
        cargo()
            .current_dir(root().join("ebpf"))
            .args(["fmt", "--check"]),
    )?;
    ebpf::check()?;
    shell::run(cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))?;
    shell::run(
        cargo()
            .env(
                "RUSTDOCFLAGS",
                "-D warnings -A rustdoc::private-intra-doc-links",
            )
            .args([
                "doc",
                "--workspace",
                "--no-deps",
                "--document-private-items",
                "--locked",
            ]),
    )
}

/// The verb.
pub fn run() -> Done {
    run_checks()?;
    eprintln!("xtask: no complaints");
    Ok(())
}
