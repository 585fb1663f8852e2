//! Sizes of the files of an arena and of its slot table: computed from the arena's bytes and the index capacity, or read from a table's
//! header.

use crate::table::{ChunkRecord, HEADER_BYTES, Header, MAGIC, ROW_BYTES, Row, VERSION};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Region number. Unique during the life of the pod.
    pub region: u64,
    /// Bytes of the arena's file, a multiple of [`Geometry::segment_bytes`]. The arena may use less: see [`Header::capacity_rows`].
    pub arena_bytes: u64,
    /// Bytes of a segment, a power of two. Slots never cross a segment's end.
    pub segment_bytes: u64,
    /// Number of rows: one per 64 KiB of arena.
    pub rows: u32,
    /// Number of chunk records.
    pub chunks: u32,
}

const SEGMENT_BYTES_MIN: u64 = 4 << 20;
const SEGMENT_BYTES_MAX: u64 = 256 << 20;

impl Geometry {
    /// Sizes of an arena of a fixed size. A segment has `arena / 64` bytes, as a power of two between 4 MiB and 256 MiB. The arena is rounded down to
    /// whole segments, but is at least one. The table has one chunk record per row (a chunk takes at least one row), at most
    /// `index_entries_max`. Pages of unused records are never populated.
    pub fn new(region: u64, arena_bytes: u64, index_entries_max: u32) -> Self {
        Self::reserving(region, arena_bytes, 0, index_entries_max)
    }

    /// Sizes of an arena that has `arena_bytes` at first and can grow to `most_bytes`: its segments are those of [`Geometry::new`], and its
    /// files are as long as it may ever become. Pages behind the arena's end are never touched.
    pub fn reserving(
        region: u64,
        arena_bytes: u64,
        most_bytes: u64,
        index_entries_max: u32,
    ) -> Self {
        let segment_bytes = (arena_bytes / 64)
            .clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
            .next_power_of_two();
        let arena_bytes = (arena_bytes.max(most_bytes) / segment_bytes).max(1) * segment_bytes;
        let rows = u32::try_from(arena_bytes / ROW_BYTES).unwrap_or(u32::MAX);
        let chunks = rows.min(index_entries_max.max(64));
        Self {
            region,
            arena_bytes,
            segment_bytes,
            rows,
            chunks,
        }
    }

    pub fn segment_rows(&self) -> u32 {
        (self.segment_bytes / ROW_BYTES) as u32
    }

    /// Rows of an arena of this size: whole segments, at least one, and at most all rows of the file.
    pub fn rows_of(&self, arena_bytes: u64) -> u32 {
        let segments = (arena_bytes / self.segment_bytes).max(1);
        let rows = segments * u64::from(self.segment_rows());
        u32::try_from(rows).map_or(self.rows, |rows| rows.min(self.rows))
    }

    /// Sizes of an arena of this size whose segments and records are those of this one: what it costs while the rest of the files is unused.
    pub fn of_size(&self, arena_bytes: u64) -> Self {
        let rows = self.rows_of(arena_bytes);
        Self {
            arena_bytes: u64::from(rows) * ROW_BYTES,
            rows,
            chunks: self.chunks.min(rows),
            ..*self
        }
    }

    /// Bytes of the slot table: header page, rows, chunk records.
    pub fn table_bytes(&self) -> u64 {
        self.chunks_offset() + u64::from(self.chunks) * size_of::<ChunkRecord>() as u64
    }

    /// Offset of the first chunk record in the table.
    pub fn chunks_offset(&self) -> u64 {
        (HEADER_BYTES + u64::from(self.rows) * size_of::<Row>() as u64).next_multiple_of(4096)
    }

    /// The header of a table with this geometry, nothing populated, and all rows in use.
    pub fn header(&self) -> Header {
        Header {
            magic: MAGIC,
            version: VERSION,
            row_bytes: ROW_BYTES as u32,
            region: self.region,
            arena_bytes: self.arena_bytes,
            rows: self.rows,
            chunks: self.chunks,
            segment_bytes: self.segment_bytes,
            rows_offset: HEADER_BYTES,
            chunks_offset: self.chunks_offset(),
            populated_rows: 0,
            capacity_rows: self.rows,
            shrinks: 0,
            lowest_rows: self.rows,
            reserved: [0; 12],
        }
    }

    /// The geometry of a table from an earlier boot, if this build can use it: its header must equal the one that this build writes for its
    /// sizes, and the files must be long enough (`table_bytes`, `arena_bytes`).
    pub fn of_header(
        header: &Header,
        arena_bytes: u64,
        table_bytes: u64,
    ) -> Result<Self, UnusableTable> {
        let geometry = Self {
            region: header.region,
            arena_bytes: header.arena_bytes,
            segment_bytes: header.segment_bytes,
            rows: header.rows,
            chunks: header.chunks,
        };
        if header.magic != MAGIC {
            return Err(UnusableTable::NoTable);
        }
        if header.version != VERSION || header.row_bytes != ROW_BYTES as u32 {
            return Err(UnusableTable::OtherFormat(header.version));
        }
        let sound = header.region != 0
            && header.arena_bytes > 0
            && header.segment_bytes.is_power_of_two()
            && header.segment_bytes >= ROW_BYTES
            && header.arena_bytes.is_multiple_of(header.segment_bytes)
            && header.arena_bytes / ROW_BYTES == u64::from(header.rows)
            && header.arena_bytes == arena_bytes
            && header.rows_offset == HEADER_BYTES
            && header.chunks_offset == geometry.chunks_offset()
            && header.populated_rows <= header.rows
            && header.capacity_rows <= header.rows
            && geometry.table_bytes() == table_bytes;
        if sound {
            Ok(geometry)
        } else {
            Err(UnusableTable::OtherSizes)
        }
    }
}

/// Why a table from an earlier boot cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnusableTable {
    /// The file is not a slot table.
    #[error("the file is not a slot table")]
    NoTable,
    /// Written by a build with another format.
    #[error("slot table of version {0}; this build supports version {VERSION}")]
    OtherFormat(u32),
    /// Sizes contradict each other, or the file's length.
    #[error("sizes in the slot table's header do not match its files")]
    OtherSizes,
}
