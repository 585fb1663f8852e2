//! Chunks that EVENTS reports as stored on disk. A disk evicts objects on its own, so every claim is looked up again every few seconds and
//! withdrawn when its object is missing. Shared tiers are not claimed: this sidecar cannot know when another one removes an object.

use super::super::memory::EventDomain;
use super::super::memory::Handle;
use super::super::name::Name;
use super::super::table::Table;
use super::super::{Engine, Time};
use crate::effect::{Effect, LookupJob};
use crate::tier::{Cause, Kind};
use kvcachepool_protocol::key::LayoutId;
use kvcachepool_protocol::message::Event;
use kvcachepool_protocol::object::{Fidelity, ObjectName};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Limit on claims, about 200 bytes each. Objects beyond it are not reported.
const CLAIMS_MAX: usize = 65_536;
const NAMES_PER_LOOKUP: usize = 4_096;
/// Pause between two lookups. Milliseconds.
const PAUSE_MS: u64 = 1_000;

/// Content of the event that withdraws a claim.
#[derive(Debug, Clone)]
struct Claim {
    domain: EventDomain,
    namespace: Vec<u8>,
    hash: Vec<u8>,
    first_token: u32,
    tokens: u32,
}

impl Claim {
    /// Its object. `layout`: that of the domain's objects.
    fn object(&self, name: &Name, layout: Option<LayoutId>) -> ObjectName {
        let (model, of_memory) = self.domain;
        ObjectName {
            model: model.hex16(),
            layout: layout.unwrap_or(of_memory).hex16(),
            key: name.key,
            fidelity: Fidelity::Exact,
        }
    }

    fn event(&self, kind: &str) -> Event {
        Event {
            kind: kind.into(),
            tier: Kind::Disk.name().into(),
            hash: self.hash.clone(),
            namespace: self.namespace.clone(),
            first_token: self.first_token,
            tokens: self.tokens,
            ..Event::default()
        }
    }
}

/// All claims, and the lookup in flight.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    of: BTreeMap<Name, Claim>,
    asked: Option<(u64, Vec<Name>)>,
    last: Option<Name>,
    due_ms: u64,
}

impl Claims {
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }
}

impl<T: Table> Engine<T> {
    /// Starts keeping events and claiming objects on disk, at the first reader. A reader begins with a snapshot.
    pub fn want_events(&mut self) {
        if self.memory.ring.starts() {
            return;
        }
        let Some(at) = self.disk() else { return };
        for entry in 0..self.memory.index.len() {
            let e = self.memory.index.entry(entry);
            if e.is_some_and(|e| e.live && e.written >> at & 1 == 1) {
                self.claim(self.memory.index.handle(entry), at);
            }
        }
    }

    fn disk(&self) -> Option<usize> {
        let disk = |t: &super::Tier| t.config.kind == Kind::Disk;
        self.lower.tiers.iter().position(disk)
    }

    /// Records that a tier has a chunk.
    pub(super) fn claim(&mut self, chunk: Handle, at: usize) {
        let claims = &self.lower.claims.of;
        if !self.memory.ring.started() || self.disk() != Some(at) || claims.len() >= CLAIMS_MAX {
            return;
        }
        let Some(e) = self
            .memory
            .index
            .get(chunk)
            .filter(|e| e.listed && e.complete())
        else {
            return;
        };
        let name = e.name;
        if claims.contains_key(&name) {
            return;
        }
        let Some((domain, event)) = self.memory.event_of(chunk.entry, "stored") else {
            return;
        };
        let claim = Claim {
            domain,
            namespace: event.namespace.clone(),
            hash: event.hash.clone(),
            first_token: event.first_token,
            tokens: event.tokens,
        };
        self.lower.claims.of.insert(name, claim);
        let tier = Kind::Disk.name().into();
        self.memory.ring.push(domain, Event { tier, ..event });
    }

    /// Withdraws all claims, because the content of the disk is unknown.
    pub(super) fn take_claims_back(&mut self, at: usize) {
        if self.disk() != Some(at) {
            return;
        }
        let claims = std::mem::take(&mut self.lower.claims);
        let domains: BTreeSet<EventDomain> = claims.of.values().map(|c| c.domain).collect();
        for domain in domains {
            let cleared = Event {
                kind: "cleared".into(),
                tier: Kind::Disk.name().into(),
                ..Event::default()
            };
            self.memory.ring.push(domain, cleared);
        }
    }

    /// Starts a lookup of the next claims.
    pub(super) fn verify_claims(&mut self, now: Time) {
        let claims = &self.lower.claims;
        if claims.of.is_empty() || claims.asked.is_some() || now.mono_ms < claims.due_ms {
            return;
        }
        let up = |t: &super::Tier| t.config.kind == Kind::Disk && t.up();
        if !self.lower.tiers.iter().any(up) {
            return;
        }
        let batch = |from: Bound<Name>| -> Vec<(Name, ObjectName)> {
            let next = claims
                .of
                .range((from, Bound::Unbounded))
                .take(NAMES_PER_LOOKUP);
            next.map(|(name, claim)| {
                let origin = self.lower.origins.get(&name.layout);
                (*name, claim.object(name, origin.map(|o| o.layout)))
            })
            .collect()
        };
        let mut next = claims
            .last
            .map_or(Vec::new(), |last| batch(Bound::Excluded(last)));
        if next.is_empty() {
            next = batch(Bound::Unbounded);
        }
        let (names, objects) = next.into_iter().unzip();
        let lookup = self.lower.next_lookup;
        self.lower.next_lookup += 1;
        self.lower.claims.asked = Some((lookup, names));
        self.effects.push(Effect::Lookup(LookupJob {
            lookup,
            tier: Kind::Disk,
            names: objects,
            independent: false,
        }));
    }

    /// Handles a lookup result. Returns false if the lookup is not one of claims.
    pub(super) fn claims_looked_up(
        &mut self,
        now: Time,
        lookup: u64,
        present: &Result<Vec<bool>, Cause>,
    ) -> bool {
        let claims = &mut self.lower.claims;
        let Some((_, names)) = claims.asked.take_if(|(id, _)| *id == lookup) else {
            return false;
        };
        claims.due_ms = now.mono_ms + PAUSE_MS;
        if let Ok(present) = present {
            claims.last = names.last().copied();
            for (name, there) in names.iter().zip(present) {
                if !there && let Some(claim) = self.lower.claims.of.remove(name) {
                    self.memory.ring.push(claim.domain, claim.event("removed"));
                }
            }
        }
        true
    }

    /// One page of a domain's claims, starting at number `from`, and the number of the next page.
    pub(crate) fn claimed(
        &self,
        from: usize,
        most: usize,
        domain: EventDomain,
    ) -> (Vec<Event>, Option<usize>) {
        let claims = &self.lower.claims.of;
        let events = claims
            .iter()
            .skip(from)
            .take(most)
            .filter(|(_, claim)| claim.domain == domain)
            .map(|(name, claim)| {
                let whole = self
                    .memory
                    .index
                    .find(name)
                    .and_then(|e| self.memory.event_of(e, "stored"));
                let tier = Kind::Disk.name().into();
                whole.map_or_else(|| claim.event("stored"), |(_, e)| Event { tier, ..e })
            })
            .collect();
        let end = from.saturating_add(most);
        (events, (end < claims.len()).then_some(end))
    }
}
