//! The contract between the sidecar and the vLLM connector: keys, domain descriptors, wire frames and messages, the shared slot table, the
//! object format, the config file and the status JSON. The crate does not use tokio, kube or CUDA. Every decoder is total: any bytes give a
//! value or a named error.

pub mod check;
pub mod config;
pub mod domain;
pub mod env_reference;
pub mod frame;
pub mod geometry;
pub mod key;
pub mod layouts;
pub mod lockfile;
pub mod message;
pub mod object;
pub mod refs;
pub mod remote;
pub mod sizing;
pub mod status;
pub mod table;
pub mod window;

/// Version of the wire protocol in HELLO and in every frame header. Versions may differ by one during an upgrade.
pub const PROTOCOL_VERSION: u8 = 1;
