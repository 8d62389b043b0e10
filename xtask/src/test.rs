//! All tests, on BPF programs built afresh, and their sum.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::shell::{Done, TOLD, cargo};
use crate::{ebpf, setup};

/// Sets up, tests, and prints `N passed, N failed` as the last line, whatever happens.
pub fn run(args: &[String]) -> Done {
    let sum = all(args).unwrap_or_else(|message| {
        eprintln!("xtask: {message}");
        Sum {
            passed: 0,
            failed: 1,
        }
    });
    println!("\n{} passed, {} failed", sum.passed, sum.failed);
    if sum.failed > 0 || sum.passed == 0 {
        return Err(TOLD.into());
    }
    Ok(())
}

fn all(args: &[String]) -> Done<Sum> {
    setup::for_tests()?;
    let object = ebpf::build()?;
    let mut tests = cargo()
        .env("PREFIXLB_BPF_OBJECT", object)
        .env("PATH", path()?)
        .args(["test", "--workspace", "--locked", "--no-fail-fast"])
        .args(args)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cargo test cannot be started: {error}"))?;
    let mut sum = Sum::default();
    let out = tests.stdout.take().into_iter();
    // Test output need not be UTF-8, and one odd line must not hide the rest.
    for line in out.flat_map(|out| BufReader::new(out).split(b'\n')) {
        let line = line.map_err(|error| format!("the tests' output cannot be read: {error}"))?;
        let line = String::from_utf8_lossy(&line);
        sum.add(&line);
        println!("{line}");
    }
    let status = tests.wait().map_err(|error| error.to_string())?;
    if sum.failed == 0 && !status.success() {
        sum.failed = 1; // something did not even run
    }
    Ok(sum)
}

/// PATH with the programs of `.setup` in front.
fn path() -> Done<OsString> {
    let usual = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(setup::bin()).chain(std::env::split_paths(&usual));
    std::env::join_paths(folders)
        .map_err(|error| format!("{} cannot be in PATH: {error}", setup::bin().display()))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Sum {
    passed: u64,
    failed: u64,
}

impl Sum {
    /// Adds what a line like `test result: ok. 3 passed; 0 failed; …` says.
    fn add(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else {
            return;
        };
        for part in rest.split(['.', ';']) {
            match part.trim().split_once(' ') {
                Some((n, "passed")) => self.passed += n.parse().unwrap_or(0),
                Some((n, "failed")) => self.failed += n.parse().unwrap_or(0),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed() {
        let mut sum = Sum::default();
        sum.add("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; finished in 0.1s");
        sum.add("test result: FAILED. 2 passed; 4 failed; 0 ignored; 0 measured");
        sum.add("test x ... ok");
        assert_eq!(
            sum,
            Sum {
                passed: 5,
                failed: 4
            }
        );
    }
}
