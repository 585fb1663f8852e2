//! The protocol as its users see it, in one program: every program more takes seconds to build.
#![allow(clippy::unwrap_used, reason = "a test")]

mod config;
mod domain;
mod frames;
mod object;
mod samples;
mod sizing;
mod status;
mod table;
mod vectors;
mod window;
