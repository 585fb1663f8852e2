//! Adoption of a slot table from an earlier engine. The table contains everything needed to rebuild the index.

use super::MemoryTier;
use super::entry::{Entry, Handle, NONE};
use super::evict::Why;
use super::grants::Grant;
use super::slots::bytes_of;
use crate::Time;
use crate::mistake::Mistake;
use crate::name::Name;
use crate::table::{COMMITTED, ChunkRecord, FREE, GRANTED, PUBLISHED, Row, Table};
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, LayoutId, NamespaceId};
use std::collections::BTreeMap;

impl<T: Table> MemoryTier<T> {
    /// Reads the whole table. COMMITTED slots are freed, because their digests are unknown. GRANTED slots stay with their owners. PUBLISHED
    /// slots are readable after a check, or freed if the start is `cold`. A slot that contains another one is rejected: the inner one may
    /// belong to a writer that still copies.
    pub(super) fn take_over(&mut self, now: Time, cold: bool) -> Vec<Handle> {
        let mut grants: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let mut in_use = Vec::new();
        let mut row_number = 0;
        let header = self.slots.geometry().header();
        while row_number < self.slots.capacity_rows() {
            let row = self.slots.row(row_number);
            if row.state == FREE {
                row_number += 1;
                continue;
            }
            let whole = row.check(&header, row_number).is_ok()
                && (row_number + 1..row_number + row.slot_rows)
                    .all(|inner| self.slots.row(inner).state == FREE);
            let slot_rows = if whole { row.slot_rows } else { 0 };
            let sound = self.slots.claim(row_number, slot_rows, row.section);
            in_use.push(row_number);
            self.take_over_row(row_number, &row, sound, &mut grants);
            row_number += if sound { row.slot_rows } else { 1 };
        }
        self.slots.settle(|row| in_use.binary_search(&row).is_ok());
        // rejected slots are freed only now, because the allocator must know its segments first
        for row in in_use {
            let keep = match self.slots.row(row).state {
                GRANTED => true,
                PUBLISHED => self.by_slot(row).is_some(),
                _ => false,
            };
            if !keep {
                self.slots.free(row, false);
            }
        }
        self.take_over_grants(grants);
        self.take_over_notes();
        let adopted = self.finish_entries(cold);
        // after every number is known to be used or vacant
        self.take_over_fetches(now);
        self.slots.open();
        adopted
    }

    fn by_slot(&self, row_number: u32) -> Option<u32> {
        let row = self.slots.row(row_number);
        let e = self.index.entry(row.chunk)?;
        (e.live && e.slot(row.section) == row_number).then_some(row.chunk)
    }

    fn take_over_row(
        &mut self,
        row_number: u32,
        row: &Row,
        sound: bool,
        grants: &mut BTreeMap<u32, Vec<u32>>,
    ) {
        if row.chunk < self.slots.geometry().chunks {
            self.index.extend_to(row.chunk);
        }
        let entry = if sound && row.section < 128 {
            self.entry_of_record(row)
        } else {
            None
        };
        match row.state {
            GRANTED => {
                self.grants.hold(row_number, row);
                // the number is not reused while a row names it, whether or not the record belongs to that row
                self.index.row_added(row.chunk);
                if let Some(entry) = entry {
                    grants.entry(entry).or_default().push(row_number);
                }
            }
            PUBLISHED => {
                let Some(entry) = entry else { return };
                let e = &mut self.index[entry];
                if e.slot(row.section) == NONE {
                    e.put_slot(row.section, row_number, bytes_of(row));
                    e.have |= 1 << row.section;
                    e.rows += 1;
                }
            }
            COMMITTED => {}
            _ => {}
        }
    }

    /// The entry of the record that a row names, created at its first row. None: the record is unused or belongs to another chunk.
    fn entry_of_record(&mut self, row: &Row) -> Option<u32> {
        if row.chunk >= self.slots.geometry().chunks {
            return None;
        }
        let record = self.slots.record(row.chunk);
        if record.state != 1 || record.key[..8] != row.key_prefix {
            return None;
        }
        if !self.index[row.chunk].live {
            let usable = record.check().is_ok()
                && matches!(
                    KeyKind::try_from(record.kind),
                    Ok(KeyKind::Prefix | KeyKind::Opaque)
                )
                && record.fidelity == 0
                && record.first_token.checked_add(record.tokens).is_some();
            if !usable {
                return None;
            }
            let name = Name {
                layout: self.index.layout_number(LayoutId(record.layout)),
                key: ChunkKey(record.key),
            };
            if self.index.find(&name).is_some() {
                return None;
            }
            self.index.list_alone(row.chunk, name);
            let e = &mut self.index[row.chunk];
            e.live = true;
            fill(e, &record);
            if record.expires_unix_s != 0 {
                self.index.expires_at(row.chunk, record.expires_unix_s);
            }
        }
        Some(row.chunk)
    }

    /// Adopts grants of an earlier boot: one grant per chunk, without a scheduler.
    fn take_over_grants(&mut self, grants: BTreeMap<u32, Vec<u32>>) {
        for (entry, rows) in grants {
            let last_hash = EngineHash(self.slots.record(entry).last_hash);
            let id = self.grants.open(Grant {
                chunk: self.index.handle(entry),
                name: self.index[entry].name,
                last_hash,
                asked_by: None,
                granted_ms: None,
                rows,
                needed: self.index[entry].needed,
                void: false,
            });
            self.index[entry].open = Some(id);
        }
    }

    /// Ends fetches of a dead engine: takes their slots back once nothing can write into them any more.
    fn take_over_fetches(&mut self, now: Time) {
        // the kernel may still complete reads for a dead engine
        if self.config.fetch_outlives_engine && !T::makes(Mistake::FetchOutlives) {
            self.owner_died(now, 0, self.config.quarantine_ms);
        } else {
            for row in self.grants.rows_of(0) {
                self.come_back(row);
            }
        }
    }

    /// Links and counts the entries, and removes the empty ones. Returns the readable ones.
    fn finish_entries(&mut self, cold: bool) -> Vec<Handle> {
        let mut adopted = Vec::new();
        for entry in 0..self.index.len() {
            if !self.index[entry].live {
                if self.slots.record(entry).state != 0 {
                    self.slots.clear_record(entry);
                }
                self.index.leave_vacant(entry);
                continue;
            }
            let parent = Name {
                layout: self.index[entry].name.layout,
                key: self.index[entry].parent_key,
            };
            if parent.key != ChunkKey::default() {
                match self.index.find(&parent) {
                    Some(p) if self.index.follows(entry, p) => self.index.link(entry, p),
                    _ => self.index.await_parent(entry, parent),
                }
            }
        }
        for entry in 0..self.index.len() {
            let e = &self.index[entry];
            // a note is live and not listed
            if !e.live || !e.listed {
                continue;
            }
            if cold {
                let rows: Vec<u32> = e.slots.iter().copied().filter(|r| *r != NONE).collect();
                let e = &mut self.index[entry];
                (e.slots, e.have, e.bytes) = (Vec::new(), 0, 0);
                for row in rows {
                    self.free_row(row, Why::Ended);
                }
            }
            self.index.recount(entry);
            let e = &self.index[entry];
            if e.have == 0 && e.open.is_none() {
                self.remove(entry, Why::Ended);
                continue;
            }
            let (complete, handle) = (e.complete(), self.index.handle(entry));
            let (bytes, record) = (e.bytes, self.slots.record(entry));
            if record.kind == KeyKind::Opaque as u8 {
                self.count_to_quota(entry, NamespaceId(record.namespace), bytes);
            }
            // the earlier boot's record of written tiers is lost
            self.index[entry].missed = u8::MAX;
            if complete {
                self.became_readable(entry);
                self.stats.adopted_chunks += 1;
                self.stats.stored_chunks -= 1;
                adopted.push(handle);
            }
            self.unpark(entry);
        }
        adopted
    }
}

fn fill(e: &mut Entry, record: &ChunkRecord) {
    e.first_token = record.first_token;
    e.tokens = record.tokens;
    e.needed = u128::from(record.needed[0]) | u128::from(record.needed[1]) << 64;
    e.expires_unix_s = record.expires_unix_s;
    e.parent_key = ChunkKey(record.parent);
}
