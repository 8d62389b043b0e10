//! What both sides of prefixlb must agree on: map layouts, selection arithmetic and HTTP framing.
//!
//! Compiled twice, for the host and for the BPF target; so: no `std`, no allocation, no floating point.
//! Nothing that both sides need exists a second time elsewhere.
#![no_std]
#![forbid(unsafe_code)]

pub mod chunked;
pub mod framing;
pub mod gate;
pub mod hexkey;
pub mod ledger;
pub mod ledger_op;
pub mod maglev;
