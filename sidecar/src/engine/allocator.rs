//! Which rows are free: segments that take a slot size at first use and change it only when wholly free.

/// A segment that has no slot size.
const NO_SIZE: u32 = 0;

#[derive(Debug, Clone, Default)]
struct Segment {
    /// Rows of a slot; [`NO_SIZE`] while wholly free.
    size: u32,
    /// The size before that; readers of that time may still hold references to such slots.
    size_before: u32,
    used: u32,
    free: Vec<u32>,
    /// Place in the list of segments of its size that have a free slot.
    place: Option<usize>,
    /// Its rows contradicted each other at a boot: never used again.
    broken: bool,
}

/// A slot that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// First row.
    pub row: u32,
    /// The segment has just got another slot size than it may have had: the generations of all rows in it must be raised before
    /// anything else is written.
    pub resized: Option<(u32, u32)>,
}

/// Free slots of an arena.
#[derive(Debug)]
pub struct Allocator {
    segment_rows: u32,
    segments: Vec<Segment>,
    /// Segments without a size that are populated.
    empty: Vec<u32>,
    /// Per slot size: segments with a free slot.
    open: Vec<(u32, Vec<u32>)>,
    usable: u32,
    used_rows: u64,
}

impl Allocator {
    /// An allocator over `rows` rows of which none is usable yet.
    pub fn new(rows: u32, segment_rows: u32) -> Self {
        let segment_rows = segment_rows.max(1);
        Self {
            segment_rows,
            segments: vec![Segment::default(); (rows / segment_rows) as usize],
            empty: Vec::new(),
            open: Vec::new(),
            usable: 0,
            used_rows: 0,
        }
    }

    /// Rows of slots that are taken.
    pub fn used_rows(&self) -> u64 {
        self.used_rows
    }

    /// Rows of a segment.
    pub fn segment_rows(&self) -> u32 {
        self.segment_rows
    }

    /// At a boot: the slot at `row` is in use. False where that contradicts another slot of the segment; then the segment is
    /// never used again, but the slot counts as taken.
    pub fn claim(&mut self, row: u32, slot_rows: u32) -> bool {
        let start = row % self.segment_rows;
        let Some(segment) = self.segments.get_mut((row / self.segment_rows) as usize) else {
            return false;
        };
        let fits = slot_rows > 0
            && start.is_multiple_of(slot_rows)
            && start + slot_rows <= self.segment_rows
            && (segment.size == NO_SIZE || segment.size == slot_rows);
        segment.used += 1;
        if !fits {
            segment.broken = true;
            return false;
        }
        segment.size = slot_rows;
        self.used_rows += u64::from(slot_rows);
        true
    }

    /// At a boot, after every `claim`: `taken` says which rows begin a slot in use; all others are free.
    pub fn settle(&mut self, taken: impl Fn(u32) -> bool) {
        for number in 0..self.segments.len() {
            let first = number as u32 * self.segment_rows;
            let (size, broken) = {
                let s = &self.segments[number];
                (s.size, s.broken)
            };
            if size == NO_SIZE || broken {
                continue;
            }
            self.segments[number].free = (0..self.segment_rows / size)
                .rev()
                .map(|i| first + i * size)
                .filter(|row| !taken(*row))
                .collect();
        }
    }

    /// The first `rows` rows are populated: whole segments of them become usable.
    pub fn populate(&mut self, rows: u32) {
        let whole = (rows / self.segment_rows).min(self.segments.len() as u32);
        for number in self.usable..whole {
            let segment = &self.segments[number as usize];
            if segment.broken {
                continue;
            }
            if segment.size == NO_SIZE {
                self.empty.push(number);
            } else if !segment.free.is_empty() {
                self.open_up(number);
            }
        }
        // the lowest segment is taken first
        self.empty.sort_unstable_by(|a, b| b.cmp(a));
        self.usable = self.usable.max(whole);
    }

    /// Takes a slot of exactly `slot_rows` rows, from a segment of that size or an empty one.
    pub fn take(&mut self, slot_rows: u32) -> Option<Taken> {
        if slot_rows == 0 || slot_rows > self.segment_rows {
            return None;
        }
        let of_size = self.open.iter().find(|(size, _)| *size == slot_rows);
        let (number, resized) = match of_size.and_then(|(_, list)| list.last().copied()) {
            Some(number) => (number, None),
            None => {
                let number = self.empty.pop()?;
                let first = number * self.segment_rows;
                let segment = self.segments.get_mut(number as usize)?;
                let other = segment.size_before != slot_rows;
                segment.size = slot_rows;
                segment.free = (0..self.segment_rows / slot_rows)
                    .rev()
                    .map(|i| first + i * slot_rows)
                    .collect();
                self.open_up(number);
                (number, other.then_some((first, self.segment_rows)))
            }
        };
        let segment = self.segments.get_mut(number as usize)?;
        let row = segment.free.pop()?;
        segment.used += 1;
        self.used_rows += u64::from(slot_rows);
        if segment.free.is_empty() {
            self.close(number);
        }
        Some(Taken { row, resized })
    }

    /// Gives a slot back. A segment that becomes wholly free loses its slot size.
    pub fn give(&mut self, row: u32) {
        let number = row / self.segment_rows;
        let usable = number < self.usable;
        let Some(segment) = self.segments.get_mut(number as usize) else {
            return;
        };
        segment.used = segment.used.saturating_sub(1);
        if segment.broken {
            return;
        }
        self.used_rows = self.used_rows.saturating_sub(u64::from(segment.size));
        if segment.used > 0 {
            segment.free.push(row);
            if usable && segment.place.is_none() {
                self.open_up(number);
            }
            return;
        }
        segment.size_before = segment.size;
        segment.free.clear();
        if segment.place.is_some() {
            self.close(number);
        }
        if let Some(segment) = self.segments.get_mut(number as usize) {
            segment.size = NO_SIZE;
        }
        if usable {
            self.empty.push(number);
        }
    }

    /// Segments of another slot size, those with the fewest slots in use first: what to empty when no slot of `slot_rows` can
    /// be had otherwise. At most `count` of them, as (first row, slot rows).
    pub fn reclaimable(&self, slot_rows: u32, count: usize) -> Vec<(u32, u32)> {
        let mut list: Vec<_> = (0u32..)
            .zip(&self.segments)
            .take(self.usable as usize)
            .filter(|(_, s)| s.size != NO_SIZE && s.size != slot_rows && !s.broken)
            .map(|(number, s)| (s.used * s.size, number * self.segment_rows, s.size))
            .collect();
        list.sort_unstable();
        list.truncate(count);
        list.into_iter()
            .map(|(_, first, size)| (first, size))
            .collect()
    }

    /// Slots of a segment with a size that nobody uses.
    pub fn free_slots(&self) -> u64 {
        self.segments.iter().map(|s| s.free.len() as u64).sum()
    }

    fn open_up(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(number as usize) else {
            return;
        };
        let list = match self.open.iter().position(|(size, _)| *size == segment.size) {
            Some(i) => i,
            None => {
                self.open.push((segment.size, Vec::new()));
                self.open.len() - 1
            }
        };
        if let Some((_, list)) = self.open.get_mut(list) {
            segment.place = Some(list.len());
            list.push(number);
        }
    }

    fn close(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(number as usize) else {
            return;
        };
        let Some(place) = segment.place.take() else {
            return;
        };
        let size = segment.size;
        let Some((_, list)) = self.open.iter_mut().find(|(s, _)| *s == size) else {
            return;
        };
        list.swap_remove(place);
        if let Some(moved) = list.get(place).copied()
            && let Some(segment) = self.segments.get_mut(moved as usize)
        {
            segment.place = Some(place);
        }
        self.open.retain(|(_, list)| !list.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn only_populated_whole_segments_are_given_out() {
        let mut a = Allocator::new(32, 8);
        assert_eq!(a.take(4), None);
        a.populate(15);
        assert_eq!(a.take(4).map(|t| t.row), Some(0));
        assert_eq!(a.take(4).map(|t| t.row), Some(4));
        assert_eq!(a.take(4), None);
        a.populate(16);
        assert_eq!(a.take(8).map(|t| t.row), Some(8));
    }

    #[test]
    fn a_segment_changes_its_slot_size_only_when_wholly_free_and_says_so() {
        let mut a = Allocator::new(8, 8);
        a.populate(8);
        let first = a.take(4).unwrap();
        assert_eq!(
            first.resized,
            Some((0, 8)),
            "sizes of earlier boots are unknown"
        );
        assert_eq!(a.take(2), None);
        a.give(first.row);
        assert_eq!(a.take(4).unwrap().resized, None, "the same size again");
        a.give(0);
        assert_eq!(a.take(2).unwrap().resized, Some((0, 8)));
    }

    #[test]
    fn a_segment_that_contradicts_itself_is_never_used() {
        let mut a = Allocator::new(16, 8);
        assert!(a.claim(0, 4));
        assert!(!a.claim(3, 4));
        a.settle(|row| row == 0 || row == 3);
        a.populate(16);
        assert_eq!(a.take(4).map(|t| t.row), Some(8));
        assert_eq!(a.take(4).map(|t| t.row), Some(12));
        assert_eq!(a.take(4), None);
        a.give(0);
        a.give(3);
        assert_eq!(a.take(4), None);
    }

    proptest! {
        #[test]
        fn slots_never_overlap_never_cross_segments_and_all_come_back(
            steps in prop::collection::vec((0u32..3, 0usize..64), 1..400)
        ) {
            let mut a = Allocator::new(64, 16);
            a.populate(64);
            let mut held: BTreeMap<u32, u32> = BTreeMap::new();
            for (kind, pick) in steps {
                let size = [1, 3, 8][kind as usize];
                if pick % 3 != 0 {
                    if let Some(t) = a.take(size) {
                        prop_assert_eq!(t.row / 16, (t.row + size - 1) / 16);
                        for (row, rows) in &held {
                            prop_assert!(t.row + size <= *row || row + rows <= t.row);
                        }
                        held.insert(t.row, size);
                    }
                } else if let Some(row) = held.keys().nth(pick % held.len().max(1)).copied() {
                    held.remove(&row);
                    a.give(row);
                }
                let used: u64 = held.values().map(|r| u64::from(*r)).sum();
                prop_assert_eq!(a.used_rows(), used);
            }
            for row in held.into_keys() { a.give(row); }
            for _ in 0..4 { prop_assert!(a.take(16).is_some()); }
        }
    }
}
