//! Clear of the lower tiers. From the clear until the shell has removed the objects, a tier is neither read nor written. Objects from
//! before a clear are therefore never served after it, however long the removal takes.

use super::super::mistake::Mistake;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::stats::count;
use super::{Tier, TierPlanner};
use crate::effect::{ClearJob, Effect};
use crate::tier::{Cause, Kind};
use kvcachepool_protocol::key::{LayoutId, ModelId};

/// Retry interval after a failed removal. Milliseconds.
const RETRY_MS: u64 = 5_000;

/// Progress of a tier's clear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clearing {
    /// Requests that wait for the tier must be cancelled first.
    Begins,
    /// Waits until no write is in flight, and at least until `from_ms`.
    Waits {
        from_ms: u64,
    },
    Ordered,
}

impl Tier {
    /// True while a clear is in progress.
    pub fn clears(&self) -> bool {
        self.clearing.is_some()
    }
}

impl TierPlanner {
    /// The shell finished or failed a removal.
    pub fn cleared(&mut self, now: Time, kind: Kind, removed: Result<u64, Cause>) {
        let Some(at) = self.tiers.iter().position(|t| t.config.kind == kind) else {
            return;
        };
        // from an earlier boot
        if self.clearing(at) != Some(Clearing::Ordered) {
            return;
        }
        let result = match removed {
            Ok(_) => "cleared",
            Err(cause) => cause.name(),
        };
        self.stat(at, |s| count(&mut s.clears, result, 1));
        let from_ms = now.mono_ms + RETRY_MS;
        let next = removed.is_err().then_some(Clearing::Waits { from_ms });
        self.set_clearing(at, next);
        if let Some(tier) = self.tiers.get_mut(at) {
            tier.clear_failed = removed.err();
        }
        if let Ok(objects) = removed {
            self.stat(at, |s| s.cleared_objects += objects);
            self.known.forget(at);
        }
    }

    fn clearing(&self, at: usize) -> Option<Clearing> {
        self.tiers.get(at).and_then(|t| t.clearing)
    }

    fn set_clearing(&mut self, at: usize, clearing: Option<Clearing>) {
        if let Some(tier) = self.tiers.get_mut(at) {
            tier.clearing = clearing;
        }
    }

    /// Records a domain whose objects may be in tiers.
    pub fn note_domain(&mut self, model: ModelId, layout: LayoutId) {
        self.domains.insert((model, layout));
    }
}

impl<T: Table> Engine<T> {
    /// Clears all tiers. The disk is cleared completely, because it belongs to this sidecar; a shared tier loses only the domains that
    /// this engine knows.
    pub(crate) fn clear_tiers(&mut self) {
        if self.lower.tiers.is_empty() || T::makes(Mistake::ClearMemoryOnly) {
            return;
        }
        for entry in 0..self.memory.index.len() {
            let listed = self.memory.index.entry(entry).filter(|e| e.listed);
            if let Some(layout) = listed.map(|e| e.name.layout) {
                let record = self.memory.slots.record(entry);
                let origin = self.lower.origins.get(&layout);
                // of a layout without an instance since the start, only objects with the same layout are known
                let layout = origin.map_or(LayoutId(record.layout), |origin| origin.layout);
                self.lower.domains.insert((ModelId(record.model), layout));
            }
        }
        for tier in &mut self.lower.tiers {
            // a removal in progress finds nothing new: nothing was written since
            tier.clearing.get_or_insert(Clearing::Begins);
        }
    }

    /// Advances the clears in progress.
    pub(super) fn advance_clears(&mut self, now: Time) {
        for at in 0..self.lower.tiers.len() {
            if self.lower.clearing(at) == Some(Clearing::Begins) {
                self.lower
                    .set_clearing(at, Some(Clearing::Waits { from_ms: 0 }));
                self.cancel_all_of(now, at);
            }
            let Some(tier) = self.lower.tiers.get_mut(at) else {
                return;
            };
            let Some(Clearing::Waits { from_ms }) = tier.clearing else {
                continue;
            };
            // a write in flight would leave its object behind
            if now.mono_ms < from_ms || tier.writes.puts > 0 || tier.down.is_some() {
                continue;
            }
            tier.clearing = Some(Clearing::Ordered);
            let domains = (tier.config.kind != Kind::Disk).then(|| self.lower.domains.clone());
            self.effects.push(Effect::Clear(ClearJob {
                tier: tier.config.kind,
                domains,
            }));
        }
    }
}
