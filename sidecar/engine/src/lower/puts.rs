//! Writes: a readable chunk is offered to the tiers that lack it, queued, and written within limits, leased while it is read. It is offered
//! when it becomes readable, and again when a request asks for a chunk that a tier rejected or may have lost.

use super::super::memory::{Entry, Handle};
use super::super::mistake::Mistake;
use super::super::name::Name;
use super::super::table::{PUBLISHED, Table};
use super::super::{Engine, Time};
use super::stats::count;
use super::{Tier, TierPlanner};
use crate::config::{Admission, WritePolicy};
use crate::effect::{Effect, Target, WriteJob};
use crate::tier::{Cause, Status, Stored};
use kvcachepool_protocol::object::Object;
use std::collections::VecDeque;

/// Pause of offers after a tier refused a chunk for a reason that applies to others too. An accepted chunk ends the pause.
const REFUSED_PAUSE_MS: u64 = 30_000;
/// Pause of a flush's writes after a transient failure.
const FAILED_PAUSE_MS: u64 = 1_000;
/// A flush gives up on a tier that accepts nothing for this long.
const FAILING_MS_MAX: u64 = 30_000;
/// Attempts per chunk in a flush.
const TRIES_MAX: u32 = 8;

/// A chunk that became readable, or that a request asked for again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub chunk: Handle,
    /// Bit mask of the tiers that may take it.
    pub tiers: u8,
}

impl Offer {
    /// The chunk came from a tier: it is not offered to that tier and those behind it.
    pub fn fetched_from(&mut self, tier: usize) {
        self.tiers = (1 << tier) - 1;
    }
}

/// A chunk that waits to be written to a tier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiting {
    pub name: Name,
    pub chunk: Handle,
    pub bytes: u64,
    pub since_ms: u64,
    /// Another process may have written the object: look it up first.
    pub look_first: bool,
    /// Failed attempts in this flush.
    pub failed: u32,
}

/// A chunk that is being written to a tier.
#[derive(Debug, Clone)]
pub(crate) struct Put {
    pub name: Name,
    pub chunk: Handle,
    pub tier: usize,
    pub bytes: u64,
    pub targets: Vec<Target>,
    /// Another process may have written the object: look it up first.
    pub look_first: bool,
    /// Failed attempts in this flush, before this one.
    pub failed: u32,
    /// The tier went down since the write began, and may have lost the object.
    pub doubtful: bool,
}

/// Write queue of a tier.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    pub queue: VecDeque<Waiting>,
    pub queue_bytes: u64,
    pub puts: u32,
    pub put_bytes: u64,
    /// No offers before this time.
    pub refused_until_ms: u64,
    pub paused_until_ms: u64,
}

impl TierPlanner {
    /// True if the flush tries this chunk again. Transient failures are retried, after a pause that delays the next chunks as well.
    fn tries_again(&mut self, now: Time, done: &Put, stored: Result<Stored, Cause>) -> bool {
        let Some(tier) = self.tiers.get_mut(done.tier) else {
            return false;
        };
        let Some(walk) = tier.walk.as_mut() else {
            return false;
        };
        match stored {
            Ok(_) => walk.failing_since_ms = None,
            Err(cause) if cause.status() == Status::Temporary && !done.doubtful => {
                let since_ms = *walk.failing_since_ms.get_or_insert(now.mono_ms);
                let again = done.failed + 1 < TRIES_MAX && now.mono_ms < since_ms + FAILING_MS_MAX;
                if again {
                    tier.writes.paused_until_ms = now.mono_ms + FAILED_PAUSE_MS;
                    return true;
                }
            }
            Err(_) => {}
        }
        false
    }
}

impl<T: Table> Engine<T> {
    /// Offers a chunk that became readable.
    pub(crate) fn offer(&mut self, chunk: Handle) {
        if !self.lower.tiers.is_empty() {
            let tiers = u8::MAX;
            self.lower.offers.push(Offer { chunk, tiers });
        }
    }

    /// A request asked for a chunk again: offers it to tiers that only take such chunks, and to writable tiers that missed it.
    pub(crate) fn touched(&mut self, chunk: Handle) {
        let tiers = self.lower.tiers.iter().enumerate();
        let (mut takes, mut reused) = (0, false);
        for (at, tier) in tiers {
            takes |= u8::from(tier.up() && tier.is_written()) << at;
            reused |= tier.config.admission == Admission::Reused;
        }
        let Some(e) = self.memory.index.get_mut(chunk) else {
            return;
        };
        let first = !std::mem::replace(&mut e.reused, true) && reused;
        let tiers = if first { u8::MAX } else { e.missed & takes };
        if tiers != 0 {
            self.lower.offers.push(Offer { chunk, tiers });
        }
    }

    /// Queues the offered chunks for the tiers that should have them.
    pub(super) fn take_offers(&mut self, now: Time) {
        for offer in std::mem::take(&mut self.lower.offers) {
            let Some(e) = self
                .memory
                .index
                .get(offer.chunk)
                .filter(|e| e.listed && e.complete())
            else {
                continue;
            };
            let (name, missed) = (e.name, e.missed);
            if !self.lower.origins.contains_key(&name.layout) {
                continue;
            }
            for at in 0..self.lower.tiers.len() {
                if offer.tiers >> at & 1 == 0 {
                    continue;
                }
                let again = missed >> at & 1 == 1;
                let known = &self.lower.known;
                let look_first = again || known.had(&name, at);
                if known.has(&name, at, now.mono_ms) {
                    // another process wrote it, and the tier may evict it
                    if self.lacks(at, offer.chunk) {
                        self.missed(offer.chunk, at);
                    }
                } else if !(again && self.refuses_more(now, at, offer.chunk)) {
                    self.queue_put(now, at, offer.chunk, look_first, 0);
                }
            }
        }
    }

    /// True if the tier should not be offered the chunk again: it refused one just now, or a waiting chunk would be dropped for it.
    fn refuses_more(&self, now: Time, at: usize, chunk: Handle) -> bool {
        self.lower.tiers.get(at).is_some_and(|tier| {
            let (writes, most) = (&tier.writes, tier.config.put_queue_bytes_max);
            now.mono_ms < writes.refused_until_ms
                || !writes.queue.is_empty()
                    && writes.queue_bytes + self.memory.stored_bytes(chunk) > most
        })
    }

    /// True if the tier should have this readable chunk, and is not known to have it.
    pub(super) fn lacks(&self, at: usize, chunk: Handle) -> bool {
        self.meant_for(at, chunk)
            .is_some_and(|e| e.written >> at & 1 == 0)
    }

    /// True if the tier should have this readable chunk, and its last sighting is too old at `since_ms` to rely on.
    pub(super) fn may_lack(&self, at: usize, chunk: Handle, since_ms: u64) -> bool {
        self.meant_for(at, chunk).is_some_and(|e| {
            e.written >> at & 1 == 1 && !self.lower.known.has(&e.name, at, since_ms)
        })
    }

    /// The readable chunk, if the tier takes it.
    fn meant_for(&self, at: usize, chunk: Handle) -> Option<&Entry> {
        let (e, tier) = (self.memory.index.get(chunk)?, self.lower.tiers.get(at)?);
        let wanted = match (tier.config.write, tier.config.admission) {
            (WritePolicy::None, _) => false,
            (_, Admission::All) => true,
            (_, Admission::Reused) => e.reused,
        };
        Some(e).filter(|e| wanted && e.listed && e.complete())
    }

    /// Forgets that a tier has a chunk.
    pub(super) fn not_written(&mut self, at: usize, chunk: Handle) {
        if let Some(e) = self.memory.index.get_mut(chunk) {
            e.written &= !(1 << at);
        }
    }

    /// Records that a tier did not take a chunk, so that the next request for it offers it again.
    pub(super) fn missed(&mut self, chunk: Handle, at: usize) {
        if let Some(e) = self.memory.index.get_mut(chunk) {
            e.missed |= 1 << at;
        }
    }

    /// Records that a tier has a chunk.
    pub(super) fn written(&mut self, chunk: Handle, at: usize) {
        if let Some(e) = self.memory.index.get_mut(chunk) {
            e.written |= 1 << at;
            e.missed &= !(1 << at);
        }
        self.claim(chunk, at);
    }

    /// Queues a chunk for a tier that takes it and is not known to have it.
    pub(super) fn queue_put(
        &mut self,
        now: Time,
        at: usize,
        chunk: Handle,
        look_first: bool,
        failed: u32,
    ) {
        let Some(name) = self.memory.index.get(chunk).map(|e| e.name) else {
            return;
        };
        if !self.lacks(at, chunk) {
            return;
        }
        if self.lower.removes(&name, at) {
            // offered again when the tier has confirmed the removal
            self.missed(chunk, at);
            return;
        }
        let bytes = self.memory.stored_bytes(chunk);
        let Some(tier) = self.lower.tiers.get_mut(at) else {
            return;
        };
        let config = tier.config;
        let writing = self.lower.writing.entry(name).or_default();
        // also if that is an evicted chunk of the same name: this chunk is offered when that write ends
        if *writing >> at & 1 == 1 && !T::makes(Mistake::PutTwice) {
            return;
        }
        tier.stats.offered_chunks += 1;
        if !tier.up() && !T::makes(Mistake::TierIsDown) {
            count(&mut tier.stats.puts, "TierDown", 1);
            if *writing == 0 {
                self.lower.writing.remove(&name);
            }
            self.missed(chunk, at);
            return;
        }
        *writing |= 1 << at;
        tier.writes.queue_bytes += bytes;
        tier.writes.queue.push_back(Waiting {
            name,
            chunk,
            bytes,
            since_ms: now.mono_ms,
            look_first,
            failed,
        });
        if let Some(e) = self.memory.index.get_mut(chunk) {
            e.missed &= !(1 << at);
        }
        let most = config.put_queue_bytes_max;
        self.drop_waiting(at, "QueueFull", |tier| {
            let full = tier.writes.queue_bytes > most && tier.writes.queue.len() > 1;
            full && !T::makes(Mistake::PutBounds)
        });
    }

    /// Drops the oldest queued chunks while `needed` holds.
    fn drop_waiting(&mut self, at: usize, why: &'static str, needed: impl Fn(&Tier) -> bool) {
        while let Some(tier) = self.lower.tiers.get_mut(at).filter(|t| needed(t)) {
            let Some(oldest) = tier.writes.queue.pop_front() else {
                return;
            };
            tier.writes.queue_bytes = tier.writes.queue_bytes.saturating_sub(oldest.bytes);
            count(&mut tier.stats.puts, why, 1);
            self.not_writing(&oldest.name, oldest.chunk, at);
            self.missed(oldest.chunk, at);
        }
    }

    /// A queued or running write ended. Offers another chunk that has the same name by now, because it could not be queued meanwhile.
    fn not_writing(&mut self, name: &Name, chunk: Handle, at: usize) {
        if let Some(writing) = self.lower.writing.get_mut(name) {
            *writing &= !(1 << at);
            if *writing == 0 {
                self.lower.writing.remove(name);
            }
        }
        if let Some(other) = self.there(name).filter(|other| *other != chunk) {
            let (chunk, tiers) = (other, 1 << at);
            self.lower.offers.push(Offer { chunk, tiers });
        }
    }

    /// Starts queued writes, tier by tier, within the limits, and drops those that waited too long.
    pub(super) fn begin_puts(&mut self, now: Time) {
        for at in 0..self.lower.tiers.len() {
            self.drop_waiting(at, "TooOld", |tier| {
                let oldest = tier.writes.queue.front().filter(|_| !tier.flushes());
                oldest.is_some_and(|w| {
                    now.mono_ms >= w.since_ms + tier.put_wait_ms() + tier.config.put_age_ms_max
                })
            });
            while let Some(waiting) = self.next_put(now, at) {
                match self.object(now, at, waiting.chunk) {
                    Ok((object, targets)) => self.begin_put(at, &waiting, object, targets),
                    Err(why) => {
                        self.writes.give_back(at, waiting.bytes);
                        self.lower.stat(at, |s| count(&mut s.puts, why, 1));
                        self.not_writing(&waiting.name, waiting.chunk, at);
                    }
                }
            }
        }
    }

    /// Limit on bytes being written to a tier, because they cannot be evicted. A single larger chunk is still written.
    pub(super) fn put_bytes_max(&self, tier: &Tier) -> u64 {
        tier.config
            .put_bytes_max
            .min(self.memory.granted_bytes_max() / 4)
    }

    /// Limit on queued bytes: with `WriteBack`, the oldest chunks beyond it are written early; in a flush, it bounds the queue.
    pub(super) fn waiting_bytes_max(&self, tier: &Tier) -> u64 {
        (tier.config.put_queue_bytes_max / 2).min(self.memory.slots.capacity_bytes() / 16)
    }

    fn next_put(&mut self, now: Time, at: usize) -> Option<Waiting> {
        let tier = self.lower.tiers.get(at)?;
        let due = |next: &&Waiting| {
            let waited = now.mono_ms >= next.since_ms + tier.put_wait_ms();
            let much = tier.writes.queue_bytes > self.waiting_bytes_max(tier);
            now.mono_ms >= tier.writes.paused_until_ms && (waited || much)
        };
        let Some(next) = tier.writes.queue.front().filter(due).copied() else {
            self.writes.leave(at);
            return None;
        };
        // the chunk may have gained sections since it was queued
        let bytes = self.memory.stored_bytes(next.chunk);
        let most = self.put_bytes_max(self.lower.tiers.get(at)?);
        let tier = self.lower.tiers.get_mut(at)?;
        let (config, writes) = (&tier.config, &mut tier.writes);
        let full =
            writes.puts >= config.puts_max || writes.puts > 0 && writes.put_bytes + bytes > most;
        if full && !T::makes(Mistake::PutBounds) || !self.writes.take(now.mono_ms, at, bytes) {
            return None;
        }
        writes.queue.pop_front();
        writes.queue_bytes = writes.queue_bytes.saturating_sub(next.bytes);
        Some(Waiting { bytes, ..next })
    }

    fn begin_put(&mut self, at: usize, waiting: &Waiting, object: Object, targets: Vec<Target>) {
        let Some(tier) = self.lower.tiers.get_mut(at) else {
            return;
        };
        tier.writes.puts += 1;
        tier.writes.put_bytes += waiting.bytes;
        let tier = tier.config.kind;
        let put = self.lower.next_put;
        self.lower.next_put += 1;
        let origin = self.lower.origins.get(&waiting.name.layout);
        self.effects.push(Effect::Write(WriteJob {
            put,
            tier,
            object: Box::new(object),
            sections: targets.clone(),
            portable: origin.and_then(|origin| origin.portable.clone()),
            look_first: waiting.look_first,
        }));
        self.lower.puts.insert(
            put,
            Put {
                name: waiting.name,
                chunk: waiting.chunk,
                tier: at,
                bytes: waiting.bytes,
                targets,
                look_first: waiting.look_first,
                failed: waiting.failed,
                doubtful: false,
            },
        );
        if !T::makes(Mistake::PutUnleased) {
            self.memory.lease(waiting.chunk);
        }
    }

    /// A write ended. It counts only if the slots still hold what was read.
    pub(crate) fn put_done(&mut self, now: Time, put: u64, stored: Result<Stored, Cause>) {
        // from an earlier boot
        let Some(done) = self.lower.puts.remove(&put) else {
            return;
        };
        let same = self.put_stands(&done);
        if !T::makes(Mistake::PutUnleased) {
            self.memory.unlease(done.chunk);
        }
        self.not_writing(&done.name, done.chunk, done.tier);
        let removes = self.lower.removes(&done.name, done.tier);
        let result = match stored {
            Ok(_) if !same => "Changed",
            Ok(Stored::New) => "stored",
            Ok(Stored::Already) => "already",
            Err(cause) => cause.name(),
        };
        if done.look_first && stored == Ok(Stored::Already) {
            self.writes.give_back(done.tier, done.bytes);
        }
        match stored {
            // the object will be removed now
            Ok(_) if removes => self.missed(done.chunk, done.tier),
            Ok(_) if done.doubtful => self.missed(done.chunk, done.tier),
            Ok(Stored::New) if same => self.lower.known.usable(done.name, done.tier, now.mono_ms),
            Ok(Stored::Already) if same => {
                self.lower.known.present(done.name, done.tier, now.mono_ms)
            }
            Err(cause) if cause.of_the_tier() || cause.status() == Status::Temporary => {
                self.missed(done.chunk, done.tier);
            }
            _ => {}
        }
        // if the stored object is unusable, the tier still lacks the chunk
        if same && stored.is_ok() && self.lower.known.has(&done.name, done.tier, now.mono_ms) {
            self.written(done.chunk, done.tier);
        }
        if let Some(tier) = self.lower.tiers.get_mut(done.tier) {
            tier.writes.puts = tier.writes.puts.saturating_sub(1);
            tier.writes.put_bytes = tier.writes.put_bytes.saturating_sub(done.bytes);
            match stored {
                // a tier may be several servers: while one refuses, others accept
                Ok(Stored::New) => tier.writes.refused_until_ms = 0,
                Err(cause)
                    if cause.of_the_tier()
                        && cause.status() == Status::Permanent
                        && !done.doubtful =>
                {
                    tier.writes.refused_until_ms = now.mono_ms + REFUSED_PAUSE_MS;
                }
                _ => {}
            }
            count(&mut tier.stats.puts, result, 1);
            if result == "stored" {
                tier.stats.put_bytes += done.bytes;
            }
        }
        if self.lower.tries_again(now, &done, stored) {
            self.queue_put(now, done.tier, done.chunk, true, done.failed + 1);
        }
        // the digests did not match: check the chunk in memory, and let its readers know
        if stored == Err(Cause::Corrupt)
            && self.memory.index.get(done.chunk).is_some_and(|e| e.listed)
        {
            self.start_check(now, done.chunk.entry, false, false);
        }
    }

    /// True if the slots being read still belong to the chunk.
    pub(super) fn put_stands(&self, put: &Put) -> bool {
        put.targets.iter().all(|target| {
            let row = self.memory.slots.row(target.section.slot.get());
            row.state == PUBLISHED && row.generation == target.section.generation.get()
        })
    }

    /// The tier went down: drops its queue. Writes in flight end when the shell reports them.
    pub(super) fn end_puts_of(&mut self, at: usize) {
        if !T::makes(Mistake::TierIsDown) {
            self.drop_waiting(at, "TierDown", |_| true);
        }
        for e in self.memory.index.entries_mut() {
            e.missed |= e.written & 1 << at;
            e.written &= !(1 << at);
        }
        for put in self.lower.puts.values_mut().filter(|put| put.tier == at) {
            put.doubtful = true;
        }
        if let Some(tier) = self.lower.tiers.get_mut(at) {
            (tier.writes.refused_until_ms, tier.writes.paused_until_ms) = (0, 0);
        }
    }
}
