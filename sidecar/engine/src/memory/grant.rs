//! Grants: slots that a worker writes. A grant covers all missing sections of a chunk or none, and a chunk has at most one open grant.
//! Every slot's grant ends by COMMIT, ABORT, a HELLO that does not name it, or proof of death.

use super::MemoryTier;
use super::grants::Grant;
use crate::Time;
use crate::name::Name;
use crate::table::{ChunkRecord, Row, Table};
use kvcachepool_protocol::domain::SectionPlan;
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, LayoutId, ModelId, NamespaceId};
use kvcachepool_protocol::message as wire;
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};
use kvcachepool_protocol::table::MAX_BLOCK_HASHES;

/// Domain and writers of the chunks to grant.
#[derive(Debug, Clone, Copy)]
pub struct GrantContext<'a> {
    pub scheduler: u64,
    pub tag: u64,
    pub kind: KeyKind,
    pub model: ModelId,
    pub layout: LayoutId,
    pub namespace: NamespaceId,
    pub plan: &'a SectionPlan,
    /// Lock number of the writer, per section.
    pub writers: &'a [u32],
    /// Unix seconds after which the chunks expire; 0 = never.
    pub expires_unix_s: u64,
}

/// A chunk to grant. The caller checks sizes and hashes.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    pub key: ChunkKey,
    /// Key of the preceding chunk.
    pub parent: Option<ChunkKey>,
    /// Engine hash of its last block.
    pub last_hash: EngineHash,
    /// Position of its first token.
    pub first_token: u32,
    pub tokens: u32,
    /// Bit mask of the sections that the chunk needs.
    pub sections: u128,
    /// Engine hashes of its blocks.
    pub block_hashes: &'a [EngineHash],
}

struct Place {
    name: Name,
    /// Entry of the incomplete chunk, if one exists.
    found: Option<u32>,
    parent: Option<u32>,
    lacking: u128,
}

/// A grant to the engine itself, which fills the slots from a lower tier as owner 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(u64);

impl FetchId {
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

impl<T: Table> MemoryTier<T> {
    /// Grants the missing sections of a chunk. Returns `GRANT_*` of the wire. For `GRANT_GRANTED` only, appends one reference per section
    /// of the domain to `refs`.
    pub fn grant(
        &mut self,
        now: Time,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
        refs: &mut Vec<SectionRef>,
    ) -> u8 {
        let name = Name {
            layout: self.index.layout_number(context.layout),
            key: wish.key,
        };
        if let Some(old) = self.index.find(&name)
            && self.index[old].expired(now.unix_s)
        {
            self.doom(old);
        }
        if context.kind == KeyKind::Opaque
            && let Some(old) = self.index.find(&name)
        {
            // objects of one key may differ in length
            if self.index[old].complete() || self.index[old].open.is_some() {
                return wire::GRANT_EXISTS;
            }
            // the rest of a void grant
            self.doom(old);
        }
        let found = self.index.find(&name);
        if let Some(entry) = found {
            self.need_anew(entry, wish.sections);
        }
        let lacking = match found.map(|e| &self.index[e]) {
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
            Some(key) => match self.index.find(&Name {
                layout: name.layout,
                key,
            }) {
                // a fetched chunk may follow chunks that only the engine holds locally
                None if context.writers.is_empty() => None,
                None => return wire::GRANT_NO_PARENT,
                Some(p) => {
                    let e = &self.index[p];
                    if e.first_token.checked_add(e.tokens) != Some(wish.first_token)
                        || wish.parent == Some(wish.key)
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
        let dead = |owner: &u32| self.grants.is_dead(*owner);
        // no writers: a grant to the engine itself, whose slots of an earlier boot may be in quarantine
        if context.writers.iter().any(dead) || context.writers.is_empty() && dead(&0) {
            return wire::GRANT_NOT_READY;
        }
        // clients leave half of the limit to vLLM's workers
        let of_client = context.kind == KeyKind::Opaque && !context.writers.is_empty();
        let left_over = if of_client {
            self.granted_bytes_max() / 2
        } else {
            0
        };
        if !self.may_grant(bytes + left_over) {
            self.stats.granted_bytes_refusals += 1;
            return wire::GRANT_NOT_READY;
        }
        if let Some(refused) = self.make_quota(context, wish.tokens) {
            return refused;
        }
        // the parent must not be evicted to make room
        if let Some(p) = parent {
            self.index[p].leases += 1;
        }
        let place = Place {
            name,
            found,
            parent,
            lacking,
        };
        let result = self.grant_slots(now, context, wish, &place, refs);
        if let Some(p) = parent {
            self.index[p].leases -= 1;
            self.unpark(p);
        }
        result
    }

    /// Takes slots for the missing sections of a chunk. Fails with the result of a GRANT: the chunk exists or is on its way, or nothing can
    /// be evicted for it. Ignores `context.writers`. The parent may be missing, because the engine may hold it locally.
    pub fn fetch(
        &mut self,
        now: Time,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
    ) -> Result<(FetchId, Vec<SectionRef>), u8> {
        let mut refs = Vec::new();
        let context = GrantContext {
            writers: &[],
            ..*context
        };
        let result = self.grant(now, &context, wish, &mut refs);
        if result != wire::GRANT_GRANTED {
            return Err(result);
        }
        refs.retain(|r| r.slot.get() != NO_SLOT);
        let id = refs
            .first()
            .and_then(|r| self.grants.of_row(r.slot.get()))
            .ok_or(wire::GRANT_NO_ROOM)?;
        Ok((FetchId(id), refs))
    }

    fn grant_slots(
        &mut self,
        now: Time,
        context: &GrantContext<'_>,
        wish: &Wish<'_>,
        place: &Place,
        refs: &mut Vec<SectionRef>,
    ) -> u8 {
        let Place {
            name,
            found,
            parent,
            lacking,
        } = *place;
        if let Some(entry) = found {
            self.index[entry].leases += 1;
        }
        let entry = found.or_else(|| self.occupy());
        let rows = entry.and_then(|_| self.take_rows(context.plan, wish.tokens, lacking));
        if let Some(entry) = found {
            self.index[entry].leases -= 1;
        }
        let (entry, rows) = match (entry, rows) {
            (Some(entry), Some(rows)) => (entry, rows),
            (entry, _) => {
                if found.is_none()
                    && let Some(entry) = entry
                {
                    self.index.vacate(entry);
                }
                if found.is_some()
                    && let Some(entry) = entry
                {
                    self.unpark(entry);
                }
                self.stats.no_room_refusals += 1;
                if self.slots.populated_rows() < self.slots.capacity_rows() {
                    // there will be room later: the arena is still being populated
                    return wire::GRANT_NOT_READY;
                }
                return wire::GRANT_NO_ROOM;
            }
        };
        if found.is_none() {
            self.slots.set_record(entry, &record(context, wish));
            let e = &mut self.index[entry];
            e.first_token = wish.first_token;
            e.tokens = wish.tokens;
            e.needed = wish.sections;
            e.expires_unix_s = context.expires_unix_s;
            e.parent_key = wish.parent.unwrap_or_default();
            if context.expires_unix_s != 0 {
                self.index.expires_at(entry, context.expires_unix_s);
            }
            self.index.list(entry, name, parent);
            if context.kind == KeyKind::Opaque {
                let bytes = context.plan.slot_bytes(wish.tokens);
                self.count_to_quota(entry, context.namespace, bytes);
            }
            if let (None, Some(key)) = (parent, wish.parent) {
                self.index.await_parent(entry, Name { key, ..name });
            }
        }
        let mut section_rows = Vec::with_capacity(rows.len());
        for (section, row, size) in &rows {
            let owner = context.writers.get(*section as usize).copied().unwrap_or(0);
            let length = context.plan.section_bytes(*section, wish.tokens);
            let mut key_prefix = [0; 8];
            key_prefix.copy_from_slice(&wish.key.0[..8]);
            let fields = Row {
                owner,
                slot_rows: *size,
                chunk: entry,
                section: *section,
                length,
                key_prefix,
                kind: context.kind as u8,
                ..Row::default()
            };
            self.slots.grant(*row, &fields);
            self.index.row_added(entry);
            self.grants.hold(*row, &fields);
            section_rows.push((*section, *row, length));
        }
        for section in 0..context.plan.sections() {
            refs.push(match section_rows.iter().find(|(s, _, _)| *s == section) {
                Some((_, row, length)) => {
                    let generation = self.slots.row(*row).generation;
                    SectionRef::new(*row, generation, *length as u32, section)
                }
                None => SectionRef::new(NO_SLOT, 0, 0, section),
            });
        }
        let of_vllm = !context.writers.is_empty() && context.kind != KeyKind::Opaque;
        let id = self.grants.open(Grant {
            chunk: self.index.handle(entry),
            name,
            last_hash: wish.last_hash,
            // no scheduler's ABORT may name a grant to the engine itself
            asked_by: (!context.writers.is_empty()).then_some((context.scheduler, context.tag)),
            granted_ms: of_vllm.then_some(now.mono_ms),
            rows: section_rows.iter().map(|(_, row, _)| *row).collect(),
            needed: wish.sections,
            void: false,
        });
        self.index[entry].open = Some(id);
        self.stats.granted_chunks += 1;
        wire::GRANT_GRANTED
    }

    /// Allocates slots for some sections, all or none.
    fn take_rows(
        &mut self,
        plan: &SectionPlan,
        tokens: u32,
        sections: u128,
    ) -> Option<Vec<(u32, u32, u32)>> {
        let mut rows = Vec::new();
        for section in sections_of(sections) {
            let size = plan.section_rows(section, tokens);
            match self.take_row(size, section) {
                Some(row) => rows.push((section, row, size)),
                None => {
                    for (_, row, _) in rows {
                        self.slots.give_back(row);
                    }
                    return None;
                }
            }
        }
        Some(rows)
    }

    /// True if the limit on granted bytes has room.
    pub fn may_grant(&self, bytes: u64) -> bool {
        let counts = self.slots.counts();
        counts.granted_bytes + counts.committed_bytes + bytes <= self.granted_bytes_max()
    }

    pub(crate) fn granted_bytes_max(&self) -> u64 {
        match self.config.limits.granted_bytes_max {
            0 => self.slots.capacity_bytes() / 4,
            bytes => bytes,
        }
    }
}

/// Sections that every readable chunk has.
fn full_sections(plan: &SectionPlan) -> u128 {
    plan.section_map(plan.full_groups())
}

/// Iterates over the section numbers in a bit mask.
pub(crate) fn sections_of(map: u128) -> impl Iterator<Item = u32> {
    (0..128u32).filter(move |s| map >> s & 1 == 1)
}

pub(crate) fn record(context: &GrantContext<'_>, wish: &Wish<'_>) -> ChunkRecord {
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
        kind: context.kind as u8,
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
