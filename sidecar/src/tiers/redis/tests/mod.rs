//! The tier against real servers: one rig, and a file for each thing that must hold.

mod rig;
mod suite;
