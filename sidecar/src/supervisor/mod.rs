//! The process above the engine (PID 1 of the container). It holds the memory, restarts the engine in milliseconds, answers health
//! checks meanwhile, forwards signals and reaps zombies. A small poll loop without threads, because it must never die while the
//! container should live. It knows no frames, keys or tiers.

mod backoff;
pub mod child;
mod heartbeat;
pub mod listen;
pub mod messages;
mod run;
mod signals;
mod standby;

pub use run::{SupervisorError, run, somebody_listens};
