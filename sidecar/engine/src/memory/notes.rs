//! Notes of removals in the slot table, so that the next engine process knows which removals no tier has confirmed yet. A note is a chunk
//! record that no row names: a process that does not know notes takes it for an unused one.

use super::MemoryTier;
use crate::table::{ChunkRecord, Table};
use kvcachepool_protocol::key::{ChunkKey, KeyKind};
use zerocopy::FromZeros;

/// Notes take at most one in this many chunk records.
const RECORDS_PER_NOTE: u32 = 8;

/// An opaque object that a tier has not removed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Note {
    pub key: ChunkKey,
    /// Number of the tier's kind on the wire.
    pub tier: u8,
}

impl Note {
    /// A chunk has tokens, a note has none.
    fn record(self) -> ChunkRecord {
        ChunkRecord {
            state: 1,
            kind: KeyKind::Opaque as u8,
            key: self.key.0,
            first_token: self.tier.into(),
            ..ChunkRecord::new_zeroed()
        }
    }

    fn of(record: &ChunkRecord) -> Option<Self> {
        let (key, tier) = (ChunkKey(record.key), record.first_token.try_into().ok()?);
        Some(Self { key, tier }).filter(|note| note.record() == *record)
    }
}

impl<T: Table> MemoryTier<T> {
    /// Writes a note. Returns the number of its record; none: no record is left for it.
    pub fn note(&mut self, note: Note) -> Option<u32> {
        if self.noted >= self.slots.geometry().chunks / RECORDS_PER_NOTE {
            return None;
        }
        let entry = self.occupy()?;
        self.noted += 1;
        self.slots.set_record(entry, &note.record());
        Some(entry)
    }

    /// Removes a note.
    pub fn forget_note(&mut self, entry: u32) {
        self.noted = self.noted.saturating_sub(1);
        self.slots.clear_record(entry);
        self.index.vacate(entry);
    }

    /// All notes, by the numbers of their records.
    pub fn notes(&self) -> Vec<(u32, Note)> {
        let unlisted = self.index.live().filter(|(_, e)| !e.listed);
        let note = |entry| Some((entry, Note::of(&self.slots.record(entry))?));
        unlisted
            .filter_map(|(handle, _)| note(handle.entry))
            .collect()
    }

    /// At a start: the entries of notes are in use. They may come after the last one that a row names. Records were used in order, so there
    /// is none behind the first without a key.
    pub(super) fn take_over_notes(&mut self) {
        for entry in 0..self.slots.geometry().chunks {
            if self.index.entry(entry).is_some_and(|e| e.live) {
                continue;
            }
            let record = self.slots.record(entry);
            if entry >= self.index.len() && record.key == [0; 32] {
                return;
            }
            self.index.extend_to(entry);
            if Note::of(&record).is_some()
                && let Some(e) = self.index.entry_mut(entry)
            {
                e.live = true;
                self.noted += 1;
            }
        }
    }
}
