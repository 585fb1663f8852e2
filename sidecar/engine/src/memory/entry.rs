//! Entries of the index: one per chunk, with the number of its record in the slot table.

use super::grant::sections_of;
use super::{Event, MemoryTier, evict};
use crate::name::Name;
use crate::table::Table;
use kvcachepool_protocol::key::{ChunkKey, NamespaceId};

/// No entry, no row.
pub(crate) const NONE: u32 = u32::MAX;

/// A reference to an entry. It is stale once the entry is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Handle {
    pub entry: u32,
    pub epoch: u32,
}

/// How a listed chunk counts in [`super::Usage`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Lacks sections.
    Incomplete,
    /// Readable after a check of its bytes.
    Unchecked,
    Checked,
}

impl Class {
    pub const COUNT: usize = Self::Checked as usize + 1;
}

/// One chunk. `have` and `needed` are bit masks of sections.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub name: Name,
    /// Rises when the entry is removed.
    pub epoch: u32,
    /// In the index under its name.
    pub listed: bool,
    /// In use; otherwise vacant, or waiting until no row names its record.
    pub live: bool,
    /// Rows that name this record and are not FREE, including voided ones.
    pub rows: u32,
    pub first_token: u32,
    pub tokens: u32,
    pub needed: u128,
    /// PUBLISHED sections.
    pub have: u128,
    /// Row of each COMMITTED or PUBLISHED section, else [`NONE`].
    pub slots: Vec<u32>,
    /// Bytes of the slots in `slots`, in whole rows.
    pub bytes: u64,
    /// `bytes` when the chunk became readable. Pins count this value, whatever is added later.
    pub weight: u64,
    /// The grant that fills the chunk.
    pub open: Option<u64>,
    /// Key of the preceding chunk; zeros for the first one.
    pub parent_key: ChunkKey,
    pub parent: u32,
    pub first_child: u32,
    pub sibling_after: u32,
    pub sibling_before: u32,
    pub soft_pins: u32,
    pub leases: u32,
    pub admin_pin: bool,
    /// Known to the eviction policy.
    pub known: bool,
    /// Returned by the policy as next, but not evictable.
    pub parked: bool,
    /// In the queue of incomplete chunks.
    pub queued: bool,
    /// Requested again since it was stored here.
    pub reused: bool,
    /// Bit mask of the tiers that were seen to have it.
    pub written: u8,
    /// Bit mask of the tiers that should have it and did not take it, or may have lost it.
    pub missed: u8,
    /// Start time of the last successful check; none = not checked in this boot.
    pub checked_ms: Option<u64>,
    /// Start time of the check in progress.
    pub check_began_ms: u64,
    /// Number of sections being checked.
    pub checking: u32,
    pub expires_unix_s: u64,
    /// An opaque object: its namespace, and the bytes that it counts there.
    pub quota: Option<(NamespaceId, u64)>,
    /// The class under which it is counted; `ChunkIndex::recount` updates it.
    pub class: Option<Class>,
}

impl Entry {
    pub fn vacant(epoch: u32) -> Self {
        Self {
            name: Name {
                layout: 0,
                key: ChunkKey::default(),
            },
            epoch,
            listed: false,
            live: false,
            rows: 0,
            first_token: 0,
            tokens: 0,
            needed: 0,
            have: 0,
            slots: Vec::new(),
            bytes: 0,
            weight: 0,
            open: None,
            parent_key: ChunkKey::default(),
            parent: NONE,
            first_child: NONE,
            sibling_after: NONE,
            sibling_before: NONE,
            soft_pins: 0,
            leases: 0,
            admin_pin: false,
            known: false,
            parked: false,
            queued: false,
            reused: false,
            written: 0,
            missed: 0,
            checked_ms: None,
            check_began_ms: 0,
            checking: 0,
            expires_unix_s: 0,
            quota: None,
            class: None,
        }
    }

    /// The current class; none = not listed.
    pub fn class_now(&self) -> Option<Class> {
        self.listed
            .then(|| match (self.complete(), self.checked_ms) {
                (false, _) => Class::Incomplete,
                (true, None) => Class::Unchecked,
                (true, Some(_)) => Class::Checked,
            })
    }

    /// True if all needed sections are PUBLISHED.
    pub fn complete(&self) -> bool {
        self.needed != 0 && self.needed & !self.have == 0
    }

    pub fn pinned(&self) -> bool {
        self.soft_pins > 0 || self.leases > 0 || self.admin_pin
    }

    /// True if nothing reads, writes or pins it.
    pub fn idle(&self) -> bool {
        self.live && self.open.is_none() && !self.pinned()
    }

    pub fn slot(&self, section: u32) -> u32 {
        self.slots.get(section as usize).copied().unwrap_or(NONE)
    }

    /// A slot of `bytes` holds a section. A table of an earlier boot may name any section.
    pub fn put_slot(&mut self, section: u32, row: u32, bytes: u64) {
        let at = (section as usize).min(127);
        if self.slots.len() <= at {
            self.slots.resize(at + 1, NONE);
        }
        self.slots[at] = row;
        self.bytes += bytes;
    }

    pub fn expired(&self, unix_s: u64) -> bool {
        self.expires_unix_s != 0 && self.expires_unix_s <= unix_s
    }
}

impl<T: Table> MemoryTier<T> {
    /// Takes an entry into use, without listing it. Evicts one if none is vacant.
    pub(crate) fn occupy(&mut self) -> Option<u32> {
        loop {
            let entry = self.index.occupy(self.slots.geometry().chunks);
            if entry.is_some() || !self.evict_one() {
                return entry;
            }
        }
    }

    /// Removes the entry from the index. Its readers continue; it is removed when nothing holds it.
    pub(crate) fn doom(&mut self, entry: u32) {
        let Some(e) = self.index.entry_mut(entry).filter(|e| e.live && e.listed) else {
            return;
        };
        if e.complete() {
            self.tell_removed(entry);
        }
        let parent = self.index.unlist(entry);
        // a later boot must not find it either
        self.slots.clear_record(entry);
        if let Some(parent) = parent {
            self.unpark(parent);
        }
        self.events.push(Event::Unlisted(self.index.handle(entry)));
        if let Some(e) = self.index.entry(entry)
            && let Some(grant) = e.open
        {
            self.void(grant);
        }
        self.remove_if_idle(entry);
    }

    /// Removes an unlisted entry that nothing holds.
    pub(crate) fn remove_if_idle(&mut self, entry: u32) {
        let idle = self
            .index
            .entry(entry)
            .is_some_and(|e| !e.listed && e.idle());
        if idle {
            self.remove(entry, evict::Why::Ended);
        }
    }

    /// Removes the entry: frees its slots, and its number once no row names it.
    pub(crate) fn remove(&mut self, entry: u32, why: evict::Why) {
        let Some(e) = self.index.entry_mut(entry).filter(|e| e.live) else {
            return;
        };
        let (listed, complete) = (e.listed, e.complete());
        let slots = std::mem::take(&mut e.slots);
        let open = e.open.take();
        if listed {
            if complete {
                self.tell_removed(entry);
            }
            if let Some(parent) = self.index.unlist(entry) {
                self.unpark(parent);
            }
        }
        let evicted = why == evict::Why::Evicted;
        self.eviction.remove(&mut self.index, entry, evicted);
        if let Some(grant) = open {
            self.grants.void(grant);
        }
        self.drop_pins(entry);
        self.quotas.remove(&self.index[entry]);
        for row in slots {
            if row != NONE {
                self.free_row(row, why);
            }
        }
        self.slots.clear_record(entry);
        if listed {
            self.events.push(Event::Unlisted(self.index.handle(entry)));
        }
        self.index.vacate(entry);
    }

    /// Total bytes of a chunk's readable sections.
    pub fn stored_bytes(&self, chunk: Handle) -> u64 {
        self.index.get(chunk).map_or(0, |e| {
            sections_of(e.have)
                .map(|s| self.slots.row(e.slot(s)).length)
                .sum()
        })
    }
}
