//! The tier against real servers: one rig, and a file for each thing that must hold.

mod faults;
mod rig;
mod suite;
mod topology;
mod ways;
