//! Decides which part of a prefix to fetch. Chunks are not fetched if they add too little to the hit, if prefill is expected to be quicker,
//! or if they are expected to come after the request's wait.

use super::super::mistake::Mistake;
use super::super::probe::Probe;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::ask::{LookupState, TierLookup};
use super::speed::Estimate;
use super::stats::count;
use super::{TIERS_MAX, TierPlanner};
use crate::config::LoadOrRecompute;
use kvcachepool_protocol::key::KeyKind;
use std::collections::BTreeSet;

/// The load would add fewer than `minLoadTokens`.
const TOO_LITTLE: &str = "min_load_tokens";
/// Prefill is expected to be quicker, or the load to end after the request's wait.
const RECOMPUTE: &str = "recompute";

/// The part of a PROBE's prefix to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Worth {
    pub until: usize,
    /// Chunks before this one are in memory, in a tier or in flight.
    pub there: usize,
    /// Reason why available chunks after the fetched part are not fetched; none: no more are known to be available.
    pub declined: Option<&'static str>,
}

impl Worth {
    /// Fetch everything that is available.
    pub fn all(end: usize) -> Self {
        Self {
            until: end,
            there: end,
            declined: None,
        }
    }
}

/// A chosen load, kept to compare its time with the estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub since_ms: u64,
    /// Expected time. Microseconds.
    pub expected_us: u64,
    /// Chunks before this one need no fetch.
    pub from: usize,
}

/// A candidate load.
struct Load {
    tiers: [Part; TIERS_MAX],
    /// Rate limit of reads; 0 = no limit.
    bytes_per_s: u64,
    /// Expected time in µs; none without an estimate for one of the tiers.
    us: Option<u64>,
}

/// A tier's share of a load, and its earlier work.
#[derive(Default)]
struct Part {
    bytes: u64,
    estimate: Option<Estimate>,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            tiers: Default::default(),
            bytes_per_s: 0,
            us: Some(0),
        }
    }
}

/// State of a PROBE's prefix.
struct Prefix {
    /// Chunks before this one are in memory.
    held: usize,
    /// Chunks before this one are in memory, in a tier or in flight.
    there: usize,
    /// Chunks before this one are in memory or in flight.
    comes: usize,
    /// Lookups may still find more chunks.
    open: bool,
    begun: bool,
}

impl Prefix {
    fn of(tier_lookup: &TierLookup) -> Self {
        let state = |at: usize| tier_lookup.states.get(at).copied().unwrap_or_default();
        let run = |from: usize, goes_on: fn(LookupState) -> bool| {
            let mut all = from..tier_lookup.end;
            all.find(|at| !goes_on(state(*at)))
                .unwrap_or(tier_lookup.end)
        };
        let is_held = |s| matches!(s, LookupState::Memory | LookupState::Fetched(_));
        let is_coming = |s| {
            matches!(
                s,
                LookupState::Memory | LookupState::Fetched(_) | LookupState::Fetching(_)
            )
        };
        let is_there = |s| {
            !matches!(
                s,
                LookupState::Pending
                    | LookupState::Asked(_)
                    | LookupState::Absent
                    | LookupState::Dropped
            )
        };
        let there = run(tier_lookup.first, is_there);
        let begins =
            |s: &LookupState| matches!(s, LookupState::Fetching(_) | LookupState::Fetched(_));
        Self {
            held: run(tier_lookup.first, is_held),
            there,
            comes: run(tier_lookup.first, is_coming),
            open: there < tier_lookup.end
                && matches!(state(there), LookupState::Pending | LookupState::Asked(_)),
            begun: tier_lookup.states.iter().any(begins),
        }
    }
}

impl TierPlanner {
    /// Leaves the available chunks from `until` on in their tiers.
    pub fn decline(&mut self, tier_lookup: &mut TierLookup, why: &'static str) {
        if tier_lookup.declined.replace(why).is_none() {
            count(&mut self.loads.choices, why, 1);
        }
    }

    /// A PROBE's wait ended: tiers from which it still waits for fetches are too slow for what they have in flight.
    pub fn wait_ended(&mut self, now: Time, probe: &Probe) {
        // a client waits as long as it likes
        if probe.question.kind == KeyKind::Opaque {
            return;
        }
        let states = probe.tier_lookup.iter().flat_map(|l| &l.states);
        let waited_ms = now.mono_ms.saturating_sub(probe.asked_ms);
        let late: BTreeSet<usize> = states
            .filter_map(|state| match state {
                LookupState::Fetching(tier) => Some(*tier),
                _ => None,
            })
            .collect();
        for at in late {
            if let Some(tier) = self.tiers.get_mut(at) {
                tier.speed
                    .given_up(now.mono_ms, tier.fetch_bytes, waited_ms);
            }
        }
    }

    /// Records the outcome of the chosen load when its PROBE is answered.
    pub fn load_ended(&mut self, now: Time, probe: &Probe) {
        let Some((tier_lookup, chosen)) = probe
            .tier_lookup
            .as_ref()
            .and_then(|a| Some((a, a.chosen?)))
        else {
            return;
        };
        let prefix = Prefix::of(tier_lookup);
        let tokens = u128::from(probe.question.tokens_before(prefix.held))
            .saturating_sub(u128::from(probe.question.tokens_before(chosen.from)));
        let took_us = now.mono_ms.saturating_sub(chosen.since_ms) * 1_000;
        let speed = u128::from(tier_lookup.reach.prefill_tokens_per_s);
        let outcome = if tokens == 0 {
            "failed"
        } else if speed == 0 {
            "unknown"
        } else if u128::from(took_us) * speed <= tokens * 1_000_000 {
            "quicker"
        } else {
            "slower"
        };
        let loads = &mut self.loads;
        count(&mut loads.outcomes, outcome, 1);
        if chosen.expected_us > 0 {
            loads.expected_us += chosen.expected_us;
            loads.took_us += took_us;
        }
    }
}

impl<T: Table> Engine<T> {
    /// Computes how much of a PROBE's prefix to fetch, from the current state.
    pub(super) fn worth(&self, now: Time, probe: &Probe, tier_lookup: &TierLookup) -> Worth {
        let prefix = Prefix::of(tier_lookup);
        let there = prefix.there;
        if there == prefix.comes || T::makes(Mistake::FetchWorthless) {
            return Worth {
                until: there,
                there,
                declined: None,
            };
        }
        let quicker = self.quicker_until(now, probe, tier_lookup, &prefix);
        let enough =
            prefix.begun || self.adds(probe, tier_lookup, &prefix, quicker) >= self.least();
        let until = if enough { quicker } else { prefix.comes };
        let declined = match (prefix.open, until == there) {
            // a fetch that is not worth its latency now may be worth it with the next chunks
            (true, _) | (false, true) => None,
            (false, false) if quicker == there => Some(TOO_LITTLE),
            (false, false) => Some(RECOMPUTE),
        };
        Worth {
            until,
            there,
            declined,
        }
    }

    fn least(&self) -> u64 {
        u64::from(self.memory.config.settings.min_load_tokens)
    }

    /// Tokens that a load of the chunks before `until` adds to the hit.
    fn adds(&self, probe: &Probe, tier_lookup: &TierLookup, prefix: &Prefix, until: usize) -> u64 {
        let local = tier_lookup.reach.local_tokens.unwrap_or(0);
        let most = tier_lookup.reach.max_load_tokens;
        let cap = most.map_or(u64::MAX, |most| local.saturating_add(most));
        let end = |at: usize| {
            probe
                .question
                .tokens_before(at)
                .clamp(local, cap.max(local))
        };
        end(until).saturating_sub(end(prefix.held))
    }

    /// The longest available part whose load is expected to end no later than its prefill and the request's wait. Fetches in flight are
    /// always included, and without an estimate for a tier or the engine, everything available is loaded.
    fn quicker_until(
        &self,
        now: Time,
        probe: &Probe,
        tier_lookup: &TierLookup,
        prefix: &Prefix,
    ) -> usize {
        let speed = u128::from(tier_lookup.reach.prefill_tokens_per_s);
        if speed == 0 || self.memory.config.load_or_recompute == LoadOrRecompute::AlwaysLoad {
            return prefix.there;
        }
        let wait_ends_ms = probe.asked_ms.saturating_add(probe.question.wait_ms);
        let left_us = u128::from(wait_ends_ms.saturating_sub(now.mono_ms)) * 1_000;
        let mut until = prefix.comes;
        let mut load = self.no_load(now, probe, tier_lookup);
        for at in prefix.held..prefix.there {
            self.add(&mut load, probe, tier_lookup, at);
            let load_us = u128::from(load.us.unwrap_or(0));
            let tokens = u128::from(self.adds(probe, tier_lookup, prefix, at + 1));
            let quicker = load_us * speed <= tokens * 1_000_000;
            if at >= prefix.comes && quicker && load_us <= left_us {
                until = at + 1;
            }
        }
        until
    }

    /// An empty load: each tier's earlier work and estimate.
    fn no_load(&self, now: Time, probe: &Probe, tier_lookup: &TierLookup) -> Load {
        let chunk_tokens = probe.question.chunk_tokens;
        let chunk_bytes = tier_lookup.reach.domain.plan.chunk_bytes(chunk_tokens);
        let mut load = Load {
            bytes_per_s: self.reads.bytes_per_s(),
            ..Load::default()
        };
        for (part, tier) in load.tiers.iter_mut().zip(&self.lower.tiers) {
            let queued = u64::from(tier.queued).saturating_mul(chunk_bytes);
            part.bytes = tier.fetch_bytes.saturating_add(queued);
            part.estimate = tier.speed.estimate(now.mono_ms);
        }
        load
    }

    /// Adds a chunk to a load. Tiers work in parallel.
    fn add(&self, load: &mut Load, probe: &Probe, tier_lookup: &TierLookup, at: usize) {
        let state = tier_lookup.states.get(at).copied().unwrap_or_default();
        let (LookupState::Found(tier) | LookupState::Fetching(tier), Some(key)) =
            (state, probe.question.keys.get(at))
        else {
            return;
        };
        let Some(part) = load.tiers.get_mut(tier) else {
            return;
        };
        // chunks already wanted are part of the tier's earlier work
        if !self.lower.pending.contains_key(&tier_lookup.name(*key)) {
            let tokens = probe.question.tokens_of(at);
            let bytes = tier_lookup.reach.domain.plan.chunk_bytes(tokens);
            part.bytes = part.bytes.saturating_add(bytes);
        }
        let paced = u128::from(part.bytes) * 1_000_000 / u128::from(load.bytes_per_s.max(1));
        let least_us = match load.bytes_per_s {
            0 => 0,
            _ => u64::try_from(paced).unwrap_or(u64::MAX),
        };
        let us = part.estimate.map(|e| e.us(part.bytes).max(least_us));
        load.us = load.us.and_then(|longest| us.map(|us| longest.max(us)));
    }

    /// Records the estimate when a PROBE's fetches start.
    pub(super) fn choose(
        &mut self,
        now: Time,
        probe: &Probe,
        tier_lookup: &mut TierLookup,
        worth: Worth,
    ) {
        let prefix = Prefix::of(tier_lookup);
        if tier_lookup.chosen.is_some() || prefix.begun || worth.until <= prefix.held {
            return;
        }
        let mut load = self.no_load(now, probe, tier_lookup);
        for at in prefix.held..worth.until {
            self.add(&mut load, probe, tier_lookup, at);
        }
        let known = tier_lookup.reach.prefill_tokens_per_s > 0 && load.us.is_some();
        let choice = match self.memory.config.load_or_recompute {
            LoadOrRecompute::AlwaysLoad => "always",
            LoadOrRecompute::Auto if known => "load",
            LoadOrRecompute::Auto => "unknown",
        };
        count(&mut self.lower.loads.choices, choice, 1);
        tier_lookup.chosen = Some(Chosen {
            since_ms: now.mono_ms,
            expected_us: load.us.unwrap_or(0),
            from: prefix.held,
        });
    }
}
