//! The state of a pool that a leader session keeps between reconcile passes. The next leader does not need it.

use super::applied::Applied;
use crate::api::KVCachePoolStatus;
use crate::pods::{Breaker, Evictions, Faults, Update};
use crate::status::Writes;
use jiff::Timestamp;
use std::time::Instant;

#[derive(Debug, Default)]
pub struct Memory {
    /// Uid of the pool, because a later pool may have the same name.
    pub uid: String,
    /// The newest generation of the pool that was seen.
    pub generation: i64,
    pub applied: Applied,
    /// Time of the last check that the managed servers have a password.
    pub password: Option<Instant>,
    /// Since when the API server refuses the purge Job.
    pub purge_refused: Option<Timestamp>,
    /// `None` before the first pass.
    pub breaker: Option<Breaker>,
    /// `None` before the first pass.
    pub update: Option<Update>,
    pub evictions: Evictions,
    pub faults: Faults,
    /// The status that the last plan computed, whether it is written or not.
    pub planned: Option<KVCachePoolStatus>,
    /// The last written status, and the pool's resource version after the write.
    pub written: Option<(KVCachePoolStatus, String)>,
    pub writes: Writes,
}

impl Memory {
    /// Discards everything if the pool has another uid than in the last pass.
    pub fn reset_unless(&mut self, uid: &str) {
        if self.uid != uid {
            *self = Self {
                uid: uid.to_owned(),
                ..Self::default()
            };
        }
    }
}
