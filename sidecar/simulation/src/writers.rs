//! Who writes to which rows of an arena at the moment.

use super::memory::{COPIES, Memory, Writer, overlap, right, rows_of};
use super::rules::Rule;
use kvcachepool_engine::table::GRANTED;

impl Memory {
    /// Somebody begins to write: the slot must be his.
    pub fn begin_write(
        &mut self,
        region: usize,
        pid: usize,
        owner: u32,
        slot: u32,
        generation: u32,
        length: u64,
    ) {
        self.is_granted(region, owner, slot, generation);
        self.writes(region, pid, slot, rows_of(length));
    }

    /// The sidecar begins to copy `rows` rows of a window to a slot, from its row `first` on: the slot must be the worker's.
    pub fn begin_copy(
        &mut self,
        region: usize,
        owner: u32,
        slot: u32,
        generation: u32,
        first: u32,
        rows: u32,
    ) {
        self.is_granted(region, owner, slot, generation);
        self.writes(region, COPIES, slot + first, rows);
    }

    fn is_granted(&mut self, region: usize, owner: u32, slot: u32, generation: u32) {
        let row = self.regions[region]
            .rows
            .get(slot as usize)
            .copied()
            .unwrap_or_default();
        if row.state != GRANTED || row.owner != owner || row.generation != generation {
            self.broke(Rule::S3, || {
                format!("owner {owner} begins to write slot {slot} generation {generation}, which is {row:?}")
            });
        }
    }

    fn writes(&mut self, region: usize, pid: usize, slot: u32, rows: u32) {
        if let Some(other) = self.regions[region]
            .writers
            .iter()
            .find(|w| overlap(w.slot, w.rows, slot, rows))
        {
            let other = other.clone();
            self.broke(Rule::S3, || {
                format!("process {pid} writes slot {slot} while {other:?} does")
            });
        }
        self.regions[region].writers.push(Writer {
            pid,
            slot,
            rows,
            ghost_until: None,
        });
        self.tear(region, slot, rows);
    }

    /// A write ended; whole or not.
    pub fn end_write(&mut self, region: usize, pid: usize, slot: u32, whole: Option<(u64, u32)>) {
        let r = &mut self.regions[region];
        let Some(at) = r
            .writers
            .iter()
            .position(|w| w.pid == pid && w.slot == slot && w.ghost_until.is_none())
        else {
            return;
        };
        let w = r.writers.swap_remove(at);
        if let Some((hash, section)) = whole {
            for at in 0..w.rows {
                if let Some(c) = r.content.get_mut((w.slot + at) as usize) {
                    *c = right(hash, section, at);
                }
            }
        }
    }
}
