//! The engine over a table in private memory: invariants under random use, eviction order, starvation, a table
//! that others write to, speed.

mod eviction;
mod random;
mod rig;
mod scribble;
mod speed;
