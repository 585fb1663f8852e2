//! The slot table with a private copy of its rows. Connectors can write to the shared table through their descriptors. So that such a write
//! cannot lead this process to a wrong offset, length or generation, the shared rows are read once at the start, and only written
//! afterwards. Chunk records are read later too, for the names that events and eviction need.

use crate::table::{COMMITTED, ChunkRecord, PUBLISHED, Row, Table};
use zerocopy::FromZeros;

/// Slots by state, without GRANTED ones; owners count those.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SlotCounts {
    pub committed: u64,
    pub published: u64,
}

/// A table, and the last values written to its rows.
#[derive(Debug)]
pub(crate) struct Mirror<T> {
    pub shared: T,
    populated_rows: u32,
    rows: Vec<Row>,
    counts: SlotCounts,
}

impl<T: Table> Mirror<T> {
    /// Reads the rows of a table, possibly from an earlier engine.
    pub fn new(shared: T) -> Self {
        let geometry = shared.geometry();
        let mut mirror = Self {
            populated_rows: shared.populated_rows().min(geometry.rows),
            // pages of rows that were never used are not touched
            rows: Row::new_vec_zeroed(geometry.rows as usize)
                .unwrap_or_else(|_| vec![Row::default(); geometry.rows as usize]),
            counts: SlotCounts::default(),
            shared,
        };
        for number in 0..geometry.rows {
            let row = mirror.shared.row(number);
            if row != Row::default()
                && let Some(copy) = mirror.rows.get_mut(number as usize)
            {
                *copy = row;
                mirror.counts.add(row.state);
            }
        }
        mirror
    }

    pub fn counts(&self) -> SlotCounts {
        self.counts
    }

    pub fn populated_rows(&self) -> u32 {
        self.populated_rows
    }

    pub fn set_populated_rows(&mut self, rows: u32) {
        self.populated_rows = rows;
        self.shared.set_populated_rows(rows);
    }

    /// The row as this process wrote it last; zeros out of range.
    pub fn row(&self, row: u32) -> Row {
        self.rows.get(row as usize).copied().unwrap_or_default()
    }

    pub fn set_state(&mut self, row: u32, state: u32) {
        if let Some(copy) = self.rows.get_mut(row as usize) {
            self.counts.remove(copy.state);
            self.counts.add(state);
            copy.state = state;
        }
        self.shared.set_state(row, state);
    }

    pub fn set_generation(&mut self, row: u32, generation: u32) {
        if let Some(copy) = self.rows.get_mut(row as usize) {
            copy.generation = generation;
        }
        self.shared.set_generation(row, generation);
    }

    pub fn set_fields(&mut self, row: u32, fields: &Row) {
        if let Some(copy) = self.rows.get_mut(row as usize) {
            *copy = Row {
                state: copy.state,
                generation: copy.generation,
                ..*fields
            };
        }
        self.shared.set_fields(row, fields);
    }

    pub fn set_digest(&mut self, row: u32, digest: [u8; 16]) {
        if let Some(copy) = self.rows.get_mut(row as usize) {
            copy.digest = digest;
        }
        self.shared.set_digest(row, digest);
    }

    /// A record from the shared table. After the start, only names may be used from it.
    pub fn chunk(&self, chunk: u32) -> ChunkRecord {
        self.shared.chunk(chunk)
    }

    pub fn set_chunk(&mut self, chunk: u32, record: &ChunkRecord) {
        self.shared.set_chunk(chunk, record);
    }

    pub fn set_needed(&mut self, chunk: u32, needed: [u64; 2]) {
        self.shared.set_needed(chunk, needed);
    }

    pub fn clear_chunk(&mut self, chunk: u32) {
        self.shared.clear_chunk(chunk);
    }
}

impl SlotCounts {
    fn of(&mut self, state: u32) -> Option<&mut u64> {
        match state {
            COMMITTED => Some(&mut self.committed),
            PUBLISHED => Some(&mut self.published),
            _ => None,
        }
    }

    pub fn add(&mut self, state: u32) {
        if let Some(count) = self.of(state) {
            *count += 1;
        }
    }

    fn remove(&mut self, state: u32) {
        if let Some(count) = self.of(state) {
            *count -= 1;
        }
    }
}
