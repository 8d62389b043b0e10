//! Configuration: what was typed becomes what is meant.
//!
//! [`settings`] holds what is meant, with every default in one place. What was typed lives in the reader
//! and goes no further.

pub mod settings;

pub use settings::*;
