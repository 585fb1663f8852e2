//! Grants: slots that a worker writes. All sections of a chunk or none, never two open grants for one chunk, and an end for
//! every slot: COMMIT, ABORT, not named in a HELLO, or proof of death.

use super::entry::{Handle, NONE};
use super::evict::Why;
use super::index::Name;
use super::mistake::{Mistake, made};
use super::table::{COMMITTED, ChunkRecord, FREE, GRANTED, PUBLISHED, ROW_BYTES, Row, Table};
use super::{Action, Engine, Time};
use kvcachepool_protocol::domain::{SectionPlan, slot_rows};
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, LayoutId, ModelId, NamespaceId};
use kvcachepool_protocol::message as wire;
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};
use kvcachepool_protocol::table::MAX_BLOCK_HASHES;
use std::collections::BTreeSet;

/// Sections of one chunk that one GRANT gave out.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub chunk: Handle,
    pub name: Name,
    pub last_hash: EngineHash,
    /// (scheduler, tag); none for grants of an earlier boot and for fetches.
    pub asked_by: Option<(u64, u64)>,
    /// Rows that are still GRANTED or COMMITTED.
    pub rows: Vec<u32>,
    /// Sections that the chunk needs once this is done.
    pub needed: u128,
    /// Nothing of it counts any more; its rows come back one by one.
    pub void: bool,
}

/// What a process has to write.
#[derive(Debug, Clone, Default)]
pub(crate) struct Owner {
    pub rows: BTreeSet<u32>,
    /// It is dead; its rows come back then.
    pub free_at_ms: Option<u64>,
}

/// Whose chunks are granted, and to whom.
#[derive(Debug, Clone, Copy)]
pub struct GrantContext<'a> {
    /// Scheduler's number.
    pub scheduler: u64,
    /// Tag of its GRANT.
    pub tag: u64,
    /// Identity of values.
    pub model: ModelId,
    /// Identity of arrangement.
    pub layout: LayoutId,
    /// Who shares.
    pub namespace: NamespaceId,
    /// Sections of the domain.
    pub plan: &'a SectionPlan,
    /// Lock number of the writer, per section.
    pub writers: &'a [u32],
    /// Unix seconds after which the chunks are dead; 0 = never.
    pub expires_unix_s: u64,
}

/// One chunk to be granted. Sizes and hashes are checked by the caller.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// Its key.
    pub key: ChunkKey,
    /// Key of the chunk before it.
    pub parent: Option<ChunkKey>,
    /// Engine hash of its last block.
    pub last_hash: EngineHash,
    /// Position of its first token.
    pub first_token: u32,
    /// Tokens.
    pub tokens: u32,
    /// Sections that it will need.
    pub sections: u128,
    /// Engine hashes of its blocks.
    pub block_hashes: &'a [EngineHash],
}

impl<T: Table> Engine<T> {
    /// Grants the sections of a chunk that are missing. Appends one reference per section of the domain to `refs`.
    /// Returns `GRANT_*` of the wire; references are appended for `GRANT_GRANTED` only.
    pub fn grant(
        &mut self,
        now: Time,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
        refs: &mut Vec<SectionRef>,
    ) -> u8 {
        let name = Name {
            layout: self.layout_number(context.layout),
            key: wish.key,
        };
        if let Some(old) = self.find(&name)
            && self.entries[old as usize].expired(now.unix_s)
        {
            self.doom(old);
        }
        let found = self.find(&name);
        if let Some(entry) = found {
            self.need_anew(entry, wish.sections);
        }
        let lacking = match found.map(|e| &self.entries[e as usize]) {
            Some(e) if e.tokens != wish.tokens || e.first_token != wish.first_token => {
                return wire::GRANT_INVALID;
            }
            Some(e) if e.open.is_some() => return wire::GRANT_EXISTS,
            Some(e) => wish.sections & !e.have,
            None if wish.sections & full_sections(context.plan) != full_sections(context.plan) => {
                return wire::GRANT_INVALID;
            }
            None => wish.sections,
        };
        if lacking == 0 {
            return wire::GRANT_EXISTS;
        }
        let parent = match wish.parent {
            None if wish.first_token != 0 => return wire::GRANT_INVALID,
            None => None,
            Some(key) => match self.find(&Name {
                layout: name.layout,
                key,
            }) {
                None => return wire::GRANT_NO_PARENT,
                Some(p) => {
                    let e = &self.entries[p as usize];
                    if e.first_token + e.tokens != wish.first_token || wish.parent == Some(wish.key)
                    {
                        return wire::GRANT_INVALID;
                    }
                    Some(p)
                }
            },
        };
        let bytes: u64 = sections_of(lacking)
            .map(|s| context.plan.section_bytes(s, wish.tokens))
            .sum();
        if self.granted_bytes + bytes > self.granted_bytes_max() {
            self.stats.granted_bytes_refusals += 1;
            return wire::GRANT_NOT_READY;
        }
        // what the grant builds on must not go to make room for it
        if let Some(p) = parent {
            self.entries[p as usize].leases += 1;
        }
        let result = self.grant_slots(context, wish, name, found, parent, lacking, refs);
        if let Some(p) = parent {
            self.entries[p as usize].leases -= 1;
            self.unpark(p);
        }
        result
    }

    #[allow(clippy::too_many_arguments)]
    fn grant_slots(
        &mut self,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
        name: Name,
        found: Option<u32>,
        parent: Option<u32>,
        lacking: u128,
        refs: &mut Vec<SectionRef>,
    ) -> u8 {
        if let Some(entry) = found {
            self.entries[entry as usize].leases += 1;
        }
        let entry = found.or_else(|| self.occupy());
        let rows = entry.and_then(|_| self.take_rows(context.plan, wish.tokens, lacking));
        if let Some(entry) = found {
            self.entries[entry as usize].leases -= 1;
        }
        let (entry, rows) = match (entry, rows) {
            (Some(entry), Some(rows)) => (entry, rows),
            (entry, _) => {
                if found.is_none()
                    && let Some(entry) = entry
                {
                    self.entries[entry as usize].live = false;
                    self.vacant.push(entry);
                }
                if found.is_some()
                    && let Some(entry) = entry
                {
                    self.unpark(entry);
                }
                self.stats.no_room_refusals += 1;
                return wire::GRANT_NO_ROOM;
            }
        };
        if found.is_none() {
            self.table.set_chunk(entry, &record(context, wish));
            let e = &mut self.entries[entry as usize];
            e.first_token = wish.first_token;
            e.tokens = wish.tokens;
            e.needed = wish.sections;
            e.expires_unix_s = context.expires_unix_s;
            if context.expires_unix_s != 0 {
                self.expires_at(entry, context.expires_unix_s);
            }
            self.list(entry, name, parent);
        }
        let id = self.next_grant;
        self.next_grant += 1;
        let mut section_rows = Vec::with_capacity(rows.len());
        for (section, row, size) in &rows {
            let owner = context.writers.get(*section as usize).copied().unwrap_or(0);
            let length = context.plan.section_bytes(*section, wish.tokens);
            self.write_grant(*row, *size, owner, entry, *section, length, wish.key);
            self.by_row.insert(*row, id);
            self.owners.entry(owner).or_default().rows.insert(*row);
            self.granted_bytes += u64::from(*size) * ROW_BYTES;
            section_rows.push((*section, *row, length));
        }
        for section in 0..context.plan.sections() {
            refs.push(match section_rows.iter().find(|(s, _, _)| *s == section) {
                Some((_, row, length)) => {
                    let generation = self.table.row(*row).generation;
                    SectionRef::new(*row, generation, *length as u32, section)
                }
                None => SectionRef::new(NO_SLOT, 0, 0, section),
            });
        }
        self.entries[entry as usize].open = Some(id);
        self.grants.insert(
            id,
            Grant {
                chunk: self.handle(entry),
                name,
                last_hash: wish.last_hash,
                asked_by: Some((context.scheduler, context.tag)),
                rows: section_rows.iter().map(|(_, row, _)| *row).collect(),
                needed: wish.sections,
                void: false,
            },
        );
        self.by_tag
            .entry((context.scheduler, context.tag))
            .or_default()
            .push(id);
        self.stats.granted_chunks += 1;
        wire::GRANT_GRANTED
    }

    /// Slots for some sections, all or none.
    fn take_rows(
        &mut self,
        plan: &SectionPlan,
        tokens: u32,
        sections: u128,
    ) -> Option<Vec<(u32, u32, u32)>> {
        let mut rows = Vec::new();
        for section in sections_of(sections) {
            let bytes = plan.section_bytes(section, tokens);
            let group = plan.locate(section).map_or(0, |(group, _)| group);
            let wanted = bytes.div_ceil(ROW_BYTES) as u32;
            let size = slot_rows(plan.full_bytes(group))
                .into_iter()
                .rev()
                .find(|size| *size >= wanted)
                .unwrap_or(wanted);
            match self.take_row(size) {
                Some(row) => rows.push((section, row, size)),
                None => {
                    for (_, row, _) in rows {
                        self.alloc.give(row);
                    }
                    return None;
                }
            }
        }
        Some(rows)
    }

    /// The order of these writes is the protocol: see `protocol::table`.
    #[allow(clippy::too_many_arguments)]
    fn write_grant(
        &mut self,
        row: u32,
        size: u32,
        owner: u32,
        entry: u32,
        section: u32,
        length: u64,
        key: ChunkKey,
    ) {
        if !made(Mistake::GenerationLate) {
            let generation = self.table.row(row).generation.wrapping_add(1);
            self.table.set_generation(row, generation);
        }
        let mut key_prefix = [0; 8];
        key_prefix.copy_from_slice(&key.0[..8]);
        self.table.set_fields(
            row,
            &Row {
                owner,
                slot_rows: size,
                chunk: entry,
                section,
                length,
                key_prefix,
                ..Row::default()
            },
        );
        self.table.set_state(row, GRANTED);
        self.entries[entry as usize].rows += 1;
    }

    /// COMMIT of one section. Anything that is not GRANTED to `owner` as named is ignored.
    pub fn commit(&mut self, owner: u32, section: SectionRef) -> bool {
        let row_number = section.slot.get();
        let row = self.table.row(row_number);
        let as_named =
            row.generation == section.generation.get() && row.section == section.section.get();
        if row.state != GRANTED
            || row.owner != owner
            || owner == 0
            || !(as_named || made(Mistake::CommitGeneration))
        {
            self.stats.commits_ignored += 1;
            return false;
        }
        let Some(grant) = self
            .by_row
            .get(&row_number)
            .and_then(|id| self.grants.get(id))
        else {
            self.free_row(row_number, Why::Ended);
            return false;
        };
        let chunk = grant.chunk;
        let taken = self.get(chunk).is_none_or(|e| e.slot(row.section) != NONE);
        if grant.void || taken {
            self.leave_grant(row_number);
            self.free_row(row_number, Why::Ended);
            return false;
        }
        self.fill_slot(chunk, row_number, &row);
        self.table.set_state(row_number, COMMITTED);
        self.actions.push(Action::Digest {
            slot: row_number,
            generation: row.generation,
            length: row.length,
            urgent: false,
        });
        true
    }

    /// The writer of a slot is done with it.
    pub(crate) fn fill_slot(&mut self, chunk: Handle, row_number: u32, row: &Row) {
        self.not_granted_any_more(row_number, row);
        if let Some(e) = self.get_mut(chunk) {
            let at = row.section as usize;
            if e.slots.len() <= at {
                e.slots.resize(at + 1, NONE);
            }
            e.slots[at] = row_number;
            e.bytes += u64::from(row.slot_rows) * ROW_BYTES;
        }
    }

    /// The digest of a COMMITTED slot was taken: readable from now on.
    pub(crate) fn publish(&mut self, now: Time, row_number: u32, row: &Row, digest: [u8; 16]) {
        self.table.set_digest(row_number, digest);
        self.table.set_state(row_number, PUBLISHED);
        if made(Mistake::GenerationLate) {
            self.table
                .set_generation(row_number, row.generation.wrapping_add(1));
        }
        if let Some(e) = self.entries.get_mut(row.chunk as usize).filter(|e| e.live) {
            if e.have == 0 {
                // what an earlier boot left beside it still waits for its check
                e.checked_ms = Some(now.mono_ms);
            }
            e.have |= 1 << row.section;
            if made(Mistake::HalfChunk) {
                let handle = self.handle(row.chunk);
                self.filled(handle, 0);
            }
        }
        self.leave_grant(row_number);
    }

    /// An incomplete chunk that nobody fills needs what the next GRANT says, which may be less than the last one said.
    fn need_anew(&mut self, entry: u32, sections: u128) {
        let e = &mut self.entries[entry as usize];
        if e.open.is_some() || e.complete() || e.needed == sections {
            return;
        }
        e.needed = sections;
        let complete = e.complete();
        self.table
            .set_needed(entry, [sections as u64, (sections >> 64) as u64]);
        if complete {
            self.became_readable(entry);
        }
    }

    /// A grant ended: all its sections are PUBLISHED, or some went.
    fn filled(&mut self, handle: Handle, needed: u128) {
        let Some(e) = self.get_mut(handle) else {
            return;
        };
        if e.have == 0 {
            self.remove(handle.entry, Why::Ended);
            return;
        }
        let before = e.needed;
        if needed & !e.have == 0 {
            e.needed |= needed;
        }
        if made(Mistake::HalfChunk) {
            e.needed = e.have;
        }
        let (after, news) = (e.needed, e.complete() && !e.known);
        if after != before {
            self.table
                .set_needed(handle.entry, [after as u64, (after >> 64) as u64]);
        }
        if news {
            self.became_readable(handle.entry);
        }
        self.unpark(handle.entry);
        self.remove_if_idle(handle.entry);
    }

    /// Forgets a grant whose rows are all gone.
    pub(crate) fn close(&mut self, id: u64) {
        let Some(grant) = self.grants.remove(&id) else {
            return;
        };
        if let Some(tag) = grant.asked_by
            && let Some(list) = self.by_tag.get_mut(&tag)
        {
            list.retain(|g| *g != id);
            if list.is_empty() {
                self.by_tag.remove(&tag);
            }
        }
        if let Some(e) = self.get_mut(grant.chunk)
            && e.open == Some(id)
        {
            e.open = None;
        }
    }

    /// Nothing of the grant counts any more: what is COMMITTED of it is freed, what is GRANTED comes back from its owners, and
    /// a new GRANT may follow.
    pub(crate) fn void(&mut self, id: u64) {
        let Some(grant) = self.grants.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut grant.void, true) {
            return;
        }
        self.stats.voided_grants += 1;
        let (rows, chunk) = (grant.rows.clone(), grant.chunk);
        let filling = self.get_mut(chunk).is_some_and(|e| {
            let open = e.open == Some(id);
            if open {
                e.open = None;
            }
            open
        });
        for row_number in rows {
            let row = self.table.row(row_number);
            if row.state == COMMITTED {
                if let Some(e) = self.get_mut(chunk)
                    && let Some(slot) = e.slots.get_mut(row.section as usize)
                    && *slot == row_number
                {
                    *slot = NONE;
                    e.bytes -= u64::from(row.slot_rows) * ROW_BYTES;
                }
                self.leave_grant(row_number);
                self.free_row(row_number, Why::Ended);
            }
        }
        if filling {
            self.filled(chunk, 0);
        }
    }

    /// A GRANTED slot comes back unwritten, or half written; its grant is void.
    pub(crate) fn come_back(&mut self, row_number: u32) {
        if let Some(id) = self.by_row.get(&row_number).copied() {
            self.void(id);
        }
        self.leave_grant(row_number);
        self.free_row(row_number, Why::Ended);
    }

    /// A worker's ABORT of one section. Anything that is not GRANTED to `owner` as named is ignored.
    pub fn abort(&mut self, owner: u32, section: SectionRef) -> bool {
        let row = self.table.row(section.slot.get());
        let mine = row.state == GRANTED && row.owner == owner && owner != 0;
        if !mine || row.generation != section.generation.get() {
            return false;
        }
        self.come_back(section.slot.get());
        true
    }

    /// A scheduler's ABORT: what its GRANT `tag` gave out and was never shipped comes back at once, void or not. `hashes` of last
    /// blocks: these chunks only. Returns the slots that came back; 0 for an unknown tag.
    pub fn abort_grant(&mut self, scheduler: u64, tag: u64, hashes: Option<&[EngineHash]>) -> u32 {
        let ids = if made(Mistake::AbortTag) {
            let names: Vec<_> = self
                .by_tag
                .get(&(scheduler, tag))
                .into_iter()
                .flatten()
                .filter_map(|id| self.grants.get(id))
                .map(|g| g.name)
                .collect();
            let asked = |g: &Grant| {
                names.contains(&g.name) || hashes.is_some_and(|h| h.contains(&g.last_hash))
            };
            let mut ids: Vec<u64> = self
                .grants
                .iter()
                .filter(|(_, g)| asked(g))
                .map(|(id, _)| *id)
                .collect();
            ids.sort_unstable();
            ids
        } else {
            self.by_tag
                .get(&(scheduler, tag))
                .cloned()
                .unwrap_or_default()
        };
        let mut freed = 0;
        for id in ids {
            let Some(grant) = self.grants.get(&id) else {
                continue;
            };
            if hashes.is_some_and(|hashes| !hashes.contains(&grant.last_hash)) {
                continue;
            }
            let rows = grant.rows.clone();
            self.void(id);
            for row in rows {
                if self.by_row.get(&row) == Some(&id) && self.table.row(row).state == GRANTED {
                    self.come_back(row);
                    freed += 1;
                }
            }
        }
        freed
    }

    /// A worker's HELLO names every slot that it still holds, as (slot, generation); what it does not name comes back.
    pub fn reconcile(&mut self, owner: u32, named: &[(u32, u32)]) -> u32 {
        let rows: Vec<u32> = match self.owners.get(&owner) {
            Some(o) => o.rows.iter().copied().collect(),
            None => return 0,
        };
        let mut named = named.to_vec();
        named.sort_unstable();
        let mut back = 0;
        for row in rows {
            let generation = self.table.row(row).generation;
            if named.binary_search(&(row, generation)).is_err() {
                self.come_back(row);
                back += 1;
            }
        }
        back
    }

    /// A process is proven dead. Its grants are void now; its slots come back after `quarantine_ms`.
    pub fn owner_died(&mut self, now: Time, owner: u32, quarantine_ms: u64) {
        let Some(o) = self.owners.get_mut(&owner) else {
            return;
        };
        if o.free_at_ms.is_some() {
            return;
        }
        o.free_at_ms = Some(now.mono_ms + quarantine_ms);
        let rows: Vec<u32> = o.rows.iter().copied().collect();
        for row in rows {
            if let Some(id) = self.by_row.get(&row).copied() {
                self.void(id);
            }
        }
        self.end_quarantines(now);
    }

    /// Slots of the dead whose time is over come back.
    pub(crate) fn end_quarantines(&mut self, now: Time) {
        let mut over: Vec<u32> = self
            .owners
            .iter()
            .filter(|(_, o)| o.free_at_ms.is_some_and(|at| at <= now.mono_ms))
            .map(|(owner, _)| *owner)
            .collect();
        over.sort_unstable();
        for owner in over {
            let rows = self
                .owners
                .remove(&owner)
                .map(|o| o.rows)
                .unwrap_or_default();
            for row in rows {
                self.come_back(row);
            }
        }
    }

    /// Locks that own slots and are not known to be dead.
    pub fn living_owners(&self) -> Vec<u32> {
        let mut list: Vec<u32> = self
            .owners
            .iter()
            .filter(|(owner, o)| **owner != 0 && o.free_at_ms.is_none() && !o.rows.is_empty())
            .map(|(owner, _)| *owner)
            .collect();
        list.sort_unstable();
        list
    }

    /// Bytes granted to a lock's holder and not committed.
    pub fn granted_to(&self, owner: u32) -> u64 {
        let rows = self
            .owners
            .get(&owner)
            .map(|o| o.rows.iter())
            .into_iter()
            .flatten();
        rows.map(|row| u64::from(self.table.row(*row).slot_rows) * ROW_BYTES)
            .sum()
    }

    /// A row is not the grant's any more; the last one ends the grant.
    fn leave_grant(&mut self, row: u32) {
        let Some(id) = self.by_row.remove(&row) else {
            return;
        };
        let Some(grant) = self.grants.get_mut(&id) else {
            return;
        };
        grant.rows.retain(|r| *r != row);
        if grant.rows.is_empty() {
            let (chunk, needed, void) = (grant.chunk, grant.needed, grant.void);
            self.close(id);
            if !void {
                self.filled(chunk, needed);
            }
        }
    }

    fn not_granted_any_more(&mut self, row_number: u32, row: &Row) {
        self.granted_bytes = self
            .granted_bytes
            .saturating_sub(u64::from(row.slot_rows) * ROW_BYTES);
        if let Some(o) = self.owners.get_mut(&row.owner) {
            o.rows.remove(&row_number);
            if o.rows.is_empty() && o.free_at_ms.is_none() {
                self.owners.remove(&row.owner);
            }
        }
    }

    /// A row becomes FREE; nothing else of it changes until it is granted again.
    pub(crate) fn free_row(&mut self, row_number: u32, why: Why) {
        let row = self.table.row(row_number);
        if row.state == FREE {
            return;
        }
        if row.state == GRANTED {
            self.not_granted_any_more(row_number, &row);
        }
        self.by_row.remove(&row_number);
        if self.checks.remove(&row_number).is_some_and(|c| c.sweep) {
            self.sweeping -= 1;
        }
        if !(made(Mistake::InPlace) && why == Why::Evicted) {
            self.table.set_state(row_number, FREE);
        }
        self.alloc.give(row_number);
        self.row_left(row.chunk);
    }

    fn granted_bytes_max(&self) -> u64 {
        match self.config.limits.granted_bytes_max {
            0 => self.geometry.arena_bytes / 4,
            bytes => bytes,
        }
    }
}

/// Sections that every readable chunk has.
fn full_sections(plan: &SectionPlan) -> u128 {
    let [low, high] = plan.section_map(plan.full_groups());
    u128::from(low) | u128::from(high) << 64
}

/// Numbers of the sections in a map.
pub(crate) fn sections_of(map: u128) -> impl Iterator<Item = u32> {
    (0..128u32).filter(move |s| map >> s & 1 == 1)
}

fn record(context: &GrantContext<'_>, wish: &Wish<'_>) -> ChunkRecord {
    let count = if wish.block_hashes.len() <= MAX_BLOCK_HASHES {
        wish.block_hashes.len()
    } else {
        0
    };
    let mut block_hashes = [[0; 32]; MAX_BLOCK_HASHES];
    for (to, from) in block_hashes.iter_mut().zip(&wish.block_hashes[..count]) {
        *to = from.0;
    }
    ChunkRecord {
        state: 1,
        kind: KeyKind::Prefix as u8,
        fidelity: 0,
        block_hash_count: count as u16,
        key: wish.key.0,
        model: context.model.0,
        layout: context.layout.0,
        namespace: context.namespace.0,
        parent: wish.parent.unwrap_or_default().0,
        last_hash: wish.last_hash.0,
        first_token: wish.first_token,
        tokens: wish.tokens,
        needed: [wish.sections as u64, (wish.sections >> 64) as u64],
        expires_unix_s: context.expires_unix_s,
        block_hashes,
        reserved: [0; 24],
    }
}
