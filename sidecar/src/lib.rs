//! The sidecar: a node-local KV cache for the vLLM of its pod.
//!
//! Data flows one way: `serve` (sockets) -> the engine's sessions (decisions, no I/O) -> outputs, which `serve` carries out in memory,
//! windows and tiers. `admin` answers HTTP. `supervisor` is the parent process, which never exits. Decisions, memory, windows and
//! tiers are separate crates. `remote` is a client of the socket in a process of its own, and serves others over TLS.

pub mod admin;
pub mod cli;
pub mod config_file;
pub mod log;
pub mod remote;
pub mod serve;
pub mod supervisor;
mod terminated;
#[cfg(test)]
#[path = "../tiers/src/testing/mod.rs"]
mod testing;
