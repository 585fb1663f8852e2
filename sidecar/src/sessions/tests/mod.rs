//! The state machine as a peer sees it: frames in, frames out, over a table in private memory.

mod memory;
mod paths;
mod peer;
mod refusals;
mod speed;
