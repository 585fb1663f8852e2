//! What the state machine orders of tiers: taken down, and compared with what it may order.

use super::counts::Fault;
use super::lower::{FETCHES_MAX, LOOKUPS_MAX, Task, TierJob};
use super::rules::Rule;
use super::text::CHUNK_TOKENS;
use super::world::{World, say};
use kvcachepool_engine::table::ROW_BYTES;
use kvcachepool_engine::tier::Kind;
use kvcachepool_engine::{ClearJob, Effect, FetchJob, LookupJob, Target, WriteJob};
use kvcachepool_protocol::key::ChunkKey;

impl World {
    /// The state machine wants something of a tier.
    pub(super) fn effect(&mut self, effect: Effect) {
        match effect {
            Effect::Digest(_) => {}
            Effect::Lookup(LookupJob {
                lookup,
                tier,
                names,
            }) => {
                let task = Task::Lookup {
                    lookup,
                    keys: names.iter().map(|n| n.key).collect(),
                };
                self.hit(Fault::TierAsked);
                self.push_job(tier, 0, task);
            }
            Effect::CancelLookup { lookup } => {
                let is = |t: &Task| matches!(t, Task::Lookup { lookup: l, .. } if *l == lookup);
                self.cancel_job(is);
            }
            Effect::Fetch(FetchJob {
                fetch,
                tier,
                name,
                sections,
            }) => {
                let Some(region) = self.memory.borrow().supervisor else {
                    return;
                };
                self.follows_on(name.key);
                self.is_not_spoilt(tier, name.key);
                let length = |t: &Target| u64::from(t.section.length.get());
                let bytes = sections.iter().map(length).sum();
                let task = Task::Fetch {
                    fetch,
                    key: name.key,
                    region,
                    targets: sections,
                    digests: Vec::new(),
                    writing: false,
                };
                self.hit(Fault::FetchBegun);
                self.push_job(tier, bytes, task);
            }
            Effect::CancelFetch { fetch } => {
                let is = |t: &Task| matches!(t, Task::Fetch { fetch: f, .. } if *f == fetch);
                self.cancel_job(is);
                self.hit(Fault::FetchCancelled);
            }
            Effect::Write(WriteJob {
                put,
                tier,
                object,
                sections,
                ..
            }) => {
                let Some(region) = self.memory.borrow().supervisor else {
                    return;
                };
                self.put_ordered(put, &object, &sections);
                let bytes = object.sections.iter().map(|s| s.raw_bytes).sum();
                let task = Task::Put {
                    put,
                    object,
                    targets: sections,
                    region,
                };
                self.push_job(tier, bytes, task);
            }
            Effect::Discard { tier, name } => self.discard(tier, &name.key),
            Effect::Clear(ClearJob { tier, domains }) => {
                self.push_job(tier, 0, Task::Clear { domains })
            }
        }
    }

    fn push_job(&mut self, kind: Kind, bytes: u64, task: Task) {
        say!(self, "{kind} is asked: {task:?}");
        let at = self.lower.stores.iter().position(|s| s.kind == kind);
        let Some(tier) = at.filter(|at| self.lower.stores[*at].told_up) else {
            self.broke(Rule::S10, || format!("{kind} is down and asked: {task:?}"));
            return;
        };
        let store = &self.lower.stores[tier];
        let clears = matches!(task, Task::Clear { .. });
        let stale = match &task {
            Task::Fetch { key, .. } => store.objects.get(&key.0).is_some_and(|held| held.stale),
            _ => false,
        };
        if stale || store.clearing != clears {
            self.broke(Rule::S10, || {
                format!("{kind} has what was cleared, and is asked: {task:?}")
            });
            return;
        }
        self.side.jobs.push(TierJob {
            tier,
            bytes,
            cancelled: false,
            stale: false,
            task,
        });
        self.tier_bounds(tier);
        self.put_bounds(tier);
    }

    /// What is under way with a tier is bounded, cancelled or not.
    fn tier_bounds(&mut self, tier: usize) {
        let is = |fetch: bool| {
            let list = self.side.jobs.iter().filter(|j| j.tier == tier);
            list.filter(move |j| match j.task {
                Task::Fetch { .. } => fetch,
                Task::Lookup { .. } => !fetch,
                Task::Put { .. } | Task::Clear { .. } => false,
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

    fn cancel_job(&mut self, is: impl Fn(&Task) -> bool) {
        if let Some(job) = self.side.jobs.iter_mut().find(|j| is(&j.task)) {
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
