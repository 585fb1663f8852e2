//! Tiers below memory: what they hold, and everything that they may do to whoever asks: be slow, fail, hang, lie, answer what was
//! cancelled, and go on writing after it. Reads may outlive the engine.

use super::counts::Fault;
use super::memory::{ENGINE, right_digest, rows_of, short};
use super::rules::Rule;
use super::text::{BLOCK_TOKENS, CHUNK_BLOCKS, Piece, block_hashes, piece};
use super::world::{World, say};
use super::writing::{PUT_BYTES_MAX, PUTS_MAX};
use crate::engine::config::{Admission, TierConfig};
use crate::engine::table::ROW_BYTES;
use crate::engine::{FetchId, Landed, Order, Report, Target};
use crate::sessions::Input;
use crate::tiers::{Cause, Kind};
use kvcachepool_protocol::domain::Domain;
use kvcachepool_protocol::key::unpack_hashes;
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, NamespaceId, chunk_key};
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Object, Section};
use std::collections::{BTreeMap, BTreeSet};

/// Bounds of every tier here.
pub const LOOKUPS_MAX: u32 = 3;
pub const FETCHES_MAX: u32 = 2;
const QUEUE_MAX: u32 = 4;

/// An object as a tier holds it.
#[derive(Debug, Clone)]
pub struct Held {
    pub object: Object,
    pub hash: u64,
    /// Its bytes are not those that its head promises.
    pub corrupt: bool,
}

/// One tier.
#[derive(Debug)]
pub struct Store {
    pub kind: Kind,
    pub up: bool,
    /// As the state machine of this boot was told.
    pub told_up: bool,
    /// Nothing of it moves before.
    pub hung_until: u64,
    pub objects: BTreeMap<[u8; 32], Held>,
}

/// What the shell does for the state machine.
#[derive(Debug, Clone)]
pub enum Task {
    Lookup {
        lookup: u64,
        keys: Vec<ChunkKey>,
    },
    Fetch {
        fetch: FetchId,
        key: ChunkKey,
        region: usize,
        targets: Vec<Target>,
        digests: Vec<Option<[u8; 16]>>,
        writing: bool,
    },
    Put {
        put: u64,
        object: Box<Object>,
        targets: Vec<Target>,
        region: usize,
    },
}

/// A task and how it stands.
#[derive(Debug, Clone)]
pub struct TierJob {
    pub tier: usize,
    pub bytes: u64,
    pub cancelled: bool,
    pub task: Task,
}

/// Tiers and everything about them.
#[derive(Debug, Default)]
pub struct Lower {
    pub stores: Vec<Store>,
    pub domain: Option<Domain>,
    /// Chunks that may be there: granted to a worker, or in a tier, at some time.
    pub ever: BTreeSet<u64>,
}

/// Tiers of a history, the nearest first.
pub fn configs(tiers: usize) -> Vec<TierConfig> {
    [Kind::Disk, Kind::S3]
        .into_iter()
        .take(tiers)
        .map(|kind| TierConfig {
            lookups_max: LOOKUPS_MAX,
            fetches_max: FETCHES_MAX,
            fetch_queue_max: QUEUE_MAX,
            puts_max: PUTS_MAX,
            put_bytes_max: PUT_BYTES_MAX,
            put_queue_bytes_max: 64 << 16,
            put_age_ms_max: 3_000,
            admission: match kind {
                Kind::S3 => Admission::Reused,
                _ => Admission::All,
            },
            ..TierConfig::new(kind)
        })
        .collect()
}

impl World {
    /// Fills the tiers with some of the documents.
    pub fn fill_tiers(&mut self) {
        if self.p.tiers == 0 {
            return;
        }
        let domain = self.domain();
        let mut pieces = Vec::new();
        for document in 0..self.p.documents {
            for at in 0..self.p.chunks {
                pieces.push(piece(document, at, None));
                if self.p.tails > 0 {
                    pieces.extend((1..CHUNK_BLOCKS).map(|b| piece(document, at, Some(b))));
                }
            }
        }
        for config in configs(self.p.tiers) {
            let mut objects = BTreeMap::new();
            for piece in &pieces {
                if self.rng.chance(self.p.filled) {
                    let held = self.held(&domain, piece);
                    self.lower.ever.insert(held.hash);
                    objects.insert(held.object.key().0, held);
                }
            }
            self.lower.stores.push(Store {
                kind: config.kind,
                up: !self.rng.chance(100),
                told_up: false,
                hung_until: 0,
                objects,
            });
        }
        self.lower.domain = Some(domain);
    }

    /// A chunk as somebody wrote it down once.
    fn held(&mut self, domain: &Domain, piece: &Piece) -> Held {
        let namespace = NamespaceId::default();
        let key = |hash: &[u8; 32]| {
            let hash = EngineHash(*hash);
            chunk_key(&domain.model_id, &namespace, KeyKind::Prefix, &hash)
        };
        let hash = short(&piece.hash);
        let window = self.rng.chance(700);
        let sections = (0..domain.plan.sections()).filter_map(|section| {
            let (group, shard) = domain.plan.locate(section)?;
            let bytes = domain.plan.section_bytes(section, piece.tokens);
            let digest = right_digest(hash, section, bytes);
            (group == 0 || window).then_some(Section {
                group: group as u32,
                shard,
                stored_bytes: bytes,
                raw_bytes: bytes,
                stored_digest: digest,
                raw_digest: digest,
            })
        });
        let blocks = block_hashes(piece);
        let mut object = Object {
            kind: KeyKind::Prefix,
            codec: Codec::None,
            fidelity: Fidelity::Exact,
            cipher: Cipher::None,
            model: domain.model_id,
            layout: domain.layout_id,
            namespace,
            last_hash: EngineHash(piece.hash),
            parent: piece.parent.as_ref().map(key).unwrap_or_default(),
            part: 0,
            parts: 1,
            tokens: piece.tokens,
            first_token: piece.first_token,
            created_unix_ms: 0,
            expires_unix_s: 0,
            writer: [0; 16],
            engine: "vllm".into(),
            engine_version: "0.32.0".into(),
            nonce: [0; 24],
            sections: sections.collect(),
            block_hashes: unpack_hashes(&blocks).unwrap().to_vec(),
            token_ids: Vec::new(),
        };
        if self.p.rates.tier > 0 && self.rng.chance(30) {
            // of somebody else, or of a time that is over
            match self.rng.below(3) {
                0 => object.tokens += BLOCK_TOKENS,
                1 => object.expires_unix_s = 1,
                _ => object.parent.0[0] ^= 1,
            }
        }
        Held {
            object,
            hash,
            corrupt: self.p.rates.tier > 0 && self.rng.chance(self.p.corrupt),
        }
    }

    /// An engine began: it is told of the tiers.
    pub(super) fn tell_tiers(&mut self) {
        for at in 0..self.lower.stores.len() {
            self.lower.stores[at].told_up = false;
            if self.lower.stores[at].up {
                self.tell_tier(at);
            }
        }
    }

    fn tell_tier(&mut self, at: usize) {
        if self.side.core.is_none() {
            return;
        }
        let store = &mut self.lower.stores[at];
        let (tier, up) = (store.kind, store.up);
        store.told_up = up;
        let down = (!up).then(|| "Io".to_owned());
        say!(self, "tier {tier} is up: {up}");
        self.drive(Input::Tier(Report::State { tier, down }));
    }

    /// A tier goes down, comes up, or hangs.
    pub(super) fn tier_fault(&mut self) -> bool {
        if self.lower.stores.is_empty() {
            return false;
        }
        let at = self.rng.below(self.lower.stores.len());
        if self.lower.stores[at].up && self.rng.chance(500) {
            self.lower.stores[at].hung_until = self.now + self.rng.span(100, 8_000);
            self.hit(Fault::TierHung);
            return true;
        }
        let store = &mut self.lower.stores[at];
        store.up = !store.up;
        let fault = if store.up {
            Fault::TierUp
        } else {
            Fault::TierDown
        };
        self.hit(fault);
        if !self.side.stopped {
            self.tell_tier(at);
        }
        true
    }

    /// The state machine wants something of a tier.
    pub(super) fn tier_ordered(&mut self, order: Order) {
        match order {
            Order::Lookup {
                lookup,
                tier,
                names,
            } => {
                let task = Task::Lookup {
                    lookup,
                    keys: names.iter().map(|n| n.key).collect(),
                };
                self.hit(Fault::TierAsked);
                self.push_job(tier, 0, task);
            }
            Order::CancelLookup { lookup } => {
                let is = |t: &Task| matches!(t, Task::Lookup { lookup: l, .. } if *l == lookup);
                self.cancel_job(is);
            }
            Order::Fetch {
                fetch,
                tier,
                name,
                sections,
            } => {
                let Some(region) = self.memory.borrow().supervisor else {
                    return;
                };
                self.follows_on(name.key);
                let length = |t: &Target| u64::from(t.section.length.get());
                let bytes = sections.iter().map(length).sum();
                let task = Task::Fetch {
                    fetch,
                    key: name.key,
                    region,
                    targets: sections,
                    digests: Vec::new(),
                    writing: false,
                };
                self.hit(Fault::FetchBegun);
                self.push_job(tier, bytes, task);
            }
            Order::CancelFetch { fetch } => {
                let is = |t: &Task| matches!(t, Task::Fetch { fetch: f, .. } if *f == fetch);
                self.cancel_job(is);
                self.hit(Fault::FetchCancelled);
            }
            Order::Put {
                put,
                tier,
                object,
                sections,
            } => {
                let Some(region) = self.memory.borrow().supervisor else {
                    return;
                };
                self.put_ordered(put, &object, &sections);
                let bytes = object.sections.iter().map(|s| s.raw_bytes).sum();
                let task = Task::Put {
                    put,
                    object,
                    targets: sections,
                    region,
                };
                self.push_job(tier, bytes, task);
            }
            Order::News { .. } => {}
        }
    }

    fn push_job(&mut self, kind: Kind, bytes: u64, task: Task) {
        say!(self, "{kind} is asked: {task:?}");
        let at = self.lower.stores.iter().position(|s| s.kind == kind);
        let Some(tier) = at.filter(|at| self.lower.stores[*at].told_up) else {
            self.broke(Rule::S10, || format!("{kind} is down and asked: {task:?}"));
            return;
        };
        self.side.jobs.push(TierJob {
            tier,
            bytes,
            cancelled: false,
            task,
        });
        self.tier_bounds(tier);
        self.put_bounds(tier);
    }

    /// What is under way with a tier is bounded, cancelled or not.
    fn tier_bounds(&mut self, tier: usize) {
        let is = |fetch: bool| {
            let list = self.side.jobs.iter().filter(|j| j.tier == tier);
            list.filter(move |j| match j.task {
                Task::Fetch { .. } => fetch,
                Task::Lookup { .. } => !fetch,
                Task::Put { .. } => false,
            })
        };
        let (fetches, lookups) = (is(true).count(), is(false).filter(|j| !j.cancelled).count());
        let bytes: u64 = is(true).map(|j| j.bytes).sum();
        let most = u64::from(self.p.segments) * 64 * ROW_BYTES / 4;
        if fetches > FETCHES_MAX as usize
            || lookups > LOOKUPS_MAX as usize
            || fetches > 1 && bytes > most
        {
            self.broke(Rule::S9, || {
                format!("{fetches} fetches ({bytes} bytes) and {lookups} lookups at once with tier {tier}")
            });
        }
    }

    fn cancel_job(&mut self, is: impl Fn(&Task) -> bool) {
        if let Some(job) = self.side.jobs.iter_mut().find(|j| is(&j.task)) {
            job.cancelled = true;
        }
    }

    /// A chunk is fetched only for a request that has, or may get, everything before it.
    fn follows_on(&mut self, key: ChunkKey) {
        let Some(domain) = &self.lower.domain else {
            return;
        };
        let key_of = |hash: &[u8; 32]| {
            let hash = EngineHash(*hash);
            chunk_key(
                &domain.model_id,
                &NamespaceId::default(),
                KeyKind::Prefix,
                &hash,
            )
        };
        let ever = &self.lower.ever;
        let follows = self.side.asked.values().any(|asked| {
            let at = asked.full.iter().position(|hash| key_of(hash) == key);
            at.is_some_and(|at| {
                let from = asked.local.unwrap_or(usize::MAX).min(at);
                asked.local.is_some() && asked.hashes[from..at].iter().all(|h| ever.contains(h))
            })
        });
        if !follows {
            self.broke(Rule::S10, || {
                format!("chunk {key:?} is fetched, and nobody can use it")
            });
        }
    }

    /// A tier answers, or goes on with what it does.
    pub fn tier_step(&mut self) -> bool {
        if self.side.core.is_none() || self.side.jobs.is_empty() {
            return false;
        }
        let at = self.rng.below(self.side.jobs.len());
        let tier = self.side.jobs[at].tier;
        if self.faults_on && self.now < self.lower.stores[tier].hung_until {
            return false;
        }
        let fails = self.faults_on && self.p.rates.tier > 0 && self.rng.chance(60);
        match self.side.jobs[at].task.clone() {
            Task::Lookup { lookup, keys } => self.lookup_ends(at, lookup, &keys, fails),
            Task::Fetch { .. } => self.fetch_goes_on(at, fails),
            Task::Put { .. } => self.put_ends(at, fails),
        }
        true
    }

    fn lookup_ends(&mut self, at: usize, lookup: u64, keys: &[ChunkKey], fails: bool) {
        let job = self.side.jobs.swap_remove(at);
        if job.cancelled {
            self.hit(Fault::LateReport);
            if self.rng.chance(500) {
                return;
            }
        }
        let store = &self.lower.stores[job.tier];
        let mut present: Vec<bool> = keys
            .iter()
            .map(|k| store.objects.contains_key(&k.0))
            .collect();
        if fails && self.rng.chance(300) {
            // a lie, or a list of another question
            self.hit(Fault::TierLied);
            if self.rng.chance(500) {
                present.fill(true);
            } else {
                present.pop();
            }
            self.tell_core(Report::LookedUp {
                lookup,
                present: Ok(present),
            });
            return;
        }
        let present = if fails {
            self.hit(Fault::TierFailed);
            Err(Cause::Timeout)
        } else {
            Ok(present)
        };
        self.tell_core(Report::LookedUp { lookup, present });
    }

    pub(super) fn tell_core(&mut self, report: Report) {
        say!(self, "reported: {report:?}");
        self.drive(Input::Tier(report));
        self.audit_tiers();
    }

    /// What the state machine keeps of tiers is what it should be, and adds up.
    pub(super) fn audit_tiers(&mut self) {
        if self.p.tiers == 0 {
            return;
        }
        let engine = self.side.core.as_ref().and_then(|c| c.engine());
        if let Some(Err(what)) = engine.map(|e| e.audit_lower()) {
            self.broke(Rule::S11, || what);
        }
    }

    fn fetch_goes_on(&mut self, at: usize, fails: bool) {
        let job = self.side.jobs[at].clone();
        let Task::Fetch {
            fetch,
            key,
            region,
            targets,
            digests,
            writing,
        } = job.task
        else {
            return;
        };
        let held = self.lower.stores[job.tier].objects.get(&key.0).cloned();
        let target = targets.get(digests.len()).copied();
        let section = |t: &Target, h: &Held| {
            let sections = &h.object.sections;
            sections
                .iter()
                .any(|s| (s.group, s.shard) == (t.group, t.shard))
        };
        match (held, target) {
            (Some(held), Some(target)) if writing => {
                let slot = target.section.slot.get();
                let length = u64::from(target.section.length.get());
                let whole = (!held.corrupt).then_some((held.hash, target.section.section.get()));
                self.memory
                    .borrow_mut()
                    .end_write(region, ENGINE, slot, whole);
                let digest = self.memory.borrow().digest(region, slot, length);
                self.goes_on(at, Some(digest), false);
            }
            (Some(held), Some(target)) if !section(&target, &held) => {
                self.hit(Fault::WindowMissing);
                self.goes_on(at, None, false);
            }
            (Some(_), Some(target)) if !fails && (!job.cancelled || self.rng.chance(600)) => {
                if job.cancelled {
                    self.hit(Fault::WroteAfterCancel);
                }
                let (slot, generation) =
                    (target.section.slot.get(), target.section.generation.get());
                let length = u64::from(target.section.length.get());
                self.touched(region, slot, rows_of(length));
                self.memory
                    .borrow_mut()
                    .begin_write(region, ENGINE, 0, slot, generation, length);
                self.collect();
                if let Task::Fetch { writing, .. } = &mut self.side.jobs[at].task {
                    *writing = true;
                }
            }
            (held, target) => {
                self.side.jobs.swap_remove(at);
                let whole = held.filter(|_| target.is_none());
                self.fetch_ends(fetch, whole, digests, job.cancelled, fails);
            }
        }
    }

    /// A section is done.
    fn goes_on(&mut self, at: usize, digest: Option<[u8; 16]>, writes: bool) {
        if let Task::Fetch {
            digests, writing, ..
        } = &mut self.side.jobs[at].task
        {
            *writing = writes;
            digests.push(digest);
        }
    }

    fn fetch_ends(
        &mut self,
        fetch: FetchId,
        whole: Option<Held>,
        digests: Vec<Option<[u8; 16]>>,
        cancelled: bool,
        fails: bool,
    ) {
        if cancelled {
            self.hit(Fault::LateReport);
        }
        let landed = match whole {
            Some(held) => {
                if held.corrupt {
                    self.hit(Fault::TierCorrupt);
                }
                Ok(Landed {
                    object: Box::new(held.object),
                    digests,
                })
            }
            None => {
                self.hit(Fault::TierFailed);
                Err(if fails { Cause::Io } else { Cause::Missing })
            }
        };
        let again = self.faults_on && self.rng.chance(50);
        let report = Report::Fetched { fetch, landed };
        self.tell_core(report.clone());
        if again {
            // said twice: the second one is nobody's
            self.tell_core(report);
        }
    }

    /// Answers to PROBEs are final when their wait is over, whatever tiers do.
    pub(super) fn answers_in_time(&mut self) {
        if self.side.core.is_none() {
            return;
        }
        let now = self.core_now().mono_ms;
        let late = self.side.asked.iter().find(|(_, a)| {
            let due = a.asked_ms + a.wait_ms;
            let open = |id: u64| {
                let conn = self.conns.iter().find(|c| c.id == id);
                conn.is_some_and(|c| c.server_open)
            };
            // soft pins, and with them the question, end after 30 s
            !a.answered && now >= due && now < a.asked_ms + 30_000 && open(a.conn)
        });
        if let Some(((instance, tag), asked)) = late {
            let what = format!(
                "PROBE {tag} of instance {instance}, asked at {} for {} ms, is not answered at {now}",
                asked.asked_ms, asked.wait_ms
            );
            self.broke(Rule::L3, || what);
        }
    }

    /// At the end nothing is asked of tiers any more.
    pub(super) fn tiers_rest(&mut self) {
        let open = self.side.jobs.len();
        let idle = self
            .side
            .core
            .as_ref()
            .and_then(|c| c.engine())
            .is_none_or(|e| e.lower_idle());
        if open > 0 || !idle {
            self.broke(Rule::L1, || {
                format!("{open} orders are open at the end, nothing waits: {idle}")
            });
        }
    }
}
