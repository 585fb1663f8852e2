//! The size of the arena follows the config. It grows once the host has room, and shrinks from its end: chunks there are evicted, and
//! slots in use hold the end back.

use super::MemoryTier;
use crate::mistake::Mistake;
use crate::table::{ROW_BYTES, Table};
use std::ops::Range;

/// Bytes given up at a time. The host takes some 20 ms to release their pages, in which it does nothing else.
const CUT_BYTES_MAX: u64 = 256 << 20;

/// What the size in the config asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Resize {
    /// The arena has that size.
    Done,
    /// These rows are to be populated.
    Grow(Range<u32>),
    Shrink,
}

impl<T: Table> MemoryTier<T> {
    /// What the config asks for.
    pub fn resize(&self) -> Resize {
        let (now, target) = (self.slots.capacity_rows(), self.target_rows());
        match target.cmp(&now) {
            std::cmp::Ordering::Equal => Resize::Done,
            std::cmp::Ordering::Greater => Resize::Grow(self.slots.populated_rows()..target),
            std::cmp::Ordering::Less => Resize::Shrink,
        }
    }

    fn target_rows(&self) -> u32 {
        self.slots.geometry().rows_of(self.config.arena_bytes)
    }

    /// The arena keeps its size for now.
    pub fn stay(&mut self) {
        self.slots.allow(self.slots.capacity_rows());
    }

    /// Allocates slots only where the arena stays, evicts chunks at its end, and gives up the rows without slots in use there. The caller
    /// releases their pages.
    pub fn cut(&mut self) -> Option<Range<u32>> {
        let (capacity, target) = (self.slots.capacity_rows(), self.target_rows());
        self.slots.allow(target);
        let segment_rows = self.slots.segment_rows();
        let segments_max = (CUT_BYTES_MAX / (u64::from(segment_rows) * ROW_BYTES)).max(1) as u32;
        let lowest = target.max(capacity.saturating_sub(segments_max * segment_rows));
        let mut end = capacity;
        while end > lowest {
            let first = end - segment_rows;
            if let Some(slot_rows) = self.slots.in_use(first) {
                self.empty_segment(first, slot_rows);
            }
            if self.slots.in_use(first).is_some() && !T::makes(Mistake::CutInUse) {
                break;
            }
            end = first;
        }
        (end < capacity).then(|| {
            self.slots.cut(end);
            end..capacity
        })
    }
}
