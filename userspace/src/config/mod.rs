//! Configuration: what was typed becomes what is meant.
//!
//! [`settings`] holds what is meant, with every default in one place. `typed` is the shape of the file,
//! `values` reads single values, `reader` brings the two together, `check` judges the
//! whole, and `place` says where a mistake is.

mod check;
mod place;
mod reader;
pub mod settings;
mod typed;
pub mod values;

pub use check::{Fault, check};
pub use reader::{ConfigError, read, read_file};
pub use settings::*;
