// What the committed BPF object was built from, and with. Used by the build script, which refuses a stale object,
// and by `cargo xtask`, which renews and checks it; so that all mean the same.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

/// The file beside the object: one word a line, then its value.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Digest of the sources.
    pub sources: String,
    /// Digest of the object itself.
    pub object: String,
    /// Compiler and linker. With the same ones the same sources give the same object, byte for byte.
    pub tools: String,
}

impl Note {
    /// Reads the file's text; what is not there stays empty and so matches nothing.
    pub fn parse(text: &str) -> Self {
        let value = |word: &str| {
            let found = text
                .lines()
                .find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
            found.unwrap_or_default().to_owned()
        };
        Self {
            sources: value("sources"),
            object: value("object"),
            tools: value("tools"),
        }
    }
}

/// Digest of bytes, as it is written down.
pub fn of_bytes(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}

/// The sources' digest, and every file that went into it.
pub fn of_sources(root: &Path) -> io::Result<(String, Vec<PathBuf>)> {
    let mut files = vec![
        root.join("ebpf/Cargo.toml"),
        root.join("ebpf/Cargo.lock"),
        root.join("ebpf/common/Cargo.toml"),
    ];
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
    Ok((of_bytes(&text), files))
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
