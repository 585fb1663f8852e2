//! Entries of the index: one per chunk, with the number of its record in the slot table.

use super::grant::sections_of;
use super::{Event, MemoryTier, evict};
use crate::name::Name;
use crate::table::Table;
use kvcachepool_protocol::key::ChunkKey;

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
    /// The class under which it is counted; [`MemoryTier::recount`] updates it.
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

    pub fn slot(&self, section: u32) -> u32 {
        self.slots.get(section as usize).copied().unwrap_or(NONE)
    }

    pub fn expired(&self, unix_s: u64) -> bool {
        self.expires_unix_s != 0 && self.expires_unix_s <= unix_s
    }
}

impl<T: Table> MemoryTier<T> {
    pub(crate) fn handle(&self, entry: u32) -> Handle {
        Handle {
            entry,
            epoch: self.entries.get(entry as usize).map_or(0, |e| e.epoch),
        }
    }

    /// Entries in use.
    pub fn live(&self) -> impl Iterator<Item = (Handle, &Entry)> {
        (0u32..)
            .zip(&self.entries)
            .filter(|(_, e)| e.live)
            .map(|(entry, e)| {
                let epoch = e.epoch;
                (Handle { entry, epoch }, e)
            })
    }

    /// The entry behind a handle, unless it was removed.
    pub(crate) fn get(&self, handle: Handle) -> Option<&Entry> {
        self.entries
            .get(handle.entry as usize)
            .filter(|e| e.live && e.epoch == handle.epoch)
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut Entry> {
        self.entries
            .get_mut(handle.entry as usize)
            .filter(|e| e.live && e.epoch == handle.epoch)
    }

    /// Updates the counters after a change that affects [`Entry::class_now`].
    pub(crate) fn recount(&mut self, entry: u32) {
        let Some(e) = self.entries.get_mut(entry as usize) else {
            return;
        };
        let now = e.class_now();
        if let Some(before) = std::mem::replace(&mut e.class, now) {
            self.census[before as usize] -= 1;
        }
        if let Some(now) = now {
            self.census[now as usize] += 1;
        }
    }

    pub(crate) fn find(&self, name: &Name) -> Option<u32> {
        self.index.get(name).copied()
    }

    /// Allocates a vacant entry, without listing it. Evicts one if none is vacant.
    pub(crate) fn occupy(&mut self) -> Option<u32> {
        loop {
            let entry = match self.vacant.pop() {
                Some(entry) => entry,
                None if (self.entries.len() as u32) < self.geometry.chunks => {
                    self.entries.push(Entry::vacant(1));
                    self.entries.len() as u32 - 1
                }
                None if self.evict_one() => continue,
                None => return None,
            };
            let e = &mut self.entries[entry as usize];
            let epoch = e.epoch;
            *e = Entry::vacant(epoch);
            e.live = true;
            return Some(entry);
        }
    }

    /// Adds an entry to the index, and links it to its parent and to children that waited for it.
    pub(crate) fn list(&mut self, entry: u32, name: Name, parent: Option<u32>) {
        self.index.insert(name, entry);
        if let Some(e) = self.entries.get_mut(entry as usize) {
            e.name = name;
            e.listed = true;
        }
        self.recount(entry);
        if let Some(parent) = parent {
            self.link(entry, parent);
        }
        for orphan in self.orphans.remove(&name).unwrap_or_default() {
            let waits = self
                .get(orphan)
                .is_some_and(|o| o.parent == NONE && o.listed);
            if waits && self.follows(orphan.entry, entry) {
                self.link(orphan.entry, entry);
            }
        }
    }

    /// True if `child` begins where `parent` ends. Such links cannot form a cycle.
    pub(crate) fn follows(&self, child: u32, parent: u32) -> bool {
        let end = self
            .entries
            .get(parent as usize)
            .and_then(|p| p.first_token.checked_add(p.tokens.max(1)));
        let begin = self.entries.get(child as usize).map(|c| c.first_token);
        begin.is_some() && begin == end
    }

    pub(crate) fn link(&mut self, child: u32, parent: u32) {
        let first = match self.entries.get_mut(parent as usize) {
            Some(p) => std::mem::replace(&mut p.first_child, child),
            None => return,
        };
        if let Some(c) = self.entries.get_mut(child as usize) {
            c.parent = parent;
            c.sibling_after = first;
            c.sibling_before = NONE;
        }
        if let Some(f) = self.entries.get_mut(first as usize) {
            f.sibling_before = child;
        }
    }

    fn unlink(&mut self, child: u32) {
        let Some(c) = self.entries.get_mut(child as usize) else {
            return;
        };
        let (parent, before, after) = (c.parent, c.sibling_before, c.sibling_after);
        (c.parent, c.sibling_before, c.sibling_after) = (NONE, NONE, NONE);
        if let Some(b) = self.entries.get_mut(before as usize) {
            b.sibling_after = after;
        } else if let Some(p) = self.entries.get_mut(parent as usize)
            && p.first_child == child
        {
            p.first_child = after;
        }
        if let Some(a) = self.entries.get_mut(after as usize) {
            a.sibling_before = before;
        }
        if parent != NONE {
            self.unpark(parent);
        } else if !self.orphans.is_empty() {
            self.forget_orphan(child);
        }
    }

    /// The entry stops waiting for its parent.
    fn forget_orphan(&mut self, child: u32) {
        let Some(c) = self.entries.get(child as usize) else {
            return;
        };
        let parent = Name {
            layout: c.name.layout,
            key: c.parent_key,
        };
        if let Some(list) = self.orphans.get_mut(&parent) {
            list.retain(|o| o.entry != child);
            if list.is_empty() {
                self.orphans.remove(&parent);
            }
        }
    }

    /// Removes the entry from the index. Its readers continue; it is removed when nothing holds it.
    pub(crate) fn doom(&mut self, entry: u32) {
        let Some(e) = self
            .entries
            .get_mut(entry as usize)
            .filter(|e| e.live && e.listed)
        else {
            return;
        };
        e.listed = false;
        let (name, complete) = (e.name, e.complete());
        self.recount(entry);
        self.index.remove(&name);
        if complete {
            self.tell_removed(entry);
        }
        // a later boot must not find it either
        self.table.clear_chunk(entry);
        self.let_children_go(entry);
        self.unlink(entry);
        self.events.push(Event::Unlisted(self.handle(entry)));
        if let Some(e) = self.entries.get(entry as usize)
            && let Some(grant) = e.open
        {
            self.void(grant);
        }
        self.remove_if_idle(entry);
    }

    /// Removes an unlisted entry that nothing holds.
    pub(crate) fn remove_if_idle(&mut self, entry: u32) {
        let idle = self
            .entries
            .get(entry as usize)
            .is_some_and(|e| e.live && !e.listed && !e.pinned() && e.open.is_none());
        if idle {
            self.remove(entry, evict::Why::Ended);
        }
    }

    /// Removes the entry: frees its slots, and its number once no row names it.
    pub(crate) fn remove(&mut self, entry: u32, why: evict::Why) {
        let Some(e) = self.entries.get_mut(entry as usize).filter(|e| e.live) else {
            return;
        };
        let (listed, name, complete) = (e.listed, e.name, e.complete());
        let slots = std::mem::take(&mut e.slots);
        let (known, open) = (std::mem::take(&mut e.known), e.open.take());
        e.listed = false;
        self.recount(entry);
        if listed {
            self.index.remove(&name);
            if complete {
                self.tell_removed(entry);
            }
            self.let_children_go(entry);
            self.unlink(entry);
        }
        if known {
            self.policy.remove(entry, why == evict::Why::Evicted);
        }
        if let Some(grant) = open
            && let Some(grant) = self.grants.get_mut(&grant)
        {
            grant.void = true;
        }
        self.drop_pins(entry);
        for row in slots {
            if row != NONE {
                self.free_row(row, why);
            }
        }
        self.table.clear_chunk(entry);
        if listed {
            self.events.push(Event::Unlisted(self.handle(entry)));
        }
        if let Some(e) = self.entries.get_mut(entry as usize) {
            e.live = false;
            e.epoch = e.epoch.wrapping_add(1);
            e.bytes = 0;
            if e.rows == 0 {
                self.vacant.push(entry);
            }
        }
    }

    /// A parent is removed before its children: they stay readable, and are linked again when it returns.
    fn let_children_go(&mut self, entry: u32) {
        let Some(e) = self.entries.get_mut(entry as usize) else {
            return;
        };
        let name = e.name;
        let mut child = std::mem::replace(&mut e.first_child, NONE);
        while let Some(c) = self.entries.get_mut(child as usize) {
            let orphan = Handle {
                entry: child,
                epoch: c.epoch,
            };
            child = c.sibling_after;
            (c.parent, c.sibling_before, c.sibling_after) = (NONE, NONE, NONE);
            self.orphans.entry(name).or_default().push(orphan);
        }
    }

    /// A row no longer names this entry's record.
    pub(crate) fn row_left(&mut self, entry: u32) {
        if let Some(e) = self.entries.get_mut(entry as usize) {
            e.rows = e.rows.saturating_sub(1);
            if e.rows == 0 && !e.live {
                self.vacant.push(entry);
            }
        }
    }

    /// Total bytes of a chunk's readable sections.
    pub fn stored_bytes(&self, chunk: Handle) -> u64 {
        self.get(chunk).map_or(0, |e| {
            sections_of(e.have)
                .map(|s| self.table.row(e.slot(s)).length)
                .sum()
        })
    }
}
