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
mod filesystem;
mod frugality;
mod harness;
mod limits;
mod lmcache;
mod metrics_doc;
mod pod;
mod pool_config;
mod redis;
mod remote;
mod resize;
mod s3;
mod s3_faults;
mod s3_identity;
mod s3_proxy;
mod size;
mod supervision;
mod survival;
#[path = "../../tiers/src/testing/mod.rs"]
mod testing;
mod tiers;
mod tools;
mod vllm;
mod wait;
mod window;
