//! An engine simulator, good enough to be believed: what a replica's time goes into, without a GPU.
//!
//! `cache` is a block-wise prefix cache with LRU, `engine` a pure step model (continuous batching, chunked
//! prefill and decode sharing one token budget), `server` the OpenAI-compatible front with vLLM's metrics and
//! faults on demand.
//!
//! What it leaves out: preemption when the cache runs full (requests wait instead), speculative decoding, and
//! sampling: what it writes is filler.

pub mod cache;
pub mod engine;
pub mod fault;
pub mod http;
pub mod server;
