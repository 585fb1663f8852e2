//! What an answer to a PROBE says of lower tiers: the state of each chunk, the expected wait, and updates.

use super::super::Engine;
use super::super::Time;
use super::super::probe::Probe;
use super::super::table::Table;
use super::ask::LookupState;
use super::{TierPlanner, number};
use crate::Changed;
use kvcachepool_protocol::message as wire;

/// Shortest interval between two updates of one PROBE. Milliseconds.
const UPDATE_MS: u64 = 20;

impl TierPlanner {
    /// Wire state, tier number and pending flag of a chunk that memory lacks.
    pub fn state_of(&self, probe: &Probe, at: usize) -> (u8, u8, bool) {
        let state = probe.tier_lookup.as_ref().and_then(|a| a.states.get(at));
        let named = |tier: &usize| self.number_of(*tier);
        match state {
            Some(LookupState::Asked(tier) | LookupState::Fetching(tier)) => {
                (wire::CHUNK_PENDING, named(tier), true)
            }
            Some(LookupState::Pending) => {
                let untried = |tier: &usize| {
                    probe
                        .tier_lookup
                        .as_ref()
                        .is_some_and(|a| !a.tried(at, *tier))
                };
                let last = self.tiers.len().saturating_sub(1);
                let next = (0..last).find(untried).unwrap_or(last);
                (wire::CHUNK_PENDING, named(&next), true)
            }
            // the request's next PROBE fetches it
            Some(LookupState::Found(tier)) => (wire::CHUNK_PENDING, named(tier), false),
            _ => (wire::CHUNK_ABSENT, 0, false),
        }
    }

    /// Reason why chunks of a PROBE are not fetched; empty = none is declined.
    pub fn declined(&self, probe: &Probe) -> &'static str {
        let tier_lookup = probe.tier_lookup.as_ref();
        tier_lookup.and_then(|a| a.declined).unwrap_or_default()
    }

    /// Number of the tier that a chunk of a PROBE was fetched from.
    pub fn fetched_from(&self, probe: &Probe, at: usize) -> Option<u8> {
        match probe.tier_lookup.as_ref()?.states.get(at)? {
            LookupState::Fetched(tier) => Some(self.number_of(*tier)),
            _ => None,
        }
    }

    fn number_of(&self, tier: usize) -> u8 {
        self.tiers.get(tier).map_or(0, |t| number(t.config.kind))
    }

    /// Expected wait of a PROBE for lower tiers. Milliseconds.
    pub fn pending_ms(&self, probe: &Probe) -> u64 {
        let Some(tier_lookup) = &probe.tier_lookup else {
            return 0;
        };
        let mut longest = 0;
        // a fetch slower than the average has already taken its age
        let age = |since: Option<u64>| since.map_or(0, |since| self.now_ms.saturating_sub(since));
        for (at, tier) in self.tiers.iter().enumerate() {
            let (mut asked, mut coming) = (false, false);
            for state in &tier_lookup.states {
                asked |= *state == LookupState::Asked(at);
                coming |=
                    matches!(state, LookupState::Fetching(t) | LookupState::Found(t) if *t == at);
            }
            if !asked && !coming {
                continue;
            }
            let in_flight = self.in_flight.values().filter(|f| f.tier == at);
            let mut expected_ms = tier.expected_ms(age(in_flight.map(|f| f.since_ms).min()));
            if asked {
                let mut lookups = self.lookups.values().filter(|l| l.tier == at);
                let oldest = lookups.next().map(|l| l.since_ms);
                expected_ms += tier.lookup_ms.max(age(oldest));
            }
            longest = longest.max(expected_ms);
        }
        longest
    }
}

impl<T: Table> Engine<T> {
    /// Queues updates for PROBEs whose answers changed, at most one per interval.
    pub(super) fn send_updates(&mut self, now: Time) {
        let mut ids = std::mem::take(&mut self.lower.updates);
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            let Some(probe) = self.leases.probe_mut(id).filter(|p| !p.answered) else {
                continue;
            };
            let Some(tier_lookup) = probe.tier_lookup.as_mut().filter(|a| a.changed) else {
                continue;
            };
            if now.mono_ms < tier_lookup.updated_ms + UPDATE_MS {
                self.lower.updates.push(id);
                continue;
            }
            tier_lookup.updated_ms = now.mono_ms;
            tier_lookup.changed = false;
            self.changed.push(Changed::Partial { probe: id });
        }
    }
}
