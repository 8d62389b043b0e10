//! Refuses to build with a BPF object that is not of these sources, and puts the object where it is loaded from.

#[path = "build/digest.rs"]
mod digest;

use std::path::{Path, PathBuf};
use std::{env, fs, process};

const RENEW: &str = "run `cargo xtask ebpf`";

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| ".".into()));
    if let Err(sentence) = provide_object(&here).and_then(|()| refuse_stale(&here)) {
        eprintln!("{sentence}");
        process::exit(1);
    }
}

/// The committed object, or the one that `PREFIXLB_BPF_OBJECT` names: tests run on one built afresh.
fn provide_object(here: &Path) -> Result<(), String> {
    println!("cargo::rerun-if-env-changed=PREFIXLB_BPF_OBJECT");
    let committed = here.join("bpf/prefixlb.bpf.o");
    let object = env::var_os("PREFIXLB_BPF_OBJECT").map_or(committed, PathBuf::from);
    println!("cargo::rerun-if-changed={}", object.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("prefixlb.bpf.o");
    let told = |error| format!("{} cannot be copied: {error}; {RENEW}", object.display());
    fs::copy(&object, out).map(drop).map_err(told)
}

/// The committed object must be of the sources beside it, and nobody else's bytes.
fn refuse_stale(here: &Path) -> Result<(), String> {
    // The one who renews the object must be able to build what loads it.
    println!("cargo::rerun-if-env-changed=PREFIXLB_STALE_BPF");
    let noted = here.join("bpf/prefixlb.bpf.digest");
    println!("cargo::rerun-if-changed={}", noted.display());
    let root = here.join("..");
    // A package of this crate alone has the object and not its sources: there is nothing to compare.
    let Ok((sources, files)) = digest::of_sources(&root) else {
        return Ok(());
    };
    for file in files {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    for folder in ["ebpf/src", "ebpf/common/src"] {
        println!("cargo::rerun-if-changed={}", root.join(folder).display());
    }
    if env::var_os("PREFIXLB_STALE_BPF").is_some() {
        return Ok(());
    }
    let note = digest::Note::parse(&fs::read_to_string(&noted).unwrap_or_default());
    let object = fs::read(here.join("bpf/prefixlb.bpf.o")).unwrap_or_default();
    if note.sources != sources {
        return Err(format!(
            "userspace/bpf/prefixlb.bpf.o is not built from these sources of ebpf/: {RENEW}"
        ));
    }
    if note.object != digest::of_bytes(&object) {
        return Err(format!(
            "userspace/bpf/prefixlb.bpf.o is not the object that prefixlb.bpf.digest speaks of: {RENEW}"
        ));
    }
    Ok(())
}
