//! What a leader session remembers of a pool from one reconcile pass to the next. The next leader needs nothing of it.

use super::applied::Applied;
use crate::api::KVCachePoolStatus;
use crate::pods::{Breaker, Evictions, Faults, Update};
use crate::status::Writes;
use jiff::Timestamp;
use std::time::Instant;

/// The memory of one pool.
#[derive(Debug, Default)]
pub struct Memory {
    /// Uid of the pool: a later pool of the same name is another one.
    pub uid: String,
    /// The state in which the operator left the pool's objects.
    pub applied: Applied,
    /// When the operator last made sure that the managed servers have a password.
    pub password: Option<Instant>,
    /// Since when the API server refuses the Job that purges the pool.
    pub purge_refused: Option<Timestamp>,
    /// The breaker; `None` before the first pass.
    pub breaker: Option<Breaker>,
    /// Updates of running pods; `None` before the first pass.
    pub update: Option<Update>,
    /// Evictions of missed pods.
    pub evictions: Evictions,
    /// Faults of the pool's sidecars.
    pub faults: Faults,
    /// The last written status, and the version of the pool then.
    pub written: Option<(KVCachePoolStatus, String)>,
    /// Times of the last writes of the status.
    pub writes: Writes,
}

impl Memory {
    /// Forgets everything if `uid` is another pool than last time.
    pub fn reset_unless(&mut self, uid: &str) {
        if self.uid != uid {
            *self = Self {
                uid: uid.to_owned(),
                ..Self::default()
            };
        }
    }
}
