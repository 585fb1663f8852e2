//! A region's slot table as the engine sees it: every call is one step that the engine's death can separate from the next one.

use super::memory::Shared;
use super::rules::Rule;
use kvcachepool_engine::mistake::{Mistake, made};
use kvcachepool_engine::table::{ChunkRecord, FREE, Geometry, PUBLISHED, Row, Table};
use zerocopy::FromZeros;

/// One region's table, as the engine sees it.
#[derive(Debug)]
pub struct SimTable {
    memory: Shared,
    at: usize,
    geometry: Geometry,
}

impl SimTable {
    pub fn of(memory: &Shared, at: usize) -> Self {
        let geometry = memory.borrow().regions[at].geometry;
        Self {
            memory: memory.clone(),
            at,
            geometry,
        }
    }
}

impl Table for SimTable {
    fn makes(mistake: Mistake) -> bool {
        made(mistake)
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn populated_rows(&self) -> u32 {
        self.memory.borrow().regions[self.at].populated
    }

    fn set_populated_rows(&mut self, rows: u32) {
        let mut m = self.memory.borrow_mut();
        if m.spend() {
            m.regions[self.at].populated = rows;
        }
        m.end_if_dead();
    }

    fn capacity_rows(&self) -> u32 {
        self.memory.borrow().regions[self.at].capacity
    }

    fn set_capacity_rows(&mut self, rows: u32) {
        let mut m = self.memory.borrow_mut();
        if m.spend() {
            m.regions[self.at].capacity = rows;
        }
        m.end_if_dead();
    }

    fn count_shrink(&mut self, _: u32) {
        let mut m = self.memory.borrow_mut();
        if m.spend() {
            m.regions[self.at].shrinks += 1;
        }
        m.end_if_dead();
    }

    fn row(&self, row: u32) -> Row {
        self.memory.borrow().regions[self.at]
            .rows
            .get(row as usize)
            .copied()
            .unwrap_or_default()
    }

    fn set_state(&mut self, row: u32, state: u32) {
        let mut m = self.memory.borrow_mut();
        if row >= self.geometry.rows || !m.spend() {
            m.end_if_dead();
            return;
        }
        m.state_changes(self.at, row, state);
        let before = m.regions[self.at].rows[row as usize];
        if before.state == PUBLISHED && state == FREE {
            m.emptied.push(before.chunk);
        }
        m.regions[self.at].rows[row as usize].state = state;
    }

    fn set_generation(&mut self, row: u32, generation: u32) {
        let mut m = self.memory.borrow_mut();
        if row < self.geometry.rows && m.spend() {
            m.regions[self.at].rows[row as usize].generation = generation;
        }
        m.end_if_dead();
    }

    fn set_fields(&mut self, row: u32, fields: &Row) {
        let mut m = self.memory.borrow_mut();
        if row >= self.geometry.rows || m.crashed {
            return;
        }
        let before = m.regions[self.at].rows[row as usize];
        let mut after = Row {
            state: before.state,
            generation: before.generation,
            ..*fields
        };
        if !m.spend() {
            // any of the fields may have reached the memory
            let coin = m.rng.bits();
            let pick = |bit: u32| coin >> bit & 1 == 1;
            let keep = before;
            if pick(0) {
                after.owner = keep.owner
            }
            if pick(1) {
                after.slot_rows = keep.slot_rows
            }
            if pick(2) {
                after.chunk = keep.chunk
            }
            if pick(3) {
                after.section = keep.section
            }
            if pick(4) {
                after.length = keep.length
            }
            if pick(5) {
                after.digest = keep.digest
            }
            if pick(6) {
                after.key_prefix = keep.key_prefix
            }
        } else if before.state != FREE {
            m.broke(Rule::S2, || {
                format!("fields of slot {row} change while it is {before:?}")
            });
        }
        m.regions[self.at].rows[row as usize] = after;
        m.end_if_dead();
    }

    fn set_digest(&mut self, row: u32, digest: [u8; 16]) {
        let mut m = self.memory.borrow_mut();
        if row < self.geometry.rows && m.spend() {
            m.regions[self.at].rows[row as usize].digest = digest;
        }
        m.end_if_dead();
    }

    fn chunk(&self, chunk: u32) -> ChunkRecord {
        self.memory.borrow().regions[self.at]
            .chunks
            .get(chunk as usize)
            .copied()
            .unwrap_or_else(ChunkRecord::new_zeroed)
    }

    fn set_chunk(&mut self, chunk: u32, record: &ChunkRecord) {
        let mut m = self.memory.borrow_mut();
        if chunk >= self.geometry.chunks || !m.spend() {
            m.end_if_dead();
            return;
        }
        let at = self.at;
        m.regions[at].chunks[chunk as usize].state = 0;
        if !m.spend() {
            // half of it reached the memory
            let state = m.regions[at].chunks[chunk as usize].state;
            m.regions[at].chunks[chunk as usize] = ChunkRecord {
                state,
                parent: [0; 32],
                ..*record
            };
            m.end_if_dead();
            return;
        }
        m.regions[at].chunks[chunk as usize] = ChunkRecord {
            state: 0,
            ..*record
        };
        if m.spend() {
            m.regions[at].chunks[chunk as usize].state = record.state;
        }
        m.end_if_dead();
    }

    fn set_needed(&mut self, chunk: u32, needed: [u64; 2]) {
        let mut m = self.memory.borrow_mut();
        if chunk < self.geometry.chunks && m.spend() {
            m.regions[self.at].chunks[chunk as usize].needed = needed;
        }
        m.end_if_dead();
    }

    fn clear_chunk(&mut self, chunk: u32) {
        let mut m = self.memory.borrow_mut();
        if chunk < self.geometry.chunks && m.spend() {
            let record = &mut m.regions[self.at].chunks[chunk as usize];
            let key = (record.state == 1).then_some(record.key);
            record.state = 0;
            // a fetch that is given up ends a record, too: nothing was read of it, and its child may be there before it
            if m.emptied.contains(&chunk) {
                m.evicted.extend(key);
            }
        }
        m.end_if_dead();
    }
}
