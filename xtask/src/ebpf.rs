//! Building the BPF programs.

#[path = "../../userspace/build/digest.rs"]
mod digest;

use std::path::PathBuf;

use crate::setup;
use crate::shell::{Done, cargo, command, root, run};

const TARGET: &str = "bpfel-unknown-none";

fn committed(name: &str) -> PathBuf {
    root().join("userspace/bpf").join(name)
}

/// Builds the programs and returns where the object is.
///
/// Paths are mapped away, so that the object is the same wherever the project lies.
pub fn build() -> Done<PathBuf> {
    setup::bpf()?;
    let home = std::env::var("CARGO_HOME")
        .or_else(|_| std::env::var("HOME").map(|home| format!("{home}/.cargo")))
        .unwrap_or_default();
    let flags = format!(
        "-C debuginfo=2 -C link-arg=--btf -C linker=bpf-linker -C target-cpu=v3 \
         --remap-path-prefix={}=/prefixlb --remap-path-prefix={home}=/cargo",
        root().display()
    );
    run(command("cargo")
        .current_dir(root().join("ebpf"))
        .env("RUSTC", "/usr/bin/rustc")
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", flags)
        .env_remove("RUSTUP_TOOLCHAIN")
        .env("CARGO_TARGET_DIR", root().join("target/ebpf"))
        .args(["build", "--release", "--locked", "--target", TARGET]))?;
    Ok(root()
        .join("target/ebpf")
        .join(TARGET)
        .join("release/prefixlb"))
}

/// Builds the programs, notes their sources' digest, and shows what the verifier makes of them.
pub fn renew() -> Done {
    let built = build()?;
    let object = committed("prefixlb.bpf.o");
    let write = |error| format!("{}: {error}", object.display());
    std::fs::create_dir_all(root().join("userspace/bpf")).map_err(write)?;
    std::fs::copy(built, &object).map_err(write)?;
    let (digest, files) = digest::of_sources(&root()).map_err(write)?;
    std::fs::write(committed("prefixlb.bpf.digest"), format!("{digest}\n")).map_err(write)?;
    eprintln!(
        "xtask: {} is built from {} files, digest {digest}",
        object.display(),
        files.len()
    );
    run(cargo().args([
        "test",
        "--quiet",
        "-p",
        "prefixlb",
        "--test",
        "kernel_ledger",
        "--",
        "--nocapture",
        "programs_verify",
    ]))
}

/// Whether the committed object's digest is that of the sources.
pub fn check_digest() -> Done {
    let (digest, _) = digest::of_sources(&root()).map_err(|error| error.to_string())?;
    let noted = std::fs::read_to_string(committed("prefixlb.bpf.digest")).unwrap_or_default();
    if noted.trim() == digest {
        Ok(())
    } else {
        Err("userspace/bpf/prefixlb.bpf.o is stale: run `cargo xtask ebpf`".into())
    }
}
