//! The HTTP path from outside: faults that were reported in public against proxies and routers of this kind,
//! and what the specifications say beyond them. The ids in comments (F01, S02, …) are those of
//! `fixtures/field-cases.md`.

#[path = "../harness/mod.rs"]
mod harness;

mod affinity;
mod forwarding;
mod framing;
mod health_ops;
mod interim;
mod pool;
mod streaming;
