//! Consistency checks of redundant state, for tests and the simulation. Each line is one named invariant.

use super::MemoryTier;
use super::entry::{Class, Entry, NONE};
use super::mirror::SlotCounts;
use crate::table::{COMMITTED, FREE, GRANTED, PUBLISHED, ROW_BYTES, Table};
use std::collections::BTreeMap;

impl<T: Table> MemoryTier<T> {
    /// The shared table matches this process's state.
    pub fn check_shared(&self) -> Result<(), String> {
        let populated = self.table.shared.populated_rows();
        say(
            populated == self.table.populated_rows(),
            "PopulatedIsShared",
            || format!("{populated} of {}", self.table.populated_rows()),
        )?;
        for number in 0..self.geometry.rows {
            let (own, shared) = (self.table.row(number), self.table.shared.row(number));
            say(own == shared, "RowsAreShared", || {
                format!("row {number}: {own:?}, shared {shared:?}")
            })?;
        }
        Ok(())
    }

    /// Checks everything except what other processes can write.
    pub fn check(&self) -> Result<(), String> {
        self.check_rows()?;
        self.check_usage()?;
        self.check_grants()?;
        self.check_entries()?;
        self.check_orphans()?;
        self.check_vacant()?;
        self.check_pins()
    }

    fn check_rows(&self) -> Result<(), String> {
        let mut used = 0;
        let (mut granted, mut committed) = (0, 0);
        let mut row_number = 0;
        while row_number < self.geometry.rows {
            let row = self.table.row(row_number);
            let size = if row.state == FREE {
                1
            } else {
                row.slot_rows.max(1)
            };
            for inner in row_number + 1..row_number + size {
                let inner_state = self.table.row(inner).state;
                say(inner_state == FREE, "SlotsOverlap", || {
                    format!("row {inner} in slot {row_number}")
                })?;
            }
            if row.state != FREE {
                used += u64::from(size);
                let segment = self.geometry.segment_rows();
                let whole = row_number / segment == (row_number + size - 1) / segment;
                say(whole, "SlotCrossesSegment", || {
                    format!("slot {row_number} of {size} rows")
                })?;
                let populated = row_number + size <= self.table.populated_rows();
                say(populated, "OnlyPopulatedRowsAreUsed", || {
                    format!("slot {row_number}")
                })?;
            }
            if row.state == GRANTED {
                granted += u64::from(size) * ROW_BYTES;
                let owned = self
                    .owners
                    .get(&row.owner)
                    .is_some_and(|o| o.rows.contains(&row_number));
                say(owned, "GrantedHasOwner", || {
                    format!("slot {row_number} of {}", row.owner)
                })?;
            }
            if row.state == COMMITTED {
                committed += u64::from(size) * ROW_BYTES;
            }
            row_number += size;
        }
        say(committed == self.committed_bytes, "CommittedBytes", || {
            format!("{committed} committed, {} counted", self.committed_bytes)
        })?;
        say(
            used == self.alloc.used_rows(),
            "AllocatorKnowsTheTable",
            || format!("{used} rows used, {} known", self.alloc.used_rows()),
        )?;
        say(granted == self.granted_bytes, "GrantedBytes", || {
            format!("{granted} granted, {} counted", self.granted_bytes)
        })
    }

    /// Incremental counters match a full count.
    fn check_usage(&self) -> Result<(), String> {
        let mut slots = SlotCounts::default();
        for number in 0..self.geometry.rows {
            slots.add(self.table.row(number).state);
        }
        say(slots == self.table.counts(), "SlotsAreCounted", || {
            format!("{:?} counted, {slots:?} there", self.table.counts())
        })?;
        let mut census = [0; Class::COUNT];
        for class in self.entries.iter().filter_map(Entry::class_now) {
            census[class as usize] += 1;
        }
        say(census == self.census, "ChunksAreCounted", || {
            format!("{:?} counted, {census:?} there", self.census)
        })?;
        for (owner, o) in &self.owners {
            let size = |row: &u32| u64::from(self.table.row(*row).slot_rows) * ROW_BYTES;
            let bytes: u64 = o.rows.iter().map(size).sum();
            say(bytes == o.bytes, "OwnedBytesAreCounted", || {
                format!("{} counted of {owner}, {bytes} there", o.bytes)
            })?;
        }
        Ok(())
    }

    fn check_grants(&self) -> Result<(), String> {
        for (owner, o) in &self.owners {
            for row in &o.rows {
                let r = self.table.row(*row);
                say(
                    r.state == GRANTED && r.owner == *owner,
                    "OwnedIsGranted",
                    || format!("slot {row} of {owner}"),
                )?;
            }
        }
        for (id, grant) in &self.grants {
            say(!grant.rows.is_empty(), "GrantHasRows", || {
                format!("grant {id}")
            })?;
            for row in &grant.rows {
                let state = self.table.row(*row).state;
                let right = self.by_row.get(row) == Some(id)
                    && (state == GRANTED || state == COMMITTED && !grant.void);
                say(right, "GrantOwnsItsRows", || {
                    format!("grant {id}, slot {row}, state {state}")
                })?;
            }
        }
        for (row, id) in &self.by_row {
            let known = self.grants.get(id).is_some_and(|g| g.rows.contains(row));
            say(known, "RowKnowsItsGrant", || {
                format!("slot {row}, grant {id}")
            })?;
        }
        let tags = self.by_tag.values().flatten();
        for id in tags {
            say(self.grants.contains_key(id), "TagNamesGrants", || {
                format!("grant {id}")
            })?;
        }
        Ok(())
    }

    fn check_entries(&self) -> Result<(), String> {
        let mut rows_named: BTreeMap<u32, u32> = BTreeMap::new();
        for row in 0..self.geometry.rows {
            let r = self.table.row(row);
            if r.state != FREE {
                *rows_named.entry(r.chunk).or_default() += 1;
            }
        }
        for (number, e) in (0u32..).zip(&self.entries) {
            let named = rows_named.get(&number).copied().unwrap_or(0);
            say(e.rows == named, "RecordKnowsItsRows", || {
                format!("entry {number}: {} of {named}", e.rows)
            })?;
            if !e.live {
                continue;
            }
            say(
                !e.listed || self.find(&e.name) == Some(number),
                "ListedIsFound",
                || format!("entry {number}"),
            )?;
            for (section, row) in (0u32..).zip(&e.slots) {
                let have = e.have >> section & 1 == 1;
                if *row == NONE {
                    say(!have || !e.listed, "HaveHasSlot", || {
                        format!("entry {number} section {section}")
                    })?;
                    continue;
                }
                let r = self.table.row(*row);
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
                    .get(&open)
                    .is_some_and(|g| g.chunk == self.handle(number) && !g.void);
                say(right, "OpenGrantIsItsOwn", || {
                    format!("entry {number}, grant {open}")
                })?;
            }
            let holds = e.have != 0 || e.open.is_some() || !e.listed;
            say(holds, "EmptyEntriesEnd", || format!("entry {number}"))?;
            say(
                !e.complete() || !e.listed || e.known,
                "ReadableIsOrdered",
                || format!("entry {number}"),
            )?;
            self.check_family(number)?;
        }
        let tagged = self.grants.values().filter(|g| !g.void);
        for g in tagged {
            let open = self.get(g.chunk).is_some_and(|e| e.open.is_some());
            say(open, "OneOpenGrantPerChunk", || format!("{:?}", g.chunk))?;
        }
        Ok(())
    }

    fn check_vacant(&self) -> Result<(), String> {
        let mut vacant = self.vacant.clone();
        vacant.sort_unstable();
        let once = vacant.windows(2).all(|w| w[0] != w[1]);
        say(once, "VacantOnce", || format!("{vacant:?}"))?;
        for number in vacant {
            let e = &self.entries[number as usize];
            say(!e.live && e.rows == 0, "VacantIsUnused", || {
                format!("entry {number}: live {}, {} rows", e.live, e.rows)
            })?;
        }
        Ok(())
    }

    fn check_orphans(&self) -> Result<(), String> {
        for orphan in self.orphans.values().flatten() {
            let waits = self
                .get(*orphan)
                .is_some_and(|e| e.listed && e.parent == NONE);
            say(waits, "OrphansWait", || format!("{orphan:?}"))?;
        }
        Ok(())
    }

    fn check_family(&self, number: u32) -> Result<(), String> {
        let e = &self.entries[number as usize];
        if e.parent != NONE {
            let parent = &self.entries[e.parent as usize];
            say(parent.live && parent.listed, "ParentIsThere", || {
                format!("entry {number} under {}", e.parent)
            })?;
        }
        let (mut child, mut seen) = (e.first_child, 0);
        while child != NONE {
            let c = &self.entries[child as usize];
            say(c.live && c.parent == number, "ChildKnowsItsParent", || {
                format!("{child} under {number}")
            })?;
            child = c.sibling_after;
            seen += 1;
            say(seen <= self.entries.len(), "ChildrenEnd", || {
                format!("under {number}")
            })?;
        }
        Ok(())
    }

    /// Bytes of pins match the pinned entries, and soft pins keep their share.
    fn check_pins(&self) -> Result<(), String> {
        let (mut soft_bytes, mut leased_bytes, mut admin_bytes) = (0, 0, 0);
        for (_, e) in self.live() {
            soft_bytes += if e.soft_pins > 0 { e.weight } else { 0 };
            leased_bytes += if e.leases > 0 { e.weight } else { 0 };
            admin_bytes += if e.admin_pin { e.weight } else { 0 };
        }
        let share =
            self.geometry.arena_bytes * u64::from(self.config.limits.soft_pin_percent_max) / 100;
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
