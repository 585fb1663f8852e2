//! Lookups of a PROBE in lower tiers. The nearest tier is asked first; later tiers are asked only for chunks that nearer ones lack.

use super::super::mistake::Mistake;
use super::super::name::Name;
use super::super::probe::Probe;
use super::super::table::Table;
use super::super::{Changed, Engine, Time};
use super::stats::count;
use super::worth::Chosen;
use super::{Reach, Tier, mean_ms};
use crate::effect::{Effect, LookupJob};
use crate::tier::Cause;
use kvcachepool_protocol::key::ChunkKey;

/// Keys of one lookup that are no prefix.
const INDEPENDENT_MAX: usize = 256;

/// Lookup state of a chunk that memory lacked when the PROBE arrived. Tiers are indexes into `TierPlanner::tiers`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum LookupState {
    /// The chunk is in memory, or no tier is asked for it.
    #[default]
    Memory,
    /// To be looked up after the lookup in flight.
    Pending,
    /// A lookup is in flight.
    Asked(usize),
    /// The tier has the chunk; no fetch has started.
    Found(usize),
    Fetching(usize),
    /// Fetched, for this request or for another one while it waited.
    Fetched(usize),
    /// No tier has the chunk, or no tier delivered it.
    Absent,
    /// Not waited for: the prefix ended earlier, memory has no room, or the wait timed out.
    Dropped,
}

/// Lookup state of one PROBE in lower tiers.
#[derive(Debug, Clone)]
pub(crate) struct TierLookup {
    pub reach: Reach,
    /// The engine's number of the chunks' layout.
    pub layout: u32,
    pub states: Vec<LookupState>,
    /// First chunk that counts: the range runs from the local boundary to the load limit.
    pub first: usize,
    pub end: usize,
    pub lookup: Option<u64>,
    /// Bit mask of the tiers already tried, per chunk. A tier that failed to deliver a chunk is not asked again.
    pub tried: Vec<u8>,
    pub updated_ms: u64,
    pub changed: bool,
    /// The load chosen for this PROBE.
    pub chosen: Option<Chosen>,
    /// Reason why available chunks are not fetched.
    pub declined: Option<&'static str>,
}

impl TierLookup {
    /// True while a lookup or a fetch is pending.
    pub fn waits(&self) -> bool {
        self.states.iter().any(|s| {
            matches!(
                s,
                LookupState::Pending | LookupState::Asked(_) | LookupState::Fetching(_)
            )
        })
    }

    /// Marks a tier as tried for a chunk.
    fn tries(&mut self, at: usize, tier: usize) {
        if let Some(tried) = self.tried.get_mut(at) {
            *tried |= 1 << tier;
        }
    }

    /// True if the tier was already tried for this chunk.
    pub fn tried(&self, at: usize, tier: usize) -> bool {
        self.tried.get(at).is_some_and(|t| t >> tier & 1 == 1)
    }

    pub fn name(&self, key: ChunkKey) -> Name {
        Name {
            layout: self.layout,
            key,
        }
    }

    /// True if the PROBE names the engine's local tokens, so that fetches may start.
    pub fn fetches(&self) -> bool {
        self.reach.local_tokens.is_some()
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Lookup {
    pub probe: u64,
    pub tier: usize,
    /// Positions of the chunks in the PROBE.
    pub ats: Vec<usize>,
    pub since_ms: u64,
}

impl<T: Table> Engine<T> {
    /// Creates the lookup state of a PROBE. None if memory has every chunk, or no tier is up.
    pub(crate) fn tier_lookup(
        &self,
        probe: &Probe,
        reach: Reach,
        layout: u32,
    ) -> Option<TierLookup> {
        if !self.lower.any_up() {
            return None;
        }
        let chunk = u64::from(probe.question.chunk_tokens.max(1));
        let count = probe.pins.len().min(reach.hashes.len());
        let (first, end) = match reach.local_tokens {
            None => (0, count),
            Some(local) => {
                let most = reach
                    .max_load_tokens
                    .map_or(u64::MAX, |most| local.saturating_add(most));
                let first = usize::try_from(local / chunk).unwrap_or(usize::MAX);
                let end = usize::try_from(most.div_ceil(chunk)).unwrap_or(usize::MAX);
                (first.min(count), end.min(count))
            }
        };
        let mut states = vec![LookupState::Memory; probe.pins.len()];
        let mut any = false;
        for at in first..end {
            if let (None, Some(state)) = (probe.found(at), states.get_mut(at)) {
                *state = LookupState::Pending;
                any = true;
            }
        }
        any.then_some(TierLookup {
            reach,
            layout,
            states,
            first,
            end,
            lookup: None,
            tried: vec![0; probe.pins.len()],
            updated_ms: 0,
            changed: false,
            chosen: None,
            declined: None,
        })
    }

    /// Starts lookups and fetches for a PROBE that is not registered yet.
    pub(crate) fn begin_tier_lookup(
        &mut self,
        now: Time,
        id: u64,
        probe: &mut Probe,
        tier_lookup: TierLookup,
    ) {
        let mut tier_lookup = tier_lookup;
        self.look_up_and_fetch(now, id, probe, &mut tier_lookup);
        tier_lookup.changed = false;
        probe.tier_lookup = Some(tier_lookup);
    }

    /// Starts the next lookup and the fetches that are allowed. Completes the PROBE if nothing is pending.
    pub(super) fn advance(&mut self, now: Time, id: u64) {
        let Some(mut probe) = self.leases.take(id) else {
            return;
        };
        if let Some(mut tier_lookup) = probe.tier_lookup.take() {
            if !probe.answered {
                self.look_up_and_fetch(now, id, &mut probe, &mut tier_lookup);
            }
            probe.tier_lookup = Some(tier_lookup);
        }
        let done = !probe.answered && !probe.open();
        self.leases.put_back(id, probe);
        if done {
            self.changed.push(Changed::Final { probe: id });
        } else {
            self.lower.updates.push(id);
        }
    }

    /// If a tier's queue rejects a chunk, the next tier is asked for it.
    fn look_up_and_fetch(
        &mut self,
        now: Time,
        id: u64,
        probe: &mut Probe,
        tier_lookup: &mut TierLookup,
    ) {
        loop {
            self.ask_next(now, id, probe, tier_lookup);
            if !self.fetch_available(now, id, probe, tier_lookup) {
                return;
            }
        }
    }

    /// Starts the next lookup, with the nearest untried tier, for chunks that no tier is known to have. One lookup is in flight at a time.
    fn ask_next(&mut self, now: Time, id: u64, probe: &Probe, tier_lookup: &mut TierLookup) {
        for tier in 0..self.lower.tiers.len() {
            if tier_lookup.lookup.is_some() {
                return;
            }
            let up = self.lower.tiers.get(tier).is_some_and(Tier::up)
                && self.lower.serves(tier, &tier_lookup.reach.namespace);
            let mut ats = Vec::new();
            for at in 0..tier_lookup.states.len() {
                let open = tier_lookup.states.get(at) == Some(&LookupState::Pending);
                let Some(key) = probe.question.keys.get(at).filter(|_| open) else {
                    continue;
                };
                if tier_lookup.tried(at, tier) {
                    continue;
                }
                if probe.question.independent && ats.len() == INDEPENDENT_MAX {
                    // each takes a request of its own
                    break;
                }
                let name = tier_lookup.name(*key);
                tier_lookup.tries(at, tier);
                if !up {
                    continue;
                }
                if self.lower.removes(&name, tier) {
                    continue;
                }
                if self.lower.known.has(&name, tier, now.mono_ms) {
                    set(tier_lookup, at, LookupState::Found(tier));
                } else if !self.lower.known.lacks(&name, tier, now.mono_ms) {
                    ats.push(at);
                }
            }
            if !ats.is_empty() {
                self.look_up(now, id, probe, tier_lookup, tier, ats);
            }
        }
        if tier_lookup.lookup.is_none() {
            for state in tier_lookup
                .states
                .iter_mut()
                .filter(|s| **s == LookupState::Pending)
            {
                *state = LookupState::Absent;
            }
        }
    }

    fn look_up(
        &mut self,
        now: Time,
        id: u64,
        probe: &Probe,
        tier_lookup: &mut TierLookup,
        tier: usize,
        ats: Vec<usize>,
    ) {
        let Some(t) = self.lower.tiers.get_mut(tier) else {
            return;
        };
        t.stats.asked_chunks += ats.len() as u64;
        if t.lookups >= t.config.lookups_max {
            count(&mut t.stats.lookups, Cause::Busy.name(), ats.len() as u64);
            return;
        }
        t.lookups += 1;
        let kind = t.config.kind;
        let lookup = self.lower.next_lookup;
        self.lower.next_lookup += 1;
        let mut names = Vec::with_capacity(ats.len());
        for at in &ats {
            if let (Some(key), Some(state)) = (
                probe.question.keys.get(*at),
                tier_lookup.states.get_mut(*at),
            ) {
                *state = LookupState::Asked(tier);
                names.push(tier_lookup.reach.object(*key));
            }
        }
        tier_lookup.lookup = Some(lookup);
        self.lower.lookups.insert(
            lookup,
            Lookup {
                probe: id,
                tier,
                ats,
                since_ms: now.mono_ms,
            },
        );
        self.effects.push(Effect::Lookup(LookupJob {
            lookup,
            tier: kind,
            names,
            independent: probe.question.independent,
        }));
    }

    /// Handles a lookup result. The next tier is asked for missing chunks.
    pub(crate) fn looked_up(&mut self, now: Time, id: u64, present: Result<Vec<bool>, Cause>) {
        if self.claims_looked_up(now, id, &present) {
            return;
        }
        // cancelled, or from an earlier boot
        let Some(lookup) = self.lower.lookups.remove(&id) else {
            return;
        };
        let tier = lookup.tier;
        if let Some(t) = self.lower.tiers.get_mut(tier) {
            t.lookups = t.lookups.saturating_sub(1);
            if present.is_ok() {
                t.lookup_ms = mean_ms(t.lookup_ms, now.mono_ms.saturating_sub(lookup.since_ms));
            }
        }
        let present = match present {
            Ok(list) if list.len() == lookup.ats.len() => Ok(list),
            Ok(_) => Err(Cause::Protocol),
            Err(cause) => Err(cause),
        };
        self.end_lookup(now, id, &lookup, present.as_deref().map_err(|c| c.name()));
    }

    fn end_lookup(
        &mut self,
        now: Time,
        id: u64,
        lookup: &Lookup,
        present: Result<&[bool], &'static str>,
    ) {
        let tier = lookup.tier;
        let Some(probe) = self.leases.probe_mut(lookup.probe) else {
            return;
        };
        let Some(tier_lookup) = probe.tier_lookup.as_mut().filter(|a| a.lookup == Some(id)) else {
            return;
        };
        tier_lookup.lookup = None;
        let (mut there, mut missing) = (0, 0);
        for (nth, at) in lookup.ats.iter().enumerate() {
            let Some(key) = probe.question.keys.get(*at) else {
                continue;
            };
            let name = tier_lookup.name(*key);
            let Some(state) = tier_lookup.states.get_mut(*at) else {
                continue;
            };
            let has = present.ok().and_then(|list| list.get(nth)).copied();
            match has {
                Some(true) => {
                    there += 1;
                    self.lower.known.present(name, tier, now.mono_ms);
                }
                Some(false) => {
                    missing += 1;
                    self.lower.known.absent(name, tier, now.mono_ms);
                }
                None => {}
            }
            // unless the prefix ended before this chunk
            if *state == LookupState::Asked(tier) {
                *state = if has == Some(true) {
                    LookupState::Found(tier)
                } else {
                    LookupState::Pending
                };
            }
        }
        tier_lookup.changed = true;
        let all = lookup.ats.len() as u64;
        self.lower.stat(tier, |s| match present {
            Ok(_) => {
                count(&mut s.lookups, "present", there);
                count(&mut s.lookups, "absent", missing);
            }
            Err(why) => count(&mut s.lookups, why, all),
        });
        self.advance(now, lookup.probe);
    }

    /// The tier went down: PROBEs that asked it continue with the next tier.
    pub(super) fn end_lookups_of(&mut self, now: Time, tier: usize) {
        let ids: Vec<u64> = self
            .lower
            .lookups
            .iter()
            .filter(|(_, l)| l.tier == tier)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            if let Some(lookup) = self.forget_lookup(id) {
                self.end_lookup(now, id, &lookup, Err("TierDown"));
            }
        }
    }

    pub(super) fn forget_lookup(&mut self, id: u64) -> Option<Lookup> {
        let lookup = self.lower.lookups.remove(&id)?;
        if let Some(t) = self.lower.tiers.get_mut(lookup.tier) {
            t.lookups = t.lookups.saturating_sub(1);
        }
        self.effects.push(Effect::CancelLookup { lookup: id });
        Some(lookup)
    }

    /// Ends all lookups and fetches of a PROBE; undelivered chunks become absent. Other PROBEs that wait for the same chunks continue.
    pub(crate) fn stop_tier_lookup(&mut self, id: u64, probe: &mut Probe) {
        let Some(tier_lookup) = probe.tier_lookup.as_mut() else {
            return;
        };
        if T::makes(Mistake::NoCancel) {
            return;
        }
        if let Some(lookup) = tier_lookup.lookup.take()
            && let Some(lookup) = self.forget_lookup(lookup)
        {
            let chunks = lookup.ats.len() as u64;
            self.lower
                .stat(lookup.tier, |s| count(&mut s.lookups, "cancelled", chunks));
        }
        let fetches = tier_lookup.fetches() && tier_lookup.declined.is_none();
        for at in 0..tier_lookup.states.len() {
            let state = tier_lookup.states.get(at).copied().unwrap_or_default();
            let ends = match state {
                LookupState::Pending | LookupState::Asked(_) => true,
                // an early PROBE reports what the next one will find; a declined one reports what is available
                LookupState::Found(_) => fetches,
                _ => false,
            };
            if ends {
                set(tier_lookup, at, LookupState::Dropped);
            }
            if matches!(state, LookupState::Fetching(_)) {
                set(tier_lookup, at, LookupState::Dropped);
                if let Some(key) = probe.question.keys.get(at) {
                    let name = tier_lookup.name(*key);
                    self.leave_fetch(&name, id, at);
                }
            }
        }
    }
}

pub(super) fn set(tier_lookup: &mut TierLookup, at: usize, state: LookupState) {
    if let Some(s) = tier_lookup.states.get_mut(at) {
        *s = state;
    }
}
