//! A release: one archive and its checksum.

use std::fs;

use crate::shell::{self, Done, cargo, command, root};

const FILES: [&str; 7] = [
    "README.md",
    "CHANGELOG.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    "ARCHITECTURE.md",
    "deploy/prefixlb.toml",
    "deploy/prefixlb.service",
];

/// Builds and packs.
pub fn run() -> Done {
    shell::run(cargo().args(["build", "--release", "--locked", "-p", "prefixlb"]))?;
    let name = format!(
        "prefixlb-{}-{}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH
    );
    let dist = root().join("target/dist");
    let folder = dist.join(&name);
    let cannot = |error| format!("{}: {error}", folder.display());
    fs::create_dir_all(&folder).map_err(cannot)?;
    let binary = root().join("target/release/prefixlb");
    fs::copy(&binary, folder.join("prefixlb")).map_err(cannot)?;
    for file in FILES {
        let from = root().join(file);
        let to = folder.join(from.file_name().unwrap_or_default());
        fs::copy(&from, to).map_err(|error| format!("{file}: {error}"))?;
    }
    let archive = format!("{name}.tar.gz");
    shell::run(command("tar").current_dir(&dist).args([
        "--owner=0",
        "--group=0",
        "-czf",
        &archive,
        &name,
    ]))?;
    let sum = format!("sha256sum {archive} > {archive}.sha256");
    shell::run(command("sh").current_dir(&dist).args(["-c", &sum]))?;
    eprintln!("xtask: target/dist/{archive}");
    Ok(())
}
