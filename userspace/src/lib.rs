//! prefixlb: a prefix-aware load balancer for LLM engines.
//!
//! The modules in the order a request meets them: [`proxy`] accepts and reads it, [`picker`] chooses a
//! backend, [`backend`] knows which there are and how they fare, [`kernel`] holds what is shared with the
//! BPF programs. [`config`] says what was meant, [`state`] is what all workers share, [`metrics`] and
//! [`admin`] are how it is watched.

pub mod cli;
pub mod config;
pub mod generation;
pub mod state;

pub mod proxy;

pub mod picker;

pub mod backend;

pub mod kernel;

pub mod admin;
pub mod control;
pub mod metrics;
pub mod reqlog;
