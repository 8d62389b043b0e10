//! The picker: which backend gets a request, and why.
//!
//! No I/O, no clock of its own, no randomness of its own: a pick is a function of the request's key, the
//! pool's members, the ledger, the engine signals and the index. So a simulator can run this very code, and
//! a kernel program can be held against it.

pub mod key;
pub mod ledger;
mod pick;
pub mod signals;

pub use key::{KeyParser, PrefixKey};
pub use ledger::{Charge, Ledger};
pub use pick::{Member, NoPick, Pick, PickReason, PickRequest, Picker};
pub use signals::{EngineSignal, SignalTable};
