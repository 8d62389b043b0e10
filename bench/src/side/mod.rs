//! Side-by-side runs of the data path: one stub backend, one load, and each balancer in turn.
//!
//! What is compared is the balancer's own CPU, from the scheduler's account of its threads; rounds alternate
//! between contenders, so that a noisy machine is noisy to all. Answers are checked byte by byte.

pub mod cpu;
pub mod drive;
pub mod proxies;
pub mod stub;
