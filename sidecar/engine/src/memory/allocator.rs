//! Allocation of rows. A segment takes a slot size at first use, and changes it only when it is completely free.
//!
//! A worker page-locks the segments that contain its slots. The slots of one section, which one rank writes and reads, therefore get
//! segments of their own while few rows of partly used segments are free. Free slots of one size cannot serve another size.

use std::collections::BTreeMap;

/// Size of a segment without a slot size.
const NO_SIZE: u32 = 0;

/// In place of a section: the segment holds slots of several sections.
const SHARED: u32 = u32::MAX;

/// A section gets a segment of its own while the free slots of partly used segments take at most this part of the arena.
const FREE_PART_MAX: u64 = 8;

#[derive(Debug, Clone, Default)]
struct Segment {
    /// Rows of a slot; [`NO_SIZE`] while completely free.
    size: u32,
    /// The only section in the segment, or [`SHARED`].
    section: u32,
    /// The previous size. Readers may still hold references to such slots.
    size_before: u32,
    used: u32,
    free: Vec<u32>,
    /// Position in the `open` list of its size and section.
    place: Option<usize>,
    /// The rows were inconsistent at a boot: the segment is never used again.
    broken: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    pub row: u32,
    /// Rows of the segment if its slot size may have changed. The generations of all these rows must be raised before anything else is
    /// written.
    pub resized: Option<(u32, u32)>,
}

/// Free slots of an arena.
#[derive(Debug)]
pub struct Allocator {
    segment_rows: u32,
    segments: Vec<Segment>,
    /// Populated segments without a size.
    empty: Vec<u32>,
    /// Segments with a free slot, by slot size and section.
    open: BTreeMap<(u32, u32), Vec<u32>>,
    /// Segments whose pages are populated.
    populated: u32,
    /// Segments in which slots may be allocated.
    allowed: u32,
    used_rows: u64,
    /// Rows of free slots in segments that have a size.
    free_rows: u64,
}

impl Allocator {
    /// Creates an allocator over `rows` rows, none of which is usable yet.
    pub fn new(rows: u32, segment_rows: u32) -> Self {
        let segment_rows = segment_rows.max(1);
        let mut this = Self {
            segment_rows,
            segments: Vec::new(),
            empty: Vec::new(),
            open: BTreeMap::new(),
            populated: 0,
            allowed: 0,
            used_rows: 0,
            free_rows: 0,
        };
        this.allow(rows);
        this
    }

    pub fn used_rows(&self) -> u64 {
        self.used_rows
    }

    pub fn segment_rows(&self) -> u32 {
        self.segment_rows
    }

    /// At a boot: marks the slot at `row` as used by a section. Returns false if it contradicts another slot of the segment; then the
    /// segment is never used again, but the slot counts as allocated.
    pub fn claim(&mut self, row: u32, slot_rows: u32, section: u32) -> bool {
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
        segment.section = match segment.size {
            NO_SIZE => section,
            _ if segment.section == section => section,
            _ => SHARED,
        };
        segment.size = slot_rows;
        self.used_rows += u64::from(slot_rows);
        true
    }

    /// At a boot, after every `claim`: frees all rows except those that begin a used slot according to `taken`.
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
            let free: Vec<u32> = (0..self.segment_rows / size)
                .rev()
                .map(|i| first + i * size)
                .filter(|row| !taken(*row))
                .collect();
            self.free_rows += free.len() as u64 * u64::from(size);
            self.segments[number].free = free;
        }
    }

    /// The first `rows` rows are populated: the complete segments among them become usable.
    pub fn populate(&mut self, rows: u32) {
        let whole = (rows / self.segment_rows).min(self.segments.len() as u32);
        let before = self.usable();
        self.populated = self.populated.max(whole);
        self.make_usable(before);
    }

    /// Allocates slots only in segments among the first `rows` rows from now on. Slots behind them stay until they are given back.
    pub fn allow(&mut self, rows: u32) {
        let before = self.usable();
        if rows / self.segment_rows == self.allowed {
            return;
        }
        self.allowed = rows / self.segment_rows;
        let segments = self.segments.len().max(self.allowed as usize);
        self.segments.resize_with(segments, Segment::default);
        let after = self.usable();
        self.empty.retain(|number| *number < after);
        for number in after..before {
            self.close(number);
        }
        self.make_usable(before);
    }

    /// The pages behind the first `rows` rows are gone. No slot is in use there.
    pub fn cut(&mut self, rows: u32) {
        self.allow(rows.min(self.allowed * self.segment_rows));
        self.populated = self.populated.min(rows / self.segment_rows);
    }

    /// Slot size of the segment that starts at this row; `None` if no slot of it is in use.
    pub fn in_use(&self, first: u32) -> Option<u32> {
        let segment = self.segments.get((first / self.segment_rows) as usize)?;
        (segment.used > 0).then_some(segment.size.max(1))
    }

    /// Excludes a segment for good.
    pub fn exclude(&mut self, row: u32) {
        if let Some(segment) = self.segments.get_mut((row / self.segment_rows) as usize) {
            segment.broken = true;
        }
    }

    /// Number of segments, from the first, in which slots can be allocated.
    fn usable(&self) -> u32 {
        self.populated.min(self.allowed)
    }

    /// Offers the segments that became usable after the first `before`.
    fn make_usable(&mut self, before: u32) {
        for number in before..self.usable() {
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
        // the lowest segment is allocated first
        self.empty.sort_unstable_by(|a, b| b.cmp(a));
    }

    /// Allocates a slot of exactly `slot_rows` rows for a section. Tries, in order: the section's own segment, an empty one while few slots
    /// are free, a shared one, one of another section, and any empty one.
    pub fn take(&mut self, slot_rows: u32, section: u32) -> Option<Taken> {
        if slot_rows == 0 || slot_rows > self.segment_rows {
            return None;
        }
        let may_begin = self.free_rows * FREE_PART_MAX <= self.rows();
        let own = self.opened(slot_rows, section);
        let (number, resized) = if let Some(number) = own {
            (number, None)
        } else if may_begin && let Some(begun) = self.begin(slot_rows, section) {
            begun
        } else if let Some(number) = self.share(slot_rows) {
            (number, None)
        } else {
            self.begin(slot_rows, section)?
        };
        let segment = self.segments.get_mut(number as usize)?;
        let row = segment.free.pop()?;
        segment.used += 1;
        self.used_rows += u64::from(slot_rows);
        self.free_rows -= u64::from(slot_rows);
        if segment.free.is_empty() {
            self.close(number);
        }
        Some(Taken { row, resized })
    }

    /// A segment of this size and section with a free slot.
    fn opened(&self, slot_rows: u32, section: u32) -> Option<u32> {
        self.open.get(&(slot_rows, section))?.last().copied()
    }

    /// A segment of this size with a free slot. Its sections share it from now on.
    fn share(&mut self, slot_rows: u32) -> Option<u32> {
        if let Some(shared) = self.opened(slot_rows, SHARED) {
            return Some(shared);
        }
        let of_size = (slot_rows, 0)..=(slot_rows, SHARED);
        let number = self.open.range(of_size).next()?.1.last().copied()?;
        self.close(number);
        self.segments.get_mut(number as usize)?.section = SHARED;
        self.open_up(number);
        Some(number)
    }

    fn rows(&self) -> u64 {
        u64::from(self.allowed) * u64::from(self.segment_rows)
    }

    /// Gives an empty segment a slot size and a section. Returns its number, and its rows if the size changed.
    fn begin(&mut self, slot_rows: u32, section: u32) -> Option<(u32, Option<(u32, u32)>)> {
        let number = self.empty.pop()?;
        let first = number * self.segment_rows;
        let segment = self.segments.get_mut(number as usize)?;
        let other = segment.size_before != slot_rows;
        segment.size = slot_rows;
        segment.section = section;
        segment.free = (0..self.segment_rows / slot_rows)
            .rev()
            .map(|i| first + i * slot_rows)
            .collect();
        self.free_rows += segment.free.len() as u64 * u64::from(slot_rows);
        self.open_up(number);
        Some((number, other.then_some((first, self.segment_rows))))
    }

    /// Frees a slot. A segment that becomes completely free loses its slot size.
    pub fn give(&mut self, row: u32) {
        let number = row / self.segment_rows;
        let usable = number < self.usable();
        let Some(segment) = self.segments.get_mut(number as usize) else {
            return;
        };
        segment.used = segment.used.saturating_sub(1);
        if segment.broken {
            return;
        }
        let (size, free) = (u64::from(segment.size), segment.free.len() as u64);
        self.used_rows = self.used_rows.saturating_sub(size);
        if segment.used > 0 {
            self.free_rows += size;
            segment.free.push(row);
            if usable && segment.place.is_none() {
                self.open_up(number);
            }
            return;
        }
        self.free_rows = self.free_rows.saturating_sub(free * size);
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

    /// Segments of other slot sizes, least used first, to empty when no slot of `slot_rows` can be allocated otherwise. At most `count`, as
    /// (first row, slot rows).
    pub fn reclaimable(&self, slot_rows: u32, count: usize) -> Vec<(u32, u32)> {
        let mut list: Vec<_> = (0u32..)
            .zip(&self.segments)
            .take(self.usable() as usize)
            .filter(|(_, s)| s.size != NO_SIZE && s.size != slot_rows && !s.broken)
            .map(|(number, s)| (s.used * s.size, number * self.segment_rows, s.size))
            .collect();
        list.sort_unstable();
        list.truncate(count);
        list.into_iter()
            .map(|(_, first, size)| (first, size))
            .collect()
    }

    /// Free slots in segments that have a size.
    pub fn free_slots(&self) -> u64 {
        self.segments.iter().map(|s| s.free.len() as u64).sum()
    }

    fn open_up(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(number as usize) else {
            return;
        };
        let list = self
            .open
            .entry((segment.size, segment.section))
            .or_default();
        segment.place = Some(list.len());
        list.push(number);
    }

    fn close(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(number as usize) else {
            return;
        };
        let Some(place) = segment.place.take() else {
            return;
        };
        let key = (segment.size, segment.section);
        let Some(list) = self.open.get_mut(&key) else {
            return;
        };
        list.swap_remove(place);
        if let Some(moved) = list.get(place).copied()
            && let Some(segment) = self.segments.get_mut(moved as usize)
        {
            segment.place = Some(place);
        }
        if list.is_empty() {
            self.open.remove(&key);
        }
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
        assert_eq!(a.take(4, 0), None);
        a.populate(15);
        assert_eq!(a.take(4, 0).map(|t| t.row), Some(0));
        assert_eq!(a.take(4, 0).map(|t| t.row), Some(4));
        assert_eq!(a.take(4, 0), None);
        a.populate(16);
        assert_eq!(a.take(8, 0).map(|t| t.row), Some(8));
    }

    #[test]
    fn a_segment_changes_its_slot_size_only_when_wholly_free_and_says_so() {
        let mut a = Allocator::new(8, 8);
        a.populate(8);
        let first = a.take(4, 0).unwrap();
        assert_eq!(
            first.resized,
            Some((0, 8)),
            "sizes of earlier boots are unknown"
        );
        assert_eq!(a.take(2, 0), None);
        a.give(first.row);
        assert_eq!(a.take(4, 0).unwrap().resized, None, "the same size again");
        a.give(0);
        assert_eq!(a.take(2, 0).unwrap().resized, Some((0, 8)));
    }

    #[test]
    fn a_segment_that_contradicts_itself_is_never_used() {
        let mut a = Allocator::new(16, 8);
        assert!(a.claim(0, 4, 0));
        assert!(!a.claim(3, 4, 0));
        a.settle(|row| row == 0 || row == 3);
        a.populate(16);
        assert_eq!(a.take(4, 0).map(|t| t.row), Some(8));
        assert_eq!(a.take(4, 0).map(|t| t.row), Some(12));
        assert_eq!(a.take(4, 0), None);
        a.give(0);
        a.give(3);
        assert_eq!(a.take(4, 0), None);
    }

    /// Takes slots of 4 rows for whole chunks of these sections until one is refused. Returns the sections in each segment of 16 rows.
    fn filled(a: &mut Allocator, sections: u32) -> BTreeMap<u32, Vec<u32>> {
        let mut held: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for section in (0..sections).cycle() {
            let Some(taken) = a.take(4, section) else {
                break;
            };
            held.entry(taken.row / 16).or_default().push(section);
        }
        held
    }

    fn one_section(held: &[u32]) -> bool {
        held.iter().all(|section| *section == held[0])
    }

    /// True if four segments of 16 rows have room for a slot of this size: an empty segment, or one of this size that is not full.
    fn held_room(held: &BTreeMap<u32, u32>, size: u32) -> bool {
        (0..4).any(|number| {
            let inside: Vec<u32> = held
                .range(number * 16..(number + 1) * 16)
                .map(|(_, rows)| *rows)
                .collect();
            inside.iter().all(|rows| *rows == size) && (inside.len() as u32) < 16 / size
        })
    }

    #[test]
    fn sections_have_segments_of_their_own_and_the_whole_arena_is_used() {
        for sections in [1, 2, 4, 8] {
            let mut a = Allocator::new(64 * 16, 16);
            a.populate(64 * 16);
            let held = filled(&mut a, sections);
            assert_eq!(held.values().map(Vec::len).sum::<usize>(), 64 * 4);
            assert!(held.values().all(|held| one_section(held)), "{held:?}");
        }
    }

    #[test]
    fn a_part_that_is_given_up_does_not_open_what_is_to_follow() {
        let mut a = Allocator::new(32, 8);
        a.populate(32);
        let rows: Vec<u32> = (0..4).map(|_| a.take(8, 0).unwrap().row).collect();
        assert_eq!(rows, [0, 8, 16, 24]);
        a.allow(8);
        a.give(24);
        a.give(16);
        a.cut(24);
        assert_eq!((a.in_use(8), a.in_use(16)), (Some(8), None));
        assert_eq!(a.take(8, 0), None);
        a.cut(16);
        a.allow(32);
        assert_eq!(a.take(8, 0), None, "no pages");
        a.populate(32);
        assert_eq!(a.take(8, 0).map(|t| t.row), Some(16));
    }

    #[test]
    fn many_sections_share_segments_rather_than_begin_the_whole_arena() {
        let mut a = Allocator::new(64 * 16, 16);
        a.populate(64 * 16);
        for section in 0..64 {
            a.take(4, section).unwrap();
        }
        let empty = (0..).take_while(|_| a.take(16, 99).is_some()).count();
        // Sixteen hold the slots, and free ones take an eighth of the arena.
        assert_eq!(empty, 64 - 16 - 64 / 8);
        let mut a = Allocator::new(64 * 16, 16);
        a.populate(64 * 16);
        let held = filled(&mut a, 128);
        assert_eq!(held.values().map(Vec::len).sum::<usize>(), 64 * 4);
    }

    #[test]
    fn a_full_arena_keeps_sections_apart_while_chunks_come_and_go() {
        let mut a = Allocator::new(64 * 16, 16);
        a.populate(64 * 16);
        let mut chunks: Vec<Vec<u32>> = Vec::new();
        for number in 0..1000 {
            if a.free_slots() == 0 && a.used_rows() == 64 * 16 {
                for row in chunks.swap_remove(number * 7 % chunks.len()) {
                    a.give(row);
                }
            }
            chunks.push(
                (0..8)
                    .map(|section| a.take(4, section).unwrap().row)
                    .collect(),
            );
        }
        let mut held: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for chunk in &chunks {
            for (section, row) in (0..).zip(chunk) {
                held.entry(row / 16).or_default().push(section);
            }
        }
        assert!(held.values().all(|held| one_section(held)), "{held:?}");
    }

    #[test]
    fn a_boot_finds_whose_segments_are_whose() {
        let mut a = Allocator::new(64, 16);
        assert!(a.claim(0, 4, 1) && a.claim(16, 4, 2) && a.claim(32, 4, 1) && a.claim(36, 4, 2));
        a.settle(|row| [0, 16, 32, 36].contains(&row));
        a.populate(64);
        let of = |section, a: &mut Allocator| a.take(4, section).map(|taken| taken.row / 16);
        assert_eq!(
            [2, 1, 2, 1].map(|section| of(section, &mut a)),
            [1, 0, 1, 0].map(Some)
        );
        assert_eq!(
            of(3, &mut a),
            Some(2),
            "the shared one, as the others are begun"
        );
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
                    let room = held_room(&held, size);
                    let taken = a.take(size, (pick % 5) as u32);
                    prop_assert!(taken.is_some() || !room, "a slot is refused though one is free");
                    if let Some(t) = taken {
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
                let free: u64 = a.segments.iter().map(|s| s.free.len() as u64 * u64::from(s.size)).sum();
                prop_assert_eq!(a.free_rows, free);
            }
            for row in held.into_keys() { a.give(row); }
            for _ in 0..4 { prop_assert!(a.take(16, 0).is_some()); }
        }
    }
}
