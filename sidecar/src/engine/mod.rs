//! The cache engine: index, allocator, slot states, leases and eviction.
//! Here live decisions; no clocks, no sockets, no threads, no wire format: time is an argument, actions are returned.
//! Who may ask for what, and when a process counts as dead, is decided in `sessions/`.

pub mod config;
pub mod table;
