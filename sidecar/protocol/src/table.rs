//! The slot table: the second sealed memfd. All that a restarted engine needs to rebuild its index.
//!
//! ```text
//! 0                      Header (4096 bytes)
//! header.rows_offset     rows    x Row   (64 bytes), one per 64 KiB of arena; a larger slot is named by its first row
//! header.chunks_offset   chunks  x ChunkRecord (1024 bytes)
//! ```
//! Writers: the engine process alone. Connectors map it read-only and look at `state` and `generation` only.
//! Rules: a row becomes FREE before any other field of it changes; its new state word is written last, with release order;
//! the generation is raised **before** a slot is reused; a chunk record is complete before a row names it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First bytes of the table.
pub const MAGIC: [u8; 8] = *b"KVCPSLOT";
/// Version of this format; a table of another version is answered `unmap`.
pub const VERSION: u32 = 1;
/// Arena bytes of one row.
pub const ROW_BYTES: u64 = 64 << 10;
/// Bytes of the header page.
pub const HEADER_BYTES: u64 = 4096;
/// Engine block hashes that fit into a chunk record; longer lists are not kept.
pub const MAX_BLOCK_HASHES: usize = 24;
/// `Row::chunk` of a row that names no chunk record.
pub const NO_CHUNK: u32 = u32::MAX;

/// Nobody uses the slot.
pub const FREE: u32 = 0;
/// `owner` may write (0: the engine fetches from a tier).
pub const GRANTED: u32 = 1;
/// The writer is done, the digest is not taken yet.
pub const COMMITTED: u32 = 2;
/// Readable; bytes never change under this generation.
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
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Rows.
    pub rows: u32,
    /// Chunk records.
    pub chunks: u32,
    /// Bytes of a segment: slots never cross a segment's end.
    pub segment_bytes: u64,
    /// Offset of the first row in the table.
    pub rows_offset: u64,
    /// Offset of the first chunk record.
    pub chunks_offset: u64,
    /// Rows whose arena pages are populated, counted from 0; grows only.
    pub populated_rows: u32,
    /// Zero.
    pub reserved: [u32; 15],
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
    /// Rows of this slot.
    pub slot_rows: u32,
    /// Index of the chunk record, [`NO_CHUNK`] = none.
    pub chunk: u32,
    /// Section number in the domain's order.
    pub section: u32,
    /// Stored bytes of the section.
    pub length: u64,
    /// xxh3-128 of the stored bytes, little-endian; valid when PUBLISHED.
    pub digest: [u8; 16],
    /// First 8 bytes of the chunk key: binds the row to its record.
    pub key_prefix: [u8; 8],
    /// Zero.
    pub reserved: [u8; 8],
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
    /// Entries of `block_hashes` that are used.
    pub block_hash_count: u16,
    /// Chunk key.
    pub key: [u8; 32],
    /// Model id.
    pub model: [u8; 32],
    /// Layout id.
    pub layout: [u8; 32],
    /// Namespace id.
    pub namespace: [u8; 32],
    /// Chunk key of the parent; all zero for the first chunk.
    pub parent: [u8; 32],
    /// Engine hash of the chunk's last block.
    pub last_hash: [u8; 32],
    /// Position of the first token.
    pub first_token: u32,
    /// Tokens.
    pub tokens: u32,
    /// Bitmap of the sections that the chunk needs (128 at most).
    pub needed: [u64; 2],
    /// Unix time in seconds after which the chunk is dead; 0 = never.
    pub expires_unix_s: u64,
    /// Engine hashes of the chunk's blocks.
    pub block_hashes: [[u8; 32]; MAX_BLOCK_HASHES],
    /// Zero.
    pub reserved: [u8; 24],
}

const _: () = assert!(size_of::<Row>() == 64);
const _: () = assert!(size_of::<ChunkRecord>() == 1024);
const _: () = assert!(size_of::<Header>() == 128);
