//! The engine over a table in private memory: invariants under random use, eviction order, starvation, a table
//! that others write to, checks, speed.

mod checks;
mod eviction;
mod flushes;
mod random;
mod restart;
mod rig;
mod scribble;
mod speed;
mod writes;
