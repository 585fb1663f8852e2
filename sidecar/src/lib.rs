//! The sidecar.

pub mod engine;
pub mod sessions;
