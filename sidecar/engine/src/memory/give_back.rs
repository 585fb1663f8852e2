//! How a granted slot ends: COMMIT and its digest, ABORT, a HELLO that does not name it, or proof of death.

use super::entry::{Handle, NONE};
use super::evict::Why;
use super::grant::Grant;
use super::{DigestJob, Event, MemoryTier};
use crate::Time;
use crate::mistake::Mistake;
use crate::table::{COMMITTED, FREE, GRANTED, PUBLISHED, ROW_BYTES, Row, Table};
use kvcachepool_protocol::key::EngineHash;
use kvcachepool_protocol::refs::SectionRef;

impl<T: Table> MemoryTier<T> {
    /// COMMIT of one section. Ignored unless the named section is GRANTED to `owner`.
    pub fn commit(&mut self, owner: u32, section: SectionRef) -> bool {
        let row_number = section.slot.get();
        let row = self.table.row(row_number);
        let as_named =
            row.generation == section.generation.get() && row.section == section.section.get();
        if row.state != GRANTED
            || row.owner != owner
            || owner == 0
            || !(as_named || T::makes(Mistake::CommitGeneration))
            || (self.copied.contains_key(&row_number) && !T::makes(Mistake::CopyCommit))
        {
            self.stats.commits_ignored += 1;
            return false;
        }
        let Some(grant) = self
            .by_row
            .get(&row_number)
            .and_then(|id| self.grants.get(id))
        else {
            self.free_row(row_number, Why::Ended);
            return false;
        };
        let chunk = grant.chunk;
        let taken = self.get(chunk).is_none_or(|e| e.slot(row.section) != NONE);
        if grant.void || taken {
            self.leave_grant(row_number);
            self.free_row(row_number, Why::Ended);
            return false;
        }
        self.fill_slot(chunk, row_number, &row);
        self.table.set_state(row_number, COMMITTED);
        self.events.push(Event::Committed(DigestJob {
            slot: row_number,
            generation: row.generation,
            check: 0,
            length: row.length,
            // ahead of checks of readable chunks: this chunk is unreadable before its digest
            urgent: true,
        }));
        true
    }

    /// The writer of a slot has finished.
    pub(crate) fn fill_slot(&mut self, chunk: Handle, row_number: u32, row: &Row) {
        self.not_granted_any_more(row_number, row);
        self.committed_bytes += u64::from(row.slot_rows) * ROW_BYTES;
        if let Some(e) = self.get_mut(chunk) {
            // a table of an earlier boot may name any section
            let at = (row.section as usize).min(127);
            if e.slots.len() <= at {
                e.slots.resize(at + 1, NONE);
            }
            e.slots[at] = row_number;
            e.bytes += u64::from(row.slot_rows) * ROW_BYTES;
        }
    }

    /// Publishes a COMMITTED slot after its digest was computed.
    pub(crate) fn publish(&mut self, now: Time, row_number: u32, row: &Row, digest: [u8; 16]) {
        let bytes = u64::from(row.slot_rows) * ROW_BYTES;
        self.committed_bytes = self.committed_bytes.saturating_sub(bytes);
        self.table.set_digest(row_number, digest);
        self.table.set_state(row_number, PUBLISHED);
        if T::makes(Mistake::GenerationLate) {
            self.table
                .set_generation(row_number, row.generation.wrapping_add(1));
        }
        let mut enough = false;
        if let Some(e) = self.entries.get_mut(row.chunk as usize).filter(|e| e.live) {
            if e.have == 0 {
                // slots of an earlier boot beside it still wait for their check
                e.checked_ms = Some(now.mono_ms);
            }
            e.have |= 1 << row.section.min(127);
            enough = e.complete() && !e.known;
            self.recount(row.chunk);
            if T::makes(Mistake::HalfChunk) {
                let handle = self.handle(row.chunk);
                self.filled(handle, 0);
            }
        }
        self.leave_grant(row_number);
        // all grants of an earlier boot for a chunk form one grant here, including void ones: nothing waits for them
        let open = self.entries.get(row.chunk as usize).and_then(|e| e.open);
        if let Some(open) = open.filter(|_| enough) {
            self.void(open);
        }
    }

    /// Resets the needed sections of an incomplete chunk without a writer. The next GRANT may need fewer.
    pub(crate) fn need_anew(&mut self, entry: u32, sections: u128) {
        let e = &mut self.entries[entry as usize];
        if e.open.is_some() || e.complete() || e.needed == sections {
            return;
        }
        e.needed = sections;
        let complete = e.complete();
        self.recount(entry);
        self.table
            .set_needed(entry, [sections as u64, (sections >> 64) as u64]);
        if complete {
            self.became_readable(entry);
        }
    }

    /// A grant ended: all its sections are PUBLISHED, or some are freed.
    fn filled(&mut self, handle: Handle, needed: u128) {
        let Some(e) = self.get_mut(handle) else {
            return;
        };
        if e.have == 0 {
            self.remove(handle.entry, Why::Ended);
            return;
        }
        let before = e.needed;
        if needed & !e.have == 0 {
            e.needed |= needed;
        }
        if T::makes(Mistake::HalfChunk) {
            e.needed = e.have;
        }
        let (after, news) = (e.needed, e.complete() && !e.known);
        let more = e.complete() && e.known;
        self.recount(handle.entry);
        if after != before {
            self.table
                .set_needed(handle.entry, [after as u64, (after >> 64) as u64]);
        }
        if news {
            self.became_readable(handle.entry);
        }
        if more {
            self.events.push(Event::Readable(handle));
        }
        self.unpark(handle.entry);
        self.remove_if_idle(handle.entry);
    }

    /// Forgets a grant that has no rows left.
    pub(crate) fn close(&mut self, id: u64) {
        let Some(grant) = self.grants.remove(&id) else {
            return;
        };
        if let Some(tag) = grant.asked_by
            && let Some(list) = self.by_tag.get_mut(&tag)
        {
            list.retain(|g| *g != id);
            if list.is_empty() {
                self.by_tag.remove(&tag);
            }
        }
        if let Some(e) = self.get_mut(grant.chunk)
            && e.open == Some(id)
        {
            e.open = None;
        }
    }

    /// Voids a grant: its COMMITTED slots are freed, its owners give the GRANTED ones back, and a new GRANT for the chunk may follow.
    pub(crate) fn void(&mut self, id: u64) {
        let Some(grant) = self.grants.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut grant.void, true) {
            return;
        }
        self.stats.voided_grants += 1;
        let (rows, chunk) = (grant.rows.clone(), grant.chunk);
        let filling = self.get_mut(chunk).is_some_and(|e| {
            let open = e.open == Some(id);
            if open {
                e.open = None;
            }
            open
        });
        for row_number in rows {
            let row = self.table.row(row_number);
            if row.state == COMMITTED {
                if let Some(e) = self.get_mut(chunk)
                    && let Some(slot) = e.slots.get_mut(row.section as usize)
                    && *slot == row_number
                {
                    *slot = NONE;
                    e.bytes = e.bytes.saturating_sub(u64::from(row.slot_rows) * ROW_BYTES);
                }
                self.leave_grant(row_number);
                self.free_row(row_number, Why::Ended);
            }
        }
        if filling {
            self.filled(chunk, 0);
        }
    }

    /// Takes back a GRANTED slot, written or not, and voids its grant. A slot that is a copy's target is taken back when the copy ends.
    pub(crate) fn come_back(&mut self, row_number: u32) {
        if let Some(id) = self.by_row.get(&row_number).copied() {
            self.void(id);
        }
        if let Some(copied) = self.copied.get_mut(&row_number)
            && !T::makes(Mistake::CopyOutlives)
        {
            copied.comes_back = true;
            return;
        }
        self.leave_grant(row_number);
        self.free_row(row_number, Why::Ended);
    }

    /// A worker's ABORT of one section. Ignored unless the named section is GRANTED to `owner`.
    pub fn abort(&mut self, owner: u32, section: SectionRef) -> bool {
        let row = self.table.row(section.slot.get());
        let mine = row.state == GRANTED && row.owner == owner && owner != 0;
        if !mine || row.generation != section.generation.get() {
            return false;
        }
        self.come_back(section.slot.get());
        true
    }

    /// A scheduler's ABORT: takes back what its GRANT `tag` granted and the scheduler never shipped, void or not. `hashes` restricts this
    /// to the chunks with these last blocks. Returns the number of slots taken back; 0 for an unknown tag.
    pub fn abort_grant(&mut self, scheduler: u64, tag: u64, hashes: Option<&[EngineHash]>) -> u32 {
        let ids = if T::makes(Mistake::AbortTag) {
            let names: Vec<_> = self
                .by_tag
                .get(&(scheduler, tag))
                .into_iter()
                .flatten()
                .filter_map(|id| self.grants.get(id))
                .map(|g| g.name)
                .collect();
            let asked = |g: &Grant| {
                names.contains(&g.name) || hashes.is_some_and(|h| h.contains(&g.last_hash))
            };
            let mut ids: Vec<u64> = self
                .grants
                .iter()
                .filter(|(_, g)| asked(g))
                .map(|(id, _)| *id)
                .collect();
            ids.sort_unstable();
            ids
        } else {
            self.by_tag
                .get(&(scheduler, tag))
                .cloned()
                .unwrap_or_default()
        };
        let mut freed = 0;
        for id in ids {
            let Some(grant) = self.grants.get(&id) else {
                continue;
            };
            if hashes.is_some_and(|hashes| !hashes.contains(&grant.last_hash)) {
                continue;
            }
            let rows = grant.rows.clone();
            self.void(id);
            for row in rows {
                if self.by_row.get(&row) == Some(&id) && self.table.row(row).state == GRANTED {
                    self.come_back(row);
                    freed += 1;
                }
            }
        }
        freed
    }

    /// A worker's HELLO names every slot it still holds, as (slot, generation). Takes back all others.
    pub fn reconcile(&mut self, owner: u32, named: &[(u32, u32)]) -> u32 {
        let rows: Vec<u32> = match self.owners.get(&owner) {
            Some(o) => o.rows.iter().copied().collect(),
            None => return 0,
        };
        let mut named = named.to_vec();
        named.sort_unstable();
        let mut back = 0;
        for row in rows {
            let generation = self.table.row(row).generation;
            if named.binary_search(&(row, generation)).is_err() {
                self.come_back(row);
                back += 1;
            }
        }
        back
    }

    /// A process is proven dead: voids its grants, and frees its slots after `quarantine_ms`.
    pub fn owner_died(&mut self, now: Time, owner: u32, quarantine_ms: u64) {
        let Some(o) = self.owners.get_mut(&owner) else {
            return;
        };
        if o.free_at_ms.is_some() {
            return;
        }
        o.free_at_ms = Some(now.mono_ms + quarantine_ms);
        let rows: Vec<u32> = o.rows.iter().copied().collect();
        for row in rows {
            if let Some(id) = self.by_row.get(&row).copied() {
                self.void(id);
            }
        }
        self.end_quarantines(now);
    }

    /// Frees slots whose quarantine has ended.
    pub(crate) fn end_quarantines(&mut self, now: Time) {
        let mut over: Vec<u32> = self
            .owners
            .iter()
            .filter(|(_, o)| o.free_at_ms.is_some_and(|at| at <= now.mono_ms))
            .map(|(owner, _)| *owner)
            .collect();
        over.sort_unstable();
        for owner in over {
            let rows = self.owners.get(&owner).map(|o| o.rows.clone());
            for row in rows.unwrap_or_default() {
                self.come_back(row);
            }
            // The owner stays until copies into its slots have ended.
            if self.owners.get(&owner).is_some_and(|o| o.rows.is_empty()) {
                self.owners.remove(&owner);
            }
        }
    }

    /// Locks that own slots and are not known to be dead.
    pub fn living_owners(&self) -> Vec<u32> {
        let mut list: Vec<u32> = self
            .owners
            .iter()
            .filter(|(owner, o)| **owner != 0 && o.free_at_ms.is_none() && !o.rows.is_empty())
            .map(|(owner, _)| *owner)
            .collect();
        list.sort_unstable();
        list
    }

    /// Bytes granted to a lock's holder and not committed.
    pub fn granted_to(&self, owner: u32) -> u64 {
        self.owners.get(&owner).map_or(0, |o| o.bytes)
    }

    /// Removes a row from its grant. The last row ends the grant.
    pub(crate) fn leave_grant(&mut self, row: u32) {
        let Some(id) = self.by_row.remove(&row) else {
            return;
        };
        let Some(grant) = self.grants.get_mut(&id) else {
            return;
        };
        grant.rows.retain(|r| *r != row);
        if grant.rows.is_empty() {
            let (chunk, needed, void) = (grant.chunk, grant.needed, grant.void);
            self.close(id);
            if !void {
                self.filled(chunk, needed);
            }
        }
    }

    fn not_granted_any_more(&mut self, row_number: u32, row: &Row) {
        let bytes = u64::from(row.slot_rows) * ROW_BYTES;
        self.granted_bytes = self.granted_bytes.saturating_sub(bytes);
        if let Some(o) = self.owners.get_mut(&row.owner)
            && o.rows.remove(&row_number)
        {
            o.bytes = o.bytes.saturating_sub(bytes);
            if o.rows.is_empty() && o.free_at_ms.is_none() {
                self.owners.remove(&row.owner);
            }
        }
    }

    /// Frees a row. Its other fields keep their values until the next grant.
    pub(crate) fn free_row(&mut self, row_number: u32, why: Why) {
        let row = self.table.row(row_number);
        if row.state == FREE {
            return;
        }
        if row.state == GRANTED {
            self.not_granted_any_more(row_number, &row);
        }
        if row.state == COMMITTED {
            let bytes = u64::from(row.slot_rows) * ROW_BYTES;
            self.committed_bytes = self.committed_bytes.saturating_sub(bytes);
        }
        self.by_row.remove(&row_number);
        self.events.push(Event::Freed {
            row: row_number,
            generation: row.generation,
        });
        if !(T::makes(Mistake::InPlace) && why == Why::Evicted) {
            self.table.set_state(row_number, FREE);
        }
        self.alloc.give(row_number);
        self.row_left(row.chunk);
    }

    /// Voids the grant of a row.
    pub fn void_row(&mut self, row_number: u32) {
        if let Some(id) = self.by_row.get(&row_number).copied() {
            self.void(id);
        }
    }

    /// The bytes of a section changed: its generation fails the loads in progress, and the entry leaves the index.
    pub fn corrupt(&mut self, entry: u32, row_number: u32) {
        self.stats.corrupt_chunks += 1;
        if let Some(e) = self.entries.get_mut(entry as usize) {
            let row = self.table.row(row_number);
            if let Some(slot) = e.slots.get_mut(row.section as usize) {
                *slot = NONE;
            }
        }
        self.table.set_state(row_number, FREE);
        let generation = self.table.row(row_number).generation;
        self.table
            .set_generation(row_number, generation.wrapping_add(1));
        self.alloc.give(row_number);
        self.row_left(entry);
        // `doom` needs the record, which still names the chunk here
        self.doom(entry);
    }
}
