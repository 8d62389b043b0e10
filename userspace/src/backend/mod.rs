//! Backends: which there are, where they are, how they fare.

pub mod health;
