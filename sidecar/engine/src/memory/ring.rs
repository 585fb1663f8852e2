//! Events of stored and removed chunks for EVENTS: a bounded ring with a cursor, and snapshot pages for a reader that fell behind.

use super::MemoryTier;
use crate::name::Name;
use crate::table::Table;
use kvcachepool_protocol::key::{ChunkKey, LayoutId, ModelId};
use kvcachepool_protocol::message::{Event, EventsReply};
use std::collections::VecDeque;

const EVENTS_PER_REPLY_MAX: usize = 1024;
/// Entries examined for one page of a snapshot.
pub(crate) const ENTRIES_PER_PAGE_MAX: u32 = 1024;

/// Model and layout of a chunk. Engines receive only events of their own domain.
pub type EventDomain = (ModelId, LayoutId);

/// The latest events, numbered from 1.
#[derive(Debug, Default)]
pub struct Ring {
    events: VecDeque<(EventDomain, Event)>,
    /// Number of the newest event.
    newest: u64,
    events_max: usize,
    started: bool,
}

impl Ring {
    /// Creates a ring of `events_max` events.
    pub fn new(events_max: u32) -> Self {
        Self {
            events: VecDeque::new(),
            newest: 0,
            events_max: events_max as usize,
            started: false,
        }
    }

    /// Starts keeping events. Returns whether it was started before.
    pub(crate) fn starts(&mut self) -> bool {
        std::mem::replace(&mut self.started, true)
    }

    pub(crate) fn started(&self) -> bool {
        self.started
    }

    /// Cursor of a reader that has read everything.
    pub fn cursor(&self) -> u64 {
        self.newest
    }

    /// Appends an event; a full ring drops its oldest one.
    pub fn push(&mut self, domain: EventDomain, event: Event) {
        if self.events.len() >= self.events_max {
            self.events.pop_front();
        }
        if self.events_max > 0 {
            self.events.push_back((domain, event));
        }
        self.newest += 1;
    }

    /// Events of a domain after `cursor`. A cursor newer than the newest event, or older than the oldest kept one, is `lost`.
    pub fn after(&self, cursor: u64, domain: EventDomain) -> EventsReply {
        let oldest = self.newest - self.events.len() as u64;
        let lost = cursor < oldest || cursor > self.newest;
        let mut reply = EventsReply {
            cursor: if lost { oldest } else { cursor },
            lost,
            ..EventsReply::default()
        };
        let skip = (reply.cursor - oldest) as usize;
        for (of, event) in self.events.iter().skip(skip) {
            if reply.events.len() == EVENTS_PER_REPLY_MAX {
                break;
            }
            reply.cursor += 1;
            if *of == domain {
                reply.events.push(event.clone());
            }
        }
        reply
    }
}

impl<T: Table> MemoryTier<T> {
    pub(crate) fn tell_stored(&mut self, entry: u32) {
        self.tell(entry, "stored");
    }

    /// Records a removal. Must be called while the record of the entry is complete.
    pub(crate) fn tell_removed(&mut self, entry: u32) {
        self.tell(entry, "removed");
    }

    fn tell(&mut self, entry: u32, kind: &str) {
        if self.ring.started()
            && let Some((domain, event)) = self.event_of(entry, kind)
        {
            self.ring.push(domain, event);
        }
    }

    /// A page of a domain's chunks in memory, and the start of the next page.
    pub fn resident(&self, from: u32, domain: EventDomain) -> (Vec<Event>, Option<u32>) {
        let entries = self.index.len();
        let end = from.saturating_add(ENTRIES_PER_PAGE_MAX).min(entries);
        let readable = |entry: &u32| {
            let e = self.index.entry(*entry);
            e.is_some_and(|e| e.live && e.listed && e.complete())
        };
        let events = (from..end)
            .filter(readable)
            .filter_map(|entry| self.event_of(entry, "stored"))
            .filter(|(of, _)| *of == domain)
            .map(|(_, event)| event)
            .collect();
        (events, (end < entries).then_some(end))
    }

    pub(crate) fn event_of(&self, entry: u32, kind: &str) -> Option<(EventDomain, Event)> {
        let e = self.index.entry(entry).filter(|e| e.quota.is_none())?;
        let record = self.slots.record(entry);
        let hashes = record
            .block_hashes
            .get(..record.block_hash_count as usize)
            .unwrap_or_default();
        let namespace = match record.namespace {
            default if default == [0; 32] => Vec::new(),
            named => named.to_vec(),
        };
        let event = Event {
            kind: kind.into(),
            tier: "memory".into(),
            block_hashes: hashes.concat(),
            parent: self.parent_hash(entry).unwrap_or_default(),
            tokens: e.tokens,
            hash: record.last_hash.to_vec(),
            namespace,
            first_token: e.first_token,
        };
        Some(((ModelId(record.model), LayoutId(record.layout)), event))
    }

    /// Engine hash of the block before the chunk, if the parent is in memory.
    fn parent_hash(&self, entry: u32) -> Option<Vec<u8>> {
        let e = self.index.entry(entry)?;
        if e.parent_key == ChunkKey::default() {
            return None;
        }
        let parent = self.index.find(&Name {
            layout: e.name.layout,
            key: e.parent_key,
        })?;
        Some(self.slots.record(parent).last_hash.to_vec())
    }
}
