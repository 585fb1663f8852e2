//! A vLLM's scheduler with its side of the connector: requests that look up, load and store, and what they hold.

use super::counts::Fault;
use super::memory::short;
use super::profile::Slip;
use super::text::{CHUNK_TOKENS, Piece, block_hashes, piece};
use super::worker::{Job, JobPiece};
use super::world::{Link, Part, Phase, World, say};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{self, Abort, Grant, GrantChunk, Pin, Probe, Release, Report};
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};
use std::collections::BTreeMap;

/// An unanswered GRANT is given up after this.
const GRANT_MS: u64 = 1_000;
/// A request waits for a load no longer than this.
pub const LOAD_MS: u64 = 2_000;

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Asked,
    Have,
    Shipped,
}

/// One chunk that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    pub piece: Piece,
    pub refs: Vec<SectionRef>,
    /// Number of the tier that it came from.
    pub tier: u8,
}

/// One request, as far as the connector has to do with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub id: u32,
    pub load: bool,
    pub state: State,
    pub tag: u64,
    pub pieces: Vec<Piece>,
    /// Chunks that the engine holds itself.
    pub local: usize,
    pub since: u64,
    pub asked: u64,
    pub boot: u64,
    pub region: u64,
    pub answered: Vec<Answered>,
    /// Reports that are still to come.
    pub waiting: u32,
    pub failed: bool,
    /// Its answer is not used before: an allocation failed, or the job goes out in a later step.
    pub not_before: u64,
    /// Its PROBE is one before the first poll, that fetches nothing.
    pub early: bool,
    /// Its end must be seen: the proof that the pool serves.
    pub proof: bool,
}

/// A grant that must come back: tag of the GRANT, chunks (none: all), tag of the ABORT that is out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Back {
    pub grant: u64,
    pub hashes: Vec<u8>,
    pub asked: Option<u64>,
}

/// The scheduler's side of a connector.
#[derive(Debug, Default)]
pub struct Scheduler {
    pub pid: usize,
    pub link: Link,
    pub ready: bool,
    pub requests: Vec<Request>,
    pub back: Vec<Back>,
    pub proofs: (u32, u32),
}

impl Scheduler {
    /// Ids of requests whose pins go on.
    pub fn held(&self) -> Vec<String> {
        let holds = |r: &&Request| r.load && matches!(r.state, State::Have | State::Shipped);
        self.requests
            .iter()
            .filter(holds)
            .map(|r| name(r.id))
            .collect()
    }

    /// Its process is dead.
    pub fn end(&mut self) {
        *self = Self {
            pid: self.pid,
            ..Self::default()
        };
    }

    /// vLLM waits for nothing.
    pub fn quiet(&self) -> bool {
        self.requests.is_empty()
    }
}

fn name(id: u32) -> String {
    format!("r{id}")
}

impl World {
    pub(super) fn scheduler(&mut self, instance: usize) -> &mut Scheduler {
        &mut self.instances[instance].scheduler
    }

    fn part_of(instance: usize) -> Part {
        Part {
            instance,
            rank: None,
        }
    }

    /// One step of a scheduler.
    pub fn scheduler_step(&mut self, instance: usize) -> bool {
        if let Some((request, rank, good)) = self.instances[instance].reports.pop_front() {
            self.reported(instance, request, rank, good);
            return true;
        }
        if (!self.faults_on || self.rng.chance(400)) && self.say_aborts(instance) {
            return true;
        }
        let count = self.instances[instance].scheduler.requests.len();
        if self.faults_on && count < self.p.requests && (count == 0 || self.rng.chance(400)) {
            return self.new_request(instance);
        }
        let first = self.rng.below(count);
        for n in 0..count {
            let at = (first + n) % count;
            if self.request_step(instance, at) {
                return true;
            }
        }
        false
    }

    fn new_request(&mut self, instance: usize) -> bool {
        let document = self.rng.below(self.p.documents);
        let load = !self.rng.chance(self.p.stores);
        let count = 1 + self.rng.below(self.p.chunks);
        let tail = (self.rng.chance(self.p.tails)).then(|| 1 + self.rng.below(3));
        let mut pieces: Vec<Piece> = (0..count).map(|at| piece(document, at, None)).collect();
        if let Some(blocks) = tail {
            pieces.push(piece(document, count, Some(blocks)));
        }
        let local = if load && self.rng.chance(250) {
            self.rng.below(pieces.len())
        } else {
            0
        };
        self.begin(instance, load, pieces, local, false)
    }

    /// A request asks for the first time.
    pub fn begin(
        &mut self,
        instance: usize,
        load: bool,
        pieces: Vec<Piece>,
        local: usize,
        proof: bool,
    ) -> bool {
        let id = self.next_request;
        self.next_request += 1;
        let part = Self::part_of(instance);
        if self.link_of(part).phase != Phase::Up {
            // (0, False): nothing is asked, nothing is held
            return false;
        }
        let now = self.now;
        let request = Request {
            id,
            load,
            state: State::Asked,
            tag: 0,
            pieces,
            local,
            since: now,
            asked: now,
            boot: 0,
            region: 0,
            answered: Vec::new(),
            waiting: 0,
            failed: false,
            not_before: 0,
            early: self.p.tiers > 0 && load && !proof && self.rng.chance(400),
            proof,
        };
        self.scheduler(instance).requests.push(request);
        let at = self.instances[instance].scheduler.requests.len() - 1;
        self.ask(instance, at)
    }

    pub(super) fn ask(&mut self, instance: usize, at: usize) -> bool {
        let part = Self::part_of(instance);
        let tag = self.tag(part);
        let (now, ttl) = (
            self.now,
            if self.rng.chance(self.p.ttl) {
                1 + self.rng.below(40) as u32
            } else {
                0
            },
        );
        let window = !self.p.window_group || self.rng.chance(700);
        let speed = match self.rng.below(4) {
            0 => 0,
            1 => 10,
            2 => 1_000,
            _ => 1_000_000,
        };
        let both = self.p.window_group;
        let boot = self.link_of(part).boot;
        let patient = self.faults_on && self.rng.chance(100);
        let patience = self.rng.span(100, 5_000);
        let r = &mut self.instances[instance].scheduler.requests[at];
        (r.tag, r.asked, r.state, r.boot) = (tag, now, State::Asked, boot);
        r.not_before = if patient { now + patience } else { 0 };
        r.answered.clear();
        let (op, body) = if r.load {
            let last = r.pieces[r.pieces.len() - 1];
            let probe = Probe {
                independent: false,
                request: name(r.id),
                namespace: Vec::new(),
                hashes: r.pieces.iter().flat_map(|p| p.hash).collect(),
                tail_tokens: if last.tokens < CHUNK_TOKENS {
                    last.tokens
                } else {
                    0
                },
                local_tokens: (!r.early).then(|| r.local as u64 * u64::from(CHUNK_TOKENS)),
                budget_ms: LOAD_MS.saturating_sub(now - r.since),
                max_load_tokens: None,
                prefill_tokens_per_s: speed,
            };
            (Op::Probe, message::encode(&probe).unwrap())
        } else {
            let groups = if both && window { 3 } else { 1 };
            let chunks = r.pieces.iter().map(|p| GrantChunk {
                bytes: 0,
                hash: p.hash.to_vec(),
                parent: p.parent.map(|h| h.to_vec()).unwrap_or_default(),
                first_token: p.first_token,
                tokens: p.tokens,
                groups,
                block_hashes: block_hashes(p),
            });
            let ttl_s = if r.proof { 0 } else { ttl };
            let grant = Grant {
                request: name(r.id),
                namespace: Vec::new(),
                chunks: chunks.collect(),
                ttl_s,
            };
            (Op::Grant, message::encode(&grant).unwrap())
        };
        let id = r.id;
        let text: Vec<String> = r
            .pieces
            .iter()
            .map(|p| format!("{}@{}+{}", p.document, p.first_token, p.tokens))
            .collect();
        say!(
            self,
            "scheduler {instance} asks {op:?} for request {id}, tag {tag}: {text:?}"
        );
        self.send(part, op, tag, body, Vec::new());
        true
    }

    fn request_step(&mut self, instance: usize, at: usize) -> bool {
        let part = Self::part_of(instance);
        let now = self.now;
        let r = &self.instances[instance].scheduler.requests[at];
        let (id, load, state, asked, since, tag, proof) =
            (r.id, r.load, r.state, r.asked, r.since, r.tag, r.proof);
        if state == State::Have && self.faults_on && now < r.not_before {
            return false;
        }
        match (load, state) {
            (true, State::Asked) => {
                let cancelled = self.faults_on && !proof && self.rng.chance(self.p.rates.cancel);
                if cancelled || now >= since + LOAD_MS {
                    self.hit(if cancelled {
                        Fault::Cancelled
                    } else {
                        Fault::GrantGivenUp
                    });
                    say!(self, "scheduler {instance} stops waiting for request {id}");
                    self.end_request(instance, at, "timeout");
                    return true;
                }
                false
            }
            (true, State::Have) => {
                if self.faults_on && !proof && self.rng.chance(self.p.rates.cancel) {
                    self.hit(Fault::Cancelled);
                    self.end_request(instance, at, "cancelled");
                    return true;
                }
                // a failed allocation keeps the answer; a request that waits renews its own
                if self.faults_on && !proof && self.rng.chance(150) {
                    return self.link_of(part).phase == Phase::Up
                        && self.rng.chance(300)
                        && self.ask(instance, at);
                }
                self.ship_load(instance, at)
            }
            (false, State::Asked) => {
                if now < asked + GRANT_MS {
                    return false;
                }
                self.hit(Fault::GrantGivenUp);
                say!(
                    self,
                    "scheduler {instance} gives up GRANT {tag} of request {id}"
                );
                let r = &self.instances[instance].scheduler.requests[at];
                let hashes = if id % 2 == 0 {
                    Vec::new()
                } else {
                    r.pieces.iter().flat_map(|p| p.hash).collect()
                };
                self.take_back(instance, tag, hashes);
                self.end_request(instance, at, "unanswered");
                true
            }
            (false, State::Have) => {
                if self.faults_on && !proof && self.rng.chance(60) {
                    self.hit(Fault::NotShipped);
                    say!(self, "scheduler {instance} does not ship request {id}");
                    let hashes = if self.rng.chance(500) {
                        Vec::new()
                    } else {
                        hashes_of(&self.instances[instance].scheduler.requests[at].answered)
                    };
                    self.take_back(instance, tag, hashes);
                    self.end_request(instance, at, "preempted");
                    return true;
                }
                self.ship_store(instance, at)
            }
            (_, State::Shipped) => false,
        }
    }

    /// Sections of a chunk that a rank reads or writes.
    fn sections_of(&self, rank: usize, load: bool) -> Vec<u32> {
        let shards = if self.p.replicated { 1 } else { self.p.world };
        let shard = if self.p.replicated { 0 } else { rank as u32 };
        if self.p.replicated && rank > 0 && !load {
            return Vec::new();
        }
        if self.p.window_group {
            vec![shard, shards + shard]
        } else {
            vec![shard]
        }
    }

    fn ship_load(&mut self, instance: usize, at: usize) -> bool {
        let part = Self::part_of(instance);
        let r = self.instances[instance].scheduler.requests[at].clone();
        if self.may_say(part) {
            let to = r.local + r.answered.len();
            let pin = Pin {
                request: name(r.id),
                probe: r.tag,
                from: r.local as u32,
                to: to as u32,
            };
            let tag = self.tag(part);
            let body = message::encode(&pin).unwrap();
            self.send(part, Op::Pin, tag, body, Vec::new());
            if self.link_of(part).boot != r.boot {
                self.hit(Fault::PinAfterReboot);
            }
        }
        say!(self, "scheduler {instance} ships load {}", r.id);
        self.ship(instance, at);
        true
    }

    fn ship_store(&mut self, instance: usize, at: usize) -> bool {
        // a chunk of the grant may stay behind
        let r = &self.instances[instance].scheduler.requests[at];
        let (tag, id, several) = (r.tag, r.id, r.answered.len() > 1);
        if self.faults_on && several && self.rng.chance(100) {
            let left = self.instances[instance].scheduler.requests[at]
                .answered
                .pop()
                .unwrap();
            self.hit(Fault::NotShipped);
            self.take_back(instance, tag, left.piece.hash.to_vec());
        }
        say!(self, "scheduler {instance} ships store {id}");
        self.ship(instance, at);
        true
    }

    fn ship(&mut self, instance: usize, at: usize) {
        let (world, now) = (self.p.world as usize, self.now);
        let r = self.instances[instance].scheduler.requests[at].clone();
        for rank in 0..world {
            let sections = self.sections_of(rank, r.load);
            let pieces = r.answered.iter().flat_map(|a| {
                let hash = short(&a.piece.hash);
                a.refs
                    .iter()
                    .filter(|x| x.slot.get() != NO_SLOT && sections.contains(&x.section.get()))
                    .map(move |x| JobPiece {
                        slot: x.slot.get(),
                        generation: x.generation.get(),
                        length: x.length.get(),
                        section: x.section.get(),
                        hash,
                    })
            });
            let job = Job {
                request: r.id,
                load: r.load,
                region: r.region,
                pieces: pieces.collect(),
                since: now,
            };
            self.instances[instance].workers[rank].inbox.push_back(job);
        }
        let r = &mut self.instances[instance].scheduler.requests[at];
        r.state = State::Shipped;
        r.waiting = world as u32;
    }

    fn reported(&mut self, instance: usize, request: u32, rank: usize, good: bool) {
        let s = &mut self.instances[instance].scheduler;
        let Some(at) = s
            .requests
            .iter()
            .position(|r| r.id == request && r.state == State::Shipped)
        else {
            return;
        };
        let r = &mut s.requests[at];
        r.failed |= !good;
        r.waiting = r.waiting.saturating_sub(1);
        let _ = rank;
        if r.waiting == 0 {
            self.end_request(instance, at, "");
        }
    }

    /// The request ends: RELEASE, token counts.
    pub(super) fn end_request(&mut self, instance: usize, at: usize, miss: &str) {
        let part = Self::part_of(instance);
        let r = self.instances[instance].scheduler.requests.swap_remove(at);
        let good = r.state == State::Shipped && !r.failed;
        if r.proof && good {
            let s = &mut self.instances[instance].scheduler;
            if r.load {
                s.proofs.1 += 1
            } else {
                s.proofs.0 += 1
            }
        }
        if !r.load {
            if good {
                self.counts.stores_done += 1;
            }
            return;
        }
        if self.may_say(part) {
            let body = message::encode(&Release {
                requests: vec![name(r.id)],
            })
            .unwrap();
            let tag = self.tag(part);
            self.send(part, Op::Release, tag, body, Vec::new());
            self.say_report(part, &r, miss);
        }
    }

    fn say_report(&mut self, part: Part, r: &Request, miss: &str) {
        let tokens = |pieces: &[Piece]| pieces.iter().map(|p| u64::from(p.tokens)).sum::<u64>();
        let requested = tokens(&r.pieces[r.local..]);
        let hit = if r.state == State::Shipped {
            r.answered.iter().map(|a| u64::from(a.piece.tokens)).sum()
        } else {
            0
        };
        let mut report = Report {
            requested_tokens: requested,
            ..Report::default()
        };
        if hit > 0 {
            for a in &r.answered {
                let tier = ["", "memory", "disk", "redis", "s3", "filesystem"][usize::from(a.tier)];
                *report.hit_tokens.entry(tier.to_owned()).or_default() += u64::from(a.piece.tokens);
            }
        }
        if requested > hit {
            let why = if miss.is_empty() { "absent" } else { miss };
            report.miss_tokens = BTreeMap::from([(why.to_owned(), requested - hit)]);
        }
        if r.failed {
            report.load_failed_tokens = hit;
        }
        let body = message::encode(&report).unwrap();
        let tag = self.tag(part);
        self.send(part, Op::Report, tag, body, Vec::new());
    }

    // -- grants that come back

    pub(super) fn take_back(&mut self, instance: usize, grant: u64, hashes: Vec<u8>) {
        self.scheduler(instance).back.push(Back {
            grant,
            hashes,
            asked: None,
        });
    }

    /// Says the ABORTs that are still to be said.
    fn say_aborts(&mut self, instance: usize) -> bool {
        let part = Self::part_of(instance);
        if !self.may_say(part) {
            return false;
        }
        let Some(at) = self.instances[instance]
            .scheduler
            .back
            .iter()
            .position(|b| b.asked.is_none())
        else {
            return false;
        };
        let tag = self.tag(part);
        let back = &mut self.instances[instance].scheduler.back[at];
        back.asked = Some(tag);
        let grant = back.grant;
        let body = message::encode(&Abort {
            grant,
            hashes: back.hashes.clone(),
        })
        .unwrap();
        say!(self, "scheduler {instance} says ABORT of GRANT {grant}");
        self.send(part, Op::Abort, tag, body, Vec::new());
        if self.p.slips(Slip::AbortAck) {
            self.scheduler(instance).back.remove(at);
        }
        true
    }

    /// After a HELLO every unanswered ABORT goes out again.
    pub fn repeat_aborts(&mut self, instance: usize) {
        let again = self.instances[instance]
            .scheduler
            .back
            .iter()
            .any(|b| b.asked.is_some());
        if again {
            self.hit(Fault::AbortRepeated);
        }
        for back in &mut self.scheduler(instance).back {
            back.asked = None;
        }
    }
}

fn hashes_of(list: &[Answered]) -> Vec<u8> {
    list.iter().flat_map(|a| a.piece.hash).collect()
}
