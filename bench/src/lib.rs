//! Engine simulator, load generator and side-by-side runs: how prefixlb is shown and measured.

pub mod load;
pub mod ratio;
pub mod run;
pub mod side;
pub mod sim;
