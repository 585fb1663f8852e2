//! Consistency checks of redundant state, for tests and the simulation. Each line is one named invariant.

use super::MemoryTier;
use super::entry::NONE;
use crate::table::{COMMITTED, FREE, PUBLISHED, Table};
use std::collections::BTreeMap;

impl<T: Table> MemoryTier<T> {
    /// Checks everything except what other processes can write.
    pub fn check(&self) -> Result<(), String> {
        self.slots.check()?;
        self.index.check()?;
        self.grants.check(&self.slots)?;
        self.eviction.check(&self.index)?;
        self.check_entries()?;
        self.check_quotas()?;
        self.check_pins()
    }

    fn check_entries(&self) -> Result<(), String> {
        let mut rows_named: BTreeMap<u32, u32> = BTreeMap::new();
        for row in 0..self.slots.geometry().rows {
            let r = self.slots.row(row);
            if r.state != FREE {
                *rows_named.entry(r.chunk).or_default() += 1;
            }
        }
        for number in 0..self.index.len() {
            let e = &self.index[number];
            let named = rows_named.get(&number).copied().unwrap_or(0);
            say(e.rows == named, "RecordKnowsItsRows", || {
                format!("entry {number}: {} of {named}", e.rows)
            })?;
            if !e.live {
                continue;
            }
            for (section, row) in (0u32..).zip(&e.slots) {
                let have = e.have >> section & 1 == 1;
                if *row == NONE {
                    say(!have || !e.listed, "HaveHasSlot", || {
                        format!("entry {number} section {section}")
                    })?;
                    continue;
                }
                let r = self.slots.row(*row);
                let right = r.chunk == number
                    && r.section == section
                    && r.key_prefix == e.name.key.0[..8]
                    && r.state == if have { PUBLISHED } else { COMMITTED };
                say(right, "SlotIsItsSections", || {
                    format!("entry {number} section {section} slot {row}: {r:?}")
                })?;
            }
            if let Some(open) = e.open {
                let right = self
                    .grants
                    .get(open)
                    .is_some_and(|g| g.chunk == self.index.handle(number) && !g.void);
                say(right, "OpenGrantIsItsOwn", || {
                    format!("entry {number}, grant {open}")
                })?;
            }
            let holds = e.have != 0 || e.open.is_some() || !e.listed;
            say(holds, "EmptyEntriesEnd", || format!("entry {number}"))?;
        }
        for id in self.grants.select(|g| !g.void) {
            let Some(g) = self.grants.get(id) else {
                continue;
            };
            let open = self.index.get(g.chunk).is_some_and(|e| e.open.is_some());
            say(open, "OneOpenGrantPerChunk", || format!("{:?}", g.chunk))?;
        }
        Ok(())
    }

    /// Bytes of pins match the pinned entries, and soft pins keep their share.
    fn check_pins(&self) -> Result<(), String> {
        let (mut soft_bytes, mut leased_bytes, mut admin_bytes) = (0, 0, 0);
        for (_, e) in self.index.live() {
            soft_bytes += if e.soft_pins > 0 { e.weight } else { 0 };
            leased_bytes += if e.leases > 0 { e.weight } else { 0 };
            admin_bytes += if e.admin_pin { e.weight } else { 0 };
        }
        let share = self.share(self.config.limits.soft_pin_percent_max);
        say(soft_bytes <= share, "SoftPinsKeepTheirShare", || {
            format!("{soft_bytes} of {share}")
        })?;
        let pins = &self.pins;
        let counted = (pins.soft_bytes(), pins.leased_bytes(), pins.admin_bytes());
        let real = (soft_bytes, leased_bytes, admin_bytes);
        say(counted == real, "PinsAreCounted", || {
            format!("{counted:?} counted, {real:?} there")
        })
    }
}

pub(crate) fn say(holds: bool, name: &str, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds {
        Ok(())
    } else {
        Err(format!("{name}: {}", what()))
    }
}
