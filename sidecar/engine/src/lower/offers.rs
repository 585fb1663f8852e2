//! Offers of readable chunks to the tiers that lack them. A chunk is offered when it becomes readable, and again when a request asks for a
//! chunk that a tier rejected or may have lost.

use super::super::memory::{Entry, Handle};
use super::super::table::Table;
use super::super::{Engine, Time};
use crate::config::{Admission, WritePolicy};

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
}
