//! Running other programs: told before, judged after.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What went wrong, in one sentence.
pub type Done<T = ()> = Result<T, String>;

/// An error that was told already.
pub const TOLD: &str = "";

/// The top of the project.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// A command that runs in the top folder.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// Cargo, the one that runs us.
pub fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Says what is run, runs it, and fails if it does.
pub fn run(command: &mut Command) -> Done {
    let shown = show(command);
    eprintln!("xtask: {shown}");
    let status = command
        .status()
        .map_err(|error| format!("{shown}: cannot be started: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{shown}: {status}"))
    }
}

/// Whether the command can be run and succeeds; its output is thrown away.
pub fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The first line that the command prints.
pub fn first_line(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().next().map(str::to_owned)
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}
