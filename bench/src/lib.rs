//! Engine simulator, load generator and side-by-side runs: how prefixlb is shown and measured.

pub mod ratio;
