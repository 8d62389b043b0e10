//! The life of a request, in the order of the modules.
//!
//! `worker` accepts, `flow` is one client connection, `scan` and `request` read a head, `exchange` leads one
//! request through `window` (key and pool), `assign` (pick and charge), `link` and `upload` (to the backend),
//! `await_head` and `response` (its answer's head) and `relay` (its body). `body` follows framing in both
//! directions, `answer` is what prefixlb says itself, `timers` and `buffers` are what makes a flow cheap.

mod answer;
mod assign;
mod await_head;
mod body;
mod buffers;
mod exchange;
mod fields;
mod flow;
mod io;
mod link;
mod reason;
mod relay;
mod request;
mod response;
mod scan;
mod timers;
mod upload;
mod usage;
mod waiters;
mod window;
mod worker;

pub use reason::Reason;
pub use waiters::Waiters;
pub use worker::{bind, probe, run_worker};
