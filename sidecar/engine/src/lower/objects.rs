//! Heads of opaque objects: a request does not know the length of an object, so its head is read before a fetch.

use super::super::name::Name;
use super::super::table::Table;
use super::super::{Engine, Time};
use crate::effect::{Effect, HeadJob};
use crate::tier::Cause;
use kvcachepool_protocol::domain::SectionPlan;
use kvcachepool_protocol::key::KeyKind;
use kvcachepool_protocol::object::Object;

/// Heads in flight per tier, including those that nobody waits for any more.
const HEADS_MAX: usize = 32;

impl<T: Table> Engine<T> {
    /// Orders the heads of queued objects, tier by tier.
    pub(super) fn begin_heads(&mut self) {
        for at in 0..self.lower.tiers.len() {
            let in_flight = self.lower.heads.values().filter(|(tier, _)| *tier == at);
            for _ in in_flight.count()..HEADS_MAX {
                let Some((name, number)) = self.next_head(at) else {
                    break;
                };
                let (Some(pending), Some(tier)) =
                    (self.lower.pending.get(&name), self.lower.tiers.get(at))
                else {
                    break;
                };
                self.effects.push(Effect::Head(HeadJob {
                    head: number,
                    tier: tier.config.kind,
                    name: pending.chunk.reach.object(pending.chunk.key),
                }));
                self.lower.heads.insert(number, (at, name));
            }
        }
    }

    /// The queued object that has waited longest. Skips those that nobody waits for any more.
    fn next_head(&mut self, at: usize) -> Option<(Name, u64)> {
        let tier = self.lower.tiers.get_mut(at)?;
        while let Some((name, number)) = tier.heads.pop_front() {
            if self
                .lower
                .pending
                .get(&name)
                .is_some_and(|p| p.number == number)
            {
                return Some((name, number));
            }
        }
        None
    }

    /// A head was read. The object's fetch is queued.
    pub(crate) fn head_read(&mut self, now: Time, head: u64, object: Result<Box<Object>, Cause>) {
        let Some((at, name)) = self.lower.heads.remove(&head) else {
            // from an earlier boot
            return;
        };
        let pending = self.lower.pending.get_mut(&name);
        let Some(pending) = pending.filter(|p| p.number == head) else {
            // cancelled
            return;
        };
        let plan = match object {
            Ok(object) => plan_of(&object).ok_or(Cause::Shape),
            Err(cause) => Err(cause),
        };
        match plan {
            Ok(plan) => {
                pending.chunk.object_plan = Some(plan);
                if let Some(tier) = self.lower.tiers.get_mut(at) {
                    tier.queue.push_back((name, head));
                }
            }
            Err(cause) => {
                match cause {
                    Cause::Missing => self.lower.known.absent(name, at, now.mono_ms),
                    Cause::Shape | Cause::Corrupt | Cause::Foreign => {
                        self.lower.known.unusable(name, at, now.mono_ms);
                    }
                    _ => {}
                }
                self.end_pending(now, &name, head, cause.name());
            }
        }
    }
}

/// The plan of an opaque object, if its sections are those that its length requires.
pub(super) fn plan_of(object: &Object) -> Option<SectionPlan> {
    let lengths = || object.sections.iter().map(|s| s.raw_bytes);
    let plan = SectionPlan::opaque(lengths().try_fold(0u64, u64::checked_add)?)?;
    let planned = (0..plan.sections()).map(|section| plan.section_bytes(section, 1));
    let mut in_order = object.sections.iter().zip(0u32..);
    let sound = object.kind == KeyKind::Opaque
        && planned.eq(lengths())
        && in_order.all(|(s, at)| (s.group, s.shard) == (0, at));
    sound.then_some(plan)
}
