//! Shared memory and the lock file: sealed memfds, mappings and their digests, the slot table over a mapping, population, the memory limit,
//! and properties of passed descriptors. All `unsafe` of the data path is here, each block with its reason. No policy: `sessions` decides
//! what to create, adopt or refuse.

pub mod arena;
pub mod digest;
pub mod facts;
pub mod limit;
pub mod link;
pub mod lockfile;
pub mod mapping;
pub mod memfd;
pub mod populate;
pub mod record_lock;
pub mod verify;
