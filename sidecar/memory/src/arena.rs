//! An arena with its slot table: two sealed memfds, their mappings, and the table as the engine uses it.

use super::mapping::Mapping;
use super::memfd::{MemfdError, Pages, SEALS, sealed};
use kvcachepool_engine::table::{Geometry, ROW_BYTES, Table, UnusableTable};
use kvcachepool_protocol::table::{ChunkRecord, HEADER_BYTES, Header, Row};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fcntl_get_seals, fstat, seek};
use rustix::io::Errno;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

#[derive(Debug, Clone)]
pub struct Arena {
    pub geometry: Geometry,
    pub arena_fd: Arc<OwnedFd>,
    pub table_fd: Arc<OwnedFd>,
    pub bytes: Arc<Mapping>,
    pub table: Arc<Mapping>,
    /// Bytes in use, from the start; the rest of the file has no pages. As this process knows it: others can write to the header.
    pub capacity: Arc<AtomicU64>,
}

/// An arena could not be created or adopted.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    #[error(transparent)]
    Memfd(#[from] MemfdError),
    #[error("mapping {what} failed: {source}")]
    Map { what: &'static str, source: Errno },
    /// A returned file can still be resized or sealed further, or is not a memfd.
    #[error("{0} is not a memfd sealed against shrinking, growing and further seals")]
    Unsealed(&'static str),
    /// The table has another format.
    #[error(transparent)]
    Unusable(#[from] UnusableTable),
}

impl Arena {
    /// Creates both memfds for an arena of this capacity, and writes the header.
    pub fn create(
        geometry: Geometry,
        capacity_rows: u32,
        pages: Pages,
    ) -> Result<Self, ArenaError> {
        let table_fd = sealed("kvcachepool-table", geometry.table_bytes(), Pages::Base)?;
        let table = map("slot table", &table_fd, geometry.table_bytes())?;
        let (arena_fd, bytes) = arena_of(geometry.arena_bytes, pages)?;
        let header = Header {
            capacity_rows,
            ..geometry.header()
        };
        table.write(0, header.as_bytes());
        Ok(Self {
            geometry,
            arena_fd: Arc::new(arena_fd),
            table_fd: Arc::new(table_fd),
            bytes: Arc::new(bytes),
            table: Arc::new(table),
            capacity: Arc::new(AtomicU64::new(u64::from(capacity_rows) * ROW_BYTES)),
        })
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.capacity.load(Relaxed)
    }

    /// True if the file has pages from this offset on.
    pub fn has_pages_from(&self, offset: u64) -> bool {
        seek(&self.arena_fd, SeekFrom::Data(offset)) != Err(Errno::NXIO)
    }

    /// Frees the pages from this offset to the end of the file, and what the mapping of them costs.
    pub fn release_from(&self, offset: u64) -> Result<(), Errno> {
        let bytes = self.geometry.arena_bytes.saturating_sub(offset);
        if bytes == 0 {
            return Ok(());
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.arena_fd, hole, offset, bytes)?;
        self.bytes.renew(self.arena_fd.as_fd(), offset)
    }

    /// The end of an adopted arena is its header's word, and every connector can write to the header. Beyond what this process may use, the
    /// end is that of the allocated pages.
    pub fn distrust_capacity(&self) -> Result<(), Errno> {
        let stat = fstat(&self.arena_fd)?;
        let allocated = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        let rows = self.geometry.rows_of(allocated.min(self.capacity_bytes()));
        self.table().set_capacity_rows(rows);
        Ok(())
    }

    /// Maps both files of another process, after checking seals, sizes and header. Changes nothing.
    pub fn map(arena_fd: OwnedFd, table_fd: OwnedFd) -> Result<Self, ArenaError> {
        Ok(Self::map_checked(arena_fd, table_fd)?.0)
    }

    /// Adopts both files as the engine: as [`Arena::map`], and corrects the number of populated rows.
    pub fn adopt(arena_fd: OwnedFd, table_fd: OwnedFd) -> Result<Self, ArenaError> {
        let (arena, populated) = Self::map_checked(arena_fd, table_fd)?;
        // Every connector can write to the header. Rows without allocated pages are unpopulated, whatever the header says.
        if !populated {
            arena.table().set_populated_rows(0);
        }
        Ok(arena)
    }

    /// The arena, and whether all rows that its header calls populated have pages.
    fn map_checked(arena_fd: OwnedFd, table_fd: OwnedFd) -> Result<(Self, bool), ArenaError> {
        let (arena_bytes, allocated_bytes) = sealed_size("arena", &arena_fd)?;
        let (table_bytes, _) = sealed_size("slot table", &table_fd)?;
        if table_bytes < HEADER_BYTES {
            return Err(UnusableTable::NoTable.into());
        }
        let table = map("slot table", &table_fd, table_bytes)?;
        let mut raw = [0u8; size_of::<Header>()];
        table.read(0, &mut raw);
        let header = Header::read_from_bytes(&raw).map_err(|_| UnusableTable::NoTable)?;
        let geometry = Geometry::of_header(&header, arena_bytes, table_bytes)?;
        let bytes = map("arena", &arena_fd, arena_bytes)?;
        let arena = Self {
            geometry,
            arena_fd: Arc::new(arena_fd),
            table_fd: Arc::new(table_fd),
            bytes: Arc::new(bytes),
            table: Arc::new(table),
            capacity: Arc::new(AtomicU64::new(0)),
        };
        let rows = match header.capacity_rows {
            // written by a sidecar whose arenas have one size
            0 => geometry.rows,
            rows => rows,
        };
        let capacity = u64::from(rows) * ROW_BYTES;
        arena.capacity.store(capacity, Relaxed);
        let populated = u64::from(header.populated_rows) * ROW_BYTES <= allocated_bytes;
        Ok((arena, populated))
    }

    /// The slot table for the engine. Create only one at a time, because it is the only writer.
    pub fn table(&self) -> MappedTable {
        MappedTable {
            geometry: self.geometry,
            map: self.table.clone(),
            capacity: self.capacity.clone(),
        }
    }
}

fn arena_of(length: u64, pages: Pages) -> Result<(OwnedFd, Mapping), ArenaError> {
    // hugetlb files consist of whole pages, but the geometry's segments need not.
    let size = length.next_multiple_of(pages.bytes());
    if size != length {
        return Err(ArenaError::Map {
            what: "arena (its size is not a multiple of the huge page)",
            source: Errno::INVAL,
        });
    }
    let fd = sealed("kvcachepool-arena", size, pages)?;
    // Mapping a hugetlb file reserves its pages, and fails here if the node has too few.
    let bytes = map("arena", &fd, length)?;
    Ok((fd, bytes))
}

fn map(what: &'static str, fd: &OwnedFd, length: u64) -> Result<Mapping, ArenaError> {
    Mapping::new(fd.as_fd(), length).map_err(|source| ArenaError::Map { what, source })
}

/// Size of a fully sealed file, and its bytes with allocated pages.
fn sealed_size(what: &'static str, fd: &OwnedFd) -> Result<(u64, u64), ArenaError> {
    let seals = fcntl_get_seals(fd).map_err(|_| ArenaError::Unsealed(what))?;
    if !seals.contains(SEALS) {
        return Err(ArenaError::Unsealed(what));
    }
    let stat = fstat(fd).map_err(|source| ArenaError::Map { what, source })?;
    let [bytes, blocks] = [stat.st_size, stat.st_blocks].map(|n| u64::try_from(n).unwrap_or(0));
    Ok((bytes, blocks * 512))
}

/// Rows and chunk records in shared memory. It has a single writer; connectors read states and generations concurrently.
#[derive(Debug)]
pub struct MappedTable {
    geometry: Geometry,
    map: Arc<Mapping>,
    /// [`Arena::capacity`].
    capacity: Arc<AtomicU64>,
}

const POPULATED: u64 = offset_of!(Header, populated_rows) as u64;
const CAPACITY: u64 = offset_of!(Header, capacity_rows) as u64;
const SHRINKS: u64 = offset_of!(Header, shrinks) as u64;
const LOWEST: u64 = offset_of!(Header, lowest_rows) as u64;
const STATE: u64 = offset_of!(Row, state) as u64;
const GENERATION: u64 = offset_of!(Row, generation) as u64;
const DIGEST: u64 = offset_of!(Row, digest) as u64;
/// First byte of a row after state and generation.
const FIELDS: usize = offset_of!(Row, owner);
const NEEDED: u64 = offset_of!(ChunkRecord, needed) as u64;

impl MappedTable {
    fn row_at(&self, row: u32) -> Option<u64> {
        (row < self.geometry.rows).then(|| HEADER_BYTES + u64::from(row) * size_of::<Row>() as u64)
    }

    fn chunk_at(&self, chunk: u32) -> Option<u64> {
        (chunk < self.geometry.chunks).then(|| {
            self.geometry.chunks_offset() + u64::from(chunk) * size_of::<ChunkRecord>() as u64
        })
    }

    /// Stores a word with release order: a reader with acquire order sees everything written before.
    fn release(&self, offset: u64, value: u32) {
        if let Some(word) = self.map.word(offset) {
            word.store(value, Release);
        }
    }

    fn acquire(&self, offset: u64) -> u32 {
        self.map.word(offset).map_or(0, |word| word.load(Acquire))
    }
}

impl Table for MappedTable {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn populated_rows(&self) -> u32 {
        self.acquire(POPULATED)
    }

    fn set_populated_rows(&mut self, rows: u32) {
        self.release(POPULATED, rows);
    }

    fn capacity_rows(&self) -> u32 {
        u32::try_from(self.capacity.load(Relaxed) / ROW_BYTES).unwrap_or(self.geometry.rows)
    }

    fn set_capacity_rows(&mut self, rows: u32) {
        self.capacity.store(u64::from(rows) * ROW_BYTES, Relaxed);
        self.release(CAPACITY, rows);
    }

    fn count_shrink(&mut self, rows: u32) {
        self.release(LOWEST, rows.min(self.acquire(LOWEST)));
        self.release(SHRINKS, self.acquire(SHRINKS).wrapping_add(1));
    }

    fn row(&self, row: u32) -> Row {
        let mut value = Row::new_zeroed();
        if let Some(at) = self.row_at(row) {
            // The state is read first, with acquire order: the other fields are at least as new.
            let state = self.acquire(at + STATE);
            self.map.read(at, value.as_mut_bytes());
            value.state = state;
        }
        value
    }

    fn set_state(&mut self, row: u32, state: u32) {
        if let Some(at) = self.row_at(row) {
            self.release(at + STATE, state);
            // Readers outside compare generations after their copy: FREE must be visible before any later store to the slot.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
    }

    fn set_generation(&mut self, row: u32, generation: u32) {
        if let Some(at) = self.row_at(row) {
            self.release(at + GENERATION, generation);
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
    }

    fn set_fields(&mut self, row: u32, fields: &Row) {
        if let Some(at) = self.row_at(row) {
            self.map
                .write(at + FIELDS as u64, &fields.as_bytes()[FIELDS..]);
        }
    }

    fn set_digest(&mut self, row: u32, digest: [u8; 16]) {
        if let Some(at) = self.row_at(row) {
            self.map.write(at + DIGEST, &digest);
        }
    }

    fn chunk(&self, chunk: u32) -> ChunkRecord {
        let mut value = ChunkRecord::new_zeroed();
        if let Some(at) = self.chunk_at(chunk) {
            let state = self.acquire(at);
            self.map.read(at, value.as_mut_bytes());
            value.state = state;
        }
        value
    }

    fn set_chunk(&mut self, chunk: u32, record: &ChunkRecord) {
        if let Some(at) = self.chunk_at(chunk) {
            self.release(at, 0);
            std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
            self.map.write(at + 4, &record.as_bytes()[4..]);
            self.release(at, 1);
        }
    }

    fn set_needed(&mut self, chunk: u32, needed: [u64; 2]) {
        if let Some(at) = self.chunk_at(chunk) {
            for (i, half) in needed.iter().enumerate() {
                if let Some(word) = self.map.word64(at + NEEDED + 8 * i as u64) {
                    word.store(*half, Relaxed);
                }
            }
        }
    }

    fn clear_chunk(&mut self, chunk: u32) {
        if let Some(at) = self.chunk_at(chunk) {
            self.release(at, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::SealFlags;

    fn small() -> Arena {
        let geometry = Geometry::new(7, 8 << 20, 1 << 20);
        Arena::create(geometry, geometry.rows, Pages::Base).unwrap()
    }

    #[test]
    fn rows_and_records_come_back_as_written() {
        let arena = small();
        let mut table = arena.table();
        let fields = Row {
            owner: 3,
            slot_rows: 2,
            chunk: 5,
            section: 1,
            length: 70_000,
            key_prefix: [9; 8],
            ..Row::default()
        };
        table.set_fields(4, &fields);
        table.set_generation(4, 11);
        table.set_digest(4, [6; 16]);
        table.set_state(4, 3);
        let row = table.row(4);
        assert_eq!((row.state, row.generation, row.owner), (3, 11, 3));
        assert_eq!((row.length, row.digest), (70_000, [6; 16]));

        let mut record = ChunkRecord::new_zeroed();
        record.key = [1; 32];
        record.tokens = 256;
        table.set_chunk(2, &record);
        table.set_needed(2, [1, 2]);
        assert_eq!(table.chunk(2).state, 1);
        assert_eq!(table.chunk(2).needed, [1, 2]);
        table.clear_chunk(2);
        assert_eq!(table.chunk(2).state, 0);
    }

    #[test]
    fn an_index_out_of_range_reads_zeros_and_writes_nothing() {
        let arena = small();
        let mut table = arena.table();
        let rows = arena.geometry.rows;
        table.set_state(rows, 3);
        table.set_chunk(u32::MAX, &ChunkRecord::new_zeroed());
        assert_eq!(table.row(rows).state, 0);
        assert_eq!(table.chunk(0).state, 0);
    }

    #[test]
    fn what_one_boot_made_another_adopts_with_its_content() {
        let arena = small();
        arena.table().set_state(1, 3);
        arena.bytes.write(1 << 16, b"kv");
        let again = Arena::adopt(
            arena.arena_fd.try_clone().unwrap(),
            arena.table_fd.try_clone().unwrap(),
        )
        .unwrap();
        assert_eq!(again.geometry, arena.geometry);
        assert_eq!(again.table().row(1).state, 3);
        let mut bytes = [0u8; 2];
        assert!(again.bytes.read(1 << 16, &mut bytes));
        assert_eq!(&bytes, b"kv");
    }

    #[test]
    fn what_has_no_pages_is_not_populated_whatever_its_table_says() {
        let arena = small();
        let populated = |bytes| {
            arena.bytes.populate(0, bytes).unwrap();
            arena.table().set_populated_rows(arena.geometry.rows);
            let fds = [&arena.arena_fd, &arena.table_fd].map(|fd| fd.try_clone().unwrap());
            let [arena_fd, table_fd] = fds;
            let again = Arena::adopt(arena_fd, table_fd).unwrap();
            again.table().populated_rows()
        };
        assert_eq!(populated(4 << 20), 0);
        assert_eq!(populated(8 << 20), arena.geometry.rows);
    }

    #[test]
    fn pages_behind_the_end_are_freed_and_others_stay() {
        let arena = small();
        let allocated = || rustix::fs::fstat(&arena.arena_fd).unwrap().st_blocks as u64 * 512;
        assert!(!arena.has_pages_from(0));
        arena.bytes.populate(0, 8 << 20).unwrap();
        arena.bytes.write((4 << 20) - 2, b"kept");
        assert!(arena.has_pages_from(4 << 20));
        arena.release_from(4 << 20).unwrap();
        assert!(!arena.has_pages_from(4 << 20));
        assert!(!arena.has_pages_from(arena.geometry.arena_bytes));
        assert_eq!(allocated(), 4 << 20);
        let mut bytes = [1; 4];
        assert!(arena.bytes.read((4 << 20) - 2, &mut bytes));
        assert_eq!(&bytes, b"ke\0\0");
        // What is written there later reaches the file.
        assert!(arena.bytes.write((8 << 20) - 4, b"more"));
        let [again, table] = [&arena.arena_fd, &arena.table_fd].map(|fd| fd.try_clone().unwrap());
        let again = Arena::map(again, table).unwrap();
        assert!(again.bytes.read((8 << 20) - 4, &mut bytes));
        assert_eq!(&bytes, b"more");
        arena.release_from(8 << 20).unwrap();
    }

    #[test]
    fn an_end_that_a_connector_wrote_is_that_of_the_pages() {
        let arena = small();
        arena.bytes.populate(0, 4 << 20).unwrap();
        arena.distrust_capacity().unwrap();
        assert_eq!(arena.capacity_bytes(), 4 << 20);
        assert_eq!(arena.table().capacity_rows(), 64);
    }

    #[test]
    fn an_arena_is_adopted_with_its_present_end() {
        let arena = small();
        let again = || {
            let [bytes, table] =
                [&arena.arena_fd, &arena.table_fd].map(|fd| fd.try_clone().unwrap());
            Arena::adopt(bytes, table).unwrap()
        };
        let header = |rows| arena.table().release(CAPACITY, rows);
        header(64);
        assert_eq!(again().capacity_bytes(), 4 << 20);
        // A table of a sidecar whose arenas have one size says nothing.
        header(0);
        assert_eq!(again().capacity_bytes(), 8 << 20);
        assert_eq!(again().table().capacity_rows(), arena.geometry.rows);
    }

    #[test]
    fn nobody_can_truncate_what_is_mapped() {
        let arena = small();
        assert_eq!(
            rustix::fs::ftruncate(arena.arena_fd.as_ref(), 0).unwrap_err(),
            Errno::PERM
        );
    }

    #[test]
    fn an_unsealed_or_foreign_file_is_refused_by_name() {
        let arena = small();
        let plain =
            rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, 8 << 20).unwrap();
        let table = arena.table_fd.try_clone().unwrap();
        assert!(matches!(
            Arena::adopt(plain, table),
            Err(ArenaError::Unsealed("arena"))
        ));
        // Others could add a seal that ends all writes.
        let [whole, less] = [SEALS, SealFlags::SHRINK | SealFlags::GROW].map(|seals| {
            let fd = rustix::fs::memfd_create("some", rustix::fs::MemfdFlags::ALLOW_SEALING);
            let fd = fd.unwrap();
            rustix::fs::ftruncate(&fd, 8 << 20).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            fd
        });
        assert!(matches!(
            Arena::adopt(whole, less),
            Err(ArenaError::Unsealed("slot table"))
        ));
        let swapped = Arena::adopt(
            arena.table_fd.try_clone().unwrap(),
            arena.arena_fd.try_clone().unwrap(),
        );
        assert!(matches!(swapped, Err(ArenaError::Unusable(_))));
    }
}
