//! How a granted slot ends: COMMIT and its digest, ABORT, not named in a HELLO, or proof of death.

use super::entry::{Handle, NONE};
use super::evict::Why;
use super::grant::Grant;
use super::mistake::{Mistake, made};
use super::table::{COMMITTED, FREE, GRANTED, PUBLISHED, ROW_BYTES, Row, Table};
use super::{Action, Engine, Time};
use kvcachepool_protocol::key::EngineHash;
use kvcachepool_protocol::refs::SectionRef;

impl<T: Table> Engine<T> {
    /// COMMIT of one section. Anything that is not GRANTED to `owner` as named is ignored.
    pub fn commit(&mut self, owner: u32, section: SectionRef) -> bool {
        let row_number = section.slot.get();
        let row = self.table.row(row_number);
        let as_named =
            row.generation == section.generation.get() && row.section == section.section.get();
        if row.state != GRANTED
            || row.owner != owner
            || owner == 0
            || !(as_named || made(Mistake::CommitGeneration))
            || (self.copied.contains_key(&row_number) && !made(Mistake::CopyCommit))
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
        self.actions.push(Action::Digest {
            slot: row_number,
            generation: row.generation,
            check: 0,
            length: row.length,
            // not with the checks of what can be read already: a chunk is not there before this
            urgent: true,
        });
        true
    }

    /// The writer of a slot is done with it.
    pub(crate) fn fill_slot(&mut self, chunk: Handle, row_number: u32, row: &Row) {
        self.not_granted_any_more(row_number, row);
        self.committed_bytes += u64::from(row.slot_rows) * ROW_BYTES;
        if let Some(e) = self.get_mut(chunk) {
            // what an earlier boot left may name any section
            let at = (row.section as usize).min(127);
            if e.slots.len() <= at {
                e.slots.resize(at + 1, NONE);
            }
            e.slots[at] = row_number;
            e.bytes += u64::from(row.slot_rows) * ROW_BYTES;
        }
    }

    /// The digest of a COMMITTED slot was taken: readable from now on.
    pub(crate) fn publish(&mut self, now: Time, row_number: u32, row: &Row, digest: [u8; 16]) {
        let bytes = u64::from(row.slot_rows) * ROW_BYTES;
        self.committed_bytes = self.committed_bytes.saturating_sub(bytes);
        self.table.set_digest(row_number, digest);
        self.table.set_state(row_number, PUBLISHED);
        if made(Mistake::GenerationLate) {
            self.table
                .set_generation(row_number, row.generation.wrapping_add(1));
        }
        let mut enough = false;
        if let Some(e) = self.entries.get_mut(row.chunk as usize).filter(|e| e.live) {
            if e.have == 0 {
                // what an earlier boot left beside it still waits for its check
                e.checked_ms = Some(now.mono_ms);
            }
            e.have |= 1 << row.section.min(127);
            enough = e.complete() && !e.known;
            self.recount(row.chunk);
            if made(Mistake::HalfChunk) {
                let handle = self.handle(row.chunk);
                self.filled(handle, 0);
            }
        }
        self.leave_grant(row_number);
        // all that an earlier boot granted for a chunk is one grant here, also what was void then: nothing waits for that
        let open = self.entries.get(row.chunk as usize).and_then(|e| e.open);
        if let Some(open) = open.filter(|_| enough) {
            self.void(open);
        }
    }

    /// An incomplete chunk that nobody fills needs what the next GRANT says, which may be less than the last one said.
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

    /// A grant ended: all its sections are PUBLISHED, or some went.
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
        if made(Mistake::HalfChunk) {
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
            self.offer(handle.entry);
        }
        self.unpark(handle.entry);
        self.remove_if_idle(handle.entry);
    }

    /// Forgets a grant whose rows are all gone.
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

    /// Nothing of the grant counts any more: what is COMMITTED of it is freed, what is GRANTED comes back from its owners, and
    /// a new GRANT may follow.
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

    /// A GRANTED slot comes back unwritten, or half written; its grant is void. A slot that is copied into comes back when that ends.
    pub(crate) fn come_back(&mut self, row_number: u32) {
        if let Some(id) = self.by_row.get(&row_number).copied() {
            self.void(id);
        }
        if let Some(copied) = self.copied.get_mut(&row_number)
            && !made(Mistake::CopyOutlives)
        {
            copied.comes_back = true;
            return;
        }
        self.leave_grant(row_number);
        self.free_row(row_number, Why::Ended);
    }

    /// A worker's ABORT of one section. Anything that is not GRANTED to `owner` as named is ignored.
    pub fn abort(&mut self, owner: u32, section: SectionRef) -> bool {
        let row = self.table.row(section.slot.get());
        let mine = row.state == GRANTED && row.owner == owner && owner != 0;
        if !mine || row.generation != section.generation.get() {
            return false;
        }
        self.come_back(section.slot.get());
        true
    }

    /// A scheduler's ABORT: what its GRANT `tag` gave out and was never shipped comes back at once, void or not. `hashes` of last
    /// blocks: these chunks only. Returns the slots that came back; 0 for an unknown tag.
    pub fn abort_grant(&mut self, scheduler: u64, tag: u64, hashes: Option<&[EngineHash]>) -> u32 {
        let ids = if made(Mistake::AbortTag) {
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

    /// A worker's HELLO names every slot that it still holds, as (slot, generation); what it does not name comes back.
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

    /// A process is proven dead. Its grants are void now; its slots come back after `quarantine_ms`.
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

    /// Slots of the dead whose time is over come back.
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
            // What is still copied into stays its own until the copy has ended.
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

    /// A row is not the grant's any more; the last one ends the grant.
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

    /// A row becomes FREE; nothing else of it changes until it is granted again.
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
        if self.checks.remove(&row_number).is_some_and(|c| c.sweep) {
            self.sweeping -= 1;
        }
        if !(made(Mistake::InPlace) && why == Why::Evicted) {
            self.table.set_state(row_number, FREE);
        }
        self.alloc.give(row_number);
        self.row_left(row.chunk);
    }
}
