//! Flush: a walk through memory that queues every chunk a tier lacks, as far as the tier's queue has room. Objects whose last sighting is
//! too old are looked up at the end of the walk, and written where missing.
//! A flush begins when the last engine disconnects, when the pod is terminated, and when memory holds chunks of an earlier boot. If the
//! tier is down, or goes down during the walk, the flush begins once it is up.

use super::super::mistake::Mistake;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::{Tier, TierPlanner};
use crate::tier::Kind;
use kvcachepool_protocol::key::{ModelId, NamespaceId};

/// Chunks examined before other work runs.
const CHUNKS_AT_ONCE: u32 = 4_096;

/// Chunks in memory that a tier should have and is not known to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unwritten {
    pub tier: Kind,
    pub chunks: u64,
    pub bytes: u64,
}

/// Progress of a flush.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Index of the next entry.
    pub at: u32,
    /// Second pass: everything known to be missing is written, and old sightings are verified.
    pub again: bool,
    pub since_ms: u64,
    /// The tier has accepted nothing since this time.
    pub failing_since_ms: Option<u64>,
}

impl Tier {
    pub fn flushes(&self) -> bool {
        self.walk.is_some()
    }
}

impl TierPlanner {
    fn begin_walk(&mut self, at: usize) {
        let since_ms = self.now_ms;
        if let Some(tier) = self.tiers.get_mut(at)
            && tier.is_written()
        {
            tier.walk_due = !tier.up();
            tier.walk = tier.up().then(|| Walk {
                since_ms,
                ..Walk::default()
            });
        }
    }

    /// Ends the walk: nothing more is written to the tier now.
    pub fn end_walk(&mut self, at: usize) {
        if let Some(tier) = self.tiers.get_mut(at) {
            tier.walk = None;
        }
    }

    /// Starts the walk that was postponed while the tier was down.
    pub fn came_up(&mut self, at: usize) {
        if self.tiers.get(at).is_some_and(|t| t.walk_due) {
            self.begin_walk(at);
        }
    }

    /// The chunks of a new domain can be written from now on.
    pub fn learned(&mut self) {
        if self.adopted {
            for at in 0..self.tiers.len() {
                self.begin_walk(at);
            }
        }
    }
}

impl<T: Table> Engine<T> {
    /// Starts a flush of every tier. A tier that is down is flushed once it is up.
    pub fn flush(&mut self) {
        for at in 0..self.lower.tiers.len() {
            self.lower.begin_walk(at);
        }
    }

    /// True while a flush is running or due.
    pub fn flushes(&self) -> bool {
        self.lower.tiers.iter().any(Tier::flushes)
    }

    /// Readable chunks that each written tier lacks. Examines every chunk.
    pub fn unwritten(&self) -> Vec<Unwritten> {
        let mut list = Vec::new();
        for (at, tier) in self.lower.tiers.iter().enumerate() {
            if !tier.is_written() {
                continue;
            }
            let (mut chunks, mut bytes) = (0, 0);
            for entry in 0..self.memory.index.len() {
                let chunk = self.memory.index.handle(entry);
                if self.lacks(at, chunk) && self.nameable(at, entry) {
                    chunks += 1;
                    bytes += self.memory.stored_bytes(chunk);
                }
            }
            list.push(Unwritten {
                tier: tier.config.kind,
                chunks,
                bytes,
            });
        }
        list
    }

    /// Advances the walks in progress.
    pub(super) fn advance_flushes(&mut self, now: Time) {
        for at in 0..self.lower.tiers.len() {
            if let Some(walk) = self.lower.tiers.get(at).and_then(|t| t.walk) {
                let next = self.walk_from(now, at, walk);
                if let Some(tier) = self.lower.tiers.get_mut(at) {
                    tier.walk = next;
                }
            }
        }
    }

    /// Continues a walk. Returns none once everything it found is written.
    fn walk_from(&mut self, now: Time, at: usize, mut walk: Walk) -> Option<Walk> {
        let end = self.memory.index.len();
        for _ in 0..CHUNKS_AT_ONCE {
            if walk.at < end {
                if !self.walk_past(now, at, walk)? {
                    return Some(walk);
                }
                walk.at += 1;
            } else if !walk.again && !T::makes(Mistake::FlushBelieves) {
                (walk.at, walk.again) = (0, true);
            } else {
                let writes = &self.lower.tiers.get(at)?.writes;
                let over = writes.queue.is_empty() && writes.puts == 0;
                return (!over).then_some(walk);
            }
        }
        Some(walk)
    }

    /// Queues one chunk if the tier lacks it. Returns false if the queue is full, and none if the tier does not exist.
    fn walk_past(&mut self, now: Time, at: usize, walk: Walk) -> Option<bool> {
        let chunk = self.memory.index.handle(walk.at);
        let wanted = if walk.again {
            self.may_lack(at, chunk, walk.since_ms)
        } else {
            self.lacks(at, chunk)
        };
        if !wanted || !self.nameable(at, walk.at) {
            return Some(true);
        }
        let tier = self.lower.tiers.get(at)?;
        let (writes, bytes) = (&tier.writes, self.memory.stored_bytes(chunk));
        // queueing a chunk without room would drop one that already waits
        let room = tier.config.put_queue_bytes_max.saturating_sub(bytes);
        let full =
            writes.queue_bytes > self.waiting_bytes_max(tier).min(room) && !writes.queue.is_empty();
        if full {
            return Some(T::makes(Mistake::FlushForgets));
        }
        self.not_written(at, chunk);
        self.queue_put(now, at, chunk, true, 0);
        Some(true)
    }

    /// True if the chunk's domain is known, and readers of the tier can name it.
    fn nameable(&self, at: usize, entry: u32) -> bool {
        let Some(e) = self.memory.index.entry(entry) else {
            return false;
        };
        if !self.lower.origins.contains_key(&e.name.layout) {
            return false;
        }
        let record = self.memory.slots.record(entry);
        self.lower.models.contains(&ModelId(record.model))
            && self.lower.serves(at, &NamespaceId(record.namespace))
    }
}
