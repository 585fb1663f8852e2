//! The protocol's server side as one state machine: sessions, proofs of death, hand-back of memory, and every opcode.
//! Here lives what a peer may do and what it is answered; no sockets, no threads, no clocks (time is an argument).
//! What the cache holds and where is decided in `engine/`; bytes move in the shell.

mod core;
mod counters;
mod events;
mod hello;
mod memory;
mod peers;
mod read;
mod register;
pub mod seam;
mod status;
mod tier_metrics;
mod window;
mod write;

#[cfg(test)]
mod tests;

pub use self::core::Core;
pub use self::seam::{
    ConnId, FdFacts, FdId, FdKind, FdType, Host, HostError, Input, Now, Output, ProcessId, Start,
    WindowId, WindowNews,
};
pub use self::status::AdminError;
