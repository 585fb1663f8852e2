//! The real binary, driven by small clients that speak the protocol from processes of their own where locks and deaths matter.
//! Wrong input of every kind must end in a named refusal and a metric, never in a crash, and nothing may be lost.
// A test ends by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admin;
mod bad_config;
mod bad_descriptors;
mod bad_frames;
mod cgroup;
mod child;
mod client;
mod doctor;
#[path = "../../src/tiers/s3/tests/faulty.rs"]
mod faulty;
#[path = "../../src/free_port.rs"]
mod free_port;
mod frugality;
mod harness;
mod limits;
mod pod;
mod pool_config;
mod redis;
mod s3;
mod s3_faults;
mod s3_identity;
#[path = "../../src/tiers/s3/tests/server.rs"]
mod s3_server;
#[path = "../../src/skipped.rs"]
mod skipped;
#[path = "../../src/tiers/s3/tests/store.rs"]
mod store;
mod supervision;
mod survival;
mod tiers;
mod tools;
mod vllm;
mod wait;
mod window;
