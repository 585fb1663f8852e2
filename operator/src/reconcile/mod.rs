//! The leader's work. Watches, which every replica has, feed a queue, and each pool in the queue gets a reconcile pass: `observe` takes a
//! snapshot, `plan` computes the steps, and `act` executes them. `plan` is pure; its decisions are in `desired`, `status` and `pods`.
//! `session` connects the parts and keeps all state of one leader session; the next leader restores everything from the cluster. Failed
//! passes are retried with a growing delay.

mod act;
mod applied;
mod backoff;
mod caches;
mod children;
mod context;
mod error;
mod events;
mod gauges;
mod memory;
mod observe;
mod plan;
mod purge;
mod queue;
mod report;
mod sample;
mod session;
mod step;
mod upgrades;

pub use context::Context;
pub use session::run;
