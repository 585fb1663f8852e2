//! The index of chunks: entries by name, their order in prefixes, and their counts.

use super::check::say;
use super::entry::{Class, Entry, Handle, NONE};
use crate::name::{FastMap, Name};
use kvcachepool_protocol::key::{ChunkKey, LayoutId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Entries of an index, by number and by name. The number of an entry is the number of its record in the slot table.
#[derive(Debug, Default)]
pub(crate) struct ChunkIndex {
    entries: Vec<Entry>,
    census: [u64; Class::COUNT],
    vacant: Vec<u32>,
    names: FastMap<Name, u32>,
    layouts: Vec<LayoutId>,
    /// Entries whose parent is not in the index, by the parent's name.
    orphans: FastMap<Name, Vec<Handle>>,
    /// Unix seconds after which an entry expires. Stale handles stay until they are popped or pruned.
    expiries: BinaryHeap<Reverse<(u64, Handle)>>,
}

impl ChunkIndex {
    /// Number of entries, used or vacant.
    pub fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    pub fn entry(&self, entry: u32) -> Option<&Entry> {
        self.entries.get(entry as usize)
    }

    pub fn entry_mut(&mut self, entry: u32) -> Option<&mut Entry> {
        self.entries.get_mut(entry as usize)
    }

    pub fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.entries.iter_mut()
    }

    pub fn handle(&self, entry: u32) -> Handle {
        Handle {
            entry,
            epoch: self.entry(entry).map_or(0, |e| e.epoch),
        }
    }

    /// Entries in use.
    pub fn live(&self) -> impl Iterator<Item = (Handle, &Entry)> {
        let all = (0u32..).zip(&self.entries).filter(|(_, e)| e.live);
        all.map(|(entry, e)| {
            let epoch = e.epoch;
            (Handle { entry, epoch }, e)
        })
    }

    /// The entry behind a handle, unless it was removed.
    pub fn get(&self, handle: Handle) -> Option<&Entry> {
        self.entry(handle.entry)
            .filter(|e| e.live && e.epoch == handle.epoch)
    }

    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut Entry> {
        self.entry_mut(handle.entry)
            .filter(|e| e.live && e.epoch == handle.epoch)
    }

    pub fn find(&self, name: &Name) -> Option<u32> {
        self.names.get(name).copied()
    }

    /// The number of a layout. New layouts are numbered at their first use.
    pub fn layout_number(&mut self, layout: LayoutId) -> u32 {
        if let Some(at) = self.layouts.iter().position(|l| *l == layout) {
            return at as u32;
        }
        self.layouts.push(layout);
        self.layouts.len() as u32 - 1
    }

    /// Entries with this key, in all layouts.
    pub fn with_key(&self, key: &ChunkKey) -> Vec<u32> {
        let names = (0..self.layouts.len() as u32).map(|layout| Name { layout, key: *key });
        names.filter_map(|name| self.find(&name)).collect()
    }

    /// Number of listed entries of a class.
    pub fn count(&self, class: Class) -> u64 {
        self.census[class as usize]
    }

    /// Updates the counts after a change that affects [`Entry::class_now`].
    pub fn recount(&mut self, entry: u32) {
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

    /// Takes a vacant entry into use, without listing it. None: all of `entries_max` are in use.
    pub fn occupy(&mut self, entries_max: u32) -> Option<u32> {
        let entry = match self.vacant.pop() {
            Some(entry) => entry,
            None if self.len() < entries_max => {
                self.entries.push(Entry::vacant(1));
                self.len() - 1
            }
            None => return None,
        };
        let e = self.entry_mut(entry)?;
        *e = Entry::vacant(e.epoch);
        e.live = true;
        Some(entry)
    }

    /// At a start: entries up to this number exist.
    pub fn extend_to(&mut self, entry: u32) {
        while self.len() <= entry {
            self.entries.push(Entry::vacant(1));
        }
    }

    /// At a start: the entry is not in use. It is vacant unless rows name its record.
    pub fn leave_vacant(&mut self, entry: u32) {
        if self.entry(entry).is_some_and(|e| e.rows == 0) {
            self.vacant.push(entry);
        }
    }

    /// Ends the use of an entry. Its handles are stale from now on, and its number is vacant once no row names its record.
    pub fn vacate(&mut self, entry: u32) {
        if let Some(e) = self.entry_mut(entry) {
            e.live = false;
            e.epoch = e.epoch.wrapping_add(1);
            e.bytes = 0;
            self.leave_vacant(entry);
        }
    }

    /// A row names this entry's record.
    pub fn row_added(&mut self, entry: u32) {
        if let Some(e) = self.entry_mut(entry) {
            e.rows += 1;
        }
    }

    /// A row no longer names this entry's record.
    pub fn row_left(&mut self, entry: u32) {
        if let Some(e) = self.entry_mut(entry) {
            e.rows = e.rows.saturating_sub(1);
            if !e.live {
                self.leave_vacant(entry);
            }
        }
    }

    /// Adds an entry under a name, and links it to its parent and to children that waited for it.
    pub fn list(&mut self, entry: u32, name: Name, parent: Option<u32>) {
        self.list_alone(entry, name);
        self.recount(entry);
        if let Some(parent) = parent {
            self.link(entry, parent);
        }
        for orphan in self.orphans.remove(&name).unwrap_or_default() {
            let waits = |o: &Entry| o.parent == NONE && o.listed;
            if self.get(orphan).is_some_and(waits) && self.follows(orphan.entry, entry) {
                self.link(orphan.entry, entry);
            }
        }
    }

    /// Adds an entry under a name, without its place in a prefix.
    pub fn list_alone(&mut self, entry: u32, name: Name) {
        self.names.insert(name, entry);
        if let Some(e) = self.entry_mut(entry) {
            e.name = name;
            e.listed = true;
        }
    }

    /// Removes an entry's name. Its children stay readable, and are linked again when it returns. Returns its parent, if it had one.
    pub fn unlist(&mut self, entry: u32) -> Option<u32> {
        let e = self.entry_mut(entry)?;
        e.listed = false;
        let name = e.name;
        self.recount(entry);
        self.names.remove(&name);
        self.let_children_go(entry);
        self.unlink(entry)
    }

    /// An entry waits for its parent's return.
    pub fn await_parent(&mut self, entry: u32, parent: Name) {
        let orphan = self.handle(entry);
        self.orphans.entry(parent).or_default().push(orphan);
    }

    /// Nothing waits for a parent any more, because every entry was unlisted.
    pub fn clear_orphans(&mut self) {
        self.orphans.clear();
    }

    /// True if `child` begins where `parent` ends. Such links cannot form a cycle.
    pub fn follows(&self, child: u32, parent: u32) -> bool {
        let end = self
            .entry(parent)
            .and_then(|p| p.first_token.checked_add(p.tokens.max(1)));
        let begin = self.entry(child).map(|c| c.first_token);
        begin.is_some() && begin == end
    }

    pub fn link(&mut self, child: u32, parent: u32) {
        let first = match self.entry_mut(parent) {
            Some(p) => std::mem::replace(&mut p.first_child, child),
            None => return,
        };
        if let Some(c) = self.entry_mut(child) {
            c.parent = parent;
            c.sibling_after = first;
            c.sibling_before = NONE;
        }
        if let Some(f) = self.entry_mut(first) {
            f.sibling_before = child;
        }
    }

    fn unlink(&mut self, child: u32) -> Option<u32> {
        let c = self.entry_mut(child)?;
        let (parent, before, after) = (c.parent, c.sibling_before, c.sibling_after);
        (c.parent, c.sibling_before, c.sibling_after) = (NONE, NONE, NONE);
        if let Some(b) = self.entry_mut(before) {
            b.sibling_after = after;
        } else if let Some(p) = self.entry_mut(parent)
            && p.first_child == child
        {
            p.first_child = after;
        }
        if let Some(a) = self.entry_mut(after) {
            a.sibling_before = before;
        }
        if parent == NONE && !self.orphans.is_empty() {
            self.forget_orphan(child);
        }
        (parent != NONE).then_some(parent)
    }

    /// The entry stops waiting for its parent.
    fn forget_orphan(&mut self, child: u32) {
        let Some(c) = self.entry(child) else {
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

    fn let_children_go(&mut self, entry: u32) {
        let Some(e) = self.entry_mut(entry) else {
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

    /// Sets the expiry of an entry. Stale ones are pruned now and then, so that the list stays as short as the index.
    pub fn expires_at(&mut self, entry: u32, unix_s: u64) {
        if self.expiries.len() > 2 * self.entries.len() + 1024 {
            let mut expiries = std::mem::take(&mut self.expiries);
            expiries.retain(|Reverse((_, handle))| self.get(*handle).is_some());
            self.expiries = expiries;
        }
        self.expiries.push(Reverse((unix_s, self.handle(entry))));
    }

    /// An entry that has expired, once.
    pub fn pop_expired(&mut self, unix_s: u64) -> Option<u32> {
        while let Some(Reverse((at, handle))) = self.expiries.peek().copied() {
            if at > unix_s {
                return None;
            }
            self.expiries.pop();
            if self.get(handle).is_some() {
                return Some(handle.entry);
            }
        }
        None
    }

    /// Names, links, counts and vacant entries match the entries.
    pub fn check(&self) -> Result<(), String> {
        let mut census = [0; Class::COUNT];
        for class in self.entries.iter().filter_map(Entry::class_now) {
            census[class as usize] += 1;
        }
        say(census == self.census, "ChunksAreCounted", || {
            format!("{:?} counted, {census:?} there", self.census)
        })?;
        for (handle, e) in self.live() {
            let found = self.find(&e.name) == Some(handle.entry);
            say(!e.listed || found, "ListedIsFound", || {
                format!("{handle:?}")
            })?;
            self.check_family(handle.entry, e)?;
        }
        for orphan in self.orphans.values().flatten() {
            let waits = |e: &Entry| e.listed && e.parent == NONE;
            say(self.get(*orphan).is_some_and(waits), "OrphansWait", || {
                format!("{orphan:?}")
            })?;
        }
        self.check_vacant()
    }

    fn check_vacant(&self) -> Result<(), String> {
        let mut vacant = self.vacant.clone();
        vacant.sort_unstable();
        let once = vacant.windows(2).all(|w| w[0] != w[1]);
        say(once, "VacantOnce", || format!("{vacant:?}"))?;
        for number in vacant {
            let e = &self[number];
            say(!e.live && e.rows == 0, "VacantIsUnused", || {
                format!("entry {number}: live {}, {} rows", e.live, e.rows)
            })?;
        }
        Ok(())
    }

    fn check_family(&self, number: u32, e: &Entry) -> Result<(), String> {
        if e.parent != NONE {
            let parent = &self[e.parent];
            say(parent.live && parent.listed, "ParentIsThere", || {
                format!("entry {number} under {}", e.parent)
            })?;
        }
        let (mut child, mut seen) = (e.first_child, 0);
        while child != NONE {
            let c = &self[child];
            say(c.live && c.parent == number, "ChildKnowsItsParent", || {
                format!("{child} under {number}")
            })?;
            child = c.sibling_after;
            seen += 1;
            say(seen <= self.len(), "ChildrenEnd", || {
                format!("under {number}")
            })?;
        }
        Ok(())
    }
}

impl std::ops::Index<u32> for ChunkIndex {
    type Output = Entry;

    fn index(&self, entry: u32) -> &Entry {
        &self.entries[entry as usize]
    }
}

impl std::ops::IndexMut<u32> for ChunkIndex {
    fn index_mut(&mut self, entry: u32) -> &mut Entry {
        &mut self.entries[entry as usize]
    }
}

#[cfg(test)]
impl ChunkIndex {
    /// Number of parents that entries wait for.
    pub fn orphans(&self) -> usize {
        self.orphans.len()
    }
}
