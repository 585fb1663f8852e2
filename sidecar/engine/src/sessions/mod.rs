//! Server side of the protocol as one state machine: sessions, proofs of death, hand-back of memory, and every opcode.
//! This module decides what a peer may do and how it is answered. It uses no sockets, threads or clocks; time is an argument.
//! `Engine` decides what the cache holds and where. The shell moves bytes.

mod chunks;
mod core;
mod counters;
mod death;
mod events;
mod hello;
mod memory;
mod objects;
mod peers;
mod register;
pub mod seam;
mod status;
mod tier_metrics;
mod window;

#[cfg(test)]
pub(crate) mod tests;

pub use self::core::Core;
pub use self::seam::{
    ConnId, FdFacts, FdId, FdKind, FdType, Frame, Host, HostError, Input, Now, Output, ProcessId,
    Start, WindowId, WindowJob, WindowNews,
};
pub use self::status::AdminError;
