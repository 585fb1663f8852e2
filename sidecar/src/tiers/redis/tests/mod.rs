//! The tier against real servers: one rig, and a file for each thing that must hold.

mod cut;
mod faults;
mod marks;
mod proxy;
pub(crate) mod rig;
mod shards;
mod suite;
mod tls;
mod topology;
mod ways;
mod whole;
