//! The process above the engine (PID 1 of the container): holds the memory, restarts the engine in milliseconds, answers health
//! meanwhile, forwards signals, reaps zombies. A small poll loop without threads, because it must never die while the container
//! should live. Nothing here knows frames, keys or tiers.

mod backoff;
pub mod child;
mod heartbeat;
mod listen;
pub mod messages;
mod run;
mod signals;
mod standby;

pub use run::{SupervisorError, run, somebody_listens};
