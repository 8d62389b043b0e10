//! CPU time of a process, from the scheduler itself: nanoseconds, where `utime` has hundredths.

use std::fs;

/// Time that all threads of `pid` were on a CPU, so far. Nanoseconds.
#[must_use]
pub fn on_cpu_ns(pid: u32) -> u64 {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return 0;
    };
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("schedstat")).ok())
        .filter_map(|stat| stat.split(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// The same over a process and all that descend from it.
#[must_use]
pub fn family_on_cpu_ns(pid: u32) -> u64 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let of_children = children
        .split_whitespace()
        .filter_map(|child| child.parse().ok());
    on_cpu_ns(pid) + of_children.map(family_on_cpu_ns).sum::<u64>()
}

/// Resident memory. KiB.
#[must_use]
pub fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}
