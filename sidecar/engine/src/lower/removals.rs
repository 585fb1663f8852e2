//! Removal of opaque objects from lower tiers. From the request until the tier has confirmed it, the object is neither looked up, fetched
//! nor written there, so that a key that is stored again never returns its earlier value from a tier. Notes in the slot table keep
//! removals through a restart of the engine process.

use super::super::memory::Note;
use super::super::name::Name;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::puts::Offer;
use super::{Reach, Tier, TierPlanner, number, object_of};
use crate::effect::{Effect, RemoveJob};
use crate::tier::{Cause, Kind};
use kvcachepool_protocol::domain::opaque;
use kvcachepool_protocol::key::ChunkKey;
use kvcachepool_protocol::object::ObjectName;

/// Limit on removals that no tier has confirmed.
const REMOVALS_MAX: usize = 1 << 16;
/// Names in one order.
pub(super) const NAMES_MAX: usize = 1_000;
/// Retry interval after a failed removal. Milliseconds.
const RETRY_MS: u64 = 5_000;
/// The end of the process does not wait for a tier that has removed nothing for this long. Milliseconds.
const FAILING_MS_MAX: u64 = 30_000;

/// Too many removals wait for a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyRemovals;

#[derive(Debug)]
pub(super) struct Removal {
    object: ObjectName,
    /// Not ordered before this time; none = the order is in flight.
    from_ms: Option<u64>,
    /// Record of its note in the slot table, if there was one left.
    pub(super) note: Option<u32>,
}

impl TierPlanner {
    /// True if the tier has not confirmed the removal of this object.
    pub(super) fn removes(&self, name: &Name, tier: usize) -> bool {
        !self.removals.is_empty() && self.removals.contains_key(&(tier, *name))
    }
}

impl<T: Table> Engine<T> {
    /// At a start: takes over the removals that an earlier engine noted.
    pub(crate) fn adopt_removals(&mut self) {
        let Some(domain) = opaque() else { return };
        let layout = self.memory.index.layout_number(domain.layout_id);
        for (entry, note) in self.memory.notes() {
            let key = note.key;
            let name = Name { layout, key };
            let mut tiers = self.lower.tiers.iter();
            let at = tiers.position(|tier| number(tier.config.kind) == note.tier);
            let Some(at) = at.filter(|at| !self.lower.removes(&name, *at)) else {
                // of a tier that is no longer configured
                self.memory.forget_note(entry);
                continue;
            };
            let removal = Removal {
                object: object_of(&domain, key),
                from_ms: Some(0),
                note: Some(entry),
            };
            self.lower.removals.insert((at, name), removal);
        }
    }

    /// Removals that tiers have not confirmed, with the tiers.
    pub fn unremoved(&self) -> Vec<(Kind, usize)> {
        let tiers = self.lower.tiers.iter().enumerate();
        let waiting = |at| {
            self.lower
                .removals
                .keys()
                .filter(|(of, _)| *of == at)
                .count()
        };
        tiers
            .map(|(at, tier)| (tier.config.kind, waiting(at)))
            .filter(|(_, objects)| *objects > 0)
            .collect()
    }

    /// True while a tier that is up, and does not fail all the time, has removals to confirm.
    pub fn removes(&self) -> bool {
        let waited_for = |at: &usize| {
            self.lower.tiers.get(*at).is_some_and(|tier| {
                let since_ms = tier.removals_fail_since_ms.unwrap_or(u64::MAX);
                tier.up() && self.lower.now_ms.saturating_sub(since_ms) < FAILING_MS_MAX
            })
        };
        self.lower.removals.keys().any(|(at, _)| waited_for(at))
    }

    /// Removes objects from memory, and from the lower tiers that are written. Returns which of them were readable in memory.
    pub fn remove_objects(
        &mut self,
        now: Time,
        reach: &Reach,
        keys: &[ChunkKey],
    ) -> Result<Vec<bool>, TooManyRemovals> {
        let takes = |tier: &Tier, serves: bool| tier.is_written() && serves;
        let tiers: Vec<usize> = (0..self.lower.tiers.len())
            .filter(|at| {
                takes(
                    &self.lower.tiers[*at],
                    self.lower.serves(*at, &reach.namespace),
                )
            })
            .collect();
        if self.lower.removals.len() + tiers.len() * keys.len() > REMOVALS_MAX {
            return Err(TooManyRemovals);
        }
        let layout = self.memory.index.layout_number(reach.domain.layout_id);
        let mut removed = Vec::with_capacity(keys.len());
        for key in keys {
            let name = Name { layout, key: *key };
            removed.push(self.there(&name).is_some());
            if let Some(entry) = self.memory.index.find(&name) {
                self.memory.remove_listed(entry);
            }
            for at in &tiers {
                let before = self.lower.removals.get(&(*at, name));
                let note = match (before, self.lower.tiers.get(*at)) {
                    (Some(before), _) => before.note,
                    (None, Some(tier)) => self.memory.note(Note {
                        key: *key,
                        tier: number(tier.config.kind),
                    }),
                    (None, None) => None,
                };
                let removal = Removal {
                    object: reach.object(*key),
                    from_ms: Some(0),
                    note,
                };
                self.lower.removals.insert((*at, name), removal);
                self.lower.known.gone(&name, *at);
            }
            let queued = self.lower.pending.get(&name);
            if let Some(number) = queued.filter(|p| p.flight.is_none()).map(|p| p.number) {
                self.end_pending(now, &name, number, "Voided");
            }
        }
        self.settle();
        Ok(removed)
    }

    /// Orders removals that are due, one order at a time per tier. A write in flight would leave its object behind.
    pub(super) fn advance_removals(&mut self, now: Time) {
        if self.lower.removals.is_empty() {
            return;
        }
        for at in 0..self.lower.tiers.len() {
            let in_flight = self.lower.ordered.values().any(|(tier, _)| *tier == at);
            let up = self.lower.tiers.get(at).filter(|tier| tier.up());
            let Some(tier) = up.filter(|_| !in_flight) else {
                continue;
            };
            let (tier, names_max) = (tier.config.kind, tier.removal_names_max);
            let written = |name: &Name| {
                let writing = self.lower.writing.get(name);
                writing.is_some_and(|w| w >> at & 1 == 1)
            };
            let due = |((of, name), removal): &(&(usize, Name), &Removal)| {
                *of == at && removal.from_ms.is_some_and(|ms| ms <= now.mono_ms) && !written(name)
            };
            let due = self.lower.removals.iter().filter(due).take(names_max);
            let (names, objects): (Vec<Name>, Vec<ObjectName>) = due
                .map(|((_, name), removal)| (*name, removal.object.clone()))
                .unzip();
            if names.is_empty() {
                continue;
            }
            for name in &names {
                if let Some(removal) = self.lower.removals.get_mut(&(at, *name)) {
                    removal.from_ms = None;
                }
            }
            let removal = self.lower.next_removal;
            self.lower.next_removal += 1;
            self.lower.ordered.insert(removal, (at, names));
            self.effects.push(Effect::Remove(RemoveJob {
                removal,
                tier,
                names: objects,
            }));
        }
    }

    /// An order to remove objects has ended. Objects that were stored again meanwhile are offered to the tier.
    pub(crate) fn removal_done(&mut self, now: Time, removal: u64, removed: Result<u64, Cause>) {
        let Some((at, names)) = self.lower.ordered.remove(&removal) else {
            // from an earlier boot
            return;
        };
        if let Some(tier) = self.lower.tiers.get_mut(at) {
            let since_ms = tier.removals_fail_since_ms.unwrap_or(now.mono_ms);
            tier.removals_fail_since_ms = removed.is_err().then_some(since_ms);
            // One object that cannot be removed fails its order: in smaller ones it holds up fewer others.
            tier.removal_names_max = match removed {
                Ok(_) => NAMES_MAX,
                Err(_) => names.len().div_ceil(2),
            };
        }
        for name in names {
            // a request that arrived after the order waits for the next one
            let ordered = |r: &&mut Removal| r.from_ms.is_none();
            let Some(waits) = self.lower.removals.get_mut(&(at, name)).filter(ordered) else {
                continue;
            };
            if removed.is_err() {
                waits.from_ms = Some(now.mono_ms + RETRY_MS);
                continue;
            }
            let done = self.lower.removals.remove(&(at, name));
            if let Some(note) = done.and_then(|done| done.note) {
                self.memory.forget_note(note);
            }
            if let Some(chunk) = self.there(&name) {
                let tiers = 1 << at;
                self.lower.offers.push(Offer { chunk, tiers });
            }
        }
    }
}
