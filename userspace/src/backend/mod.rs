//! Backends: which there are, where they are, how they fare.
//!
//! Everything here runs on the control plane's single thread, away from the workers. It talks to the data
//! path through words only: the ledger's state and weight, the signal table, a backend's addresses and its
//! pool epoch. In the other direction workers say what exchanges showed ([`health::Passive::report`]) and
//! that an address seems wrong ([`request_resolve`]).
//!
//! Each word has one writer: [`probe`] the healthy bit, [`eject`] the ejected bit, [`slow_start`] the
//! weight, [`resolve`] the addresses, [`scrape`] the signals; the admin listener the draining bit.

pub mod eject;
mod fetch;
pub mod health;
pub mod probe;
pub mod prom_text;
pub mod resolve;
pub mod scrape;
pub mod signals;
pub mod slow_start;
mod supervise;

pub use resolve::request_resolve;
pub use supervise::{supervise, supervise_with};
