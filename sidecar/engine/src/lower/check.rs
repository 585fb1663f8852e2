//! Consistency checks of redundant state in `lower`, and of counters whose parts must add up.

use super::super::Engine;
use super::super::memory::say;
use super::super::name::Name;
use super::super::table::{GRANTED, Table};
use super::ask::LookupState;
use std::collections::BTreeMap;

impl<T: Table> Engine<T> {
    /// Returns the first violated invariant.
    pub fn check_tiers(&self) -> Result<(), String> {
        self.check_waiters()?;
        self.check_bounds()?;
        self.check_flights()?;
        self.check_puts()
    }

    /// The notes in the slot table are those of the removals.
    pub(crate) fn check_notes(&self) -> Result<(), String> {
        let removals = self.lower.removals.values();
        let mut expected: Vec<u32> = removals.filter_map(|removal| removal.note).collect();
        expected.sort_unstable();
        let notes = self.memory.notes();
        let there: Vec<u32> = notes.into_iter().map(|(entry, _)| entry).collect();
        say(there == expected, "RemovalsAreNoted", || {
            format!("{there:?} noted, {expected:?} wait")
        })
    }

    fn check_waiters(&self) -> Result<(), String> {
        let mut waiting: BTreeMap<(u64, usize), u32> = BTreeMap::new();
        for (id, probe) in self.leases.probes() {
            let Some(tier_lookup) = &probe.tier_lookup else {
                continue;
            };
            for (at, state) in tier_lookup.states.iter().enumerate() {
                let pinned = probe.pins.get(at).is_some_and(Option::is_some);
                say(
                    !pinned || matches!(state, LookupState::Memory | LookupState::Fetched(_)),
                    "PinnedIsThere",
                    || format!("chunk {at} of PROBE {id}: {state:?}"),
                )?;
                match state {
                    LookupState::Fetching(_) => {
                        waiting.insert((id, at), 0);
                    }
                    LookupState::Absent => {
                        let all = (0..self.lower.tiers.len()).all(|t| tier_lookup.tried(at, t));
                        say(all, "EveryTierIsTried", || {
                            format!("chunk {at} of PROBE {id}: {:?}", tier_lookup.tried)
                        })?;
                    }
                    LookupState::Pending => {
                        say(tier_lookup.lookup.is_some(), "OpenIsAsked", || {
                            format!("chunk {at} of PROBE {id}")
                        })?
                    }
                    LookupState::Asked(_) => {
                        let asked = tier_lookup
                            .lookup
                            .and_then(|l| self.lower.lookups.get(&l))
                            .is_some_and(|l| l.probe == id && l.ats.contains(&at));
                        say(asked, "AskedHasLookup", || {
                            format!("chunk {at} of PROBE {id}")
                        })?;
                    }
                    _ => {}
                }
            }
        }
        for (name, pending_fetch) in &self.lower.pending {
            say(!pending_fetch.waiters.is_empty(), "WantedByNobody", || {
                format!("{name:?}")
            })?;
            for waiter in &pending_fetch.waiters {
                match waiting.get_mut(waiter) {
                    Some(n) => *n += 1,
                    None => return Err(format!("WaiterWaits: {waiter:?} for {name:?}")),
                }
            }
        }
        let lost = waiting.iter().find(|(_, n)| **n != 1);
        say(lost.is_none(), "ComingIsWanted", || format!("{lost:?}"))?;
        for (id, lookup) in &self.lower.lookups {
            let asked = self
                .leases
                .probe(lookup.probe)
                .and_then(|p| p.tier_lookup.as_ref())
                .is_some_and(|a| a.lookup == Some(*id));
            say(asked, "LookupIsWanted", || format!("lookup {id}"))?;
        }
        Ok(())
    }

    fn check_bounds(&self) -> Result<(), String> {
        for (at, tier) in self.lower.tiers.iter().enumerate() {
            let lookups: Vec<_> = self
                .lower
                .lookups
                .values()
                .filter(|l| l.tier == at)
                .collect();
            say(
                lookups.len() == tier.lookups as usize && tier.lookups <= tier.config.lookups_max,
                "LookupsAreBounded",
                || format!("tier {at}: {} of {}", tier.lookups, lookups.len()),
            )?;
            let in_flight: Vec<_> = self
                .lower
                .in_flight
                .values()
                .filter(|f| f.tier == at)
                .collect();
            let bytes: u64 = in_flight.iter().map(|f| f.bytes).sum();
            let most = self.fetch_bytes_max(tier);
            let bounded = tier.fetches <= tier.config.fetches_max
                && (tier.fetch_bytes <= most || tier.fetches == 1);
            say(
                in_flight.len() == tier.fetches as usize && bytes == tier.fetch_bytes && bounded,
                "FetchesAreBounded",
                || format!("tier {at}: {} fetches of {bytes} bytes", tier.fetches),
            )?;
            let queued = self
                .lower
                .pending
                .values()
                .filter(|w| w.tier == at && w.flight.is_none())
                .count();
            say(
                queued == tier.queued as usize && tier.queued <= tier.config.fetch_queue_max,
                "QueueIsBounded",
                || format!("tier {at}: {} of {queued}", tier.queued),
            )?;
            let s = &tier.stats;
            let tier_lookup: usize = lookups.iter().map(|l| l.ats.len()).sum();
            let ended: u64 = s.lookups.values().sum();
            say(
                s.asked_chunks == ended + tier_lookup as u64,
                "LookupsAddUp",
                || format!("tier {at}: {s:?}, {tier_lookup} under way"),
            )?;
            let ended: u64 = s.fetches.values().sum();
            let under_way = queued as u64 + u64::from(tier.fetches);
            say(s.wanted_chunks == ended + under_way, "FetchesAddUp", || {
                format!("tier {at}: {s:?}, {under_way} under way")
            })?;
        }
        Ok(())
    }

    fn check_puts(&self) -> Result<(), String> {
        let mut writing: BTreeMap<(Name, usize), u32> = BTreeMap::new();
        for (at, tier) in self.lower.tiers.iter().enumerate() {
            let w = &tier.writes;
            let queued: u64 = w.queue.iter().map(|x| x.bytes).sum();
            let (mut puts, mut bytes) = (0, 0);
            for put in self.lower.puts.values().filter(|p| p.tier == at) {
                puts += 1;
                bytes += put.bytes;
                *writing.entry((put.name, at)).or_default() += 1;
            }
            for waiting in &w.queue {
                *writing.entry((waiting.name, at)).or_default() += 1;
            }
            let bounded = w.puts <= tier.config.puts_max
                && (w.put_bytes <= self.put_bytes_max(tier) || w.puts == 1)
                && (w.queue_bytes <= tier.config.put_queue_bytes_max || w.queue.len() == 1);
            let right = (queued, puts, bytes) == (w.queue_bytes, w.puts, w.put_bytes);
            say(bounded && right, "WritesAreBounded", || {
                format!("tier {at}: {w:?}")
            })?;
            let ended: u64 = tier.stats.puts.values().sum();
            let under_way = w.queue.len() as u64 + u64::from(w.puts);
            say(
                tier.stats.offered_chunks == ended + under_way,
                "WritesAddUp",
                || format!("tier {at}: {:?}, {under_way} under way", tier.stats),
            )?;
        }
        let noted: u32 = self.lower.writing.values().map(|w| w.count_ones()).sum();
        let once = writing.iter().all(|((name, at), n)| {
            let noted = self
                .lower
                .writing
                .get(name)
                .is_some_and(|w| w >> at & 1 == 1);
            *n == 1 && noted
        });
        say(
            once && noted as usize == writing.len(),
            "WrittenOnce",
            || format!("{writing:?}"),
        )?;
        for (id, put) in &self.lower.puts {
            // a corrupt chunk is removed while its lease still exists
            let listed = self.memory.index.get(put.chunk).is_some_and(|e| e.listed);
            say(
                !listed || self.put_stands(put),
                "WritesKeepTheirSlots",
                || format!("put {id}: {put:?}"),
            )?;
        }
        Ok(())
    }

    fn check_flights(&self) -> Result<(), String> {
        for (id, flight) in &self.lower.in_flight {
            for target in &flight.targets {
                let row = self.memory.slots.row(target.section.slot.get());
                let held = row.state == GRANTED
                    && row.owner == 0
                    && row.generation == target.section.generation.get();
                say(held, "FetchKeepsItsSlots", || {
                    format!("fetch {id}: {row:?}")
                })?;
            }
            let wanted = self
                .lower
                .pending
                .get(&flight.name)
                .is_some_and(|w| w.flight.is_some_and(|f| f.number() == *id));
            say(wanted != flight.cancelled, "FetchIsWanted", || {
                format!("fetch {id}")
            })?;
        }
        Ok(())
    }
}
