//! Flush: a walk through all of memory that puts what a tier lacks into its queue, as far as the queue takes it, until all of it went.
//! What was seen there longer ago than that is believed is looked for after that, and written where it is missing.
//! One begins when the last engine left, when the pod is told to end, and where an earlier boot left chunks. One that a tier was down for, or
//! went down in, begins when it is up.

use super::super::mistake::{Mistake, made};
use super::super::table::Table;
use super::super::{Engine, Time};
use super::Tier;
use crate::tier::Kind;
use kvcachepool_protocol::key::{ModelId, NamespaceId};

/// Chunks that are looked at before something else gets its turn.
const CHUNKS_AT_ONCE: u32 = 4_096;

/// What memory holds and a tier is not known to have, although it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unwritten {
    pub tier: Kind,
    pub chunks: u64,
    pub bytes: u64,
}

/// How far a flush is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Place of the next chunk.
    pub at: u32,
    /// Everything that the tier lacks went: this time for what it had a while ago.
    pub again: bool,
    pub since_ms: u64,
    /// Since then the tier has taken nothing.
    pub failing_since_ms: Option<u64>,
}

impl Tier {
    /// A flush is under way.
    pub fn flushes(&self) -> bool {
        self.walk.is_some()
    }
}

impl<T: Table> Engine<T> {
    /// Begins to write down everything readable that tiers lack: where one is down, when it is up.
    pub fn flush(&mut self) {
        for at in 0..self.lower.tiers.len() {
            self.begin_walk(at);
        }
    }

    /// Is something still to be written down by a flush?
    pub fn flushes(&self) -> bool {
        self.lower.tiers.iter().any(Tier::flushes)
    }

    /// What tiers lack, one entry for each tier that is written to. Looks at every chunk.
    pub fn unwritten(&self) -> Vec<Unwritten> {
        let mut list = Vec::new();
        for (at, tier) in self.lower.tiers.iter().enumerate() {
            if !tier.is_written() {
                continue;
            }
            let (mut chunks, mut bytes) = (0, 0);
            for entry in 0..self.entries.len() as u32 {
                let chunk = self.handle(entry);
                if self.lacks(at, chunk) && self.nameable(at, entry) {
                    chunks += 1;
                    bytes += self.stored_bytes(chunk);
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

    fn begin_walk(&mut self, at: usize) {
        let since_ms = self.lower.now_ms;
        if let Some(tier) = self.lower.tiers.get_mut(at)
            && tier.is_written()
        {
            tier.walk_due = !tier.up();
            tier.walk = tier.up().then(|| Walk {
                since_ms,
                ..Walk::default()
            });
        }
    }

    /// Nothing more is written to the tier now.
    pub(super) fn end_walk(&mut self, at: usize) {
        if let Some(tier) = self.lower.tiers.get_mut(at) {
            tier.walk = None;
        }
    }

    /// A tier is up: it gets the walk that it was down for.
    pub(super) fn came_up(&mut self, at: usize) {
        if self.lower.tiers.get(at).is_some_and(|t| t.walk_due) {
            self.begin_walk(at);
        }
    }

    /// Chunks of a domain can be written down from now on.
    pub(super) fn learned(&mut self) {
        if self.lower.adopted {
            for at in 0..self.lower.tiers.len() {
                self.begin_walk(at);
            }
        }
    }

    /// Goes on with the walks that are under way.
    pub(super) fn walk_on(&mut self, now: Time) {
        for at in 0..self.lower.tiers.len() {
            if let Some(walk) = self.lower.tiers.get(at).and_then(|t| t.walk) {
                let next = self.walk_from(now, at, walk);
                if let Some(tier) = self.lower.tiers.get_mut(at) {
                    tier.walk = next;
                }
            }
        }
    }

    /// Where the walk goes on; none = it is over, and all that it found went.
    fn walk_from(&mut self, now: Time, at: usize, mut walk: Walk) -> Option<Walk> {
        let end = self.entries.len() as u32;
        for _ in 0..CHUNKS_AT_ONCE {
            if walk.at < end {
                if !self.walk_past(now, at, walk)? {
                    return Some(walk);
                }
                walk.at += 1;
            } else if !walk.again && !made(Mistake::FlushBelieves) {
                (walk.at, walk.again) = (0, true);
            } else {
                let writes = &self.lower.tiers.get(at)?.writes;
                let over = writes.queue.is_empty() && writes.puts == 0;
                return (!over).then_some(walk);
            }
        }
        Some(walk)
    }

    /// Puts one chunk into the tier's queue if that is due; false = there is no room for it now. None without such a tier.
    fn walk_past(&mut self, now: Time, at: usize, walk: Walk) -> Option<bool> {
        let chunk = self.handle(walk.at);
        let wanted = if walk.again {
            self.may_lack(at, chunk, walk.since_ms)
        } else {
            self.lacks(at, chunk)
        };
        if !wanted || !self.nameable(at, walk.at) {
            return Some(true);
        }
        let tier = self.lower.tiers.get(at)?;
        let (writes, bytes) = (&tier.writes, self.stored_bytes(chunk));
        // one that the queue has no room for would take the place of what waits there
        let room = tier.config.put_queue_bytes_max.saturating_sub(bytes);
        let full =
            writes.queue_bytes > self.waiting_bytes_max(tier).min(room) && !writes.queue.is_empty();
        if full {
            return Some(made(Mistake::FlushForgets));
        }
        self.not_written(at, chunk);
        self.queue_put(now, at, chunk, true, 0);
        Some(true)
    }

    /// Is it known whose chunk it is, and may those name it who read from the tier?
    fn nameable(&self, at: usize, entry: u32) -> bool {
        let Some(e) = self.entries.get(entry as usize) else {
            return false;
        };
        if !self.lower.origins.contains_key(&e.name.layout) {
            return false;
        }
        let record = self.table.chunk(entry);
        self.lower.models.contains(&ModelId(record.model))
            && self.lower.serves(at, &NamespaceId(record.namespace))
    }
}
