//! Side-by-side runs of the data path: one stub backend, one load, and each balancer in turn.
//!
//! What is compared is the balancer's own CPU, from the scheduler's account of its threads; rounds alternate
//! between contenders, so that a noisy machine is noisy to all. Every answer is checked, byte by byte, in the
//! timed rounds as well: a balancer that is quick and wrong has no time.

pub mod cpu;
pub mod drive;
pub mod event;
pub mod proxies;
pub mod streams;
pub mod stub;
pub mod table;
