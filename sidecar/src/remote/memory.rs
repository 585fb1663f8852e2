//! The sidecar's memory as this process maps it: checked copies out of leased objects and into granted ones.

use super::objects::{Pieces, Run};
use kvcachepool_engine::table::{Geometry, Table};
use kvcachepool_memory::arena::{Arena, MappedTable};
use kvcachepool_protocol::table::{GRANTED, ROW_BYTES};
use parking_lot::RwLock;
use rustix::fd::OwnedFd;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst, fence};

/// The arena of one region, with the rows whose pages this process has mapped.
#[derive(Debug)]
struct Mapped {
    arena: Arena,
    table: MappedTable,
    touched: Vec<AtomicBool>,
}

/// The memory while one connection to the sidecar lives. No copy runs after [`Memory::end`].
#[derive(Debug)]
pub struct Memory {
    /// The lock number of this process, which owns what is granted to it.
    owner: u32,
    mapped: RwLock<Option<Mapped>>,
}

impl Memory {
    pub fn new(arena: Arena, owner: u32) -> Self {
        let touched = (0..arena.geometry.rows).map(|_| AtomicBool::new(false));
        Self {
            owner,
            mapped: RwLock::new(Some(Mapped {
                table: arena.table(),
                touched: touched.collect(),
                arena,
            })),
        }
    }

    /// Ends all copies, and returns the arena. Later copies fail.
    pub fn end(&self) -> Option<Arena> {
        self.mapped.write().take().map(|mapped| mapped.arena)
    }

    /// Copies bytes of an object from `offset` on. False: the memory was taken back, and `into` is undefined.
    pub fn read(&self, pieces: &Pieces, offset: u64, into: &mut [u8]) -> bool {
        let mapped = self.mapped.read();
        let Some(mapped) = &*mapped else {
            return false;
        };
        let range = offset..offset + into.len() as u64;
        let same = |(generation, _, _): (u32, u32, u32), run: &Run| generation == run.generation();
        // Pages behind an arena's new end would be allocated by the copy.
        if !mapped.all(pieces, range.clone(), same) {
            return false;
        }
        let mut rest = into;
        for run in pieces.runs(range.clone()) {
            let Some((part, left)) = std::mem::take(&mut rest).split_at_mut_checked(run.bytes)
            else {
                return false;
            };
            mapped.touch(&run);
            if !mapped.arena.bytes.read(run.at, part) {
                return false;
            }
            rest = left;
        }
        // The bytes are those of the object if no slot was taken back before the copy ended.
        fence(SeqCst);
        rest.is_empty() && mapped.all(pieces, range, same)
    }

    /// Copies bytes of an object to `offset`. False: the object's slots are not granted to this process any more.
    pub fn write(&self, pieces: &Pieces, offset: u64, from: &[u8]) -> bool {
        let mapped = self.mapped.read();
        let Some(mapped) = &*mapped else {
            return false;
        };
        let range = offset..offset + from.len() as u64;
        let granted = |(generation, state, owner): (u32, u32, u32), run: &Run| {
            generation == run.generation() && state == GRANTED && owner == self.owner
        };
        if !pieces.contains(offset, from.len() as u64)
            || !mapped.all(pieces, range.clone(), granted)
        {
            return false;
        }
        let mut rest = from;
        for run in pieces.runs(range) {
            let Some((part, left)) = rest.split_at_checked(run.bytes) else {
                return false;
            };
            mapped.touch(&run);
            if !mapped.arena.bytes.write(run.at, part) {
                return false;
            }
            rest = left;
        }
        fence(SeqCst);
        rest.is_empty()
    }
}

impl Run {
    fn generation(&self) -> u32 {
        self.piece.generation.get()
    }
}

impl Mapped {
    /// Whether a check of (generation, state, owner) holds for every piece of a range.
    fn all(
        &self,
        pieces: &Pieces,
        range: Range<u64>,
        check: impl Fn((u32, u32, u32), &Run) -> bool,
    ) -> bool {
        pieces.runs(range).all(|run| {
            let row = self.table.row(run.piece.slot.get());
            check((row.generation, row.state, row.owner), &run)
        })
    }

    /// Maps the pages of a slot with one call, once: page faults of the copy would cost several times as much.
    fn touch(&self, run: &Run) {
        let first = run.piece.slot.get() as usize;
        let rows = u64::from(run.piece.length.get()).div_ceil(ROW_BYTES);
        let slot = first..first.saturating_add(usize::try_from(rows).unwrap_or(usize::MAX));
        let Some(rows) = self.touched.get(slot) else {
            return;
        };
        if rows.iter().all(|row| row.load(Relaxed)) {
            return;
        }
        let length = rows.len() as u64 * ROW_BYTES;
        // A refusal is harmless: the copy then faults page by page.
        let _ = self.arena.bytes.populate(first as u64 * ROW_BYTES, length);
        rows.iter().for_each(|row| row.store(true, Relaxed));
    }
}

/// Descriptors of an arena, for a HELLO that names it.
pub fn descriptors(arena: &Arena) -> [Arc<OwnedFd>; 2] {
    [arena.arena_fd.clone(), arena.table_fd.clone()]
}

/// Maps what the reply to HELLO passed, and checks that it is the region that the reply names.
pub fn map(region: Option<u64>, arena: OwnedFd, table: OwnedFd) -> Result<Arena, String> {
    let arena = Arena::map(arena, table).map_err(|e| e.to_string())?;
    let Geometry { region: found, .. } = arena.geometry;
    match region {
        Some(named) if named == found => Ok(arena),
        named => Err(format!(
            "the sidecar passed the memory of region {found}, and named region {named:?}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_memory::memfd::Pages;
    use kvcachepool_protocol::refs::{SectionRef, pack};
    use kvcachepool_protocol::table::{COMMITTED, PUBLISHED, Row};

    const OWNER: u32 = 7;

    struct World {
        table: MappedTable,
        memory: Memory,
        pieces: Pieces,
    }

    /// An object of two pieces in slots 0 and 64, in this state.
    fn world(state: u32, owner: u32) -> World {
        let arena = Arena::create(Geometry::new(3, 16 << 20, 16 << 20), 256, Pages::Base).unwrap();
        let mut table = arena.table();
        for slot in [0, 64] {
            let row = Row {
                owner,
                ..Row::default()
            };
            table.set_fields(slot, &row);
            table.set_generation(slot, 5);
            table.set_state(slot, state);
        }
        let refs = [
            SectionRef::new(0, 5, 4 << 20, 0),
            SectionRef::new(64, 5, 10, 1),
        ];
        World {
            table,
            memory: Memory::new(arena, OWNER),
            pieces: Pieces::of_refs(&pack(&refs), 1).unwrap().remove(0),
        }
    }

    #[test]
    fn what_is_written_is_read_across_pieces() {
        let mut world = world(GRANTED, OWNER);
        let at = (4 << 20) - 3;
        assert!(world.memory.write(&world.pieces, at, b"abcdef"));
        world.table.set_state(0, PUBLISHED);
        let mut read = [0; 6];
        assert!(world.memory.read(&world.pieces, at, &mut read));
        assert_eq!(&read, b"abcdef");
        assert!(!world.memory.read(&world.pieces, at, &mut [0; 14]));
        assert!(!world.memory.write(&world.pieces, at, &[0; 14]));
    }

    #[test]
    fn a_slot_that_was_taken_back_is_neither_read_nor_written() {
        let mut world = world(GRANTED, OWNER);
        world.table.set_generation(64, 6);
        assert!(!world.memory.read(&world.pieces, 4 << 20, &mut [0; 4]));
        assert!(!world.memory.write(&world.pieces, 4 << 20, b"late"));
        assert!(world.memory.write(&world.pieces, 0, b"the other piece"));
    }

    #[test]
    fn only_what_is_granted_to_this_process_is_written() {
        for (state, owner) in [(GRANTED, OWNER + 1), (COMMITTED, OWNER), (PUBLISHED, OWNER)] {
            let world = world(state, owner);
            assert!(
                !world.memory.write(&world.pieces, 0, b"no"),
                "{state} {owner}"
            );
        }
    }

    #[test]
    fn nothing_is_copied_after_the_end() {
        let world = world(GRANTED, OWNER);
        assert!(world.memory.end().is_some());
        assert!(!world.memory.write(&world.pieces, 0, b"no"));
        assert!(!world.memory.read(&world.pieces, 0, &mut [0; 1]));
        assert!(world.memory.end().is_none());
    }
}
