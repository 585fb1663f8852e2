//! Selects the chunks of a PROBE to fetch, in prefix order, up to the first missing chunk.

use super::super::memory::Handle;
use super::super::mistake::Mistake;
use super::super::probe::Probe;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::ask::{LookupState, TierLookup, set};
use super::stats::count;

impl<T: Table> Engine<T> {
    /// The prefix ends at an undelivered chunk: cancels the wait for all chunks behind it.
    pub(super) fn cut(
        &mut self,
        id: u64,
        probe: &Probe,
        tier_lookup: &mut TierLookup,
        from: usize,
    ) {
        let mut asked = false;
        for at in from..tier_lookup.states.len() {
            let state = tier_lookup.states.get(at).copied().unwrap_or_default();
            let key = probe.question.keys.get(at).copied().unwrap_or_default();
            match state {
                LookupState::Memory | LookupState::Fetched(_) => continue,
                LookupState::Asked(_) => asked = true,
                LookupState::Fetching(_) => {
                    let name = tier_lookup.name(key);
                    self.leave_fetch(&name, id, at);
                }
                LookupState::Absent if at == from => continue,
                LookupState::Pending
                | LookupState::Found(_)
                | LookupState::Absent
                | LookupState::Dropped => {}
            }
            set(tier_lookup, at, LookupState::Dropped);
        }
        let before = tier_lookup.states.get(..from).unwrap_or_default();
        if asked
            && !before.iter().any(|s| matches!(s, LookupState::Asked(_)))
            && let Some(lookup) = tier_lookup.lookup.take()
            && let Some(lookup) = self.forget_lookup(lookup)
        {
            let chunks = lookup.ats.len() as u64;
            self.lower
                .stat(lookup.tier, |s| count(&mut s.lookups, "cancelled", chunks));
        }
    }

    /// Requests a fetch of every available chunk, in prefix order, up to the first missing one. Returns true if a tier rejected a chunk, so
    /// that the next tier can be asked for it.
    pub(super) fn fetch_available(
        &mut self,
        now: Time,
        id: u64,
        probe: &mut Probe,
        tier_lookup: &mut TierLookup,
    ) -> bool {
        if !tier_lookup.fetches() {
            return false;
        }
        let worth = self.worth(now, probe, tier_lookup);
        self.choose(now, probe, tier_lookup, worth);
        for at in tier_lookup.first..tier_lookup.end {
            match tier_lookup.states.get(at).copied().unwrap_or_default() {
                LookupState::Memory | LookupState::Fetched(_) | LookupState::Fetching(_) => {}
                LookupState::Pending | LookupState::Asked(_) => {
                    if !T::makes(Mistake::FetchHoles) {
                        return false;
                    }
                }
                LookupState::Absent | LookupState::Dropped => {
                    if !T::makes(Mistake::FetchHoles) {
                        self.cut(id, probe, tier_lookup, at);
                        return false;
                    }
                }
                LookupState::Found(_) if at >= worth.until && !T::makes(Mistake::FetchHoles) => {
                    if let Some(why) = worth.declined {
                        self.lower.decline(tier_lookup, why);
                        self.cut(id, probe, tier_lookup, worth.there);
                    }
                    return false;
                }
                LookupState::Found(tier) => {
                    let state = self.queue_fetch(now, id, at, probe, tier_lookup, tier);
                    set(tier_lookup, at, state);
                    tier_lookup.changed = true;
                    if state == LookupState::Dropped && !T::makes(Mistake::FetchHoles) {
                        self.cut(id, probe, tier_lookup, at);
                        return false;
                    }
                    if state == LookupState::Pending {
                        return tier_lookup.lookup.is_none();
                    }
                }
            }
        }
        false
    }

    /// Marks a chunk for a waiting PROBE: fetched if it is in memory, else `otherwise`.
    pub(super) fn notify_waiter(
        &mut self,
        now: Time,
        id: u64,
        at: usize,
        fetched: Option<(Handle, LookupState)>,
        otherwise: LookupState,
    ) {
        let Some(mut probe) = self.leases.take(id) else {
            return;
        };
        if let Some(mut tier_lookup) = probe.tier_lookup.take() {
            let mut state = if fetched.is_some() {
                LookupState::Dropped
            } else {
                otherwise
            };
            if let Some((handle, from)) = fetched
                && self.pin_softly(handle, id)
                && let Some(pin) = probe.pins.get_mut(at)
            {
                *pin = Some(handle);
                state = from;
                if self.must_check(handle.entry, probe.asked_ms) {
                    probe.waits.insert(handle);
                    self.leases.wait(handle, id);
                    self.start_check(now, handle.entry, true, false);
                }
            }
            set(&mut tier_lookup, at, state);
            tier_lookup.changed = true;
            probe.tier_lookup = Some(tier_lookup);
        }
        self.leases.put_back(id, probe);
        self.advance(now, id);
    }
}
