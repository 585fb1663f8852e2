//! The state machine as a peer sees it: frames in, frames out, over a table in private memory.

mod lower;
mod memory;
mod objects;
mod paths;
pub(crate) mod peer;
mod refusals;
mod resize;
mod speed;
mod window;
