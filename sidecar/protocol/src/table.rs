//! The slot table: the second sealed memfd. It holds everything that a restarted engine needs to rebuild its index.
//!
//! ```text
//! 0                      Header (4096 bytes)
//! header.rows_offset     rows    x Row   (64 bytes), one per 64 KiB of arena; a larger slot is named by its first row
//! header.chunks_offset   chunks  x ChunkRecord (1024 bytes)
//! ```
//! Only the engine process writes. Connectors map the table read-only and read only `state` and `generation`. Rules: a row becomes FREE
//! before any of its other fields change; its new state word is written last, with release order; the generation is raised **before** a
//! slot is reused; a chunk record is complete before a row refers to it.

use crate::key::{EngineHash, KeyKind, ModelId, NamespaceId, chunk_key};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First bytes of the table.
pub const MAGIC: [u8; 8] = *b"KVCPSLOT";
/// Version of this format. The sidecar answers `unmap` to a process that maps another version.
pub const VERSION: u32 = 1;
/// Arena bytes per row.
pub const ROW_BYTES: u64 = 64 << 10;
pub const HEADER_BYTES: u64 = 4096;
/// Maximum engine block hashes of a chunk record. Longer lists are not kept.
pub const MAX_BLOCK_HASHES: usize = 24;
/// `Row::chunk` of a row without a chunk record.
pub const NO_CHUNK: u32 = u32::MAX;

/// The slot is unused.
pub const FREE: u32 = 0;
/// `owner` may write (0: the engine is fetching from a tier).
pub const GRANTED: u32 = 1;
/// The writer has finished, the digest is not computed yet.
pub const COMMITTED: u32 = 2;
/// Readable. The bytes never change under this generation.
pub const PUBLISHED: u32 = 3;

/// First 128 bytes of the table (native little-endian; both sides run on one machine).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of arena per row: [`ROW_BYTES`].
    pub row_bytes: u32,
    /// Region number of this arena and table.
    pub region: u64,
    pub arena_bytes: u64,
    /// Number of rows.
    pub rows: u32,
    /// Number of chunk records.
    pub chunks: u32,
    /// Bytes of a segment. Slots never cross the end of a segment.
    pub segment_bytes: u64,
    /// Offset of the first row in the table.
    pub rows_offset: u64,
    /// Offset of the first chunk record.
    pub chunks_offset: u64,
    /// Rows whose arena pages are populated, counted from 0.
    pub populated_rows: u32,
    /// Rows that may hold slots, counted from 0: the present size of the arena. The file is as long as the arena may ever become.
    pub capacity_rows: u32,
    /// Number of times that pages at the arena's end were released. A process drops its page locks from `lowest_rows` on when it changes: a
    /// page that comes back at the same place is another one.
    pub shrinks: u32,
    /// The fewest rows that kept their pages in a release; written before `shrinks`.
    pub lowest_rows: u32,
    /// Always zero.
    pub reserved: [u32; 12],
}

/// One row: 64 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Row {
    /// [`FREE`], [`GRANTED`], [`COMMITTED`] or [`PUBLISHED`]; written last.
    pub state: u32,
    /// Raised before every reuse of the slot.
    pub generation: u32,
    /// Lock number of the writer; 0 = the engine.
    pub owner: u32,
    pub slot_rows: u32,
    /// Index of the chunk record; [`NO_CHUNK`] = none.
    pub chunk: u32,
    /// Section index in the domain's order.
    pub section: u32,
    /// Stored bytes of the section.
    pub length: u64,
    /// xxh3-128 of the stored bytes, little-endian; valid when PUBLISHED.
    pub digest: [u8; 16],
    /// First 8 bytes of the chunk key. Binds the row to its record.
    pub key_prefix: [u8; 8],
    /// [`crate::key::KeyKind`] of the chunk. Unlike the record it is kept while the slot is GRANTED.
    pub kind: u8,
    /// Always zero.
    pub reserved: [u8; 7],
}

/// One chunk: 1024 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ChunkRecord {
    /// 0 = unused, 1 = used; written last.
    pub state: u32,
    /// [`crate::key::KeyKind`].
    pub kind: u8,
    /// 0 = exact.
    pub fidelity: u8,
    /// Number of used entries of `block_hashes`.
    pub block_hash_count: u16,
    pub key: [u8; 32],
    pub model: [u8; 32],
    pub layout: [u8; 32],
    pub namespace: [u8; 32],
    /// Chunk key of the parent; all zero for the first chunk.
    pub parent: [u8; 32],
    /// Engine hash of the chunk's last block.
    pub last_hash: [u8; 32],
    /// Position of the first token.
    pub first_token: u32,
    pub tokens: u32,
    /// Bitmap of the sections that the chunk needs (at most 128).
    pub needed: [u64; 2],
    /// Expiry, Unix seconds; 0 = never.
    pub expires_unix_s: u64,
    /// Engine hashes of the chunk's blocks.
    pub block_hashes: [[u8; 32]; MAX_BLOCK_HASHES],
    /// Always zero.
    pub reserved: [u8; 24],
}

const _: () = assert!(size_of::<Row>() == 64);
const _: () = assert!(size_of::<ChunkRecord>() == 1024);
const _: () = assert!(size_of::<Header>() == 128);

/// Why a table, a row or a chunk record cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadTable {
    /// The file has another magic number.
    #[error("the file is not a slot table: wrong magic number")]
    NotATable,
    /// Written by another version.
    #[error("slot table of version {0}; this build supports version {VERSION}")]
    OtherVersion(u32),
    /// Rows have another size.
    #[error("{0} bytes of arena per row; this build uses {ROW_BYTES}")]
    RowBytes(u32),
    /// Region 0 is never assigned.
    #[error("the table has region 0, which is never assigned")]
    NoRegion,
    /// The arena's length differs from the header's, or from that of its rows.
    #[error(
        "the table describes an arena of {expected} bytes and {rows} rows, but the arena has {got} bytes"
    )]
    ArenaBytes {
        /// Arena bytes in the header.
        expected: u64,
        /// Rows in the header.
        rows: u32,
        /// Bytes of the arena file.
        got: u64,
    },
    /// Segments are not a power of two, are smaller than a row, or do not fill the arena.
    #[error("segments of {0} bytes are not a power of two that fills the arena")]
    SegmentBytes(u64),
    /// Rows or chunk records overlap each other or the header, or extend past the end.
    #[error("the table's {0} are outside the file, unaligned or overlapping")]
    OutOfBounds(&'static str),
    /// More rows are populated or in use than exist.
    #[error("{populated} rows are populated and {capacity} in use, of {rows}")]
    Populated {
        /// Populated rows in the header.
        populated: u32,
        /// Rows in use in the header.
        capacity: u32,
        /// Rows in the header.
        rows: u32,
    },
    /// A row or record contradicts itself or the table.
    #[error("row or record {index}: {what}")]
    Entry {
        /// Index of the row or record.
        index: u32,
        /// The contradiction.
        what: &'static str,
    },
}

impl Header {
    /// Validates the header of a table of `table_bytes` for an arena of `arena_bytes`. Checks every offset and count against the sizes of
    /// the files, so that indexing rows and records below their counts is within bounds.
    pub fn check(&self, table_bytes: u64, arena_bytes: u64) -> Result<(), BadTable> {
        if self.magic != MAGIC {
            return Err(BadTable::NotATable);
        }
        if self.version != VERSION {
            return Err(BadTable::OtherVersion(self.version));
        }
        if u64::from(self.row_bytes) != ROW_BYTES {
            return Err(BadTable::RowBytes(self.row_bytes));
        }
        if self.region == 0 {
            return Err(BadTable::NoRegion);
        }
        if self.arena_bytes != arena_bytes || u64::from(self.rows) * ROW_BYTES != arena_bytes {
            return Err(BadTable::ArenaBytes {
                expected: self.arena_bytes,
                rows: self.rows,
                got: arena_bytes,
            });
        }
        let segment = self.segment_bytes;
        if !segment.is_power_of_two()
            || segment < ROW_BYTES
            || arena_bytes == 0
            || !arena_bytes.is_multiple_of(segment)
        {
            return Err(BadTable::SegmentBytes(segment));
        }
        let rows_end = end(self.rows_offset, self.rows, size_of::<Row>());
        let chunks_end = end(self.chunks_offset, self.chunks, size_of::<ChunkRecord>());
        if self.rows_offset < HEADER_BYTES
            || !self.rows_offset.is_multiple_of(64)
            || rows_end.is_none_or(|e| e > self.chunks_offset)
        {
            return Err(BadTable::OutOfBounds("rows"));
        }
        if !self.chunks_offset.is_multiple_of(64) || chunks_end.is_none_or(|e| e > table_bytes) {
            return Err(BadTable::OutOfBounds("chunk records"));
        }
        if self.populated_rows > self.rows || self.capacity_rows > self.rows {
            return Err(BadTable::Populated {
                populated: self.populated_rows,
                capacity: self.capacity_rows,
                rows: self.rows,
            });
        }
        Ok(())
    }
}

fn end(offset: u64, count: u32, bytes: usize) -> Option<u64> {
    offset.checked_add(u64::from(count).checked_mul(bytes as u64)?)
}

impl Row {
    /// Whether this engine could have written this row with this `index` in the table of `header`. FREE rows always pass: only their state
    /// counts.
    pub fn check(&self, header: &Header, index: u32) -> Result<(), BadTable> {
        let bad = |what| Err(BadTable::Entry { index, what });
        if self.state == FREE {
            return Ok(());
        }
        if self.state > PUBLISHED {
            return bad("unknown state");
        }
        let segment_rows = header.segment_bytes / ROW_BYTES;
        if segment_rows == 0 || self.slot_rows == 0 {
            return bad("the slot has no rows");
        }
        let in_segment = u64::from(index) % segment_rows;
        if index >= header.rows || in_segment + u64::from(self.slot_rows) > segment_rows {
            return bad("the slot crosses its segment's end");
        }
        if self.length == 0 || self.length > u64::from(self.slot_rows) * ROW_BYTES {
            return bad("the length is 0 or exceeds the slot");
        }
        if self.chunk >= header.chunks {
            return bad("the chunk record does not exist");
        }
        Ok(())
    }
}

impl ChunkRecord {
    /// Whether this engine could have written this used record with this `index`. The key is computed again.
    pub fn check(&self, index: u32) -> Result<(), BadTable> {
        let bad = |what| Err(BadTable::Entry { index, what });
        let Ok(kind) = KeyKind::try_from(self.kind) else {
            return bad("unknown kind of key");
        };
        if self.state != 1 {
            return bad("not used");
        }
        if usize::from(self.block_hash_count) > MAX_BLOCK_HASHES {
            return bad("too many block hashes");
        }
        if self.tokens == 0 {
            return bad("no tokens");
        }
        if self.needed == [0, 0] {
            return bad("no sections");
        }
        let key = chunk_key(
            &ModelId(self.model),
            &NamespaceId(self.namespace),
            kind,
            &EngineHash(self.last_hash),
        );
        if key.0 != self.key {
            return bad("the key does not match its parts");
        }
        Ok(())
    }
}
