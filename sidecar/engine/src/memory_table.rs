//! A slot table in private memory, for tests and the simulation.

use super::mistake::{Mistake, made};
use super::table::{ChunkRecord, Geometry, Row, Table};
use zerocopy::FromZeros;

/// Rows and records as plain vectors.
#[derive(Debug, Clone)]
pub struct MemoryTable {
    geometry: Geometry,
    populated_rows: u32,
    capacity_rows: u32,
    shrinks: u32,
    rows: Vec<Row>,
    chunks: Vec<ChunkRecord>,
}

impl MemoryTable {
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            populated_rows: 0,
            capacity_rows: geometry.rows,
            shrinks: 0,
            rows: vec![Row::default(); geometry.rows as usize],
            chunks: vec![ChunkRecord::new_zeroed(); geometry.chunks as usize],
        }
    }

    fn change(&mut self, row: u32, change: impl FnOnce(&mut Row)) {
        if let Some(row) = self.rows.get_mut(row as usize) {
            change(row);
        }
    }
}

impl Table for MemoryTable {
    fn makes(mistake: Mistake) -> bool {
        made(mistake)
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn populated_rows(&self) -> u32 {
        self.populated_rows
    }
    fn set_populated_rows(&mut self, rows: u32) {
        self.populated_rows = rows;
    }
    fn capacity_rows(&self) -> u32 {
        self.capacity_rows
    }
    fn set_capacity_rows(&mut self, rows: u32) {
        self.capacity_rows = rows;
    }
    fn count_shrink(&mut self, _: u32) {
        self.shrinks += 1;
    }
    fn row(&self, row: u32) -> Row {
        self.rows.get(row as usize).copied().unwrap_or_default()
    }
    fn set_state(&mut self, row: u32, state: u32) {
        self.change(row, |r| r.state = state);
    }
    fn set_generation(&mut self, row: u32, generation: u32) {
        self.change(row, |r| r.generation = generation);
    }
    fn set_fields(&mut self, row: u32, fields: &Row) {
        self.change(row, |r| {
            *r = Row {
                state: r.state,
                generation: r.generation,
                ..*fields
            }
        });
    }
    fn set_digest(&mut self, row: u32, digest: [u8; 16]) {
        self.change(row, |r| r.digest = digest);
    }
    fn chunk(&self, chunk: u32) -> ChunkRecord {
        self.chunks
            .get(chunk as usize)
            .copied()
            .unwrap_or_else(ChunkRecord::new_zeroed)
    }
    fn set_chunk(&mut self, chunk: u32, record: &ChunkRecord) {
        if let Some(c) = self.chunks.get_mut(chunk as usize) {
            *c = ChunkRecord {
                state: 1,
                ..*record
            };
        }
    }
    fn set_needed(&mut self, chunk: u32, needed: [u64; 2]) {
        if let Some(c) = self.chunks.get_mut(chunk as usize) {
            c.needed = needed;
        }
    }
    fn clear_chunk(&mut self, chunk: u32) {
        if let Some(c) = self.chunks.get_mut(chunk as usize) {
            c.state = 0;
        }
    }
}
