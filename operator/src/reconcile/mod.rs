//! The leader's work. Watches feed a queue, and each pool in it gets a reconcile pass: `observe` takes a snapshot, `plan` turns it into
//! steps (pure; the decisions are in `desired`, `status` and `pods`), `act` carries them out. `session` wires them, and nothing of it
//! outlives it: the next leader needs nothing but the cluster. Failures wait with growing pauses.

mod act;
mod applied;
mod backoff;
mod caches;
mod children;
mod context;
mod error;
mod events;
mod gather;
mod memory;
mod observe;
mod plan;
mod purge;
mod queue;
mod report;
mod sample;
mod session;
mod step;

pub use context::Context;
pub use session::run;
