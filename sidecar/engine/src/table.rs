//! The slot table as the engine sees it: rows and chunk records behind a trait, so that production (a shared memory map)
//! and the simulation (a vector that can lose every write after the n-th one) run the same engine.

pub use kvcachepool_protocol::geometry::{Geometry, UnusableTable};
pub use kvcachepool_protocol::table::{
    COMMITTED, ChunkRecord, FREE, GRANTED, NO_CHUNK, PUBLISHED, ROW_BYTES, Row,
};

/// Rows and chunk records. Every method is one step that an engine's death can separate from the next one; what a step wrote
/// is seen by the next engine and by the connectors that map the table.
///
/// Implementations keep the order of calls (release stores); they do not check the rules of `protocol::table`, the engine does.
/// An index at or over the counts of [`Table::geometry`] reads as zeros and writes nothing.
pub trait Table {
    fn geometry(&self) -> Geometry;
    /// Rows whose arena pages are populated, from 0.
    fn populated_rows(&self) -> u32;
    /// Stores the count of populated rows (an engine only lets it grow).
    fn set_populated_rows(&mut self, rows: u32);
    fn row(&self, row: u32) -> Row;
    /// Stores the state word of a row, with release order: everything written before is seen by who sees this.
    fn set_state(&mut self, row: u32, state: u32);
    /// Stores the generation of a row, with release order.
    fn set_generation(&mut self, row: u32, generation: u32);
    /// Stores all fields of a row but `state` and `generation`, in any order.
    fn set_fields(&mut self, row: u32, fields: &Row);
    /// Stores the digest of a row.
    fn set_digest(&mut self, row: u32, digest: [u8; 16]);
    fn chunk(&self, chunk: u32) -> ChunkRecord;
    /// Stores a whole record: `state` becomes 0, then all other fields are written, then `state` becomes 1.
    fn set_chunk(&mut self, chunk: u32, record: &ChunkRecord);
    /// Stores `needed` of a record.
    fn set_needed(&mut self, chunk: u32, needed: [u64; 2]);
    /// `state` of a record becomes 0.
    fn clear_chunk(&mut self, chunk: u32);
}
