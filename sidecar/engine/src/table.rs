//! Access to the slot table, as a trait, so that the same engine runs in production (on a shared memory map) and in the simulation (on a
//! vector that can lose every write after the n-th).

use super::mistake::Mistake;
pub use kvcachepool_protocol::geometry::{Geometry, UnusableTable};
pub use kvcachepool_protocol::table::{
    COMMITTED, ChunkRecord, FREE, GRANTED, NO_CHUNK, PUBLISHED, ROW_BYTES, Row,
};

/// Rows and chunk records. Each method is one step: the engine may die between two steps. The next engine, and the connectors that map the
/// table, see what a step wrote.
///
/// Implementations keep the order of calls (release stores). The engine, not the implementation, enforces the rules of `protocol::table`.
/// Beyond the counts of [`Table::geometry`], reads return zeros and writes have no effect.
pub trait Table {
    /// True if the engine over this table makes a mistake on purpose. Only the simulation's table makes any.
    #[inline(always)]
    fn makes(_: Mistake) -> bool {
        false
    }
    fn geometry(&self) -> Geometry;
    /// Number of rows with populated arena pages, starting at row 0.
    fn populated_rows(&self) -> u32;
    fn set_populated_rows(&mut self, rows: u32);
    /// Number of rows that may hold slots, starting at row 0: the present size of the arena.
    fn capacity_rows(&self) -> u32;
    fn set_capacity_rows(&mut self, rows: u32);
    /// Counts a release of the pages behind these rows, before it.
    fn count_shrink(&mut self, rows: u32);
    fn row(&self, row: u32) -> Row;
    /// Stores the state word of a row with release order: a reader of this state sees everything written before.
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
    /// Sets `state` of a record to 0.
    fn clear_chunk(&mut self, chunk: u32);
}
