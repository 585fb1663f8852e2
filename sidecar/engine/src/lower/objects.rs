//! What only opaque objects need of lower tiers: their length, which a request does not know, and their removal.

use super::super::name::Name;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::{Reach, Tier};
use crate::effect::Effect;
use crate::tier::Cause;
use kvcachepool_protocol::domain::SectionPlan;
use kvcachepool_protocol::key::{ChunkKey, KeyKind};
use kvcachepool_protocol::object::Object;

impl<T: Table> Engine<T> {
    /// The head of an object that will be fetched was read.
    pub(crate) fn head_read(&mut self, now: Time, head: u64, object: Result<Box<Object>, Cause>) {
        let Some(name) = self.lower.heads.remove(&head) else {
            // from an earlier boot
            return;
        };
        let pending = self.lower.pending.get_mut(&name);
        let Some(pending) = pending.filter(|p| p.number == head) else {
            // cancelled
            return;
        };
        let tier = pending.tier;
        let up = self.lower.tiers.get(tier).is_some_and(Tier::up);
        let plan = match object {
            _ if !up => Err("TierDown"),
            Ok(object) => plan_of(&object).ok_or(Cause::Shape.name()),
            Err(cause) => Err(cause.name()),
        };
        match plan {
            Ok(plan) => {
                pending.chunk.object_plan = Some(plan);
                if let Some(tier) = self.lower.tiers.get_mut(tier) {
                    tier.queue.push_back((name, head));
                }
            }
            Err(why) => {
                if why == Cause::Missing.name() {
                    self.lower.known.absent(name, tier, now.mono_ms);
                } else if why == Cause::Shape.name() {
                    self.lower.known.unusable(name, tier, now.mono_ms);
                }
                self.end_pending(now, &name, head, why);
            }
        }
    }

    /// Removes objects from memory and orders their removal from the lower tiers. An object that is being written is removed when the write
    /// has ended. Returns which of them were in memory.
    pub fn remove_objects(&mut self, now: Time, reach: &Reach, keys: &[ChunkKey]) -> Vec<bool> {
        let layout = self.memory.index.layout_number(reach.domain.layout_id);
        let names: Vec<Name> = keys.iter().map(|key| Name { layout, key: *key }).collect();
        let removed = names.iter().map(|name| {
            let entry = self.memory.index.find(name);
            entry.is_some_and(|entry| self.memory.remove_listed(entry))
        });
        let removed: Vec<bool> = removed.collect();
        self.settle();
        for at in 0..self.lower.tiers.len() {
            let serves = self.lower.serves(at, &reach.namespace);
            let Some(tier) = self
                .lower
                .tiers
                .get(at)
                .filter(|t| t.is_written() && serves)
            else {
                continue;
            };
            let tier = tier.config.kind;
            for put in self.lower.puts.values_mut().filter(|put| put.tier == at) {
                if names.contains(&put.name) {
                    put.removed = Some(reach.object(put.name.key));
                }
            }
            for name in &names {
                self.lower.known.absent(*name, at, now.mono_ms);
            }
            let names = keys.iter().map(|key| reach.object(*key)).collect();
            self.effects.push(Effect::Remove { tier, names });
        }
        removed
    }
}

/// The plan of an opaque object, if its sections are those that its length requires.
fn plan_of(object: &Object) -> Option<SectionPlan> {
    let lengths = || object.sections.iter().map(|s| s.raw_bytes);
    let plan = SectionPlan::opaque(lengths().try_fold(0u64, u64::checked_add)?)?;
    let planned = (0..plan.sections()).map(|section| plan.section_bytes(section, 1));
    let in_order = object.sections.iter().zip(0u32..);
    let sound = object.kind == KeyKind::Opaque
        && planned.eq(lengths())
        && in_order
            .into_iter()
            .all(|(s, at)| (s.group, s.shard) == (0, at));
    sound.then_some(plan)
}
