//! Shared memory and the lock file: memfds with seals, mappings and their digests, the slot table over a mapping, population, the memory limit,
//! facts about descriptors that others passed. All `unsafe` of the data path lives here, each block with its reason.
//! No policy: what to create, adopt or refuse is decided by `sessions`.

pub mod arena;
pub mod digest;
pub mod facts;
pub mod limit;
pub mod link;
pub mod lockfile;
pub mod mapping;
pub mod memfd;
pub mod populate;
pub mod verify;
