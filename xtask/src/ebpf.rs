//! Building the BPF programs, and telling whether the committed object is what these sources give.

#[path = "../../userspace/build/digest.rs"]
mod digest;

use std::fs;
use std::path::{Path, PathBuf};

use digest::Note;

use crate::setup;
use crate::shell::{Done, cargo, command, first_line, root, run};

const TARGET: &str = "bpfel-unknown-none";
/// Debian's, which brings a prebuilt `core` for the target; everything else is built by the usual compiler.
const RUSTC: &str = "/usr/bin/rustc";
const STRIP: &str = "/usr/lib/llvm-22/bin/llvm-strip";

fn committed(name: &str) -> PathBuf {
    root().join("userspace/bpf").join(name)
}

/// Builds the programs and returns where the object is.
///
/// What depends on the place is mapped or stripped away, so that the object is the same wherever the project lies.
pub fn build() -> Done<PathBuf> {
    setup::bpf()?;
    let cargo = |verb: &[&str]| {
        let mut cargo = command("cargo");
        cargo
            .current_dir(root().join("ebpf"))
            .env("RUSTC", RUSTC)
            .env("RUSTC_BOOTSTRAP", "1")
            .env_remove("RUSTUP_TOOLCHAIN")
            .env("CARGO_TARGET_DIR", root().join("target/ebpf"))
            .args(verb);
        cargo
    };
    // Before the flags are made: they name the folders that this creates.
    run(&mut cargo(&["fetch", "--locked"]))?;
    run(
        cargo(&["build", "--release", "--locked", "--target", TARGET])
            // Separated by 0x1f, so that a path may have spaces.
            .env("CARGO_ENCODED_RUSTFLAGS", flags().join("\x1f")),
    )?;
    let built = root().join("target/ebpf").join(TARGET).join("release");
    let object = built.join("prefixlb.bpf.o");
    // DWARF has served to make BTF, which stays. Programs load quicker without it.
    run(command(STRIP)
        .args(["--strip-debug", "-o"])
        .args([&object, &built.join("prefixlb")]))?;
    Ok(object)
}

fn flags() -> Vec<String> {
    let home = std::env::var("CARGO_HOME")
        .or_else(|_| std::env::var("HOME").map(|home| format!("{home}/.cargo")))
        .unwrap_or_default();
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    let mut flags = [
        "-Cdebuginfo=2",
        "-Clink-arg=--btf",
        "-Clinker=bpf-linker",
        "-Ctarget-cpu=v3", // atomics
        "-Dwarnings",
    ]
    .map(str::to_owned)
    .to_vec();
    flags.push(remap(&root(), "/prefixlb"));
    // Sources of dependencies lie in a folder named after the registry or its mirror.
    for registry in fs::read_dir(Path::new(&home).join("registry/src"))
        .into_iter()
        .flatten()
        .flatten()
    {
        flags.push(remap(&registry.path(), "/registry"));
    }
    flags
}

/// What these sources give with the tools of this machine.
fn fresh() -> Done<(Vec<u8>, Note)> {
    let built = build()?;
    let object = fs::read(&built).map_err(|error| format!("{}: {error}", built.display()))?;
    let (sources, _) = digest::of_sources(&root()).map_err(|error| error.to_string())?;
    let version = |program| first_line(command(program).arg("--version")).unwrap_or_default();
    let note = Note {
        sources,
        object: digest::of_bytes(&object),
        tools: format!("{}, {}", version(RUSTC), version("bpf-linker")),
    };
    Ok((object, note))
}

/// Builds the programs, notes what they are built from, and shows what the verifier makes of them.
pub fn renew() -> Done {
    let (object, note) = fresh()?;
    let at = committed("prefixlb.bpf.o");
    let write = |error| format!("{}: {error}", at.display());
    fs::create_dir_all(root().join("userspace/bpf")).map_err(write)?;
    fs::write(&at, object).map_err(write)?;
    let text = format!(
        "sources {}\nobject {}\ntools {}\n",
        note.sources, note.object, note.tools
    );
    fs::write(committed("prefixlb.bpf.digest"), text).map_err(write)?;
    eprintln!("xtask: {} is of these sources now", at.display());
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

/// Builds the programs and fails unless the committed object is the same.
///
/// With other tools than it was built with, other bytes prove nothing; then only the sources are compared, and the
/// tests, which run on the object built here, have to do.
pub fn check() -> Done {
    let (object, here) = fresh()?;
    let noted = fs::read_to_string(committed("prefixlb.bpf.digest")).unwrap_or_default();
    let noted = Note::parse(&noted);
    let kept = fs::read(committed("prefixlb.bpf.o")).unwrap_or_default();
    let same_tools = noted.tools == here.tools;
    if !same_tools {
        eprintln!(
            "xtask: the BPF object was built with {}, here are {}: its bytes are not compared",
            noted.tools, here.tools
        );
    }
    if noted.sources == here.sources && (kept == object || !same_tools) {
        Ok(())
    } else {
        Err("userspace/bpf/prefixlb.bpf.o is stale: run `cargo xtask ebpf`".into())
    }
}
