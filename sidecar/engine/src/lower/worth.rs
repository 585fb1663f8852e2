//! Which part of a prefix is worth fetching: not where it adds too little to what memory holds, nor where computing it is expected to be
//! quicker.

use super::super::mistake::{Mistake, made};
use super::super::probe::Probe;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::TIERS_MAX;
use super::ask::{Asking, Stand};
use super::speed::Estimate;
use super::stats::count;
use crate::config::LoadOrRecompute;

/// Less than `minLoadTokens` would come of it.
const TOO_LITTLE: &str = "minLoadTokens";
/// Computing is expected to be quicker.
const RECOMPUTE: &str = "recompute";

/// What is worth fetching for a PROBE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Worth {
    pub until: usize,
    /// What is before this one is there, in memory or in a tier, or comes.
    pub there: usize,
    /// Why those from there on are not, although they are there; none: they are not known to be there (yet).
    pub declined: Option<&'static str>,
}

/// A load that was chosen, to see what comes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub since_ms: u64,
    /// How long it was expected to take.
    pub expected_us: u64,
    /// Chunks before it are there anyway.
    pub from: usize,
}

/// A load that may be chosen.
struct Load {
    tiers: [Part; TIERS_MAX],
    /// Bytes per second that may come; 0 = no bound.
    bytes_per_s: u64,
    /// How long it is expected to take; none: nothing is known of one of the tiers.
    us: Option<u64>,
}

/// What a tier does of it, with what it has before that.
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

/// How a prefix of a PROBE stands.
struct Prefix {
    /// Memory has what is before this chunk.
    held: usize,
    /// What is before this one is there, in memory or in a tier, or comes.
    there: usize,
    /// What is before this one is there or comes already.
    comes: usize,
    /// More may turn out to be there.
    open: bool,
    begun: bool,
}

impl Prefix {
    fn of(asking: &Asking) -> Self {
        let stand = |at: usize| asking.stands.get(at).copied().unwrap_or_default();
        let run = |from: usize, goes_on: fn(Stand) -> bool| {
            let mut all = from..asking.end;
            all.find(|at| !goes_on(stand(*at))).unwrap_or(asking.end)
        };
        let is_held = |s| matches!(s, Stand::Memory | Stand::Came(_));
        let is_coming = |s| matches!(s, Stand::Memory | Stand::Came(_) | Stand::Coming(_));
        let is_there = |s| {
            !matches!(
                s,
                Stand::Open | Stand::Asked(_) | Stand::Absent | Stand::Cut
            )
        };
        let there = run(asking.first, is_there);
        let begins = |s: &Stand| matches!(s, Stand::Coming(_) | Stand::Came(_));
        Self {
            held: run(asking.first, is_held),
            there,
            comes: run(asking.first, is_coming),
            open: there < asking.end && matches!(stand(there), Stand::Open | Stand::Asked(_)),
            begun: asking.stands.iter().any(begins),
        }
    }
}

impl<T: Table> Engine<T> {
    /// How far a PROBE's prefix is worth fetching, by what is known now.
    pub(super) fn worth(&self, now: Time, probe: &Probe, asking: &Asking) -> Worth {
        let prefix = Prefix::of(asking);
        let there = prefix.there;
        if there == prefix.comes || made(Mistake::FetchWorthless) {
            return Worth {
                until: there,
                there,
                declined: None,
            };
        }
        let quicker = self.quicker_until(now, probe, asking, &prefix);
        let enough = prefix.begun || self.adds(probe, asking, &prefix, quicker) >= self.least();
        let until = if enough { quicker } else { prefix.comes };
        let declined = match (prefix.open, until == there) {
            // a fetch that was not worth its latency may be with what is found next
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
        u64::from(self.config.settings.min_load_tokens)
    }

    /// Tokens by which the hit grows with the chunks before `until`.
    fn adds(&self, probe: &Probe, asking: &Asking, prefix: &Prefix, until: usize) -> u64 {
        let local = asking.reach.local_tokens.unwrap_or(0);
        let most = asking.reach.max_load_tokens;
        let cap = most.map_or(u64::MAX, |most| local.saturating_add(most));
        let end = |at: usize| {
            probe
                .question
                .tokens_before(at)
                .clamp(local, cap.max(local))
        };
        end(until).saturating_sub(end(prefix.held))
    }

    /// The longest part of what is there that is expected to be loaded no later than it could be computed. What comes already is never
    /// left, and where nothing is known of a tier, or of the engine, it is loaded.
    fn quicker_until(&self, now: Time, probe: &Probe, asking: &Asking, prefix: &Prefix) -> usize {
        let speed = u128::from(asking.reach.prefill_tokens_per_s);
        if speed == 0 || self.config.load_or_recompute == LoadOrRecompute::AlwaysLoad {
            return prefix.there;
        }
        let mut until = prefix.comes;
        let mut load = self.no_load(now, probe, asking);
        for at in prefix.held..prefix.there {
            self.add(&mut load, probe, asking, at);
            let load_us = u128::from(load.us.unwrap_or(0));
            let tokens = u128::from(self.adds(probe, asking, prefix, at + 1));
            if at >= prefix.comes && load_us * speed <= tokens * 1_000_000 {
                until = at + 1;
            }
        }
        until
    }

    /// A load of nothing: what tiers have before them, and what is expected of them.
    fn no_load(&self, now: Time, probe: &Probe, asking: &Asking) -> Load {
        let chunk_tokens = probe.question.chunk_tokens;
        let chunk_bytes = asking.reach.domain.plan.chunk_bytes(chunk_tokens);
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

    /// A load gets one chunk more; tiers work side by side.
    fn add(&self, load: &mut Load, probe: &Probe, asking: &Asking, at: usize) {
        let stand = asking.stands.get(at).copied().unwrap_or_default();
        let (Stand::There(tier) | Stand::Coming(tier), Some(key)) =
            (stand, probe.question.keys.get(at))
        else {
            return;
        };
        let Some(part) = load.tiers.get_mut(tier) else {
            return;
        };
        // what somebody waits for is among what the tier has before it
        if !self.lower.wants.contains_key(&asking.name(*key)) {
            let tokens = probe.question.tokens_of(at);
            let bytes = asking.reach.domain.plan.chunk_bytes(tokens);
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

    /// Fetches of a PROBE begin: what is expected of them is kept in mind.
    pub(super) fn choose(&mut self, now: Time, probe: &Probe, asking: &mut Asking, worth: Worth) {
        let prefix = Prefix::of(asking);
        if asking.chosen.is_some() || prefix.begun || worth.until <= prefix.held {
            return;
        }
        let mut load = self.no_load(now, probe, asking);
        for at in prefix.held..worth.until {
            self.add(&mut load, probe, asking, at);
        }
        let known = asking.reach.prefill_tokens_per_s > 0 && load.us.is_some();
        let choice = match self.config.load_or_recompute {
            LoadOrRecompute::AlwaysLoad => "always",
            LoadOrRecompute::Auto if known => "load",
            LoadOrRecompute::Auto => "unknown",
        };
        count(&mut self.lower.loads.choices, choice, 1);
        asking.chosen = Some(Chosen {
            since_ms: now.mono_ms,
            expected_us: load.us.unwrap_or(0),
            from: prefix.held,
        });
    }

    /// What is there from `until` on is left where it is.
    pub(super) fn decline(&mut self, asking: &mut Asking, why: &'static str) {
        if asking.declined.replace(why).is_none() {
            count(&mut self.lower.loads.choices, why, 1);
        }
    }

    /// A PROBE is answered: what became of the load that was chosen for it.
    pub(crate) fn load_ended(&mut self, now: Time, probe: &Probe) {
        let Some((asking, chosen)) = probe.asking.as_ref().and_then(|a| Some((a, a.chosen?)))
        else {
            return;
        };
        let prefix = Prefix::of(asking);
        let tokens = u128::from(probe.question.tokens_before(prefix.held))
            .saturating_sub(u128::from(probe.question.tokens_before(chosen.from)));
        let took_us = now.mono_ms.saturating_sub(chosen.since_ms) * 1_000;
        let speed = u128::from(asking.reach.prefill_tokens_per_s);
        let outcome = if tokens == 0 {
            "failed"
        } else if speed == 0 {
            "unknown"
        } else if u128::from(took_us) * speed <= tokens * 1_000_000 {
            "quicker"
        } else {
            "slower"
        };
        let loads = &mut self.lower.loads;
        count(&mut loads.outcomes, outcome, 1);
        if chosen.expected_us > 0 {
            loads.expected_us += chosen.expected_us;
            loads.took_us += took_us;
        }
    }
}
