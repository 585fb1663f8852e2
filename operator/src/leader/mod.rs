//! Leader election with a Lease. `elect` is the pure decision, `lease` reads and writes the object, and `run` connects the two.
//! Only work that writes for the whole cluster waits for the election; webhook, health and metrics do not.
//! This module does not depend on the work of a leader.

pub mod elect;
mod lease;
pub mod run;
#[cfg(test)]
mod tests;

pub use elect::Timing;
pub use run::{Leadership, run};
