//! What was stored and removed, for EVENTS: a bounded ring with a cursor. Who falls behind learns that something was lost.

use super::Engine;
use super::table::Table;
use kvcachepool_protocol::key::ChunkKey;
use kvcachepool_protocol::message::{Event, EventsReply};
use std::collections::VecDeque;

/// Events in one answer.
const EVENTS_PER_REPLY_MAX: usize = 1024;

/// The last events, numbered from 1.
#[derive(Debug, Default)]
pub struct Ring {
    events: VecDeque<Event>,
    /// Number of the newest event.
    newest: u64,
    events_max: usize,
}

impl Ring {
    /// A ring that keeps `events_max` events.
    pub fn new(events_max: u32) -> Self {
        Self {
            events: VecDeque::new(),
            newest: 0,
            events_max: events_max as usize,
        }
    }

    /// Forgets what a takeover told: it is nobody's news.
    pub(crate) fn restart(&mut self) {
        self.events.clear();
        self.newest = 0;
    }

    /// Cursor of one who has seen everything.
    pub fn cursor(&self) -> u64 {
        self.newest
    }

    /// Appends an event; the oldest goes where the ring is full.
    pub fn push(&mut self, event: Event) {
        if self.events.len() >= self.events_max {
            self.events.pop_front();
        }
        if self.events_max > 0 {
            self.events.push_back(event);
        }
        self.newest += 1;
    }

    /// Events after `cursor`; a cursor from the future (an earlier boot's) or from before the oldest kept one lost something.
    pub fn after(&self, cursor: u64) -> EventsReply {
        let oldest = self.newest - self.events.len() as u64;
        let lost = cursor < oldest || cursor > self.newest;
        let skip = if lost { 0 } else { (cursor - oldest) as usize };
        let events: Vec<Event> = self
            .events
            .iter()
            .skip(skip)
            .take(EVENTS_PER_REPLY_MAX)
            .cloned()
            .collect();
        EventsReply {
            cursor: oldest + skip as u64 + events.len() as u64,
            lost,
            events,
        }
    }
}

impl<T: Table> Engine<T> {
    pub(crate) fn tell_stored(&mut self, entry: u32) {
        self.tell(entry, "stored");
    }

    /// Must be called while the record of the entry is still whole.
    pub(crate) fn tell_removed(&mut self, entry: u32) {
        self.tell(entry, "removed");
    }

    fn tell(&mut self, entry: u32, kind: &str) {
        let Some(e) = self.entries.get(entry as usize) else {
            return;
        };
        let record = self.table.chunk(entry);
        let hashes = record
            .block_hashes
            .get(..record.block_hash_count as usize)
            .unwrap_or_default();
        let parent = match e.parent_key {
            none if none == ChunkKey::default() => Vec::new(),
            parent => parent.0.to_vec(),
        };
        self.ring.push(Event {
            kind: kind.into(),
            tier: "memory".into(),
            block_hashes: hashes.concat(),
            parent,
            tokens: e.tokens,
            state: String::new(),
        });
    }
}
