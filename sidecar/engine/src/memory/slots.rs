//! Slots of the arena: the shared slot table, a private copy of its rows, and the allocator.
//!
//! Connectors can write to the shared table through their descriptors. So that such a write cannot lead this process to a wrong offset,
//! length or generation, the shared rows are read once at the start, and only written afterwards. Chunk records are read later too, for the
//! names that events and eviction need.

use super::allocator::Allocator;
use super::check::say;
use crate::mistake::Mistake;
use crate::table::{
    COMMITTED, ChunkRecord, FREE, GRANTED, Geometry, PUBLISHED, ROW_BYTES, Row, Table,
};
use std::ops::Range;
use zerocopy::FromZeros;

/// Slots and bytes by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SlotCounts {
    pub granted_bytes: u64,
    pub committed: u64,
    pub committed_bytes: u64,
    pub published: u64,
}

/// The slots of one arena. Each method makes one transition of the protocol, in the order of writes that `protocol::table` describes.
#[derive(Debug)]
pub(crate) struct SlotTable<T> {
    shared: T,
    geometry: Geometry,
    populated_rows: u32,
    /// Rows that may hold slots. Rows behind them are FREE.
    capacity_rows: u32,
    /// Those rows as this process wrote them last.
    rows: Vec<Row>,
    counts: SlotCounts,
    alloc: Allocator,
}

impl<T: Table> SlotTable<T> {
    /// Reads the rows of a table, possibly from an earlier engine. No slot is usable before [`SlotTable::settle`].
    pub fn new(shared: T) -> Self {
        let geometry = shared.geometry();
        let whole_segments = |rows: u32| rows / geometry.segment_rows() * geometry.segment_rows();
        let capacity_rows = whole_segments(shared.capacity_rows().min(geometry.rows));
        let mut slots = Self {
            populated_rows: shared.populated_rows().min(capacity_rows),
            capacity_rows,
            rows: Vec::new(),
            counts: SlotCounts::default(),
            alloc: Allocator::new(capacity_rows, geometry.segment_rows()),
            geometry,
            shared,
        };
        slots.read_rows(capacity_rows);
        slots
    }

    /// Reads the shared rows from those that are known up to this one.
    fn read_rows(&mut self, to: u32) {
        let known = self.rows.len();
        // pages of rows that were never used are not touched
        let mut rows =
            Row::new_vec_zeroed(to as usize).unwrap_or_else(|_| vec![Row::default(); to as usize]);
        for (copy, row) in rows.iter_mut().zip(&self.rows) {
            *copy = *row;
        }
        for (number, copy) in (0..to).zip(&mut rows).skip(known) {
            let row = self.shared.row(number);
            if row != Row::default() {
                *copy = row;
                self.counts.add(&row);
            }
        }
        self.rows = rows;
    }

    pub fn shared(&self) -> &T {
        &self.shared
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub fn counts(&self) -> SlotCounts {
        self.counts
    }

    pub fn segment_rows(&self) -> u32 {
        self.alloc.segment_rows()
    }

    /// Bytes of slots that are not free.
    pub fn used_bytes(&self) -> u64 {
        self.alloc.used_rows() * ROW_BYTES
    }

    /// Free slots in segments that have a slot size.
    pub fn free_slots(&self) -> u64 {
        self.alloc.free_slots()
    }

    /// Segments to empty for another slot size: see [`Allocator::reclaimable`].
    pub fn reclaimable(&self, slot_rows: u32, count: usize) -> Vec<(u32, u32)> {
        self.alloc.reclaimable(slot_rows, count)
    }

    /// Rows whose pages are present.
    pub fn populated_rows(&self) -> u32 {
        self.populated_rows
    }

    /// Rows that may hold slots.
    pub fn capacity_rows(&self) -> u32 {
        self.capacity_rows
    }

    pub fn capacity_bytes(&self) -> u64 {
        u64::from(self.capacity_rows) * ROW_BYTES
    }

    /// More rows may hold slots, once they are populated.
    pub fn grow(&mut self, rows: u32) {
        let known = self.capacity_rows;
        self.read_rows(rows);
        self.alloc.allow(rows);
        for number in known..rows {
            // An engine frees rows before it gives them up: another process wrote here, or may do so.
            if self.row(number).state != FREE {
                self.set_state(number, FREE);
                self.raise_generations(number..number + 1);
                self.alloc.exclude(number);
            }
        }
        self.capacity_rows = rows;
        self.shared.set_capacity_rows(rows);
    }

    /// Allocates slots only in the first `rows` rows from now on.
    pub fn allow(&mut self, rows: u32) {
        self.alloc.allow(rows);
    }

    /// Slot size of the segment that starts at this row; `None` if no slot of it is in use.
    pub fn in_use(&self, first: u32) -> Option<u32> {
        self.alloc.in_use(first)
    }

    /// Gives up the rows behind the first `rows`, none of which is in use.
    pub fn cut(&mut self, rows: u32) {
        // The bytes of evicted slots stay right under their generation until now: readers may still copy them.
        if !T::makes(Mistake::CutQuietly) {
            self.raise_generations(rows..self.capacity_rows);
        }
        self.alloc.cut(rows);
        self.capacity_rows = rows;
        self.rows.truncate(rows as usize);
        self.rows.shrink_to_fit();
        self.populated_rows = self.populated_rows.min(rows);
        // A process that sees the count takes no page lock behind the new end.
        self.shared.set_populated_rows(self.populated_rows);
        self.shared.set_capacity_rows(rows);
        self.shared.count_shrink(rows);
    }

    /// Marks the first `rows` rows of the arena as populated.
    pub fn populate(&mut self, rows: u32) {
        let rows = rows.min(self.capacity_rows);
        if rows > self.populated_rows {
            self.populated_rows = rows;
            self.shared.set_populated_rows(rows);
            self.alloc.populate(rows);
        }
    }

    /// The row as this process wrote it last; zeros out of range.
    pub fn row(&self, row: u32) -> Row {
        self.rows.get(row as usize).copied().unwrap_or_default()
    }

    /// At a start: marks a slot as in use by a section. Returns false if it contradicts other slots: see [`Allocator::claim`].
    pub fn claim(&mut self, row: u32, slot_rows: u32, section: u32) -> bool {
        self.alloc.claim(row, slot_rows, section)
    }

    /// At a start, after every claim: frees all rows except those that begin a used slot according to `taken`.
    pub fn settle(&mut self, taken: impl Fn(u32) -> bool) {
        self.alloc.settle(taken);
    }

    /// At a start, after everything that was found is either in use or freed: slots can be allocated.
    pub fn open(&mut self) {
        self.alloc.populate(self.populated_rows);
    }

    /// Allocates a free slot of exactly `size` rows for a section.
    pub fn take(&mut self, size: u32, section: u32) -> Option<u32> {
        let taken = self.alloc.take(size, section)?;
        if let Some((first, count)) = taken.resized
            && !T::makes(Mistake::Carve)
        {
            // a reader may hold references to slots that began at other rows of this segment
            self.raise_generations(first..first + count);
        }
        Some(taken.row)
    }

    /// Fails all loads in progress from slots that began at these rows.
    fn raise_generations(&mut self, rows: Range<u32>) {
        for row in rows {
            let generation = self.row(row).generation;
            if generation != 0 {
                self.set_generation(row, generation.wrapping_add(1));
            }
        }
    }

    /// Returns a slot that was taken and not granted.
    pub fn give_back(&mut self, row: u32) {
        self.alloc.give(row);
    }

    /// Grants a taken slot.
    pub fn grant(&mut self, row: u32, fields: &Row) {
        if !T::makes(Mistake::GenerationLate) {
            let generation = self.row(row).generation.wrapping_add(1);
            self.set_generation(row, generation);
        }
        if let Some(copy) = self.rows.get_mut(row as usize) {
            *copy = Row {
                state: copy.state,
                generation: copy.generation,
                ..*fields
            };
        }
        self.shared.set_fields(row, fields);
        self.set_state(row, GRANTED);
    }

    /// The writer of a granted slot has finished.
    pub fn commit(&mut self, row: u32) {
        self.set_state(row, COMMITTED);
    }

    /// Publishes a slot whose digest was computed.
    pub fn publish(&mut self, row: u32, digest: [u8; 16]) {
        if let Some(copy) = self.rows.get_mut(row as usize) {
            copy.digest = digest;
        }
        self.shared.set_digest(row, digest);
        self.set_state(row, PUBLISHED);
        if T::makes(Mistake::GenerationLate) {
            let generation = self.row(row).generation.wrapping_add(1);
            self.set_generation(row, generation);
        }
    }

    /// Frees a slot. Its other fields keep their values until the next grant. `evicted`: to make room.
    pub fn free(&mut self, row: u32, evicted: bool) {
        if !(T::makes(Mistake::InPlace) && evicted) {
            self.set_state(row, FREE);
        }
        self.alloc.give(row);
    }

    /// Frees a slot whose bytes changed. Its new generation fails the loads in progress.
    pub fn free_corrupt(&mut self, row: u32) {
        self.set_state(row, FREE);
        let generation = self.row(row).generation.wrapping_add(1);
        self.set_generation(row, generation);
        self.alloc.give(row);
    }

    /// The record of a chunk, from the shared table. After the start, only names may be used from it.
    pub fn record(&self, chunk: u32) -> ChunkRecord {
        self.shared.chunk(chunk)
    }

    pub fn set_record(&mut self, chunk: u32, record: &ChunkRecord) {
        self.shared.set_chunk(chunk, record);
    }

    /// Stores the sections that a chunk needs, as a bit mask.
    pub fn set_needed(&mut self, chunk: u32, needed: u128) {
        self.shared
            .set_needed(chunk, [needed as u64, (needed >> 64) as u64]);
    }

    /// A later start must not find the chunk.
    pub fn clear_record(&mut self, chunk: u32) {
        self.shared.clear_chunk(chunk);
    }

    fn set_state(&mut self, row: u32, state: u32) {
        if let Some(copy) = self.rows.get_mut(row as usize) {
            self.counts.remove(copy);
            copy.state = state;
            self.counts.add(copy);
        }
        self.shared.set_state(row, state);
    }

    fn set_generation(&mut self, row: u32, generation: u32) {
        if let Some(copy) = self.rows.get_mut(row as usize) {
            copy.generation = generation;
        }
        self.shared.set_generation(row, generation);
    }

    /// The shared table matches this process's state.
    pub fn check_shared(&self) -> Result<(), String> {
        let populated = self.shared.populated_rows();
        say(
            populated == self.populated_rows,
            "PopulatedIsShared",
            || format!("{populated} of {}", self.populated_rows),
        )?;
        let capacity = self.shared.capacity_rows();
        say(capacity == self.capacity_rows, "CapacityIsShared", || {
            format!("{capacity} of {}", self.capacity_rows)
        })?;
        for number in 0..self.capacity_rows {
            let (own, shared) = (self.row(number), self.shared.row(number));
            say(own == shared, "RowsAreShared", || {
                format!("row {number}: {own:?}, shared {shared:?}")
            })?;
        }
        Ok(())
    }

    /// Slots do not overlap, and the counts and the allocator match them.
    pub fn check(&self) -> Result<(), String> {
        let (mut used, mut counts) = (0, SlotCounts::default());
        let mut row_number = 0;
        while row_number < self.geometry.rows {
            let row = self.row(row_number);
            counts.add(&row);
            if row.state == FREE {
                row_number += 1;
                continue;
            }
            let size = row.slot_rows.max(1);
            for inner in row_number + 1..row_number + size {
                let inner_state = self.row(inner).state;
                say(inner_state == FREE, "SlotsOverlap", || {
                    format!("row {inner} in slot {row_number}")
                })?;
            }
            used += u64::from(size);
            let segment = self.segment_rows();
            let whole = row_number / segment == (row_number + size - 1) / segment;
            say(whole, "SlotCrossesSegment", || {
                format!("slot {row_number} of {size} rows")
            })?;
            let populated = row_number + size <= self.populated_rows;
            say(populated, "OnlyPopulatedRowsAreUsed", || {
                format!("slot {row_number}")
            })?;
            row_number += size;
        }
        say(counts == self.counts, "SlotsAreCounted", || {
            format!("{:?} counted, {counts:?} there", self.counts)
        })?;
        say(
            used == self.alloc.used_rows(),
            "AllocatorKnowsTheTable",
            || format!("{used} rows used, {} known", self.alloc.used_rows()),
        )
    }
}

#[cfg(test)]
impl<T> SlotTable<T> {
    /// The shared table, to write what a connector may write.
    pub fn shared_mut(&mut self) -> &mut T {
        &mut self.shared
    }
}

impl SlotCounts {
    /// Counts one row more. A table of an earlier engine may claim any length, until the slot is freed.
    fn add(&mut self, row: &Row) {
        self.count(row, 1);
    }

    /// Counts one row less.
    fn remove(&mut self, row: &Row) {
        self.count(row, 1u64.wrapping_neg());
    }

    fn count(&mut self, row: &Row, by: u64) {
        let add = |to: &mut u64, n: u64| *to = to.wrapping_add(n.wrapping_mul(by));
        let bytes = bytes_of(row);
        match row.state {
            GRANTED => add(&mut self.granted_bytes, bytes),
            COMMITTED => {
                add(&mut self.committed, 1);
                add(&mut self.committed_bytes, bytes);
            }
            PUBLISHED => add(&mut self.published, 1),
            _ => {}
        }
    }
}

/// Bytes of a slot, in whole rows.
pub(crate) fn bytes_of(row: &Row) -> u64 {
    u64::from(row.slot_rows) * ROW_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_claim_any_length_are_counted_and_uncounted() {
        let row = Row {
            state: COMMITTED,
            slot_rows: u32::MAX,
            ..Row::default()
        };
        let mut counts = SlotCounts::default();
        for _ in 0..70_000 {
            counts.add(&row);
        }
        for _ in 0..70_000 {
            counts.remove(&row);
        }
        assert_eq!(counts, SlotCounts::default());
    }
}
