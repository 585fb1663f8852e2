//! Which replica reconciles: one Lease, taken and renewed. `elect` decides and is pure; `lease` is the object; `run` is the thin shell.
//! Webhook, health and metrics do not wait for this; only work that writes for the whole cluster does.
//! Nothing here knows what a leader does.

pub mod elect;
mod lease;
pub mod run;
#[cfg(test)]
mod tests;

pub use elect::Timing;
pub use run::{Leadership, run};
