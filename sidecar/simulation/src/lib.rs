//! A deterministic simulation of the pod around the real state machine (`sessions::Core`) and the real windows (`gpu::copy_engine`,
//! `gpu::lifecycle`): model connectors with all their rules, memory that outlives an engine that dies at any table write, a model of
//! the bytes, and faults. A history is a function of its seed. Each rule can be left out on purpose, to show that the simulation sees it.
//!
//! For tests and `examples/simulate` only.
#![allow(
    clippy::unwrap_used,
    reason = "a test that other tests and an example share"
)]

mod answers;
mod check;
mod counts;
mod device;
mod digests;
mod faults;
mod fetching;
mod history;
mod host;
mod keeper;
mod link;
mod lower;
mod many;
mod memory;
mod mistakes;
mod orders;
mod owner;
mod profile;
mod rng;
mod rules;
mod scheduler;
mod shapes;
mod sidecar;
mod stages;
mod table;
#[cfg(test)]
mod tests;
mod text;
mod windows;
mod worker;
mod world;
mod writers;
mod writing;

pub use counts::{ALL, Counts, FAULTS, Fault};
pub use history::{Outcome, run};
pub use many::{Summary, guarded, run_many, threads};
pub use mistakes::{Expected, MISTAKES};
pub use profile::{Profile, Rates, Slip, Wrong};
pub use rules::{Rule, Violation};
