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
    /// 0 in a record of an opaque object: a note that a tier has not removed it yet.
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

impl Row {
    /// Whether this engine could have written this row with this `index` in the table of `header`. FREE rows always pass: only their state
    /// counts.
    pub fn check(&self, header: &Header, index: u32) -> Result<(), &'static str> {
        if self.state == FREE {
            return Ok(());
        }
        if self.state > PUBLISHED {
            return Err("unknown state");
        }
        let segment_rows = header.segment_bytes / ROW_BYTES;
        if segment_rows == 0 || self.slot_rows == 0 {
            return Err("the slot has no rows");
        }
        let in_segment = u64::from(index) % segment_rows;
        if index >= header.rows || in_segment + u64::from(self.slot_rows) > segment_rows {
            return Err("the slot crosses its segment's end");
        }
        if self.length == 0 || self.length > u64::from(self.slot_rows) * ROW_BYTES {
            return Err("the length is 0 or exceeds the slot");
        }
        if self.chunk >= header.chunks {
            return Err("the chunk record does not exist");
        }
        Ok(())
    }
}

impl ChunkRecord {
    /// Whether this engine could have written this used record. The key is computed again.
    pub fn check(&self) -> Result<(), &'static str> {
        let Ok(kind) = KeyKind::try_from(self.kind) else {
            return Err("unknown kind of key");
        };
        if self.state != 1 {
            return Err("not used");
        }
        if usize::from(self.block_hash_count) > MAX_BLOCK_HASHES {
            return Err("too many block hashes");
        }
        if self.tokens == 0 {
            return Err("no tokens");
        }
        if self.needed == [0, 0] {
            return Err("no sections");
        }
        let key = chunk_key(
            &ModelId(self.model),
            &NamespaceId(self.namespace),
            kind,
            &EngineHash(self.last_hash),
        );
        if key.0 != self.key {
            return Err("the key does not match its parts");
        }
        Ok(())
    }
}
