//! How a granted slot ends: COMMIT and its digest, ABORT, a HELLO that does not name it, proof of death, or the end of a fetch. A
//! cancelled fetch keeps its slots until the last thread or kernel that may write into them has ended; a dropped future does not prove
//! that.

use super::entry::{Handle, NONE};
use super::evict::Why;
use super::grants::Grant;
use super::slots::bytes_of;
use super::{DigestJob, Event, FetchId, MemoryTier};
use crate::Time;
use crate::mistake::Mistake;
use crate::table::{COMMITTED, FREE, GRANTED, Row, Table};
use kvcachepool_protocol::key::{EngineHash, KeyKind};
use kvcachepool_protocol::refs::SectionRef;

impl<T: Table> MemoryTier<T> {
    /// COMMIT of one section. Ignored unless the named section is GRANTED to `owner`.
    pub fn commit(&mut self, owner: u32, section: SectionRef) -> bool {
        let row_number = section.slot.get();
        let row = self.slots.row(row_number);
        let as_named =
            row.generation == section.generation.get() && row.section == section.section.get();
        if row.state != GRANTED
            || row.owner != owner
            || owner == 0
            || !(as_named || T::makes(Mistake::CommitGeneration))
            || (self.grants.is_copied(row_number) && !T::makes(Mistake::CopyCommit))
        {
            self.stats.commits_ignored += 1;
            return false;
        }
        let grant = self.grants.of_row(row_number);
        let Some(grant) = grant.and_then(|id| self.grants.get(id)) else {
            self.free_row(row_number, Why::Ended);
            return false;
        };
        let chunk = grant.chunk;
        let taken = self
            .index
            .get(chunk)
            .is_none_or(|e| e.slot(row.section) != NONE);
        if grant.void || taken {
            self.leave_grant(row_number);
            self.free_row(row_number, Why::Ended);
            return false;
        }
        self.fill_slot(chunk, row_number, &row);
        self.slots.commit(row_number);
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
        self.grants.let_go(row_number, row);
        if let Some(e) = self.index.get_mut(chunk) {
            e.put_slot(row.section, row_number, bytes_of(row));
        }
    }

    /// Publishes a COMMITTED slot after its digest was computed.
    pub(crate) fn publish(&mut self, now: Time, row_number: u32, row: &Row, digest: [u8; 16]) {
        self.slots.publish(row_number, digest);
        let mut enough = false;
        if let Some(e) = self.index.entry_mut(row.chunk).filter(|e| e.live) {
            if e.have == 0 {
                // slots of an earlier boot beside it still wait for their check
                e.checked_ms = Some(now.mono_ms);
            }
            e.have |= 1 << row.section.min(127);
            enough = e.complete() && !e.known;
            self.index.recount(row.chunk);
            if T::makes(Mistake::HalfChunk) {
                let handle = self.index.handle(row.chunk);
                self.filled(handle, 0);
            }
        }
        let filled = self.leave_grant(row_number);
        if let Some(granted_ms) = filled.and_then(|grant| grant.granted_ms) {
            let took_ms = now.mono_ms.saturating_sub(granted_ms);
            self.stats.stores.add(took_ms);
        }
        // all grants of an earlier boot for a chunk form one grant here, including void ones: nothing waits for them
        let open = self.index.entry(row.chunk).and_then(|e| e.open);
        if let Some(open) = open.filter(|_| enough) {
            self.void(open);
        }
    }

    /// Resets the needed sections of an incomplete chunk without a writer. The next GRANT may need fewer.
    pub(crate) fn need_anew(&mut self, entry: u32, sections: u128) {
        let e = &mut self.index[entry];
        if e.open.is_some() || e.complete() || e.needed == sections {
            return;
        }
        e.needed = sections;
        let complete = e.complete();
        self.index.recount(entry);
        self.slots.set_needed(entry, sections);
        if complete {
            self.became_readable(entry);
        }
    }

    /// A grant ended: all its sections are PUBLISHED, or some are freed.
    fn filled(&mut self, handle: Handle, needed: u128) {
        let Some(e) = self.index.get_mut(handle) else {
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
        self.index.recount(handle.entry);
        if after != before {
            self.slots.set_needed(handle.entry, after);
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

    /// Voids a grant: its COMMITTED slots are freed, its owners give the GRANTED ones back, and a new GRANT for the chunk may follow.
    pub(crate) fn void(&mut self, id: u64) {
        let Some(Grant { rows, chunk, .. }) = self.grants.void(id) else {
            return;
        };
        self.stats.voided_grants += 1;
        let filling = self.index.get_mut(chunk).is_some_and(|e| {
            let open = e.open == Some(id);
            if open {
                e.open = None;
            }
            open
        });
        for row_number in rows {
            let row = self.slots.row(row_number);
            if row.state == COMMITTED {
                if let Some(e) = self.index.get_mut(chunk)
                    && let Some(slot) = e.slots.get_mut(row.section as usize)
                    && *slot == row_number
                {
                    *slot = NONE;
                    e.bytes = e.bytes.saturating_sub(bytes_of(&row));
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
        self.void_row(row_number);
        if !T::makes(Mistake::CopyOutlives) && self.grants.defer(row_number) {
            return;
        }
        self.leave_grant(row_number);
        self.free_row(row_number, Why::Ended);
    }

    /// A worker's ABORT of one section. Ignored unless the named section is GRANTED to `owner`.
    pub fn abort(&mut self, owner: u32, section: SectionRef) -> bool {
        let row = self.slots.row(section.slot.get());
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
        let mut ids = self.grants.of_tag(scheduler, tag);
        if T::makes(Mistake::AbortTag) {
            let tagged = ids.iter().filter_map(|id| self.grants.get(*id));
            let names: Vec<_> = tagged.map(|g| g.name).collect();
            ids = self.grants.select(|g| {
                names.contains(&g.name) || hashes.is_some_and(|h| h.contains(&g.last_hash))
            });
        }
        let mut freed = 0;
        for id in ids {
            let Some(grant) = self.grants.get(id) else {
                continue;
            };
            if hashes.is_some_and(|hashes| !hashes.contains(&grant.last_hash)) {
                continue;
            }
            let rows = grant.rows.clone();
            self.void(id);
            for row in rows {
                if self.grants.of_row(row) == Some(id) && self.slots.row(row).state == GRANTED {
                    self.come_back(row);
                    freed += 1;
                }
            }
        }
        freed
    }

    /// A HELLO names every slot that its session still holds, as (slot, generation). Takes back all others: of opaque objects, or of chunks,
    /// because a process may have a session for each.
    pub fn reconcile(&mut self, owner: u32, named: &[(u32, u32)], opaque: bool) -> u32 {
        let rows = self.grants.rows_of(owner);
        let mut named = named.to_vec();
        named.sort_unstable();
        let mut back = 0;
        for row in rows {
            let fields = self.slots.row(row);
            let of_object = fields.kind == KeyKind::Opaque as u8;
            if of_object == opaque && named.binary_search(&(row, fields.generation)).is_err() {
                self.come_back(row);
                back += 1;
            }
        }
        back
    }

    /// A process is proven dead: voids its grants, and frees its slots after `quarantine_ms`.
    pub fn owner_died(&mut self, now: Time, owner: u32, quarantine_ms: u64) {
        if !self.grants.owner_died(owner, now.mono_ms + quarantine_ms) {
            return;
        }
        for row in self.grants.rows_of(owner) {
            self.void_row(row);
        }
        self.end_quarantines(now);
    }

    /// Frees slots whose quarantine has ended.
    pub(crate) fn end_quarantines(&mut self, now: Time) {
        for owner in self.grants.quarantines_over(now.mono_ms) {
            for row in self.grants.rows_of(owner) {
                self.come_back(row);
            }
            self.grants.forget_owner(owner);
        }
    }

    /// Removes a row from its grant. The last row ends the grant, which is returned unless it is void.
    pub(crate) fn leave_grant(&mut self, row: u32) -> Option<Grant> {
        let (id, grant) = self.grants.leave(row)?;
        if let Some(e) = self.index.get_mut(grant.chunk)
            && e.open == Some(id)
        {
            e.open = None;
        }
        if grant.void {
            return None;
        }
        self.filled(grant.chunk, grant.needed);
        Some(grant)
    }

    /// Frees a row. Its other fields keep their values until the next grant.
    pub(crate) fn free_row(&mut self, row_number: u32, why: Why) {
        let row = self.slots.row(row_number);
        if row.state == FREE {
            return;
        }
        if row.state == GRANTED {
            self.grants.let_go(row_number, &row);
        }
        self.grants.forget_row(row_number);
        self.events.push(Event::Freed {
            row: row_number,
            generation: row.generation,
        });
        self.slots.free(row_number, why == Why::Evicted);
        self.index.row_left(row.chunk);
    }

    /// Voids the grant of a row.
    pub fn void_row(&mut self, row_number: u32) {
        if let Some(id) = self.grants.of_row(row_number) {
            self.void(id);
        }
    }

    /// The bytes of a section changed: its generation fails the loads in progress, and the entry leaves the index.
    pub fn corrupt(&mut self, entry: u32, row_number: u32) {
        self.stats.corrupt_chunks += 1;
        if let Some(e) = self.index.entry_mut(entry) {
            let row = self.slots.row(row_number);
            if let Some(slot) = e.slots.get_mut(row.section as usize) {
                *slot = NONE;
            }
        }
        self.slots.free_corrupt(row_number);
        self.index.row_left(entry);
        // `doom` needs the record, which still names the chunk here
        self.doom(entry);
    }

    /// An entry has all needed sections.
    pub(crate) fn became_readable(&mut self, entry: u32) {
        let Some(e) = self.index.entry_mut(entry) else {
            return;
        };
        e.weight = e.bytes;
        self.eviction.insert(&mut self.index, entry);
        self.stats.stored_chunks += 1;
        self.tell_stored(entry);
        self.events.push(Event::Readable(self.index.handle(entry)));
    }

    /// A section was read into its slot, and nothing writes there any more; `digest` was computed on the way and matches the tier's.
    /// Publishes the slot, or takes it back if the fetch was cancelled.
    pub fn fetched(&mut self, now: Time, section: SectionRef, digest: [u8; 16]) -> bool {
        let number = section.slot.get();
        let Some(row) = self.fetching(section) else {
            return false;
        };
        let id = self.grants.of_row(number);
        let grant = id.and_then(|id| self.grants.get(id));
        let Some(chunk) = grant.filter(|g| !g.void).map(|g| g.chunk) else {
            self.come_back(number);
            return false;
        };
        self.fill_slot(chunk, number, &row);
        self.publish(now, number, &row, digest);
        true
    }

    /// The object lacks this section: the chunk no longer needs it, and the slot is taken back.
    pub(crate) fn fetch_lacks(&mut self, section: SectionRef) {
        let number = section.slot.get();
        let Some(row) = self.fetching(section) else {
            return;
        };
        let bit = 1u128 << row.section.min(127);
        let grant = self.grants.of_row(number);
        if let Some(chunk) = grant.and_then(|id| self.grants.needs_less(id, bit)) {
            let needed = self.index.get_mut(chunk).and_then(|e| {
                let spare = e.slot(row.section) == NONE && e.needed & bit != 0 && !e.complete();
                spare.then(|| {
                    e.needed &= !bit;
                    e.needed
                })
            });
            if let Some(needed) = needed {
                self.slots.set_needed(chunk.entry, needed);
                self.index.recount(chunk.entry);
            }
        }
        self.leave_grant(number);
        self.free_row(number, Why::Ended);
    }

    /// True unless the fetch was cancelled or voided with its chunk.
    pub(crate) fn fetch_stands(&self, id: FetchId) -> bool {
        self.grants.get(id.number()).is_some_and(|g| !g.void)
    }

    /// Cancels a fetch. Its slots stay GRANTED until [`MemoryTier::fetch_ended`].
    pub fn cancel_fetch(&mut self, id: FetchId) {
        let rows = self
            .grants
            .get(id.number())
            .map(|g| g.rows.clone())
            .unwrap_or_default();
        self.void(id.number());
        if T::makes(Mistake::CancelWait) {
            for row in rows {
                self.free_row(row, Why::Ended);
            }
        }
    }

    /// Takes back a slot with incomplete or wrong bytes, after the last write into it.
    pub fn fetch_ended(&mut self, section: SectionRef) {
        if self.fetching(section).is_some() {
            self.come_back(section.slot.get());
        }
    }

    /// The row of a section, while the engine fills it.
    fn fetching(&self, section: SectionRef) -> Option<Row> {
        let row = self.slots.row(section.slot.get());
        let same = row.generation == section.generation.get();
        (row.state == GRANTED && row.owner == 0 && same).then_some(row)
    }
}
