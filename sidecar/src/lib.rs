//! The sidecar: a node-local KV cache for the vLLM of its pod.
//!
//! Data flows one way: `serve` (sockets) -> `sessions` and `engine` (decisions, no I/O) -> outputs that `serve` carries out, with
//! `shm` (memory), `verify` (digests) and `admin` (HTTP) beside it. `supervisor` is the process above that never dies.

pub mod admin;
pub mod cli;
pub mod config_file;
pub mod engine;
#[cfg(test)]
mod free_port;
pub mod gpu;
pub mod log;
pub mod serve;
pub mod sessions;
pub mod shm;
#[cfg(any(test, feature = "simulation"))]
pub mod sim;
#[cfg(test)]
mod skipped;
pub mod supervisor;
pub mod tiers;
pub mod verify;
