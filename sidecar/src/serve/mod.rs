//! The engine process: Unix socket in front, the sans-I/O core behind one short-held lock, and everything that the core asks the
//! operating system for. Frames are handled inline by whoever read them: no queue and no task hop between socket and answer.
//! No decision about sessions, slots or memory is taken here.

mod boot;
mod complaints;
mod connection;
pub mod daemon;
mod descriptors;
mod exit;
mod holders;
mod host;
mod listener;
mod pidfd;
mod process;
mod reload;
mod sections;
mod shell;
mod slow;
mod tiers;
mod watch;
mod window;
mod windows;

pub use process::run;
pub use shell::Shell;
