//! An engine with a domain and names for chunks.

use crate::config::{Config, EvictionPolicy};
use crate::memory_table::MemoryTable;
use crate::table::Geometry;
use crate::*;
use kvcachepool_protocol::domain::{GroupKind, GroupPlan, SectionPlan};
use kvcachepool_protocol::key::*;
use kvcachepool_protocol::message::GRANT_GRANTED;
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef};

pub const CHUNK_TOKENS: u32 = 64;
pub const BLOCK_TOKENS: u32 = 16;
/// Locks of the two writers.
pub const OWNERS: [u32; 2] = [11, 12];

pub struct Rig {
    pub engine: Engine<MemoryTable>,
    pub plan: SectionPlan,
    pub now: Time,
    pub tag: u64,
    pub layout: LayoutId,
}

/// A group of full attention over `shards`, and a window group where `window` is set. A block has `block_bytes`.
pub fn plan(shards: u32, window: bool, block_bytes: u64) -> SectionPlan {
    let full = GroupPlan {
        kind: GroupKind::Full,
        block_tokens: BLOCK_TOKENS,
        block_bytes,
        shards,
        window_tokens: 0,
    };
    let mut groups = vec![full];
    if window {
        groups.push(GroupPlan {
            kind: GroupKind::Window,
            window_tokens: 32,
            shards: 1,
            ..full
        });
    }
    SectionPlan::new(CHUNK_TOKENS, BLOCK_TOKENS, groups).unwrap()
}

pub fn hash(path: &[u8], tokens: u32) -> EngineHash {
    let mut h = [0u8; 32];
    h[..8].copy_from_slice(&(path.len() as u64).to_le_bytes());
    for (i, step) in path.iter().enumerate() {
        h[8 + i % 20] = h[8 + i % 20]
            .wrapping_mul(31)
            .wrapping_add(*step)
            .wrapping_add(1);
    }
    h[28..].copy_from_slice(&tokens.to_le_bytes());
    EngineHash(h)
}

pub fn key(path: &[u8], tokens: u32) -> ChunkKey {
    chunk_key(
        &ModelId::default(),
        &NamespaceId::default(),
        KeyKind::Prefix,
        &hash(path, tokens),
    )
}

impl Rig {
    pub fn new(arena_bytes: u64, config: Config, plan: SectionPlan) -> Self {
        let geometry = Geometry::new(1, arena_bytes, 1 << 20);
        let mut engine = Engine::new(Time::default(), MemoryTable::new(geometry), config, false);
        engine.populated(u32::MAX);
        Self {
            engine,
            plan,
            now: Time {
                mono_ms: 1,
                unix_s: 1_000,
            },
            tag: 0,
            layout: LayoutId([1; 32]),
        }
    }

    pub fn small(policy: EvictionPolicy) -> Self {
        Self::new(
            4 << 20,
            Config {
                policy,
                ..Config::default()
            },
            plan(1, false, 16 << 10),
        )
    }

    /// Asks for the chunk at the end of `path` (one step per chunk), with `tokens` tokens.
    pub fn grant(&mut self, path: &[u8], tokens: u32, groups: u32) -> (u8, Vec<SectionRef>) {
        let mut refs = Vec::new();
        let result = self.wish(path, tokens, groups, |engine, now, context, wish| {
            engine.memory.grant(now, context, wish, &mut refs)
        });
        refs.retain(|r| r.slot.get() != NO_SLOT);
        (result, refs)
    }

    /// Begins to fetch a full chunk from a tier.
    pub fn fetch(&mut self, path: &[u8]) -> Option<(FetchId, Vec<SectionRef>)> {
        let groups = self.plan.all_groups();
        self.wish(path, CHUNK_TOKENS, groups, |engine, now, context, wish| {
            engine.memory.fetch(now, context, wish).ok()
        })
    }

    fn wish<R>(
        &mut self,
        path: &[u8],
        tokens: u32,
        groups: u32,
        ask: impl FnOnce(&mut Engine<MemoryTable>, Time, &GrantContext<'_>, &Wish<'_>) -> R,
    ) -> R {
        self.tag += 1;
        let parent = (path.len() > 1).then(|| key(&path[..path.len() - 1], CHUNK_TOKENS));
        let blocks: Vec<EngineHash> = (1..=tokens / BLOCK_TOKENS)
            .map(|b| hash(path, b * BLOCK_TOKENS))
            .collect();
        let wish = Wish {
            key: key(path, tokens),
            parent,
            last_hash: hash(path, tokens),
            first_token: (path.len() as u32 - 1) * CHUNK_TOKENS,
            tokens,
            sections: self.plan.section_map(groups),
            block_hashes: &blocks,
        };
        let writers: Vec<u32> = (0..self.plan.sections())
            .map(|s| OWNERS[s as usize % 2])
            .collect();
        let context = GrantContext {
            scheduler: 1,
            kind: KeyKind::Prefix,
            tag: self.tag,
            model: ModelId::default(),
            layout: self.layout,
            namespace: NamespaceId::default(),
            plan: &self.plan,
            writers: &writers,
            expires_unix_s: 0,
        };
        ask(&mut self.engine, self.now, &context, &wish)
    }

    pub fn commit(&mut self, refs: &[SectionRef]) {
        for r in refs {
            self.engine
                .memory
                .commit(OWNERS[r.section.get() as usize % 2], *r);
        }
    }

    /// Ends a digest, if it is one; the bytes are what they should be.
    pub fn end_digest(&mut self, job: DigestJob) {
        let digest = Some([job.slot as u8; 16]);
        self.digested(job, digest);
    }

    pub fn digested(&mut self, job: DigestJob, digest: Option<[u8; 16]>) {
        let DigestJob {
            slot,
            generation,
            check,
            ..
        } = job;
        let done = Completion::Digest {
            slot,
            generation,
            check,
            digest,
        };
        self.engine.completed(self.now, done);
    }

    /// Digests that are asked for, without starting work of the tiers.
    pub fn digests(&mut self) -> Vec<DigestJob> {
        self.engine.settle();
        let mut digests = Vec::new();
        self.engine.effects.retain(|effect| match effect {
            Effect::Digest(job) => {
                digests.push(*job);
                false
            }
            _ => true,
        });
        digests
    }

    /// Ends all digests.
    pub fn digest_all(&mut self) {
        loop {
            let digests = self.digests();
            if digests.is_empty() {
                return;
            }
            for job in digests {
                self.end_digest(job);
            }
        }
    }

    /// Stores a full chunk; false where there was no room.
    pub fn store(&mut self, path: &[u8]) -> bool {
        self.store_tokens(path, CHUNK_TOKENS)
    }

    pub fn store_tokens(&mut self, path: &[u8], tokens: u32) -> bool {
        let (result, refs) = self.grant(path, tokens, self.plan.all_groups());
        self.commit(&refs);
        self.digest_all();
        result == GRANT_GRANTED
    }

    pub fn has(&self, path: &[u8]) -> bool {
        self.engine
            .memory
            .find_key(&key(path, CHUNK_TOKENS))
            .iter()
            .any(|f| f.readable)
    }

    pub fn has_tail(&self, path: &[u8], tokens: u32) -> bool {
        self.engine
            .memory
            .find_key(&key(path, tokens))
            .iter()
            .any(|f| f.readable)
    }

    /// PROBE of the chunks along `path`; returns (tag, answer).
    pub fn probe(&mut self, request: &str, path: &[u8]) -> (u64, Answer) {
        let keys = (1..=path.len())
            .map(|n| key(&path[..n], CHUNK_TOKENS))
            .collect();
        self.probe_keys(request, keys, None)
    }

    /// The same of chunks by their keys, `local_tokens` of which the engine holds itself.
    pub fn probe_keys(
        &mut self,
        request: &str,
        keys: Vec<ChunkKey>,
        local_tokens: Option<u64>,
    ) -> (u64, Answer) {
        self.tag += 1;
        let question = Question {
            scheduler: 1,
            kind: KeyKind::Prefix,
            independent: false,
            request: request.into(),
            tag: self.tag,
            layout: self.layout,
            sections: self.plan.sections(),
            keys,
            chunk_tokens: CHUNK_TOKENS,
            tail_tokens: 0,
            local_tokens,
            wait_ms: 1_000,
            reach: None,
        };
        (self.tag, self.engine.probe(self.now, question).unwrap())
    }

    /// A request that reads the chunks along `path` and ends.
    pub fn read(&mut self, path: &[u8]) {
        let (tag, _) = self.probe("reader", path);
        self.engine
            .pin(self.now, 1, "reader", tag, 0, path.len() as u32);
        self.engine.release(self.now, 1, "reader");
    }

    pub fn check(&self) {
        self.engine.check().unwrap();
    }
}
