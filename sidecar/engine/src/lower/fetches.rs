//! Fetches: the chunks of a PROBE in prefix order up to the first missing one, pending fetches with their waiters, those in flight, and the
//! limits on both.

use super::super::memory::{FetchId, GrantContext, Handle};
use super::super::mistake::Mistake;
use super::super::name::Name;
use super::super::probe::Probe;
use super::super::table::Table;
use super::super::{Engine, Time, Wish};
use super::ask::{LookupState, TierLookup, set};
use super::stats::count;
use super::worth::Worth;
use super::{Reach, Tier, TierPlanner};
use crate::effect::{Effect, FetchJob, Target};
use kvcachepool_protocol::domain::SectionPlan;
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind};
use kvcachepool_protocol::message::{GRANT_EXISTS, GRANT_NOT_READY};
use kvcachepool_protocol::refs::SectionRef;

/// A chunk that at least one PROBE waits for.
#[derive(Debug)]
pub(crate) struct PendingFetch {
    pub number: u64,
    pub tier: usize,
    /// Waiting PROBEs, with the chunk's position in each.
    pub waiters: Vec<(u64, usize)>,
    /// The fetch in flight; none = queued.
    pub flight: Option<FetchId>,
    pub chunk: Chunk,
}

/// A chunk as named by a PROBE.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub reach: Reach,
    pub key: ChunkKey,
    pub parent: Option<ChunkKey>,
    pub last_hash: EngineHash,
    pub first_token: u32,
    pub tokens: u32,
    /// Plan of an opaque object, once its head was read.
    pub object_plan: Option<SectionPlan>,
}

impl Chunk {
    pub fn plan(&self) -> &SectionPlan {
        let of_domain = &self.reach.domain.plan;
        self.object_plan.as_ref().unwrap_or(of_domain)
    }

    /// Context for a grant to the engine itself.
    pub fn context(&self, expires_unix_s: u64) -> GrantContext<'_> {
        GrantContext {
            scheduler: 0,
            tag: 0,
            kind: self.reach.kind,
            model: self.reach.domain.model_id,
            layout: self.reach.domain.layout_id,
            namespace: self.reach.namespace,
            plan: self.plan(),
            writers: &[],
            expires_unix_s,
        }
    }

    pub fn wish<'a>(&self, sections: u128, block_hashes: &'a [EngineHash]) -> Wish<'a> {
        Wish {
            key: self.key,
            parent: self.parent,
            last_hash: self.last_hash,
            first_token: self.first_token,
            tokens: self.tokens,
            sections,
            block_hashes,
        }
    }
}

/// A fetch that the shell has not completed.
#[derive(Debug)]
pub(crate) struct FetchInFlight {
    pub name: Name,
    pub tier: usize,
    pub chunk: Chunk,
    pub targets: Vec<Target>,
    pub bytes: u64,
    pub since_ms: u64,
    pub cancelled: bool,
    /// The tier went down since the fetch began, and may have lost the object.
    pub doubtful: bool,
}

/// Why a chunk cannot be fetched now.
enum Not {
    Yet,
    Ever(&'static str),
}

impl TierPlanner {
    /// The chunk that has waited longest. Skips stale queue entries.
    fn next_pending(&mut self, tier: usize) -> Option<(Name, u64)> {
        let t = self.tiers.get_mut(tier)?;
        loop {
            let (name, number) = *t.queue.front()?;
            let waits = self
                .pending
                .get(&name)
                .is_some_and(|w| w.number == number && w.flight.is_none());
            if waits {
                return Some((name, number));
            }
            t.queue.pop_front();
        }
    }
}

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
        let worth = if probe.question.kind == KeyKind::Opaque {
            // nothing could compute it
            Worth::all(tier_lookup.end)
        } else {
            let worth = self.worth(now, probe, tier_lookup);
            self.choose(now, probe, tier_lookup, worth);
            worth
        };
        let holes = probe.question.independent || T::makes(Mistake::FetchHoles);
        let mut rejected = false;
        for at in tier_lookup.first..tier_lookup.end {
            match tier_lookup.states.get(at).copied().unwrap_or_default() {
                LookupState::Memory | LookupState::Fetched(_) | LookupState::Fetching(_) => {}
                LookupState::Pending | LookupState::Asked(_) => {
                    if !holes {
                        return false;
                    }
                }
                LookupState::Absent | LookupState::Dropped => {
                    if !holes {
                        self.cut(id, probe, tier_lookup, at);
                        return false;
                    }
                }
                LookupState::Found(_) if at >= worth.until && !holes => {
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
                    if state == LookupState::Dropped && !holes {
                        self.cut(id, probe, tier_lookup, at);
                        return false;
                    }
                    if state == LookupState::Pending {
                        rejected = true;
                        if !holes {
                            break;
                        }
                    }
                }
            }
        }
        rejected && tier_lookup.lookup.is_none()
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
                && self.record_found(id, &mut probe, at, handle)
            {
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

    /// Registers a PROBE as waiter for a chunk in a tier. PROBEs that wait for one chunk share its fetch. `Pending`: the tier's queue is full.
    pub(super) fn queue_fetch(
        &mut self,
        now: Time,
        id: u64,
        at: usize,
        probe: &mut Probe,
        tier_lookup: &TierLookup,
        tier: usize,
    ) -> LookupState {
        let Some(key) = probe.question.keys.get(at).copied() else {
            return LookupState::Dropped;
        };
        let name = tier_lookup.name(key);
        // the chunk may have been stored since the PROBE arrived
        if let Some(handle) = self.readable(now, &probe.question, tier_lookup.layout, at, key) {
            if !self.must_check(handle.entry, probe.asked_ms)
                && self.record_found(id, probe, at, handle)
            {
                return LookupState::Memory;
            }
            return LookupState::Dropped;
        }
        if let Some(pending_fetch) = self.lower.pending.get_mut(&name) {
            pending_fetch.waiters.push((id, at));
            return LookupState::Fetching(pending_fetch.tier);
        }
        // an earlier waiter's fetch may have found this out
        if self.lower.known.lacks(&name, tier, now.mono_ms) || self.lower.removes(&name, tier) {
            return LookupState::Pending;
        }
        let Some(chunk) = chunk(probe, tier_lookup, at) else {
            return LookupState::Dropped;
        };
        let Some(t) = self.lower.tiers.get_mut(tier) else {
            return LookupState::Dropped;
        };
        t.stats.wanted_chunks += 1;
        let full = t.queued >= t.config.fetch_queue_max;
        if full || !t.up() {
            let why = if full { "QueueFull" } else { "TierDown" };
            count(&mut t.stats.fetches, why, 1);
            return LookupState::Pending;
        }
        let number = self.lower.next_pending;
        self.lower.next_pending += 1;
        t.queued += 1;
        if chunk.reach.kind == KeyKind::Opaque {
            t.heads.push_back((name, number));
        } else {
            t.queue.push_back((name, number));
        }
        self.lower.pending.insert(
            name,
            PendingFetch {
                number,
                tier,
                waiters: vec![(id, at)],
                flight: None,
                chunk,
            },
        );
        LookupState::Fetching(tier)
    }

    /// Removes a PROBE from a chunk's waiters. Without waiters, the fetch is dequeued or cancelled.
    pub(super) fn leave_fetch(&mut self, name: &Name, id: u64, at: usize) {
        let Some(pending_fetch) = self.lower.pending.get_mut(name) else {
            return;
        };
        pending_fetch.waiters.retain(|w| *w != (id, at));
        if !pending_fetch.waiters.is_empty() {
            return;
        }
        let Some(pending_fetch) = self.lower.pending.remove(name) else {
            return;
        };
        match pending_fetch.flight {
            Some(fetch) => {
                if let Some(flight) = self.lower.in_flight.get_mut(&fetch.number()) {
                    flight.cancelled = true;
                    // The tier may find the object unusable and delete it after this cancellation, without a report. Forgetting the object
                    // makes sure that the computed chunk is written.
                    self.lower.known.doubted(name, flight.tier);
                }
                self.memory.cancel_fetch(fetch);
                self.effects.push(Effect::CancelFetch { fetch });
            }
            None => {
                if let Some(t) = self.lower.tiers.get_mut(pending_fetch.tier) {
                    t.queued = t.queued.saturating_sub(1);
                    count(&mut t.stats.fetches, "cancelled", 1);
                }
            }
        }
    }

    /// Starts queued fetches, tier by tier, within the limits.
    pub(super) fn begin_fetches(&mut self, now: Time) {
        for tier in 0..self.lower.tiers.len() {
            while let Some((name, number)) = self.lower.next_pending(tier) {
                match self.begin_fetch(now, tier, &name) {
                    Ok(()) => {
                        if let Some(t) = self.lower.tiers.get_mut(tier) {
                            t.queue.pop_front();
                        }
                    }
                    Err(Not::Yet) => break,
                    Err(Not::Ever(why)) => self.end_pending(now, &name, number, why),
                }
            }
            if self.lower.next_pending(tier).is_none() {
                self.reads.leave(tier);
            }
        }
    }

    /// Takes slots for a chunk and orders its fetch.
    fn begin_fetch(&mut self, now: Time, tier: usize, name: &Name) -> Result<(), Not> {
        let Some(pending_fetch) = self.lower.pending.get(name) else {
            return Err(Not::Ever("cancelled"));
        };
        if self.there(name).is_some() {
            return Err(Not::Ever("stored"));
        }
        let chunk = pending_fetch.chunk.clone();
        let plan = chunk.plan();
        let bytes = plan.chunk_bytes(chunk.tokens);
        self.may_fetch(tier, bytes)?;
        if !self.reads.take(now.mono_ms, tier, bytes) {
            return Err(Not::Yet);
        }
        let sections = plan.section_map(plan.all_groups());
        let (fetch, refs) = self
            .memory
            .fetch(now, &chunk.context(0), &chunk.wish(sections, &[]))
            .map_err(|result| {
                self.reads.give_back(tier, bytes);
                match result {
                    GRANT_NOT_READY => Not::Yet,
                    // a worker is storing the chunk now
                    GRANT_EXISTS => Not::Ever("BeingStored"),
                    _ => Not::Ever("NoRoom"),
                }
            })?;
        let targets: Vec<Target> = refs
            .iter()
            .filter_map(|section| target(&chunk, *section))
            .collect();
        let Some(t) = self.lower.tiers.get_mut(tier) else {
            return Ok(());
        };
        t.queued = t.queued.saturating_sub(1);
        t.speed.begins(now.mono_ms, t.fetches);
        t.fetches += 1;
        t.fetch_bytes += bytes;
        self.effects.push(Effect::Fetch(FetchJob {
            fetch,
            tier: t.config.kind,
            name: chunk.reach.object(chunk.key),
            sections: targets.clone(),
            portable: chunk.reach.domain.portable.clone(),
        }));
        self.lower.in_flight.insert(
            fetch.number(),
            FetchInFlight {
                name: *name,
                tier,
                chunk,
                targets,
                bytes,
                since_ms: now.mono_ms,
                cancelled: false,
                doubtful: false,
            },
        );
        if let Some(pending_fetch) = self.lower.pending.get_mut(name) {
            pending_fetch.flight = Some(fetch);
        }
        Ok(())
    }

    /// Limit on bytes in flight from a tier. A single larger chunk is still fetched.
    pub(super) fn fetch_bytes_max(&self, tier: &Tier) -> u64 {
        tier.config
            .fetch_bytes_max
            .min(self.memory.granted_bytes_max() / 4)
    }

    fn may_fetch(&self, tier: usize, bytes: u64) -> Result<(), Not> {
        let Some(t) = self.lower.tiers.get(tier) else {
            return Err(Not::Ever("NoRoom"));
        };
        let most = self.fetch_bytes_max(t);
        let bounded =
            t.fetches >= t.config.fetches_max || t.fetches > 0 && t.fetch_bytes + bytes > most;
        if bounded && !T::makes(Mistake::FetchBounds) {
            return Err(Not::Yet);
        }
        if bytes > self.memory.granted_bytes_max() {
            return Err(Not::Ever("NoRoom"));
        }
        // checked first, because a refused grant counts as a refused GRANT of a worker
        if !self.memory.may_grant(bytes) {
            return Err(Not::Yet);
        }
        Ok(())
    }

    /// The chunk's handle, if it is readable.
    pub(super) fn there(&self, name: &Name) -> Option<Handle> {
        let entry = self.memory.index.find(name)?;
        let complete = self.memory.index.entry(entry)?.complete();
        complete.then(|| self.memory.index.handle(entry))
    }

    /// Ends a queued fetch. The chunk may have been stored meanwhile.
    pub(super) fn end_pending(&mut self, now: Time, name: &Name, number: u64, why: &'static str) {
        let Some(pending_fetch) = self.lower.pending.get(name).filter(|w| w.number == number)
        else {
            return;
        };
        let tier = pending_fetch.tier;
        let waiters = self
            .lower
            .pending
            .remove(name)
            .map(|w| w.waiters)
            .unwrap_or_default();
        if let Some(t) = self.lower.tiers.get_mut(tier) {
            t.queued = t.queued.saturating_sub(1);
            count(&mut t.stats.fetches, why, 1);
        }
        let fetched = self.there(name).map(|handle| (handle, LookupState::Memory));
        for (id, at) in waiters {
            self.notify_waiter(now, id, at, fetched, after::<T>(why));
        }
    }

    /// The tier went down: drops what waits for it, in order. Fetches in flight end when the shell reports them.
    pub(super) fn end_pending_of(&mut self, now: Time, tier: usize) {
        let pending = self.lower.pending.iter();
        let waits = pending.filter(|(_, p)| p.tier == tier && p.flight.is_none());
        let mut waits: Vec<(u64, Name)> = waits.map(|(name, p)| (p.number, *name)).collect();
        waits.sort_unstable();
        for (number, name) in waits {
            self.end_pending(now, &name, number, "TierDown");
        }
    }
}

/// The waiters' next state after a failed fetch. If memory was the reason, no other tier is tried.
pub(super) fn after<T: Table>(why: &str) -> LookupState {
    let memory = ["NoRoom", "BeingStored", "Voided", "stored", "cancelled"];
    if T::makes(Mistake::NoNextTier) {
        LookupState::Absent
    } else if memory.contains(&why) {
        LookupState::Dropped
    } else {
        LookupState::Pending
    }
}

/// The data that a fetch needs about a chunk of a PROBE.
fn chunk(probe: &Probe, tier_lookup: &TierLookup, at: usize) -> Option<Chunk> {
    let q = &probe.question;
    let prefix = q.kind == KeyKind::Prefix;
    Some(Chunk {
        reach: Reach {
            hashes: Vec::new(),
            ..tier_lookup.reach.clone()
        },
        key: *q.keys.get(at)?,
        parent: match at.checked_sub(1) {
            Some(before) if prefix => Some(*q.keys.get(before)?),
            _ => None,
        },
        last_hash: *tier_lookup.reach.hashes.get(at)?,
        first_token: match prefix {
            true => u32::try_from(at).ok()?.checked_mul(q.chunk_tokens)?,
            false => 0,
        },
        tokens: q.tokens_of(at),
        object_plan: None,
    })
}

fn target(chunk: &Chunk, section: SectionRef) -> Option<Target> {
    let (group, shard) = chunk.plan().locate(section.section.get())?;
    Some(Target {
        group: u32::try_from(group).ok()?,
        shard,
        section,
    })
}
