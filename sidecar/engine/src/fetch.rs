//! Slots that the engine itself fills from a lower tier: owner 0. A fetch that is cancelled keeps its slots until the last thread
//! or kernel request that may write into them has ended; a dropped future proves nothing.

use super::entry::NONE;
use super::evict::Why;
use super::mistake::{Mistake, made};
use super::table::{GRANTED, Table};
use super::{Engine, GrantContext, Time, Wish};
use kvcachepool_protocol::message::{GRANT_GRANTED, GRANT_NO_ROOM};
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(u64);

impl FetchId {
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

impl<T: Table> Engine<T> {
    /// Slots for the missing sections of a chunk that a tier has. None: it is there, on its way, or nothing may go for it.
    /// `context.writers` is not looked at. The chunk before it need not be there: the engine may hold that itself.
    pub fn fetch(
        &mut self,
        now: Time,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
    ) -> Option<(FetchId, Vec<SectionRef>)> {
        self.fetch_slots(now, context, wish).ok()
    }

    /// As [`Engine::fetch`]; else the result that a GRANT would have had.
    pub(crate) fn fetch_slots(
        &mut self,
        now: Time,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
    ) -> Result<(FetchId, Vec<SectionRef>), u8> {
        let mut refs = Vec::new();
        let context = GrantContext {
            writers: &[],
            ..*context
        };
        let result = self.grant(now, &context, wish, &mut refs);
        if result != GRANT_GRANTED {
            return Err(result);
        }
        refs.retain(|r| r.slot.get() != NO_SLOT);
        let id = refs
            .first()
            .and_then(|r| self.by_row.get(&r.slot.get()).copied())
            .ok_or(GRANT_NO_ROOM)?;
        // no scheduler's ABORT may name it
        if let Some(tag) = self.grants.get_mut(&id).and_then(|g| g.asked_by.take())
            && let Some(list) = self.by_tag.get_mut(&tag)
        {
            list.retain(|g| *g != id);
            if list.is_empty() {
                self.by_tag.remove(&tag);
            }
        }
        Ok((FetchId(id), refs))
    }

    /// The bytes of a section are in its slot and nothing writes there any more; `digest` was taken on the way and is the tier's.
    /// Readable at once, unless the fetch was cancelled meanwhile: then the slot comes back.
    pub fn fetched(&mut self, now: Time, section: SectionRef, digest: [u8; 16]) -> bool {
        let number = section.slot.get();
        let row = self.table.row(number);
        if row.state != GRANTED || row.owner != 0 || row.generation != section.generation.get() {
            return false;
        }
        let grant = self.by_row.get(&number).and_then(|id| self.grants.get(id));
        let Some(chunk) = grant.filter(|g| !g.void).map(|g| g.chunk) else {
            self.come_back(number);
            return false;
        };
        self.fill_slot(chunk, number, &row);
        self.publish(now, number, &row, digest);
        true
    }

    /// The object has no such section: the chunk does without it, and the slot comes back.
    pub(crate) fn fetch_lacks(&mut self, section: SectionRef) {
        let number = section.slot.get();
        let row = self.table.row(number);
        if row.state != GRANTED || row.owner != 0 || row.generation != section.generation.get() {
            return;
        }
        let bit = 1u128 << row.section.min(127);
        let grant = self.by_row.get(&number).copied();
        if let Some(grant) = grant.and_then(|id| self.grants.get_mut(&id)) {
            grant.needed &= !bit;
            let chunk = grant.chunk;
            let needed = self.get_mut(chunk).and_then(|e| {
                let spare = e.slot(row.section) == NONE && e.needed & bit != 0 && !e.complete();
                spare.then(|| {
                    e.needed &= !bit;
                    e.needed
                })
            });
            if let Some(needed) = needed {
                self.table
                    .set_needed(chunk.entry, [needed as u64, (needed >> 64) as u64]);
                self.recount(chunk.entry);
            }
        }
        self.leave_grant(number);
        self.free_row(number, Why::Ended);
    }

    /// Is the fetch still wanted: neither cancelled nor void with its chunk?
    pub(crate) fn fetch_stands(&self, id: FetchId) -> bool {
        self.grants.get(&id.0).is_some_and(|g| !g.void)
    }

    /// The fetch is not wanted any more. Its slots stay GRANTED until [`Engine::fetch_ended`].
    pub fn cancel_fetch(&mut self, id: FetchId) {
        let rows = self
            .grants
            .get(&id.0)
            .map(|g| g.rows.clone())
            .unwrap_or_default();
        self.void(id.0);
        if made(Mistake::CancelWait) {
            for row in rows {
                self.free_row(row, Why::Ended);
            }
        }
    }

    /// Nothing will write into this slot any more, and its bytes are not whole: cancelled, failed, or another digest.
    pub fn fetch_ended(&mut self, section: SectionRef) {
        let row = self.table.row(section.slot.get());
        if row.state == GRANTED && row.owner == 0 && row.generation == section.generation.get() {
            self.come_back(section.slot.get());
        }
    }
}
