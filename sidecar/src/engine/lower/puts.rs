//! Writing down: readable chunks go to the tiers that lack them, within bounds, each under a lease while it is read.

use super::super::entry::{Entry, Handle};
use super::super::grant::sections_of;
use super::super::index::Name;
use super::super::mistake::{Mistake, made};
use super::super::table::{PUBLISHED, Table};
use super::super::{Engine, Time};
use super::stats::count;
use super::{Order, Target, Tier};
use crate::engine::config::{Admission, WritePolicy};
use crate::tiers::{Cause, Status, Stored};
use kvcachepool_protocol::object::Object;
use std::collections::VecDeque;

/// After a tier refused a chunk as it will refuse others, it is offered nothing again for so long.
const REFUSED_PAUSE_MS: u64 = 30_000;

/// A chunk became readable, or a request came back for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub chunk: Handle,
    /// A bit for each tier that may get it.
    pub tiers: u8,
}

impl Offer {
    /// It came from a tier: those behind that one have it, too, or need not.
    pub fn came_from(&mut self, tier: usize) {
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
    /// Somebody else may have written it.
    pub look_first: bool,
}

/// A chunk that is being written to a tier.
#[derive(Debug, Clone)]
pub(crate) struct Put {
    pub name: Name,
    pub chunk: Handle,
    pub tier: usize,
    pub bytes: u64,
    pub targets: Vec<Target>,
    /// Somebody else may have written it.
    pub look_first: bool,
    /// The tier went down since it began: it may have lost what it says to have.
    pub doubtful: bool,
}

/// Chunks on their way to a tier.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    pub queue: VecDeque<Waiting>,
    pub queue_bytes: u64,
    pub puts: u32,
    pub put_bytes: u64,
    /// Nothing is offered again before.
    pub refused_until_ms: u64,
}

impl<T: Table> Engine<T> {
    /// A chunk can be read from now on.
    pub(crate) fn offer(&mut self, entry: u32) {
        if !self.lower.tiers.is_empty() {
            let (chunk, tiers) = (self.handle(entry), u8::MAX);
            self.lower.offers.push(Offer { chunk, tiers });
        }
    }

    /// A request came back for a chunk: tiers that take only such may get it now, and those that are up and did not take it.
    pub(crate) fn touched(&mut self, chunk: Handle) {
        let tiers = self.lower.tiers.iter().enumerate();
        let (mut up, mut reused) = (0, false);
        for (at, tier) in tiers {
            up |= u8::from(tier.up()) << at;
            reused |= tier.config.admission == Admission::Reused;
        }
        let Some(e) = self.get_mut(chunk) else {
            return;
        };
        let first = !std::mem::replace(&mut e.reused, true) && reused;
        let tiers = if first { u8::MAX } else { e.missed & up };
        if tiers != 0 {
            self.lower.offers.push(Offer { chunk, tiers });
        }
    }

    /// Puts what was offered into the queues of the tiers that should have it.
    pub(super) fn take_offers(&mut self, now: Time) {
        for offer in std::mem::take(&mut self.lower.offers) {
            let Some(e) = self.get(offer.chunk).filter(|e| e.listed && e.complete()) else {
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
                    // somebody wrote it, and the tier may drop it
                    if self.lacks(at, offer.chunk) {
                        self.missed(offer.chunk, at);
                    }
                } else if !(again && self.refuses_more(now, at, offer.chunk)) {
                    self.queue_put(now, at, offer.chunk, look_first);
                }
            }
        }
    }

    /// Shall a tier be left alone with a chunk that it did not take? It refused one just now, or what waits for it would have to give way.
    fn refuses_more(&self, now: Time, at: usize, chunk: Handle) -> bool {
        self.lower.tiers.get(at).is_some_and(|tier| {
            let writes = &tier.writes;
            let bytes = writes.queue_bytes + self.stored_bytes(chunk);
            let full = !writes.queue.is_empty() && bytes > tier.config.put_queue_bytes_max;
            full || now.mono_ms < writes.refused_until_ms
        })
    }

    /// Puts a chunk into the queue of a tier, if it is one for it that is not known to be there.
    pub(super) fn queue_put(&mut self, now: Time, at: usize, chunk: Handle, look_first: bool) {
        let bytes = self.stored_bytes(chunk);
        let Some(name) = self.get(chunk).map(|e| e.name) else {
            return;
        };
        if !self.lacks(at, chunk) {
            return;
        }
        let Some(tier) = self.lower.tiers.get_mut(at) else {
            return;
        };
        let config = tier.config;
        let writing = self.lower.writing.entry(name).or_default();
        if *writing >> at & 1 == 1 && !made(Mistake::PutTwice) {
            return;
        }
        tier.stats.offered_chunks += 1;
        if !tier.up() && !made(Mistake::TierIsDown) {
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
        });
        if let Some(e) = self.get_mut(chunk) {
            e.missed &= !(1 << at);
        }
        let most = config.put_queue_bytes_max;
        self.drop_waiting(at, "QueueFull", |tier| {
            let full = tier.writes.queue_bytes > most && tier.writes.queue.len() > 1;
            full && !made(Mistake::PutBounds)
        });
    }

    /// Should a tier get this readable chunk, and is not known to have it?
    pub(super) fn lacks(&self, at: usize, chunk: Handle) -> bool {
        self.meant_for(at, chunk)
            .is_some_and(|e| e.written >> at & 1 == 0)
    }

    /// Should a tier have this readable chunk, and was seen to have it, but so long ago that it may have dropped it since?
    pub(super) fn may_lack(&self, now: Time, at: usize, chunk: Handle) -> bool {
        self.meant_for(at, chunk).is_some_and(|e| {
            e.written >> at & 1 == 1 && !self.lower.known.has(&e.name, at, now.mono_ms)
        })
    }

    /// The readable chunk, if the tier is one for it.
    fn meant_for(&self, at: usize, chunk: Handle) -> Option<&Entry> {
        let (e, tier) = (self.get(chunk)?, self.lower.tiers.get(at)?);
        let wanted = match (tier.config.write, tier.config.admission) {
            (WritePolicy::None, _) => false,
            (_, Admission::All) => true,
            (_, Admission::Reused) => e.reused,
        };
        Some(e).filter(|e| wanted && e.listed && e.complete())
    }

    /// A tier is not believed any more to have a chunk.
    pub(super) fn not_written(&mut self, at: usize, chunk: Handle) {
        if let Some(e) = self.get_mut(chunk) {
            e.written &= !(1 << at);
        }
    }

    /// Drops the oldest as long as that is needed.
    fn drop_waiting(&mut self, at: usize, why: &'static str, needed: impl Fn(&Tier) -> bool) {
        while let Some(tier) = self.lower.tiers.get_mut(at).filter(|t| needed(t)) {
            let Some(oldest) = tier.writes.queue.pop_front() else {
                return;
            };
            tier.writes.queue_bytes = tier.writes.queue_bytes.saturating_sub(oldest.bytes);
            count(&mut tier.stats.puts, why, 1);
            self.not_writing(&oldest.name, at);
            self.missed(oldest.chunk, at);
        }
    }

    /// A tier did not take a chunk that it should have: it is offered again when a request comes back for it.
    fn missed(&mut self, chunk: Handle, at: usize) {
        if let Some(e) = self.get_mut(chunk) {
            e.missed |= 1 << at;
        }
    }

    fn not_writing(&mut self, name: &Name, at: usize) {
        if let Some(writing) = self.lower.writing.get_mut(name) {
            *writing &= !(1 << at);
            if *writing == 0 {
                self.lower.writing.remove(name);
            }
        }
    }

    /// Begins what waits, tier by tier, as far as its bounds allow. What waited for too long goes.
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
                        self.not_writing(&waiting.name, at);
                    }
                }
            }
        }
    }

    /// Bytes that may be written to a tier at once, if it is more than one chunk: nothing of them can make room meanwhile.
    pub(super) fn put_bytes_max(&self, tier: &Tier) -> u64 {
        tier.config.put_bytes_max.min(self.granted_bytes_max() / 4)
    }

    /// With `WriteBack`: bytes that may wait for their time; the oldest of more are written. At a flush: bytes that it lets wait.
    pub(super) fn waiting_bytes_max(&self, tier: &Tier) -> u64 {
        (tier.config.put_queue_bytes_max / 2).min(self.geometry.arena_bytes / 16)
    }

    fn next_put(&mut self, now: Time, at: usize) -> Option<Waiting> {
        let tier = self.lower.tiers.get(at)?;
        let due = |next: &&Waiting| {
            now.mono_ms >= next.since_ms + tier.put_wait_ms()
                || tier.writes.queue_bytes > self.waiting_bytes_max(tier)
        };
        let Some(next) = tier.writes.queue.front().filter(due).copied() else {
            self.writes.leave(at);
            return None;
        };
        // it may have got more sections since
        let bytes = self.stored_bytes(next.chunk);
        let most = self.put_bytes_max(self.lower.tiers.get(at)?);
        let tier = self.lower.tiers.get_mut(at)?;
        let (config, writes) = (&tier.config, &mut tier.writes);
        let full =
            writes.puts >= config.puts_max || writes.puts > 0 && writes.put_bytes + bytes > most;
        if full && !made(Mistake::PutBounds) || !self.writes.take(now.mono_ms, at, bytes) {
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
        let put = self.lower.next_put;
        self.lower.next_put += 1;
        self.lower.orders.push(Order::Put {
            put,
            tier: tier.config.kind,
            object: Box::new(object),
            sections: targets.clone(),
            look_first: waiting.look_first,
        });
        self.lower.puts.insert(
            put,
            Put {
                name: waiting.name,
                chunk: waiting.chunk,
                tier: at,
                bytes: waiting.bytes,
                targets,
                look_first: waiting.look_first,
                doubtful: false,
            },
        );
        if !made(Mistake::PutUnleased) {
            self.lease(waiting.chunk);
        }
    }

    /// A write ended. It counts only if what was read is still what it was.
    pub(super) fn put_done(&mut self, now: Time, put: u64, stored: Result<Stored, Cause>) {
        // of an earlier boot
        let Some(done) = self.lower.puts.remove(&put) else {
            return;
        };
        let same = self.put_stands(&done);
        if !made(Mistake::PutUnleased) {
            self.unlease(done.chunk);
        }
        self.not_writing(&done.name, done.tier);
        let result = match stored {
            Ok(_) if !same => "Changed",
            Ok(Stored::New) => "stored",
            Ok(Stored::Already) => "already",
            Err(cause) => cause.name(),
        };
        if same
            && stored.is_ok()
            && !done.doubtful
            && let Some(e) = self.get_mut(done.chunk)
        {
            e.written |= 1 << done.tier;
        }
        if done.look_first && stored == Ok(Stored::Already) {
            self.writes.give_back(done.tier, done.bytes);
        }
        match stored {
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
        if let Some(tier) = self.lower.tiers.get_mut(done.tier) {
            tier.writes.puts = tier.writes.puts.saturating_sub(1);
            tier.writes.put_bytes = tier.writes.put_bytes.saturating_sub(done.bytes);
            if let Err(cause) = stored
                && cause.of_the_tier()
                && cause.status() == Status::Permanent
            {
                tier.writes.refused_until_ms = now.mono_ms + REFUSED_PAUSE_MS;
            }
            count(&mut tier.stats.puts, result, 1);
            if result == "stored" {
                tier.stats.put_bytes += done.bytes;
            }
        }
        // its bytes were not what they should be: are they still, and who reads them meanwhile?
        if stored == Err(Cause::Corrupt) && self.get(done.chunk).is_some_and(|e| e.listed) {
            self.start_check(now, done.chunk.entry, false, false);
        }
    }

    /// Are the slots that are being read still those of the chunk?
    pub(super) fn put_stands(&self, put: &Put) -> bool {
        put.targets.iter().all(|target| {
            let row = self.table.row(target.section.slot.get());
            row.state == PUBLISHED && row.generation == target.section.generation.get()
        })
    }

    /// The tier went down, and may come back with less: what waits for it goes. What is being written ends when the shell says so.
    pub(super) fn end_puts_of(&mut self, at: usize) {
        if !made(Mistake::TierIsDown) {
            self.drop_waiting(at, "TierDown", |_| true);
        }
        for e in &mut self.entries {
            e.missed |= e.written & 1 << at;
            e.written &= !(1 << at);
        }
        for put in self.lower.puts.values_mut().filter(|put| put.tier == at) {
            put.doubtful = true;
        }
        if let Some(tier) = self.lower.tiers.get_mut(at) {
            tier.writes.refused_until_ms = 0;
        }
    }

    /// Bytes of the sections that a chunk has.
    pub(crate) fn stored_bytes(&self, chunk: Handle) -> u64 {
        self.get(chunk).map_or(0, |e| {
            sections_of(e.have)
                .map(|s| self.table.row(e.slot(s)).length)
                .sum()
        })
    }
}
