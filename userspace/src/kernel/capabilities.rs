//! What this process may do, by name: "operation not permitted" helps nobody.

use std::fs;

const SYS_ADMIN: u32 = 21;

/// What loading and running the programs asks for. CAP_SYS_ADMIN stands for both, as before Linux 5.8.
const NEEDED: [(u32, &str); 2] = [(39, "CAP_BPF"), (12, "CAP_NET_ADMIN")];

/// Fails with a clause that names the capabilities that are missing.
pub fn check() -> Result<(), String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    match effective(&status) {
        Some(mask) => missing_of(mask).map_or(Ok(()), Err),
        // Without /proc nothing is known: the kernel will say.
        None => Ok(()),
    }
}

fn effective(status: &str) -> Option<u64> {
    let hex = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}

fn missing_of(mask: u64) -> Option<String> {
    let has = |bit: u32| mask & (1 << bit) != 0;
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(bit, _)| !has(*bit) && !has(SYS_ADMIN))
        .map(|(_, name)| *name)
        .collect();
    match missing[..] {
        [] => None,
        [one] => Some(format!("{one} is missing")),
        _ => Some(format!("{} are missing", missing.join(" and "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let status = "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t0000008000000000\n";
        assert_eq!(effective(status), Some(1 << 39));
        assert_eq!(effective("Name:\tx\n"), None);
        let missing = |mask| missing_of(mask).unwrap_or_default();
        assert_eq!(missing(0), "CAP_BPF and CAP_NET_ADMIN are missing");
        assert_eq!(missing(1 << 39), "CAP_NET_ADMIN is missing");
        assert_eq!(missing(1 << 12), "CAP_BPF is missing");
        assert_eq!(missing(1 << 39 | 1 << 12), "");
        assert_eq!(missing(1 << SYS_ADMIN), "");
    }
}
