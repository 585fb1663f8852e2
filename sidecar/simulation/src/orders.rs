//! What the state machine orders of tiers: taken down, and compared with what it may order.

use super::counts::Fault;
use super::lower::{FETCHES_MAX, LOOKUPS_MAX, TierJob};
use super::rules::Rule;
use super::text::CHUNK_TOKENS;
use super::world::{World, say};
use kvcachepool_engine::table::ROW_BYTES;
use kvcachepool_engine::tier::Kind;
use kvcachepool_engine::{Effect, Target};
use kvcachepool_protocol::key::ChunkKey;

impl World {
    /// The state machine wants something of a tier.
    pub(super) fn effect(&mut self, effect: Effect) {
        let length = |t: &Target| u64::from(t.section.length.get());
        let (kind, bytes) = match &effect {
            Effect::Lookup(job) => {
                self.hit(Fault::TierAsked);
                (job.tier, 0)
            }
            Effect::Fetch(job) => {
                self.follows_on(job.name.key);
                self.is_not_spoilt(job.tier, job.name.key);
                self.hit(Fault::FetchBegun);
                (job.tier, job.sections.iter().map(length).sum())
            }
            Effect::Write(job) => {
                self.put_ordered(job);
                let sections = job.object.sections.iter();
                (job.tier, sections.map(|s| s.raw_bytes).sum())
            }
            Effect::Clear(job) => (job.tier, 0),
            Effect::CancelLookup { lookup } => {
                let is = |e: &Effect| matches!(e, Effect::Lookup(job) if job.lookup == *lookup);
                return self.cancel_job(is);
            }
            Effect::CancelFetch { fetch } => {
                let is = |e: &Effect| matches!(e, Effect::Fetch(job) if job.fetch == *fetch);
                self.cancel_job(is);
                return self.hit(Fault::FetchCancelled);
            }
            Effect::Discard { tier, name } => return self.discard(*tier, &name.key),
            // no client of the simulation stores opaque objects
            Effect::Digest(_) | Effect::Head(_) | Effect::Remove(_) => return,
        };
        say!(self, "{kind} is asked: {effect:?}");
        let at = self.lower.stores.iter().position(|s| s.kind == kind);
        let Some(tier) = at.filter(|at| self.lower.stores[*at].told_up) else {
            self.broke(Rule::S10, || {
                format!("{kind} is down and asked: {effect:?}")
            });
            return;
        };
        let store = &self.lower.stores[tier];
        let clears = matches!(effect, Effect::Clear(_));
        let stale = match &effect {
            Effect::Fetch(job) => store.objects.get(&job.name.key.0).is_some_and(|h| h.stale),
            _ => false,
        };
        if stale || store.clearing != clears {
            self.broke(Rule::S10, || {
                format!("{kind} has what was cleared, and is asked: {effect:?}")
            });
            return;
        }
        let Some(region) = self.memory.borrow().supervisor else {
            return;
        };
        self.side.jobs.push(TierJob {
            tier,
            region,
            bytes,
            cancelled: false,
            stale: false,
            digests: Vec::new(),
            writing: false,
            effect,
        });
        self.tier_bounds(tier);
        self.put_bounds(tier);
    }

    /// What is under way with a tier is bounded, cancelled or not.
    fn tier_bounds(&mut self, tier: usize) {
        let is = |fetch: bool| {
            let list = self.side.jobs.iter().filter(|j| j.tier == tier);
            list.filter(move |j| match j.effect {
                Effect::Fetch(_) => fetch,
                Effect::Lookup(_) => !fetch,
                _ => false,
            })
        };
        let (fetches, lookups) = (is(true).count(), is(false).filter(|j| !j.cancelled).count());
        let bytes: u64 = is(true).map(|j| j.bytes).sum();
        let most = u64::from(self.p.segments) * 64 * ROW_BYTES / 4;
        if fetches > FETCHES_MAX as usize
            || lookups > LOOKUPS_MAX as usize
            || fetches > 1 && bytes > most
        {
            self.broke(Rule::S9, || {
                format!("{fetches} fetches ({bytes} bytes) and {lookups} lookups at once with tier {tier}")
            });
        }
    }

    fn cancel_job(&mut self, is: impl Fn(&Effect) -> bool) {
        if let Some(job) = self.side.jobs.iter_mut().find(|j| is(&j.effect)) {
            job.cancelled = true;
        }
    }

    /// What could not be used is not asked for again.
    fn is_not_spoilt(&mut self, kind: Kind, key: ChunkKey) {
        let mut stores = self.lower.stores.iter();
        if stores.any(|s| s.kind == kind && s.spoilt.contains(&key.0)) {
            self.broke(Rule::S10, || {
                format!("chunk {key:?} of {kind} could not be used, and is fetched again")
            });
        }
    }

    /// A chunk is fetched only for a request that has, or may get, everything before it, and enough of it.
    fn follows_on(&mut self, key: ChunkKey) {
        let ever = &self.lower.ever;
        let follows = self.side.asked.values().any(|asked| {
            let key_of = |hash| self.lower.key_of(hash);
            let at = asked.full.iter().position(|hash| key_of(hash) == Some(key));
            at.is_some_and(|at| {
                let from = asked.local.unwrap_or(usize::MAX).min(at);
                let all = (asked.hashes.len() - from) * CHUNK_TOKENS as usize;
                asked.local.is_some()
                    && all >= self.p.min_load_tokens as usize
                    && asked.hashes[from..at].iter().all(|h| ever.contains(h))
            })
        });
        if !follows {
            self.broke(Rule::S10, || {
                format!("chunk {key:?} is fetched, and nobody can use it")
            });
        }
    }
}
