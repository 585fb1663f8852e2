//! The tier against real servers: one rig, and a file for each thing that must hold.

mod claims;
mod cluster;
mod cut;
mod failover;
mod faults;
mod ipv6;
mod manage;
mod marks;
mod proxy;
mod resharding;
mod shards;
mod suite;
mod tls;
mod topology;
mod traffic;
mod watches;
mod ways;
mod whole;
