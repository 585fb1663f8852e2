//! Tiers below memory: what they hold, and everything that they may do to whoever asks: be slow, fail, hang, lie, answer what was
//! cancelled, and go on writing after it. Reads may outlive the engine.

use super::counts::Fault;
use super::memory::{right_digest, short};
use super::rules::Rule;
use super::text::{BLOCK_TOKENS, CHUNK_BLOCKS, Piece, block_hashes, piece};
use super::world::{World, say};
use super::writing::{PUT_BYTES_MAX, PUTS_MAX};
use kvcachepool_engine::config::{Admission, TierConfig, WritePolicy};
use kvcachepool_engine::sessions::Input;
use kvcachepool_engine::tier::{Cause, Kind};
use kvcachepool_engine::{Completion, Domains, Effect};
use kvcachepool_protocol::domain::Domain;
use kvcachepool_protocol::key::{
    ChunkKey, EngineHash, KeyKind, NamespaceId, chunk_key, unpack_hashes,
};
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Form, Object, Section};
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
    /// Its head is another's, or of a time that is over.
    pub wrong: bool,
    /// Of before a clear: nobody may get it any more.
    pub stale: bool,
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
    /// A clear is under way: nothing else may be asked of it.
    pub clearing: bool,
    /// Objects that the state machine of this boot found to be none: it must not ask for them again.
    pub spoilt: BTreeSet<[u8; 32]>,
}

/// An effect that a tier works on, and how it stands.
#[derive(Debug, Clone)]
pub struct TierJob {
    pub tier: usize,
    pub region: usize,
    pub bytes: u64,
    pub cancelled: bool,
    /// Of before a clear.
    pub stale: bool,
    /// Of the sections that a fetch is done with.
    pub digests: Vec<Option<[u8; 16]>>,
    /// A fetch writes the next section.
    pub writing: bool,
    pub effect: Effect,
}

/// Tiers and everything about them.
#[derive(Debug, Default)]
pub struct Lower {
    pub stores: Vec<Store>,
    pub domain: Option<Domain>,
    /// Last block of every chunk that was granted to a worker, or lay in a tier.
    pub granted: BTreeSet<[u8; 32]>,
    /// Chunks that may be there: granted to a worker, or in a tier, at some time.
    pub ever: BTreeSet<u64>,
}

impl Lower {
    /// Key of the chunk that ends with this block.
    pub fn key_of(&self, hash: &[u8; 32]) -> Option<ChunkKey> {
        let model = self.domain.as_ref()?.model_id;
        let (namespace, hash) = (NamespaceId::default(), EngineHash(*hash));
        Some(chunk_key(&model, &namespace, KeyKind::Prefix, &hash))
    }
}

/// Tiers of a history, the nearest first.
pub fn configs(tiers: usize) -> Vec<TierConfig> {
    let kinds: &[Kind] = match tiers {
        0 => &[],
        1 => &[Kind::Disk],
        2 => &[Kind::Disk, Kind::S3],
        _ => &[Kind::Disk, Kind::Redis, Kind::S3],
    };
    kinds
        .iter()
        .map(|kind| TierConfig {
            lookups_max: LOOKUPS_MAX,
            fetches_max: FETCHES_MAX,
            fetch_queue_max: QUEUE_MAX,
            puts_max: PUTS_MAX,
            put_bytes_max: PUT_BYTES_MAX,
            put_queue_bytes_max: 64 << 16,
            put_wait_ms: 500,
            put_age_ms_max: 3_000,
            write: match kind {
                Kind::Redis => WritePolicy::WriteBack,
                _ => WritePolicy::WriteThrough,
            },
            admission: match kind {
                Kind::S3 => Admission::Reused,
                _ => Admission::All,
            },
            ..TierConfig::new(*kind)
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
                    self.lower.granted.insert(piece.hash);
                    objects.insert(held.object.key().0, held);
                }
            }
            self.lower.stores.push(Store {
                kind: config.kind,
                up: !self.rng.chance(100),
                told_up: false,
                hung_until: 0,
                objects,
                clearing: false,
                spoilt: BTreeSet::new(),
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
            (group == 0 || window).then(|| Section::plain(group as u32, shard, bytes, digest))
        });
        let blocks = block_hashes(piece);
        let mut object = Object {
            kind: KeyKind::Prefix,
            codec: Codec::None,
            fidelity: Fidelity::Exact,
            form: Form::default(),
            cipher: Cipher::None,
            model: domain.model_id,
            layout: domain.object_layout,
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
        let wrong = self.p.rates.tier > 0 && self.rng.chance(30);
        if wrong {
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
            wrong,
            stale: false,
            corrupt: self.p.rates.tier > 0 && self.rng.chance(self.p.corrupt),
        }
    }

    /// An engine began: it is told of the tiers.
    pub(super) fn tell_tiers(&mut self) {
        for at in 0..self.lower.stores.len() {
            self.lower.stores[at].told_up = false;
            self.lower.stores[at].spoilt.clear();
            // a boot that ends does not end its clears
            self.lower.stores[at].clearing = false;
            for held in self.lower.stores[at].objects.values_mut() {
                held.stale = false;
            }
            if self.lower.stores[at].up {
                self.tell_tier(at);
            }
        }
    }

    fn tell_tier(&mut self, at: usize) {
        if self.side.driver.is_none() {
            return;
        }
        let store = &mut self.lower.stores[at];
        let (tier, up) = (store.kind, store.up);
        store.told_up = up;
        store.spoilt.clear();
        let down = (!up).then(|| "Io".to_owned());
        say!(self, "tier {tier} is up: {up}");
        self.drive(Input::Completed(Completion::Tier { tier, down }));
    }

    /// A tier drops some of what it holds, for want of room or by age, and tells nobody.
    pub(super) fn tier_drops(&mut self) -> bool {
        if self.lower.stores.is_empty() {
            return false;
        }
        let at = self.rng.below(self.lower.stores.len());
        let (rng, store) = (&mut self.rng, &mut self.lower.stores[at]);
        let before = store.objects.len();
        store.objects.retain(|_, _| rng.chance(500));
        let dropped = store.objects.len() < before;
        if dropped {
            self.hit(Fault::TierDropped);
            say!(self, "tier {at} drops some of what it holds");
        }
        dropped
    }

    /// An object that nobody can use any more is taken away.
    pub(super) fn discard(&mut self, kind: Kind, key: &ChunkKey) {
        let Some(store) = self.lower.stores.iter_mut().find(|s| s.kind == kind) else {
            return;
        };
        if !store.told_up {
            self.broke(Rule::S10, || format!("{kind} is down and asked to discard"));
            return;
        }
        if let Some(held) = store.objects.get(&key.0).filter(|held| held.wrong) {
            let expired = held.object.expires_unix_s != 0;
            say!(self, "{kind} discards {key:?}: it has expired: {expired}");
            if !expired {
                self.broke(Rule::S10, || {
                    format!("{kind} is to discard what has not expired")
                });
                return;
            }
            let store = self.lower.stores.iter_mut().find(|s| s.kind == kind);
            if let Some(store) = store {
                store.objects.remove(&key.0);
                store.spoilt.remove(&key.0);
            }
            self.hit(Fault::TierDiscarded);
        }
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

    /// Everything is cleared: what tiers hold, and what is on its way from there, is of before.
    pub(super) fn clear_tiers(&mut self) {
        for store in &mut self.lower.stores {
            store.clearing = true;
            for held in store.objects.values_mut() {
                held.stale = true;
            }
        }
        for job in &mut self.side.jobs {
            job.stale = true;
        }
    }

    /// A tier removed what it holds, or some of it, or could not.
    pub(super) fn clear_ends(&mut self, tier: usize, domains: Option<&Domains>, fails: bool) {
        let store = &mut self.lower.stores[tier];
        let of = |held: &Held| {
            let domain = (held.object.model, held.object.layout);
            domains.is_none_or(|all| all.contains(&domain))
        };
        let before = store.objects.len();
        let keeps = |n: usize, held: &Held| !of(held) || fails && n.is_multiple_of(2);
        let mut n = 0;
        store.objects.retain(|_, held| {
            n += 1;
            keeps(n, held)
        });
        let removed = if fails {
            Err(Cause::Timeout)
        } else {
            store.clearing = false;
            store.spoilt.clear();
            // of a domain that nobody has asked for yet
            for held in store.objects.values_mut() {
                held.stale = false;
            }
            Ok((before - store.objects.len()) as u64)
        };
        let tier = store.kind;
        self.hit(if fails {
            Fault::ClearFailed
        } else {
            Fault::TierCleared
        });
        self.tell_core(Completion::Clear { tier, removed });
    }

    /// Answers to PROBEs are final when their wait is over, whatever tiers do.
    pub(super) fn answers_in_time(&mut self) {
        if self.side.driver.is_none() {
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
            .core()
            .and_then(|c| c.engine())
            .is_none_or(|e| e.lower_idle());
        if open > 0 || !idle {
            self.broke(Rule::L1, || {
                format!("{open} orders are open at the end, nothing waits: {idle}")
            });
        }
    }
}
