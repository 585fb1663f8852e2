//! Slots that the engine itself fills from a lower tier, as owner 0. A cancelled fetch keeps its slots until the last thread or kernel
//! request that may write into them has ended; a dropped future does not prove that.

use super::entry::NONE;
use super::evict::Why;
use super::{GrantContext, MemoryTier, Wish};
use crate::Time;
use crate::mistake::Mistake;
use crate::table::{GRANTED, Row, Table};
use kvcachepool_protocol::message::{GRANT_GRANTED, GRANT_NO_ROOM};
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(u64);

impl FetchId {
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

impl<T: Table> MemoryTier<T> {
    /// Takes slots for the missing sections of a chunk. Fails with the result of a GRANT: the chunk exists or is on its way, or nothing can
    /// be evicted for it. Ignores `context.writers`. The parent may be missing, because the engine may hold it locally.
    pub fn fetch(
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
            .and_then(|r| self.grants.of_row(r.slot.get()))
            .ok_or(GRANT_NO_ROOM)?;
        Ok((FetchId(id), refs))
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
        self.grants.get(id.0).is_some_and(|g| !g.void)
    }

    /// Cancels a fetch. Its slots stay GRANTED until [`MemoryTier::fetch_ended`].
    pub fn cancel_fetch(&mut self, id: FetchId) {
        let rows = self
            .grants
            .get(id.0)
            .map(|g| g.rows.clone())
            .unwrap_or_default();
        self.void(id.0);
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
