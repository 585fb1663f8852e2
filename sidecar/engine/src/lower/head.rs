//! Heads of objects: their content, and the domain data that it requires.

use super::super::memory::sections_of;
use super::super::memory::{Handle, NONE};
use super::super::table::Table;
use super::super::{Engine, Time};
use crate::effect::Target;
use kvcachepool_protocol::domain::{Domain, Portable, SectionPlan};
use kvcachepool_protocol::key::{EngineHash, KeyKind, LayoutId, ModelId, NamespaceId};
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Form, Object, Section};
use kvcachepool_protocol::refs::SectionRef;
use std::sync::Arc;

/// Limit on an engine's name and version in an object's head. Bytes.
const ENGINE_BYTES: usize = 16;
const ENGINE_VERSION_BYTES: usize = 32;

/// The writer's data in an object's head, and the placement of its sections.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    plan: SectionPlan,
    form: Form,
    /// Layout of the objects.
    pub(super) layout: LayoutId,
    pub(super) portable: Option<Arc<Portable>>,
    engine: String,
    engine_version: String,
}

impl<T: Table> Engine<T> {
    /// Records the domain of a layout. Chunks of unknown domains cannot be written.
    pub fn learn(&mut self, domain: &Domain, engine: &str, engine_version: &str) {
        if self.lower.tiers.is_empty() || domain.not_shareable.is_some() {
            return;
        }
        self.lower
            .note_domain(domain.model_id, domain.object_layout);
        let layout = self.memory.index.layout_number(domain.layout_id);
        let origin = || Origin {
            plan: domain.plan.clone(),
            form: domain.form,
            layout: domain.object_layout,
            portable: domain.portable.clone(),
            engine: within(engine, ENGINE_BYTES),
            engine_version: within(engine_version, ENGINE_VERSION_BYTES),
        };
        let new_layout = !self.lower.origins.contains_key(&layout);
        self.lower.origins.entry(layout).or_insert_with(origin);
        if self.lower.models.insert(domain.model_id) || new_layout {
            self.lower.learned();
        }
    }

    /// The head of a chunk's object for a tier, and the slots of its sections.
    pub(super) fn object(
        &self,
        now: Time,
        at: usize,
        chunk: Handle,
    ) -> Result<(Object, Vec<Target>), &'static str> {
        let e = self
            .memory
            .index
            .get(chunk)
            .filter(|e| e.listed && e.complete())
            .ok_or("Gone")?;
        if e.expired(now.unix_s) {
            return Err("Expired");
        }
        // an object is written once: wait for sections in flight, or write without them if they do not arrive
        if e.open.is_some() {
            return Err("SectionsComing");
        }
        let origin = self.lower.origins.get(&e.name.layout).ok_or("Gone")?;
        // other processes can write to the record, so its chunk key is compared
        let record = self.memory.slots.record(chunk.entry);
        let kind = KeyKind::try_from(record.kind).map_err(|_| "BadRecord")?;
        let (model, last_hash) = (ModelId(record.model), EngineHash(record.last_hash));
        let namespace = NamespaceId(record.namespace);
        if !self.lower.models.contains(&model) || !self.lower.serves(at, &namespace) {
            return Err("NotShared");
        }
        let hashes = record.block_hashes.get(..record.block_hash_count as usize);
        let mut block_hashes: Vec<EngineHash> = hashes
            .unwrap_or_default()
            .iter()
            .map(|h| EngineHash(*h))
            .collect();
        if block_hashes.last() != Some(&last_hash) {
            block_hashes.clear();
        }
        let (mut sections, mut targets) = (Vec::new(), Vec::new());
        for number in sections_of(e.have) {
            let slot = e.slot(number);
            let (group, shard) = origin.plan.locate(number).ok_or("Gone")?;
            if slot == NONE {
                return Err("Gone");
            }
            let row = self.memory.slots.row(slot);
            let group = group as u32;
            sections.push(Section::plain(group, shard, row.length, row.digest));
            targets.push(Target {
                group,
                shard,
                section: SectionRef::new(slot, row.generation, row.length as u32, number),
            });
        }
        let object = Object {
            kind,
            codec: Codec::None,
            fidelity: Fidelity::Exact,
            form: origin.form,
            cipher: Cipher::None,
            model,
            layout: origin.layout,
            namespace,
            last_hash,
            parent: e.parent_key,
            part: 0,
            parts: 1,
            tokens: e.tokens,
            first_token: e.first_token,
            created_unix_ms: now.unix_s.saturating_mul(1000),
            expires_unix_s: e.expires_unix_s,
            writer: [0; 16],
            engine: origin.engine.clone(),
            engine_version: origin.engine_version.clone(),
            nonce: [0; 24],
            sections,
            block_hashes,
            token_ids: Vec::new(),
        };
        if object.key() != e.name.key {
            return Err("BadRecord");
        }
        Ok((object, targets))
    }
}

/// The longest prefix of a text that fits.
fn within(text: &str, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at));
    text.get(..end.unwrap_or(0)).unwrap_or_default().to_owned()
}
