//! How fetches end: the received chunk is compared with the request, and published only if it matches.

use super::super::memory::FetchId;
use super::super::memory::NONE;
use super::super::memory::record;
use super::super::mistake::Mistake;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::ask::LookupState;
use super::fetches::{FetchInFlight, after};
use super::objects::plan_of;
use super::stats::count;
use super::{Tier, mean_ms};
use crate::effect::{Effect, Landed};
use crate::tier::Cause;
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Object};

/// Limit on clock skew between nodes, in seconds. An object that expired longer ago is deleted.
const CLOCKS_DIFFER_S: u64 = 300;

impl<T: Table> Engine<T> {
    /// A fetch ended: nothing writes into its slots any more. A cancelled fetch returns its slots, whatever it received.
    pub(crate) fn landed(&mut self, now: Time, fetch: FetchId, landed: Result<Landed, Cause>) {
        let Some(flight) = self.lower.in_flight.remove(&fetch.number()) else {
            // from an earlier boot
            return;
        };
        if let Some(t) = self.lower.tiers.get_mut(flight.tier) {
            t.fetches = t.fetches.saturating_sub(1);
            t.fetch_bytes = t.fetch_bytes.saturating_sub(flight.bytes);
            let whole = landed.is_ok() && !flight.cancelled;
            t.speed.ends(now.mono_ms, flight.bytes, whole, t.fetches);
        }
        let result = match &landed {
            _ if flight.cancelled => Err("cancelled"),
            Err(cause) => Err(cause.name()),
            Ok(landed) => self.take_in(now, fetch, &flight, landed),
        };
        if result.is_err() {
            self.memory.cancel_fetch(fetch);
            for target in &flight.targets {
                self.memory.fetch_ended(target.section);
            }
        }
        self.remember(now, &flight, &landed, result);
        if flight.cancelled {
            return;
        }
        let pending_fetch = self.lower.pending.remove(&flight.name);
        let fetched = self
            .there(&flight.name)
            .filter(|_| result.is_ok())
            .map(|handle| (handle, LookupState::Fetched(flight.tier)));
        let otherwise = after::<T>(result.err().unwrap_or("Voided"));
        for (id, at) in pending_fetch.map(|w| w.waiters).unwrap_or_default() {
            self.notify_waiter(now, id, at, fetched, otherwise);
        }
    }

    /// Counts the result of a fetch, and updates what is known of the tier.
    fn remember(
        &mut self,
        now: Time,
        flight: &FetchInFlight,
        landed: &Result<Landed, Cause>,
        result: Result<(), &'static str>,
    ) {
        let unusable = [
            Cause::Corrupt.name(),
            Cause::Foreign.name(),
            Cause::Shape.name(),
            "Unsupported",
            "Expired",
        ];
        let gone = match result {
            Err("Expired") if expired_long_ago(now, landed) => self.discards(flight),
            _ => matches!(landed, Err(Cause::Missing)),
        };
        let known = &mut self.lower.known;
        match result {
            Ok(()) if flight.doubtful => {}
            Ok(()) => known.usable(flight.name, flight.tier, now.mono_ms),
            Err(_) if gone => known.absent(flight.name, flight.tier, now.mono_ms),
            Err(why) if unusable.contains(&why) && !T::makes(Mistake::AskUnusable) => {
                known.unusable(flight.name, flight.tier, now.mono_ms);
            }
            Err(_) => {}
        }
        if let Some(t) = self.lower.tiers.get_mut(flight.tier) {
            count(&mut t.stats.fetches, result.err().unwrap_or("landed"), 1);
            if result.is_ok() {
                t.stats.fetched_bytes += flight.bytes;
            }
            if landed.is_ok() {
                t.fetch_ms = mean_ms(t.fetch_ms, now.mono_ms.saturating_sub(flight.since_ms));
            }
        }
    }

    /// Orders the deletion of an unusable object in a tier that is written to: while it exists, nothing is written under its name.
    fn discards(&mut self, flight: &FetchInFlight) -> bool {
        let writes = |t: &&Tier| t.up() && t.is_written();
        let Some(tier) = self.lower.tiers.get(flight.tier).filter(writes) else {
            return false;
        };
        self.effects.push(Effect::Discard {
            tier: tier.config.kind,
            name: flight.chunk.reach.object(flight.chunk.key),
        });
        true
    }

    /// Publishes the received chunk if it matches the request.
    fn take_in(
        &mut self,
        now: Time,
        fetch: FetchId,
        flight: &FetchInFlight,
        landed: &Landed,
    ) -> Result<(), &'static str> {
        compare::<T>(now, flight, landed)?;
        if !self.memory.fetch_stands(fetch) {
            // cleared or expired during the fetch
            return Err("Voided");
        }
        self.complete_record(flight, &landed.object);
        for (target, digest) in flight.targets.iter().zip(&landed.digests) {
            match digest {
                Some(digest) => {
                    self.memory.fetched(now, target.section, *digest);
                }
                None => self.memory.fetch_lacks(target.section),
            }
        }
        self.settle();
        let there = self.there(&flight.name);
        match there {
            Some(chunk) if flight.doubtful => self.missed(chunk, flight.tier),
            Some(chunk) => self.written(chunk, flight.tier),
            None => {}
        }
        // offer the chunk to nearer tiers only; tiers behind the source have it, or do not take it
        for offer in self.lower.offers.iter_mut().rev() {
            if there == Some(offer.chunk) {
                offer.fetched_from(flight.tier);
            }
        }
        there.map(|_| ()).ok_or("Voided")
    }

    /// Copies block hashes and expiry from the object's head to the record of a new chunk.
    fn complete_record(&mut self, flight: &FetchInFlight, object: &Object) {
        let Some(entry) = self.memory.index.find(&flight.name) else {
            return;
        };
        let Some(e) = self.memory.index.entry_mut(entry) else {
            return;
        };
        // the record of a chunk with readable sections does not change
        if e.slots.iter().any(|row| *row != NONE) {
            return;
        }
        e.expires_unix_s = object.expires_unix_s;
        let whole = object.block_hashes.last() == Some(&object.last_hash);
        let hashes = if whole {
            object.block_hashes.as_slice()
        } else {
            &[]
        };
        let wish = flight.chunk.wish(e.needed, hashes);
        let record = record(&flight.chunk.context(object.expires_unix_s), &wish);
        self.memory.slots.set_record(entry, &record);
        if object.expires_unix_s != 0 {
            self.memory.index.expires_at(entry, object.expires_unix_s);
        }
    }
}

/// True if the object has expired on any node's clock.
fn expired_long_ago(now: Time, landed: &Result<Landed, Cause>) -> bool {
    landed
        .as_ref()
        .is_ok_and(|l| l.object.expires_unix_s + CLOCKS_DIFFER_S <= now.unix_s)
}

/// Compares a received object with the requested chunk, and its bytes with the head's digests.
fn compare<T: Table>(
    now: Time,
    flight: &FetchInFlight,
    landed: &Landed,
) -> Result<(), &'static str> {
    let (object, chunk) = (&landed.object, &flight.chunk);
    let domain = &chunk.reach.domain;
    let same = object.kind == chunk.reach.kind
        && object.model == domain.model_id
        && object.layout == domain.object_layout
        && object.namespace == chunk.reach.namespace
        && object.last_hash == chunk.last_hash
        && object.parent == chunk.parent.unwrap_or_default()
        && object.first_token == chunk.first_token
        && object.tokens == chunk.tokens
        && (object.part, object.parts) == (0, 1);
    if !same {
        return Err(Cause::Foreign.name());
    }
    let plain = object.codec == Codec::None
        && object.cipher == Cipher::None
        && object.fidelity == Fidelity::Exact;
    if !plain {
        return Err("Unsupported");
    }
    if object.expires_unix_s != 0 && object.expires_unix_s <= now.unix_s {
        return Err("Expired");
    }
    if landed.digests.len() != flight.targets.len() {
        return Err(Cause::Protocol.name());
    }
    if chunk.object_plan.is_some() && plan_of(object) != chunk.object_plan {
        // replaced since its head was read
        return Err(Cause::Shape.name());
    }
    let full = chunk.plan().full_groups();
    for (target, digest) in flight.targets.iter().zip(&landed.digests) {
        let section = object.section(target.group, target.shard);
        match (section, digest) {
            (Some(section), Some(digest)) => {
                if section.raw_bytes != u64::from(target.section.length.get()) {
                    return Err(Cause::Shape.name());
                }
                if section.raw_digest != *digest && !T::makes(Mistake::FetchDigest) {
                    return Err(Cause::Corrupt.name());
                }
            }
            // only groups that keep a window may be missing
            (None, None) if full >> target.group & 1 == 0 => {}
            _ => return Err(Cause::Shape.name()),
        }
    }
    Ok(())
}
