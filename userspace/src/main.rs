//! The `prefixlb` command.

fn main() {}
