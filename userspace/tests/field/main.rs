//! The HTTP path from outside: faults that were reported in public against proxies and routers of this kind,
//! and what the specifications say beyond them. The ids in comments (F01, S02, …) are those of
//! `fixtures/field-cases.md`.

mod affinity;
mod catalogue;
mod cuts;
mod forwarding;
mod framing;
#[path = "../harness/mod.rs"]
mod harness;
mod health_ops;
mod interim;
mod pool;
mod streaming;
