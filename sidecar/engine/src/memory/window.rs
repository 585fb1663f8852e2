//! Copies that the sidecar makes between a worker's window and slots. A copy into a slot requires a GRANT to the window's process. Until
//! the copy has ended, COMMIT is refused and the slot is not taken back.

use super::MemoryTier;
use crate::mistake::Mistake;
use crate::table::{FREE, GRANTED, ROW_BYTES, Table};
use kvcachepool_protocol::window::{Direction, Reason, Run};

impl<T: Table> MemoryTier<T> {
    /// Checks whether a copy of these runs may begin for the process with lock `owner`. A store holds its slots until
    /// [`MemoryTier::copy_ended`]. A load holds nothing: the reader compares generations after its own copy.
    pub fn copy_begins(
        &mut self,
        owner: u32,
        direction: Direction,
        runs: &[(u64, Run)],
    ) -> Result<(), Reason> {
        for (_, run) in runs {
            self.may_copy(owner, direction, run)?;
        }
        if direction == Direction::Store {
            for (_, run) in runs {
                self.grants.copy_begins(run.slot);
            }
        }
        Ok(())
    }

    fn may_copy(&self, owner: u32, direction: Direction, run: &Run) -> Result<(), Reason> {
        let refused = match direction {
            Direction::Store => Reason::NotGranted,
            Direction::Load => Reason::Generation,
        };
        if run.slot >= self.slots.geometry().rows {
            return Err(Reason::BadRecord);
        }
        let row = self.slots.row(run.slot);
        let same = row.state != FREE && row.generation == run.generation;
        let mine = match direction {
            Direction::Store => {
                let coming_back = self.grants.comes_back(run.slot);
                let owner_lives = self.grants.lives(owner);
                let granted = row.state == GRANTED && row.owner == owner;
                (owner != 0 && granted && owner_lives && !coming_back)
                    || T::makes(Mistake::CopyUnowned)
            }
            Direction::Load => true,
        };
        if !((same || T::makes(Mistake::CopyUnowned)) && mine) {
            return Err(refused);
        }
        let end = u64::from(run.offset) + u64::from(run.bytes);
        if end > u64::from(row.slot_rows.max(1)) * ROW_BYTES {
            return Err(Reason::BadRecord);
        }
        Ok(())
    }

    /// An allowed copy has ended, successfully or not. Slots that waited for it are taken back.
    pub fn copy_ended(&mut self, direction: Direction, runs: &[(u64, Run)]) {
        if direction == Direction::Load {
            return;
        }
        for (_, run) in runs {
            if self.grants.copy_ended(run.slot) {
                self.come_back(run.slot);
            }
        }
    }

    /// True if a copy into one of these slots is in flight.
    pub fn copies_into(&self, slots: impl IntoIterator<Item = u32>) -> bool {
        slots.into_iter().any(|slot| self.grants.is_copied(slot))
    }
}
