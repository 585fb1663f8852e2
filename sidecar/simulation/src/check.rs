//! What is compared at the seam: answers against memory, leases, order of eviction, bounds.

use super::counts::Fault;
use super::memory::{Bytes, FLIPPED, rows_of, short};
use super::rules::Rule;
use super::scheduler::LOAD_MS;
use super::sidecar::Asked;
use super::text::CHUNK_TOKENS;
use super::world::{Part, Wire, World};
use kvcachepool_engine::config::Verify;
use kvcachepool_engine::sessions::{ConnId, Frame};
use kvcachepool_engine::table::{PUBLISHED, Row};
use kvcachepool_protocol::domain::{Domain, RankPart, SchedulerPart, join};
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_PARTIAL, Op};
use kvcachepool_protocol::key::unpack_hashes;
use kvcachepool_protocol::message::{
    self, CHUNK_ABSENT, CHUNK_READY, Grant, Hello, Pin, Probe, ProbeReply, Release,
};
use kvcachepool_protocol::object::Fidelity;
use kvcachepool_protocol::refs::{self, NO_SLOT};

impl World {
    /// The domain that all instances share.
    pub fn domain(&self) -> Domain {
        let scheduler = SchedulerPart::check(&self.register_of(Part {
            instance: 0,
            rank: None,
        }))
        .unwrap();
        let ranks: Vec<RankPart> = (0..self.p.world as usize)
            .map(|r| {
                RankPart::check(&self.register_of(Part {
                    instance: 0,
                    rank: Some(r),
                }))
                .unwrap()
            })
            .collect();
        join(
            &scheduler,
            &ranks.iter().collect::<Vec<_>>(),
            Fidelity::Exact,
        )
        .unwrap()
    }

    pub fn pins_ended(&self) -> u64 {
        self.core_stats(|s| s.soft_pins_displaced + s.soft_pins_expired)
    }

    /// Before a scheduler's frame is handled.
    pub fn before_frame(&mut self, conn: ConnId, instance: usize, wire: &Wire) {
        match wire.frame.op {
            Op::Probe => {
                let probe: Probe = message::decode(&wire.frame.body).unwrap();
                let hashes = unpack_hashes(&probe.hashes)
                    .unwrap()
                    .iter()
                    .map(|h| short(&h.0))
                    .collect();
                let request = number(&probe.request);
                let asked = Asked {
                    request,
                    hashes,
                    full: unpack_hashes(&probe.hashes)
                        .unwrap()
                        .iter()
                        .map(|h| h.0)
                        .collect(),
                    local: probe
                        .local_tokens
                        .map(|t| t as usize / CHUNK_TOKENS as usize),
                    conn: conn.0,
                    asked_at: self.now,
                    asked_ms: self.core_now().mono_ms,
                    wait_ms: match probe.budget_ms {
                        0 => LOAD_MS,
                        ms => ms,
                    },
                    ..Asked::default()
                };
                // of one request the last three are answered
                let mut of = self.side.asked.iter_mut();
                let older = of.by_ref().filter(|(_, a)| a.request == request);
                let mut older: Vec<_> = older.collect();
                older.sort_by_key(|((_, tag), _)| std::cmp::Reverse(*tag));
                for (_, a) in older.into_iter().skip(2) {
                    a.answered = true;
                }
                self.side.asked.insert((instance, wire.frame.tag), asked);
            }
            Op::Grant => {
                let grant: Grant = message::decode(&wire.frame.body).unwrap();
                let hashes = grant.chunks.iter();
                let hashes = hashes.filter_map(|c| <[u8; 32]>::try_from(c.hash.as_slice()).ok());
                for hash in hashes {
                    self.lower.ever.insert(short(&hash));
                    self.lower.granted.insert(hash);
                }
            }
            Op::Release => {
                let release: Release = message::decode(&wire.frame.body).unwrap();
                for request in &release.requests {
                    self.lease_ends(number(request));
                }
            }
            Op::Hello => {
                let hello: Hello = message::decode(&wire.frame.body).unwrap();
                let named: Vec<u32> = hello.requests.iter().map(|r| number(r)).collect();
                let of_instance = |r: u32| {
                    self.instances[instance]
                        .scheduler
                        .requests
                        .iter()
                        .any(|x| x.id == r)
                };
                let gone: Vec<u32> = self
                    .leases()
                    .into_iter()
                    .filter(|r| {
                        !named.contains(r)
                            && (of_instance(*r) || !self.known_elsewhere(instance, *r))
                    })
                    .collect();
                for request in gone {
                    self.lease_ends(request);
                }
                // it may be one that comes too late: what it does not name counts no longer as pinned for certain
                let of = self.side.asked.iter_mut();
                for (_, a) in of.filter(|((i, _), _)| *i == instance) {
                    let lost = !a.answered && a.conn != conn.0;
                    if lost || !named.contains(&a.request) {
                        a.ready.clear();
                        a.answered = true;
                    }
                }
            }
            _ => {}
        }
    }

    /// A connection ended: answers that were still to come end with it, and what their PROBEs pinned.
    pub fn answers_lost(&mut self, conn: ConnId) {
        let of = self.side.asked.values_mut();
        for a in of.filter(|a| a.conn == conn.0 && !a.answered) {
            a.ready.clear();
            a.answered = true;
        }
    }

    fn known_elsewhere(&self, instance: usize, request: u32) -> bool {
        (0..self.instances.len())
            .filter(|i| *i != instance)
            .any(|i| {
                self.instances[i]
                    .scheduler
                    .requests
                    .iter()
                    .any(|x| x.id == request)
            })
    }

    fn leases(&self) -> Vec<u32> {
        let m = self.memory.borrow();
        let mut list: Vec<u32> = m
            .regions
            .iter()
            .flat_map(|r| &r.leased)
            .map(|l| l.2)
            .collect();
        list.sort_unstable();
        list.dedup();
        list
    }

    fn lease_ends(&mut self, request: u32) {
        for region in &mut self.memory.borrow_mut().regions {
            region.leased.retain(|l| l.2 != request);
        }
        self.side.asked.retain(|_, a| a.request != request);
    }

    /// The sidecar learns of a death: leases of its scheduler end.
    pub fn forget_leases_of(&mut self, _pid: usize) {
        for region in &mut self.memory.borrow_mut().regions {
            region.leased.clear();
        }
        // who else asked goes on; what it was answered counts no longer as leased for certain
        for asked in self.side.asked.values_mut() {
            asked.ready.clear();
        }
    }

    /// After a scheduler's frame was handled.
    pub fn after_frame(&mut self, instance: usize, wire: &Wire) {
        if wire.frame.op == Op::Pin && self.side.driver.is_some() {
            self.pinned(instance, wire);
            let pin: Pin = message::decode(&wire.frame.body).unwrap();
            let of = self.side.asked.values_mut();
            for asked in of.filter(|a| a.request == number(&pin.request)) {
                asked.answered = true;
            }
        }
        self.audit_tiers();
        if matches!(wire.frame.op, Op::Grant | Op::Probe) {
            self.bounds();
        }
        if wire.frame.op == Op::Grant && self.p.ttl == 0 && self.side.driver.is_some() {
            self.children_first();
        }
    }

    /// A PIN was read: what its PROBE's answer named is leased for certain, where no soft pin ended since.
    fn pinned(&mut self, instance: usize, wire: &Wire) {
        let pin: Pin = message::decode(&wire.frame.body).unwrap();
        let Some(asked) = self.side.asked.get(&(instance, pin.probe)).cloned() else {
            return;
        };
        if asked.pins_ended != self.pins_ended() {
            return;
        }
        let mut m = self.memory.borrow_mut();
        let Some(at) = m.supervisor else { return };
        for chunk in asked
            .ready
            .iter()
            .take(pin.to as usize)
            .skip(pin.from as usize)
            .flatten()
        {
            for (slot, generation) in chunk {
                let row: Row = m.regions[at].rows[*slot as usize];
                if row.state == PUBLISHED && row.generation == *generation {
                    m.regions[at]
                        .leased
                        .push((*slot, *generation, asked.request));
                }
            }
        }
    }

    /// An answer leaves.
    pub fn check_answer(&mut self, conn: ConnId, frame: &Frame) {
        let Frame {
            op: Op::Probe,
            flags,
            tag,
            ref body,
        } = *frame
        else {
            return;
        };
        let Some(part) = self.conn(conn.0).map(|c| c.part) else {
            return;
        };
        if flags & FLAG_ERROR != 0 {
            self.side.asked.remove(&(part.instance, tag));
            return;
        }
        let reply: ProbeReply = message::decode(body).unwrap();
        let Some(mut asked) = self.side.asked.remove(&(part.instance, tag)) else {
            return;
        };
        // what ended in this very call may have ended behind the answer
        asked.pins_ended = self.side.pins_ended;
        let pins_ended = asked.pins_ended != self.pins_ended();
        asked.answered |= flags & FLAG_PARTIAL == 0;
        self.tiers_are_named(tag, &reply);
        asked.ready.clear();
        let all = refs::unpack(&reply.refs).unwrap();
        let ready = reply.states.iter().filter(|s| **s == CHUNK_READY).count();
        let sections = all.len().checked_div(ready).unwrap_or(0);
        let shards = if self.p.replicated { 1 } else { self.p.world };
        let mut given = all.chunks(sections.max(1));
        let region = self.memory.borrow().supervisor;
        for (n, state) in reply.states.iter().enumerate() {
            let refs = if *state == CHUNK_READY {
                given.next()
            } else {
                None
            };
            let (Some(refs), Some(region)) = (refs, region) else {
                asked.ready.push(None);
                continue;
            };
            let mut held = Vec::new();
            for r in refs {
                let (slot, section) = (r.slot.get(), r.section.get());
                if slot == NO_SLOT {
                    if section < shards {
                        self.broke(Rule::S5, || {
                            format!("chunk {n} of tag {tag} is ready without section {section}")
                        });
                    }
                    continue;
                }
                let row = self.memory.borrow().regions[region].rows[slot as usize];
                if pins_ended && row.generation != r.generation.get() {
                    // it gave way to another PROBE's after this answer was made: PIN finds that out, and the load, too
                    held.push((slot, r.generation.get()));
                    continue;
                }
                if row.state != PUBLISHED || row.generation != r.generation.get() {
                    self.broke(Rule::S5, || {
                        format!("chunk {n} of tag {tag} is ready in slot {slot}, which is {row:?}")
                    });
                }
                let bytes = self.bytes_of(region, r, asked.hashes[n]);
                let seen_at = match self.p.verify {
                    Verify::Always => asked.asked_at,
                    Verify::Background => 1,
                };
                let unchecked = bytes == Bytes::Flipped
                    && self.flipped_before(seen_at, region, slot, r.length.get());
                if bytes == Bytes::Wrong || unchecked {
                    self.broke(Rule::S5, || {
                        format!(
                            "chunk {n} of tag {tag} is ready in slot {slot} with {bytes:?} bytes, flipped before a check was due: {unchecked}"
                        )
                    });
                }
                held.push((slot, r.generation.get()));
            }
            asked.ready.push(Some(held));
        }
        self.side.asked.insert((part.instance, tag), asked);
    }

    /// Every chunk that is there, or on its way, has a tier that it comes from; others have none.
    fn tiers_are_named(&mut self, tag: u64, reply: &ProbeReply) {
        let named = |(state, tier): (&u8, &u8)| match *state {
            CHUNK_READY => (1..=4).contains(tier),
            CHUNK_ABSENT => *tier == 0,
            _ => *tier != 0,
        };
        let states = reply.states.iter().zip(&reply.tiers);
        if reply.states.len() != reply.tiers.len() || !states.clone().all(named) {
            self.broke(Rule::S8, || {
                format!("tag {tag}: {:?} from {:?}", reply.states, reply.tiers)
            });
        }
        let hit = |(state, tier): (&u8, &u8)| *state == CHUNK_READY && *tier > 1;
        if states.clone().any(hit) {
            self.hit(Fault::HitOfTier);
        }
    }

    fn flipped_before(&self, time: u64, region: usize, slot: u32, length: u32) -> bool {
        let rows = rows_of(u64::from(length));
        let m = self.memory.borrow();
        self.side
            .flips
            .range(slot..slot + rows)
            .any(|(row, at)| *at < time && m.regions[region].content[*row as usize] & FLIPPED != 0)
    }

    /// What a GRANT evicted has no children left.
    fn children_first(&mut self) {
        let m = self.memory.borrow();
        let Some(at) = m.supervisor.filter(|_| !m.evicted.is_empty()) else {
            return;
        };
        let region = &m.regions[at];
        let used = || (0u32..).zip(&region.chunks).filter(|(_, c)| c.state == 1);
        // a record alone is what an engine left that died before a row named it
        let there = |chunk: u32| {
            region
                .rows
                .iter()
                .any(|r| r.state == PUBLISHED && r.chunk == chunk)
        };
        let orphan = m.evicted.iter().find(|k| {
            !used().any(|(_, c)| c.key == **k) && used().any(|(n, c)| c.parent == **k && there(n))
        });
        let found = orphan.map(short);
        drop(m);
        if let Some(key) = found {
            self.broke(Rule::S7, || {
                format!("chunk {key:x} was evicted before its children")
            });
        }
    }

    /// Memory, pins and grants stay within their bounds.
    pub fn bounds(&mut self) {
        let Some(engine) = self.side.core().and_then(|c| c.engine()) else {
            return;
        };
        let (usage, arena) = (engine.usage(), engine.capacity_bytes());
        // pins of before the arena shrank stay
        let pinnable = match self.p.rates.resize {
            0 => arena,
            _ => engine.geometry().arena_bytes,
        };
        let share = pinnable * u64::from(self.p.soft_pin_percent) / 100;
        if usage.soft_pinned_bytes > share {
            self.broke(Rule::S9, || {
                format!(
                    "soft pins hold {} of {share} bytes",
                    usage.soft_pinned_bytes
                )
            });
        }
        if usage.used_bytes > arena || usage.granted_bytes > arena {
            self.broke(Rule::S9, || format!("{usage:?} is more than {arena}"));
        }
    }

    /// Counts evictions that the engine made since.
    pub fn note_evictions(&mut self, before: u64) {
        if self.core_stats(|s| s.evicted_chunks) > before {
            self.hit(Fault::Evicted);
        }
    }
}

/// Number of a request's id.
pub fn number(id: &str) -> u32 {
    id.get(1..).and_then(|n| n.parse().ok()).unwrap_or(0)
}
