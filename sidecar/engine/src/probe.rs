//! PROBE, PIN and RELEASE: what requests find, and what they hold of it.

use super::lower::{Reach, TierLookup};
use super::memory::{Handle, NONE};
use super::mistake::Mistake;
use super::name::Name;
use super::table::Table;
use super::{Changed, Engine, Time};
use kvcachepool_protocol::key::{ChunkKey, KeyKind, LayoutId};
use kvcachepool_protocol::message as wire;
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Number of the memory tier in `ProbeReply::tiers`.
const TIER_MEMORY: u8 = 1;
/// Expected upper bound of a digest check. Milliseconds.
const CHECK_MS: u64 = 50;

/// A PROBE in the engine's terms.
#[derive(Debug, Clone)]
pub struct Question {
    pub scheduler: u64,
    pub request: Arc<str>,
    pub tag: u64,
    pub kind: KeyKind,
    /// Each key counts by itself; otherwise the keys are a prefix.
    pub independent: bool,
    /// Layout that the reader can use.
    pub layout: LayoutId,
    pub sections: u32,
    /// Keys of the chunks, in prefix order.
    pub keys: Vec<ChunkKey>,
    /// Tokens of a full chunk.
    pub chunk_tokens: u32,
    /// Tokens of the last chunk; 0 = a full chunk.
    pub tail_tokens: u32,
    /// Prefix tokens that the engine holds locally; none = unknown.
    pub local_tokens: Option<u64>,
    /// Longest wait for checks and fetches. Milliseconds.
    pub wait_ms: u64,
    /// Data for lookups in lower tiers; none = they are not asked.
    pub reach: Option<Reach>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// `CHUNK_*` per key.
    pub states: Vec<u8>,
    /// Packed references, `sections` per ready chunk.
    pub refs: Vec<u8>,
    pub tiers: Vec<u8>,
    /// Chunks wait for a check or a lower tier: `Changed::Final` follows.
    pub pending: bool,
    /// Expected wait of the pending chunks. Milliseconds.
    pub pending_ms: u64,
    /// Reason why chunks in a tier are not fetched; empty = none was declined.
    pub declined: &'static str,
}

impl Question {
    /// Tokens of the chunk at a position.
    pub(crate) fn tokens_of(&self, at: usize) -> u32 {
        match self.tail_tokens {
            tail if tail != 0 && at + 1 == self.keys.len() => tail,
            _ => self.chunk_tokens,
        }
    }

    /// Prefix chunks that the engine holds completely. The request does not load them.
    fn held(&self) -> usize {
        let chunks = self.local_tokens.unwrap_or(0) / u64::from(self.chunk_tokens.max(1));
        usize::try_from(chunks).unwrap_or(usize::MAX)
    }

    /// Tokens of all chunks before a position.
    pub(crate) fn tokens_before(&self, end: usize) -> u64 {
        let full = u64::from(self.chunk_tokens);
        match end.checked_sub(1) {
            None => 0,
            Some(last) => last as u64 * full + u64::from(self.tokens_of(last)),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Probe {
    pub question: Question,
    pub asked_ms: u64,
    /// Start of the soft pins' duration: the arrival of the PROBE, or its final answer.
    pub pinned_ms: u64,
    /// Soft-pinned entry per key.
    pub pins: Vec<Option<Handle>>,
    /// Objects of memory without a soft pin, by position: only their existence is asked, or the share of soft pins is full. Their reader
    /// relies on generations.
    pub unpinned: BTreeMap<usize, Handle>,
    /// Entries whose digest checks it waits for.
    pub waits: BTreeSet<Handle>,
    /// State of its lookups in lower tiers.
    pub tier_lookup: Option<TierLookup>,
    /// The final answer was given.
    pub answered: bool,
}

impl Probe {
    /// True while checks, lookups or fetches are pending.
    pub fn open(&self) -> bool {
        !self.waits.is_empty() || self.tier_lookup.as_ref().is_some_and(TierLookup::waits)
    }

    /// The chunk at a position, if memory has it.
    pub(crate) fn found(&self, at: usize) -> Option<Handle> {
        let pinned = self.pins.get(at).copied().flatten();
        pinned.or_else(|| self.unpinned.get(&at).copied())
    }

    /// The chunks of all positions, in prefix order.
    fn all_found(&self) -> Vec<Option<Handle>> {
        (0..self.pins.len()).map(|at| self.found(at)).collect()
    }
}

impl<T: Table> Engine<T> {
    /// Looks up chunks and soft-pins those found. If chunks must be checked first, the answer is pending and [`Changed::Final`]
    /// follows; otherwise the answer is final. None: too many requests hold pins.
    pub fn probe(&mut self, now: Time, mut question: Question) -> Option<Answer> {
        let requests_max = match question.kind {
            // clients leave half of the limit to vLLM's schedulers
            KeyKind::Opaque => self.memory.config.limits.requests_max.div_ceil(2),
            _ => self.memory.config.limits.requests_max,
        };
        let (scheduler, request) = (question.scheduler, &question.request);
        if !self.leases.has_room(scheduler, request, requests_max) {
            return None;
        }
        self.lower.set_now(now);
        let id = self.leases.next_probe();
        let layout = self.memory.index.layout_number(question.layout);
        let reach = question.reach.take();
        let mut probe = Probe {
            asked_ms: now.mono_ms,
            pinned_ms: now.mono_ms,
            pins: vec![None; question.keys.len()],
            unpinned: BTreeMap::new(),
            waits: BTreeSet::new(),
            tier_lookup: None,
            answered: false,
            question,
        };
        let mut found = Vec::with_capacity(probe.question.keys.len());
        for (at, key) in probe.question.keys.iter().enumerate() {
            let Some(handle) = self.readable(now, &probe.question, layout, at, *key) else {
                continue;
            };
            found.push((at, handle));
            if !self.must_check(handle.entry, now.mono_ms) {
                self.check_if_old(now, handle.entry);
            } else if at >= probe.question.held() {
                probe.waits.insert(handle);
            }
        }
        for (at, handle) in found {
            if !self.record_found(id, &mut probe, at, handle) {
                probe.waits.remove(&handle);
            }
        }
        // in prefix order, so that after a timeout the hit ends at the first unchecked chunk
        for handle in probe.all_found().into_iter().flatten() {
            if !probe.waits.contains(&handle) {
                continue;
            }
            if self.leases.wait(handle, id) {
                self.start_check(now, handle.entry, true, false);
            }
        }
        if let Some(tier_lookup) = reach.and_then(|reach| self.tier_lookup(&probe, reach, layout)) {
            self.begin_tier_lookup(now, id, &mut probe, tier_lookup);
        }
        // a check may have removed an entry at once
        let answer = self.answer(&probe);
        probe.answered = !answer.pending;
        if probe.answered {
            self.count_answer(now, &probe);
        }
        if let Some(old) = self.leases.keep(id, probe) {
            self.end_probe(old);
        }
        Some(answer)
    }

    /// The entry of a PROBE's chunk, if it is readable.
    pub(crate) fn readable(
        &self,
        now: Time,
        q: &Question,
        layout: u32,
        at: usize,
        key: ChunkKey,
    ) -> Option<Handle> {
        let entry = self.memory.index.find(&Name { layout, key })?;
        let e = self.memory.index.entry(entry)?;
        let usable = e.name.key == key
            && e.name.layout == layout
            && (e.complete() || T::makes(Mistake::HalfChunk) && e.have != 0)
            && !e.expired(now.unix_s)
            && e.tokens == q.tokens_of(at);
        usable.then_some(Handle {
            entry,
            epoch: e.epoch,
        })
    }

    /// The answer from the current state.
    fn answer(&self, probe: &Probe) -> Answer {
        let q = &probe.question;
        // most opaque objects have few pieces
        let expected = match q.kind {
            KeyKind::Opaque => 1,
            _ => q.sections,
        };
        let mut answer = Answer {
            states: Vec::with_capacity(q.keys.len()),
            refs: Vec::with_capacity(probe.pins.iter().flatten().count() * expected as usize * 16),
            tiers: Vec::with_capacity(q.keys.len()),
            pending: false,
            pending_ms: self.lower.pending_ms(probe),
            declined: self.lower.declined(probe),
        };
        for (at, found) in probe.all_found().into_iter().enumerate() {
            let entry = found.and_then(|h| {
                self.memory
                    .index
                    .get(h)
                    .filter(|e| e.listed)
                    .map(|e| (h, e))
            });
            let Some((handle, e)) = entry else {
                let (state, tier, waits) = self.lower.state_of(probe, at);
                answer.states.push(state);
                answer.tiers.push(tier);
                answer.pending |= waits;
                continue;
            };
            answer
                .tiers
                .push(self.lower.fetched_from(probe, at).unwrap_or(TIER_MEMORY));
            if self.must_check(handle.entry, probe.asked_ms) {
                // the engine holds this chunk locally, so nothing waits for it
                answer.states.push(wire::CHUNK_PENDING);
                if probe.waits.contains(&handle) {
                    answer.pending = true;
                    answer.pending_ms = answer.pending_ms.max(CHECK_MS);
                }
                continue;
            }
            answer.states.push(wire::CHUNK_READY);
            if q.kind == KeyKind::Opaque && q.held() > at {
                // a question of existence
                continue;
            }
            // the number of an opaque object's pieces depends on its length
            let sections = match q.kind {
                KeyKind::Opaque => e.needed.count_ones(),
                _ => q.sections,
            };
            for section in 0..sections {
                let row_number = e.slot(section);
                let there = row_number != NONE && e.have >> section & 1 == 1;
                let reference = if there {
                    let row = self.memory.slots.row(row_number);
                    SectionRef::new(row_number, row.generation, row.length as u32, section)
                } else {
                    SectionRef::new(NO_SLOT, 0, 0, section)
                };
                answer.refs.extend_from_slice(reference.as_bytes());
            }
        }
        answer
    }

    /// The final answer of a waiting PROBE, as (scheduler, tag, answer). None if the request ended. Its soft pins last from now on, however
    /// long it waited.
    pub fn final_answer(&mut self, now: Time, id: u64) -> Option<(u64, u64, Answer)> {
        if self.leases.probe(id).is_none_or(|p| p.answered) {
            return None;
        }
        let mut probe = self.leases.take(id)?;
        probe.answered = true;
        probe.pinned_ms = now.mono_ms;
        self.lower.wait_ended(now, &probe);
        self.stop_tier_lookup(id, &mut probe);
        self.lower.load_ended(now, &probe);
        // chunks without a check in time count as missing
        for handle in std::mem::take(&mut probe.waits) {
            for at in 0..probe.pins.len() {
                if probe.pins[at] == Some(handle) {
                    probe.pins[at] = None;
                    self.memory.unpin_softly(handle);
                }
            }
            probe.unpinned.retain(|_, unpinned| *unpinned != handle);
            self.leases.forget_waiter(handle, id);
        }
        self.count_answer(now, &probe);
        let answer = self.answer(&probe);
        let reply = (probe.question.scheduler, probe.question.tag, answer);
        self.leases.put_back(id, probe);
        Some(reply)
    }

    /// Counts the time to the final answer of a PROBE of vLLM.
    fn count_answer(&mut self, now: Time, probe: &Probe) {
        if probe.question.kind != KeyKind::Opaque {
            let took = now.mono_ms.saturating_sub(probe.asked_ms);
            self.memory.stats.probes.add(took);
        }
    }

    /// An update of a waiting PROBE, as (scheduler, tag, answer). None if it is answered or nothing is pending.
    pub fn partial_answer(&self, id: u64) -> Option<(u64, u64, Answer)> {
        let probe = self.leases.probe(id).filter(|p| !p.answered)?;
        let answer = self.answer(probe);
        let asked = (probe.question.scheduler, probe.question.tag);
        answer.pending.then_some((asked.0, asked.1, answer))
    }

    /// PIN: chunks `from..to` of the answer to `tag` become the request's read lease, and its soft pins end. Unknown requests and tags are
    /// ignored.
    pub fn pin(
        &mut self,
        now: Time,
        scheduler: u64,
        request: &str,
        tag: u64,
        from: u32,
        to: u32,
    ) -> u32 {
        let probes = self.leases.probes_of(scheduler, request);
        let answers = probes.iter().filter_map(|id| self.leases.probe(*id));
        let named = answers.into_iter().find(|p| p.question.tag == tag);
        let kind = named.map(|p| p.question.kind);
        let chunks = named.map(Probe::all_found).unwrap_or_default();
        let mut held = Vec::new();
        for (at, handle) in (0u32..).zip(&chunks) {
            let Some(handle) = *handle else { continue };
            let Some(e) = self.memory.index.get(handle) else {
                continue;
            };
            // the engine holds the chunks before the loaded range, so they count as used
            if at < to && e.known {
                self.memory.eviction.touch(&self.memory.index, handle);
                self.touched(handle);
            }
            let opaque = kind == Some(KeyKind::Opaque);
            if at >= from && at < to && !(opaque && self.memory.leases_are_full(handle)) {
                self.memory.lease(handle);
                held.push(handle);
            }
        }
        self.leases.hold(scheduler, request, &held);
        if kind != Some(KeyKind::Opaque) {
            self.leases.load_begins(now.mono_ms, scheduler, request);
        }
        for id in probes {
            self.end_probe(id);
        }
        held.len() as u32
    }

    /// RELEASE: ends the request's pins and leases, and cancels its open PROBEs. Unknown requests are ignored.
    pub fn release(&mut self, now: Time, scheduler: u64, request: &str) {
        if let Some(began_ms) = self.leases.load_ends(scheduler, request) {
            let took_ms = now.mono_ms.saturating_sub(began_ms);
            self.memory.stats.loads.add(took_ms);
        }
        self.end_request(scheduler, request);
    }

    fn end_request(&mut self, scheduler: u64, request: &str) {
        for id in self.leases.probes_of(scheduler, request) {
            self.end_probe(id);
        }
        for handle in self.leases.release(scheduler, request) {
            self.memory.unlease(handle);
        }
    }

    /// Scheduler's HELLO: ends pins and leases of all requests that it does not name.
    pub fn keep_requests(&mut self, scheduler: u64, named: &[String]) {
        for request in self.leases.not_named(scheduler, named) {
            self.end_request(scheduler, &request);
        }
    }

    /// Marks the scheduler's open PROBEs as answered, because their answers cannot be delivered any more.
    pub fn cancel_waiting(&mut self, scheduler: u64) {
        for id in self.leases.waiting_of(scheduler) {
            self.end_probe(id);
        }
    }

    /// Records a chunk of memory in a PROBE, with a soft pin if one is needed and there is room. False: vLLM reads no chunk without one.
    pub(crate) fn record_found(
        &mut self,
        id: u64,
        probe: &mut Probe,
        at: usize,
        handle: Handle,
    ) -> bool {
        let kind = probe.question.kind;
        let opaque = kind == KeyKind::Opaque;
        let exists = opaque && at < probe.question.held();
        if !exists && self.pin_softly(handle, id, kind) {
            probe.pins[at] = Some(handle);
            return true;
        }
        if opaque {
            probe.unpinned.insert(at, handle);
        }
        opaque
    }

    /// Soft-pins a chunk for a PROBE. Ends the pins of older PROBEs as needed; false if there are none. Clients end no pins of vLLM.
    fn pin_softly(&mut self, handle: Handle, for_probe: u64, kind: KeyKind) -> bool {
        while !self.memory.pin_softly(handle) {
            if kind == KeyKind::Opaque {
                return false;
            }
            let Some(oldest) = self.leases.oldest_pinned(for_probe) else {
                return false;
            };
            if self.memory.index.get(handle).is_none() {
                return false;
            }
            self.memory.stats.soft_pins_displaced += 1;
            self.drop_soft_pins(oldest);
        }
        true
    }

    /// Ends a PROBE's soft pins. A pending answer then reports every chunk as missing.
    fn drop_soft_pins(&mut self, id: u64) {
        let Some(mut probe) = self.leases.take(id) else {
            return;
        };
        let open = !probe.answered && probe.open();
        self.stop_tier_lookup(id, &mut probe);
        let pins: Vec<Handle> = probe.pins.iter_mut().filter_map(Option::take).collect();
        probe.unpinned.clear();
        let waits = std::mem::take(&mut probe.waits);
        self.leases.put_back(id, probe);
        for handle in waits {
            self.leases.forget_waiter(handle, id);
        }
        for handle in pins {
            self.memory.unpin_softly(handle);
        }
        if open {
            self.changed.push(Changed::Final { probe: id });
        }
    }

    fn end_probe(&mut self, id: u64) {
        self.drop_soft_pins(id);
        self.leases.remove(id);
    }

    /// Timers of pins: expires soft pins and ends the wait of PROBEs.
    pub(crate) fn end_pins(&mut self, now: Time) {
        let mut expired = Vec::new();
        let mut late = Vec::new();
        for (id, probe) in self.leases.probes() {
            if !probe.answered && probe.open() {
                let waits_on = probe.waits.is_empty() && T::makes(Mistake::TierDelays);
                if !waits_on && now.mono_ms >= probe.asked_ms + probe.question.wait_ms {
                    late.push(Changed::Final { probe: id });
                }
            } else if now.mono_ms >= probe.pinned_ms + self.memory.config.soft_pin_ms {
                expired.push(id);
            }
        }
        self.changed.append(&mut late);
        for id in expired {
            self.memory.stats.soft_pins_expired += 1;
            self.end_probe(id);
        }
    }
}
