//! Objects that are generated from a seed, and memory for their puts and gets.

use fastrand::Rng;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_memory::memfd::{Pages, sealed};
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, LayoutId, ModelId, NamespaceId};
use kvcachepool_protocol::object::{
    Cipher, Codec, Fidelity, Form, HEADER_BYTES, HeaderRecord, Object, ObjectName, Section, digest,
};
use kvcachepool_tiers::{Get, Place, Put, Span};
use rustix::fd::AsFd;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use zerocopy::FromBytes;

/// Initial value of all memory.
const UNTOUCHED: u8 = 0xA5;
/// Alignment of spans, as for slots, and minimum gap behind each.
const GUARD_BYTES: u64 = 4096;

/// An arena that only grows: no two spans overlap.
#[derive(Debug)]
pub struct Memory {
    arena: Arc<Mapping>,
    next: AtomicU64,
}

impl Memory {
    /// Memory for spans of `bytes` bytes in total, with their gaps.
    pub fn new(bytes: u64) -> Self {
        let fd = sealed("tier-suite", bytes, Pages::Base).unwrap();
        let arena = Arc::new(Mapping::new(fd.as_fd(), bytes).unwrap());
        Self {
            arena,
            next: AtomicU64::new(0),
        }
    }

    /// A new span.
    pub fn span(&self, length: u64) -> Span {
        self.held(length, Arc::new(()))
    }

    /// A new span with a hold.
    pub fn held(&self, length: u64, hold: Arc<dyn Any + Send + Sync>) -> Span {
        let taken = length.next_multiple_of(GUARD_BYTES) + GUARD_BYTES;
        let offset = self.next.fetch_add(taken, Relaxed);
        let untouched = vec![UNTOUCHED; taken as usize];
        assert!(self.arena.write(offset, &untouched), "more memory");
        Span::new(self.arena.clone(), offset, length, hold).unwrap()
    }

    /// A new span with these bytes.
    pub fn filled(&self, bytes: &[u8]) -> Span {
        let span = self.span(bytes.len() as u64);
        assert!(span.write(0, bytes));
        span
    }
}

/// The current bytes of a span.
pub fn bytes_of(span: &Span) -> Vec<u8> {
    let mut bytes = vec![0; span.length as usize];
    assert!(span.read(0, &mut bytes));
    bytes
}

/// Whether the span still has its initial value.
pub fn untouched(span: &Span) -> bool {
    bytes_of(span).iter().all(|byte| *byte == UNTOUCHED)
}

/// Whether the gap behind the span still has its initial value.
fn guard_untouched(span: &Span) -> bool {
    let end = span.offset + span.length;
    let mut guard = vec![0; (end.next_multiple_of(GUARD_BYTES) + GUARD_BYTES - end) as usize];
    assert!(span.arena.read(end, &mut guard));
    guard.iter().all(|byte| *byte == UNTOUCHED)
}

#[derive(Debug, Clone)]
pub struct Sample {
    pub object: Object,
    /// Bytes per section.
    pub bytes: Vec<Vec<u8>>,
}

impl Sample {
    /// Object `number` of a seed, with sections of these lengths. Objects of one seed and length share model and layout.
    pub fn new(seed: u64, number: u64, lengths: &[u64]) -> Self {
        let bytes: Vec<Vec<u8>> = (0u64..)
            .zip(lengths)
            .map(|(index, length)| like_kv(noise(seed, number << 8 | index, *length)))
            .collect();
        let section = |(index, bytes): (u32, &Vec<u8>)| Section::exact(index / 2, index % 2, bytes);
        let last_hash = EngineHash(digits(seed, number));
        let object = Object {
            kind: KeyKind::Prefix,
            codec: Codec::None,
            fidelity: Fidelity::Exact,
            form: Form::default(),
            cipher: Cipher::None,
            model: ModelId(digits(seed, u64::MAX)),
            layout: LayoutId(digits(seed, u64::MAX - 1)),
            namespace: NamespaceId::default(),
            last_hash,
            parent: ChunkKey::default(),
            part: 0,
            parts: 1,
            tokens: 16,
            first_token: 0,
            created_unix_ms: 1_800_000_000_000 + number,
            expires_unix_s: 0,
            writer: [7; 16],
            engine: "vllm".into(),
            engine_version: "0".into(),
            nonce: [0; 24],
            sections: (0..).zip(&bytes).map(section).collect(),
            block_hashes: vec![last_hash],
            token_ids: (0..16).collect(),
        };
        Self { object, bytes }
    }

    pub fn name(&self) -> ObjectName {
        self.object.name()
    }

    /// A put of the object from new memory.
    pub fn put(&self, memory: &Memory) -> Put {
        Put {
            object: self.object.clone(),
            spans: self.bytes.iter().map(|b| memory.filled(b)).collect(),
        }
    }

    /// A get of the sections with these indexes into new memory.
    pub fn get(&self, memory: &Memory, wanted: &[usize]) -> Get {
        let place = |index: &usize| {
            let section = &self.object.sections[*index];
            Place {
                group: section.group,
                shard: section.shard,
                span: memory.span(section.stored_bytes),
            }
        };
        Get {
            name: self.name(),
            places: wanted.iter().map(place).collect(),
        }
    }

    /// A get of all sections.
    pub fn get_all(&self, memory: &Memory) -> Get {
        self.get(memory, &Vec::from_iter(0..self.bytes.len()))
    }

    /// Whether the places hold the bytes of their sections, and the gaps behind them are unchanged.
    pub fn lies_in(&self, places: &[Place]) -> bool {
        places.iter().all(|place| {
            let mut sections = self.object.sections.iter().zip(&self.bytes);
            let (_, bytes) = sections
                .find(|(s, _)| (s.group, s.shard) == (place.group, place.shard))
                .unwrap();
            *bytes == bytes_of(&place.span) && guard_untouched(&place.span)
        })
    }
}

/// A change of an object's header.
pub type Change = fn(&mut HeaderRecord);

/// Headers of this version that only a later build may write, with a valid digest: (description, change).
pub const LATER: [(&str, Change); 2] = [
    ("codec 6 is unknown to this build", |h| h.codec = 6),
    ("flags 1 is unknown to this build", |h| h.flags = 1.into()),
];

/// Changes an encoded header, and updates its digest.
pub fn sealed_again(head: &mut [u8], change: Change) {
    let (record, _) = HeaderRecord::mut_from_prefix(head).unwrap();
    change(record);
    let at = HEADER_BYTES - 16;
    let sum = digest(&head[..at]);
    head[at..HEADER_BYTES].copy_from_slice(&sum);
}

fn noise(seed: u64, purpose: u64, length: u64) -> Vec<u8> {
    let mut rng = Rng::with_seed(seed ^ purpose.rotate_left(32));
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while (bytes.len() as u64) < length {
        bytes.extend(rng.u64(..).to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}

/// Makes every other byte predictable, like signs and exponents of a KV cache, so that codecs can gain something.
fn like_kv(mut bytes: Vec<u8>) -> Vec<u8> {
    for byte in bytes.iter_mut().skip(1).step_by(2) {
        *byte = 0x3C | *byte & 0x83;
    }
    bytes
}

fn digits(seed: u64, purpose: u64) -> [u8; 32] {
    noise(!seed, purpose, 32).try_into().unwrap()
}
