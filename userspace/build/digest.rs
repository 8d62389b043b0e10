// Digest of the sources that the BPF object is built from. Used by the build script, which refuses a stale
// object, and by `cargo xtask ebpf`, which renews it; so that both mean the same.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

/// The digest, and every file that went into it.
pub fn of_sources(root: &Path) -> io::Result<(String, Vec<PathBuf>)> {
    let mut files = vec![root.join("ebpf/Cargo.toml"), root.join("ebpf/Cargo.lock")];
    for folder in ["ebpf/src", "ebpf/common/src"] {
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut text = Vec::new();
    for file in &files {
        let name = file.strip_prefix(root).unwrap_or(file);
        text.extend_from_slice(name.to_string_lossy().as_bytes());
        text.push(0);
        text.extend_from_slice(&fs::read(file)?);
        text.push(0);
    }
    Ok((format!("{:032x}", xxh3_128(&text)), files))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
