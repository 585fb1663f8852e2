//! The engine over a table in private memory: invariants under random use, eviction order, starvation, speed.

mod eviction;
mod random;
mod rig;
mod speed;
