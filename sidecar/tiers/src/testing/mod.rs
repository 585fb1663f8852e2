//! Shared by tests of this crate and of the sidecar: real servers, a scripted bucket, a tier in memory, faults, and the suite that every
//! tier must pass. The sidecar includes these files, because a feature would build the tiers twice.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "each crate uses a part"
)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking"
)]

pub mod chaos;
pub mod faulty;
mod free_port;
pub mod redis_server;
pub mod s3_server;
pub mod shelf;
mod skipped;
pub mod store;
pub mod suite;
pub mod tls;

pub use free_port::free_port;
pub use skipped::skipped;
