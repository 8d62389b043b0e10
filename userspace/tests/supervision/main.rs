//! The control plane against real sockets: probes, ejection, names, engine signals, the admin listener.
//!
//! Engines are small servers inside the test. Every wait is for an event, with a deadline that only a fault
//! reaches.

mod support;

mod admin;
mod ejection;
mod metrics;
mod names;
mod probes;
mod signals;
