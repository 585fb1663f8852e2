//! How lookups and fetches go: a section after the other, and whatever a tier may do wrong meanwhile.

use super::counts::Fault;
use super::lower::Held;
use super::memory::{ENGINE, rows_of};
use super::rules::Rule;
use super::world::{World, say};
use kvcachepool_engine::sessions::Input;
use kvcachepool_engine::table::PUBLISHED;
use kvcachepool_engine::tier::Cause;
use kvcachepool_engine::{Completion, Effect, FetchId, FetchJob, Landed, LookupJob, Target};
use kvcachepool_protocol::key::ChunkKey;

impl World {
    /// A tier answers, or goes on with what it does.
    pub fn tier_step(&mut self) -> bool {
        if self.side.driver.is_none() || self.side.jobs.is_empty() {
            return false;
        }
        let at = self.rng.below(self.side.jobs.len());
        let tier = self.side.jobs[at].tier;
        if self.faults_on && self.now < self.lower.stores[tier].hung_until {
            return false;
        }
        let fails = self.faults_on && self.p.rates.tier > 0 && self.rng.chance(60);
        if let Effect::Fetch(job) = self.side.jobs[at].effect.clone() {
            self.fetch_goes_on(at, job, fails);
            return true;
        }
        let job = self.side.jobs.swap_remove(at);
        match job.effect {
            Effect::Lookup(lookup) => self.lookup_ends(tier, lookup, job.cancelled, fails),
            Effect::Write(write) => self.put_ends(tier, job.region, write, fails),
            Effect::Clear(clear) => self.clear_ends(tier, clear.domains.as_ref(), fails),
            _ => {}
        }
        true
    }

    fn lookup_ends(&mut self, tier: usize, job: LookupJob, cancelled: bool, fails: bool) {
        if cancelled {
            self.hit(Fault::LateReport);
            if self.rng.chance(500) {
                return;
            }
        }
        let lookup = job.lookup;
        let keys: Vec<ChunkKey> = job.names.iter().map(|name| name.key).collect();
        let store = &self.lower.stores[tier];
        let mut present: Vec<bool> = keys
            .iter()
            .map(|k| store.objects.contains_key(&k.0))
            .collect();
        if fails && self.rng.chance(300) {
            // a lie, or a list of another question
            self.hit(Fault::TierLied);
            if self.rng.chance(500) {
                present.fill(true);
                self.believe(&keys);
            } else {
                present.pop();
            }
            self.tell_core(Completion::Lookup {
                lookup,
                present: Ok(present),
            });
            return;
        }
        let present = if fails {
            self.hit(Fault::TierFailed);
            Err(Cause::Timeout)
        } else {
            let missing = keys.iter().zip(&present).filter(|(_, there)| !**there);
            for (key, _) in missing {
                self.lower.stores[tier].spoilt.remove(&key.0);
            }
            Ok(present)
        };
        self.tell_core(Completion::Lookup { lookup, present });
    }

    /// What a tier says to have may be there, to whoever asked.
    fn believe(&mut self, keys: &[ChunkKey]) {
        let lower = &self.lower;
        let asked = self
            .side
            .asked
            .values()
            .flat_map(|a| a.full.iter().zip(&a.hashes));
        let said = |hash| lower.key_of(hash).is_some_and(|key| keys.contains(&key));
        let believed = asked.filter(|(full, _)| said(full)).map(|(_, hash)| *hash);
        let believed: Vec<u64> = believed.collect();
        self.lower.ever.extend(believed);
    }

    pub(super) fn tell_core(&mut self, completion: Completion) {
        say!(self, "completed: {completion:?}");
        self.drive(Input::Completed(completion));
        self.audit_tiers();
    }

    /// What the state machine keeps of tiers is what it should be, and adds up.
    pub(super) fn audit_tiers(&mut self) {
        if self.p.tiers == 0 {
            return;
        }
        let engine = self.side.core().and_then(|c| c.engine());
        if let Some(Err(what)) = engine.map(|e| e.check_tiers()) {
            self.broke(Rule::S11, || what);
        }
    }

    fn fetch_goes_on(&mut self, at: usize, fetch: FetchJob, fails: bool) {
        let job = self.side.jobs[at].clone();
        let (region, writing, digests) = (job.region, job.writing, job.digests);
        let (key, targets) = (fetch.name.key, fetch.sections);
        let held = self.lower.stores[job.tier].objects.get(&key.0).cloned();
        let target = targets.get(digests.len()).copied();
        let section = |t: &Target, h: &Held| h.object.section(t.group, t.shard).is_some();
        if let (None, Some(target), true) = (&held, target, writing) {
            // the object went in the middle
            let slot = target.section.slot.get();
            let mut memory = self.memory.borrow_mut();
            memory.end_write(region, ENGINE, slot, None);
        }
        match (held, target) {
            (Some(held), Some(target)) if writing => {
                let slot = target.section.slot.get();
                let length = u64::from(target.section.length.get());
                let whole = (!held.corrupt).then_some((held.hash, target.section.section.get()));
                self.memory
                    .borrow_mut()
                    .end_write(region, ENGINE, slot, whole);
                let digest = self.memory.borrow().digest(region, slot, length);
                self.goes_on(at, Some(digest));
            }
            (Some(held), Some(target)) if !section(&target, &held) => {
                self.hit(Fault::WindowMissing);
                self.goes_on(at, None);
            }
            (Some(_), Some(target)) if !fails && (!job.cancelled || self.rng.chance(600)) => {
                if job.cancelled {
                    self.hit(Fault::WroteAfterCancel);
                }
                let (slot, generation) =
                    (target.section.slot.get(), target.section.generation.get());
                let length = u64::from(target.section.length.get());
                self.touched(region, slot, rows_of(length));
                self.memory
                    .borrow_mut()
                    .begin_write(region, ENGINE, 0, slot, generation, length);
                self.collect();
                self.side.jobs[at].writing = true;
            }
            (held, target) => {
                self.side.jobs.swap_remove(at);
                let gone = held.is_none() && !fails;
                let whole = held.filter(|_| target.is_none());
                if gone {
                    self.lower.stores[job.tier].spoilt.remove(&key.0);
                }
                self.spoils(job.tier, job.cancelled, key, whole.as_ref());
                self.fetch_ends(fetch.fetch, whole, digests, job.cancelled, gone);
                if job.stale {
                    self.is_not_published(region, &targets);
                }
            }
        }
    }

    /// What was under way when everything was cleared is not readable afterwards.
    fn is_not_published(&mut self, region: usize, targets: &[Target]) {
        let readable = |t: &Target| {
            let row = self.memory.borrow().regions[region].rows[t.section.slot.get() as usize];
            row.state == PUBLISHED && row.generation == t.section.generation.get()
        };
        if let Some(target) = targets.iter().find(|t| readable(t)) {
            self.broke(Rule::S10, || format!("cleared, and readable: {target:?}"));
        }
    }

    /// A section is done.
    fn goes_on(&mut self, at: usize, digest: Option<[u8; 16]>) {
        let job = &mut self.side.jobs[at];
        job.writing = false;
        job.digests.push(digest);
    }

    /// An object that is none is found out; some tiers remove it.
    fn spoils(&mut self, tier: usize, cancelled: bool, key: ChunkKey, held: Option<&Held>) {
        if cancelled || held.is_none_or(|h| !h.corrupt && !h.wrong) {
            return;
        }
        let removes = self.rng.chance(300);
        let store = &mut self.lower.stores[tier];
        store.spoilt.insert(key.0);
        if removes {
            store.objects.remove(&key.0);
        }
    }

    fn fetch_ends(
        &mut self,
        fetch: FetchId,
        whole: Option<Held>,
        digests: Vec<Option<[u8; 16]>>,
        cancelled: bool,
        gone: bool,
    ) {
        if cancelled {
            self.hit(Fault::LateReport);
        }
        let landed = match whole {
            Some(held) => {
                if held.corrupt {
                    self.hit(Fault::TierCorrupt);
                }
                Ok(Landed {
                    object: Box::new(held.object),
                    digests,
                })
            }
            None => {
                self.hit(Fault::TierFailed);
                Err(if gone { Cause::Missing } else { Cause::Io })
            }
        };
        let again = self.faults_on && self.rng.chance(50);
        let completion = Completion::Fetch { fetch, landed };
        self.tell_core(completion.clone());
        if again {
            // said twice: the second one is nobody's
            self.tell_core(completion);
        }
    }
}
