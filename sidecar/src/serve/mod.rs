//! The engine process: the Unix socket, the sans-I/O core behind one short-held lock, and all system calls that the core asks for.
//! The thread that reads a frame also handles it: no queue and no task switch between socket and reply.
//! No decisions about sessions, slots or memory are made here.

mod boot;
mod complaints;
pub(crate) mod connection;
pub mod daemon;
mod descriptors;
mod exit;
mod host;
mod listener;
mod pidfd;
mod process;
mod reload;
mod shell;
mod slow;
mod tier_state;
mod tiers;
mod watch;
mod window;
mod windows;

pub use process::run;
pub use shell::Shell;
