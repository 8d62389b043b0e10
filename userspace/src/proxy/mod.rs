//! The life of a request, in the order of the modules: accept, head, request, relay.

mod reason;
mod waiters;

pub use reason::Reason;
pub use waiters::Waiters;
