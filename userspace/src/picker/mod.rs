//! The picker: which backend gets a request, and why.
//!
//! No I/O, no clock of its own, no randomness of its own: a pick is a function of the request's key, the
//! pool's members, the ledger, the engine signals and the index. So a simulator can run this very code, and
//! a kernel program can be held against it.
//!
//! `key` reads the prefix key, `index` knows who holds it, `ledger` what each has to do, `signals` what engines
//! say; `pick` brings them together, `sticky` is the policy that prefixlb exists for, `plain` has the others.

pub mod index;
pub mod key;
pub mod ledger;
mod pick;
mod plain;
pub mod signals;
mod sticky;

pub use key::{KeyParser, PrefixKey};
pub use ledger::{Charge, Ledger};
pub use pick::{Member, NoPick, Pick, PickReason, PickRequest, Picker};
pub use signals::{EngineSignal, SignalTable};
