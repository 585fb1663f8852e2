//! Slots that the engine itself fills from a lower tier: owner 0. A fetch that is cancelled keeps its slots until the last thread
//! or kernel request that may write into them has ended; a dropped future proves nothing.

use super::evict::Why;
use super::mistake::{Mistake, made};
use super::table::{GRANTED, Table};
use super::{Engine, GrantContext, Time, Wish};
use kvcachepool_protocol::message::GRANT_GRANTED;
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};

/// A fetch under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(u64);

impl<T: Table> Engine<T> {
    /// Slots for the missing sections of a chunk that a tier has. None: it is there, on its way, or nothing may go for it.
    /// `context.writers` is not looked at.
    pub fn fetch(
        &mut self,
        now: Time,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
    ) -> Option<(FetchId, Vec<SectionRef>)> {
        let mut refs = Vec::new();
        let context = GrantContext {
            writers: &[],
            ..*context
        };
        if self.grant(now, &context, wish, &mut refs) != GRANT_GRANTED {
            return None;
        }
        refs.retain(|r| r.slot.get() != NO_SLOT);
        let id = refs
            .first()
            .and_then(|r| self.by_row.get(&r.slot.get()).copied())?;
        // no scheduler's ABORT may name it
        if let Some(tag) = self.grants.get_mut(&id).and_then(|g| g.asked_by.take())
            && let Some(list) = self.by_tag.get_mut(&tag)
        {
            list.retain(|g| *g != id);
            if list.is_empty() {
                self.by_tag.remove(&tag);
            }
        }
        Some((FetchId(id), refs))
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
