//! Refuses to build with a BPF object that is not of these sources, and puts the object where it is loaded from.

#[path = "build/digest.rs"]
mod digest;

use std::path::Path;
use std::{env, fs, process};

fn main() {
    let here = env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| ".".into());
    let root = Path::new(&here).join("..");
    let noted = Path::new(&here).join("bpf/prefixlb.bpf.digest");
    provide_object(&Path::new(&here).join("bpf/prefixlb.bpf.o"));
    println!("cargo::rerun-if-changed={}", noted.display());
    // A package of this crate alone has the object and not its sources: there is nothing to compare.
    let Ok((digest, files)) = digest::of_sources(&root) else {
        return;
    };
    for file in files {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    for folder in ["ebpf/src", "ebpf/common/src"] {
        println!("cargo::rerun-if-changed={}", root.join(folder).display());
    }
    // The one who renews the object must be able to build what loads it.
    println!("cargo::rerun-if-env-changed=PREFIXLB_STALE_BPF");
    let fresh = fs::read_to_string(&noted).is_ok_and(|noted| noted.trim() == digest);
    if !fresh && env::var_os("PREFIXLB_STALE_BPF").is_none() {
        eprintln!(
            "userspace/bpf/prefixlb.bpf.o is not built from these sources of ebpf/: run `cargo xtask ebpf`"
        );
        process::exit(1);
    }
}

/// The committed object, or the one that `PREFIXLB_BPF_OBJECT` names: tests run on one built afresh.
fn provide_object(committed: &Path) {
    println!("cargo::rerun-if-env-changed=PREFIXLB_BPF_OBJECT");
    println!("cargo::rerun-if-changed={}", committed.display());
    let object = env::var_os("PREFIXLB_BPF_OBJECT").map_or(committed.to_owned(), Into::into);
    println!("cargo::rerun-if-changed={}", object.display());
    let out = env::var_os("OUT_DIR").unwrap_or_default();
    if let Err(error) = fs::copy(&object, Path::new(&out).join("prefixlb.bpf.o")) {
        eprintln!("{}: cannot be copied: {error}", object.display());
        process::exit(1);
    }
}
