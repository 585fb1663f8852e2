//! Objects to put and places to get them into: one section each, from and to slots of an arena.

use kvcachepool_memory::mapping::Mapping;
use kvcachepool_memory::memfd::{Pages, sealed};
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, LayoutId, ModelId, NamespaceId};
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Form, Object, Section};
use kvcachepool_tiers::{Get, Place, Put, Span};
use rustix::fd::AsFd;
use std::sync::Arc;

/// As many slots as operations are under way, filled with bytes that do not repeat.
pub struct Slots {
    arena: Arc<Mapping>,
    bytes: u64,
    digests: Vec<[u8; 16]>,
}

impl Slots {
    pub fn new(count: usize, bytes: u64) -> Self {
        let length = count as u64 * bytes;
        let fd = sealed("tier-load", length, Pages::Base).unwrap();
        let arena = Arc::new(Mapping::new(fd.as_fd(), length).unwrap());
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let mut page = [0; 4096];
        for at in (0..length).step_by(page.len()) {
            for word in page.as_chunks_mut::<8>().0 {
                // xorshift: quick, and nothing that a device could compress
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                *word = state.to_le_bytes();
            }
            let end = (length - at).min(4096) as usize;
            assert!(arena.write(at, page.get(..end).unwrap()));
        }
        let digest = |slot| arena.xxh3_128(slot as u64 * bytes, bytes).unwrap();
        let digests = (0..count).map(digest).collect();
        Self {
            arena,
            bytes,
            digests,
        }
    }

    /// Where a slot lies.
    pub fn span(&self, slot: usize) -> Span {
        let offset = slot as u64 * self.bytes;
        Span::new(self.arena.clone(), offset, self.bytes, Arc::new(())).unwrap()
    }

    /// Object `number` with the bytes of a slot.
    pub fn put(&self, slot: usize, number: u64) -> Put {
        Put {
            object: object(number, self.bytes, self.digests[slot]),
            spans: vec![self.span(slot)],
        }
    }

    /// Object `number`, into a slot.
    pub fn get(&self, slot: usize, number: u64) -> Get {
        Get {
            name: object(number, self.bytes, [0; 16]).name(),
            places: vec![Place {
                group: 0,
                shard: 0,
                span: self.span(slot),
            }],
        }
    }
}

/// Objects of one run are of one model; runs beside or after each other share nothing.
fn object(number: u64, bytes: u64, digest: [u8; 16]) -> Object {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    hash[8..16].copy_from_slice(&bytes.to_le_bytes());
    let mut model = [0xB3; 32];
    model[..4].copy_from_slice(&std::process::id().to_le_bytes());
    Object {
        kind: KeyKind::Prefix,
        codec: Codec::None,
        fidelity: Fidelity::Exact,
        form: Form::default(),
        cipher: Cipher::None,
        model: ModelId(model),
        layout: LayoutId([0xB4; 32]),
        namespace: NamespaceId::default(),
        last_hash: EngineHash(hash),
        parent: ChunkKey::default(),
        part: 0,
        parts: 1,
        tokens: 16,
        first_token: 0,
        created_unix_ms: 1_800_000_000_000,
        expires_unix_s: 0,
        writer: [1; 16],
        engine: "tier_load".into(),
        engine_version: "0".into(),
        nonce: [0; 24],
        sections: vec![Section::plain(0, 0, bytes, digest)],
        block_hashes: vec![EngineHash(hash)],
        token_ids: (0..16).collect(),
    }
}
