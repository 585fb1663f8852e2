//! Objects: one per complete chunk, with the same bytes in every lower tier. A new process can use every object that it finds.
//!
//! ```text
//! 0      header, 512 bytes little-endian, its xxh3-128 in the last 16
//! 512    section table, 64 bytes each      { u32 group, u32 shard, u64 offset, u64 stored, u64 raw, 16 stored digest, 16 raw digest }
//!        engine block hashes, 32 bytes each
//!        token ids, u32 each (may be none)
//! 4 KiB  sections in order of (group, shard), each from the next multiple of 4 KiB; zeros between
//! ```
//! An object has exactly one encoding, and the decoder accepts no other: no gaps, no unknown flags, no other order.

mod form;
mod names;
mod wire;

pub use form::{Axis, Dim, Element, Form, MAX_DIMS};
pub use names::{BadName, ObjectName, REDIS_PREFIX, REDIS_SEGMENT_BYTES};
pub use wire::{BadObject, DimRecord, HEADER_BYTES, HeaderRecord, SectionRecord, head_bytes};

use crate::key::{ChunkKey, EngineHash, KeyKind, LayoutId, ModelId, NamespaceId, chunk_key};
use xxhash_rust::xxh3::xxh3_128;

/// First bytes of an object.
pub const MAGIC: [u8; 8] = *b"KVCPOBJ1";
/// Version of this format.
pub const VERSION: u32 = 1;
/// Every section starts at a multiple of this, so that direct I/O can read into slots.
pub const ALIGN: u64 = 4096;
/// Maximum sections of an object.
pub const MAX_SECTIONS: usize = crate::domain::MAX_SECTIONS;
/// Maximum tokens of a chunk, and maximum block hashes and token ids of an object.
pub const MAX_TOKENS: u32 = 65_536;
/// Longest object. Sums of lengths cannot overflow.
pub const MAX_BYTES: u64 = 1 << 40;

/// How section bytes are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(u8)]
pub enum Codec {
    /// Not packed.
    #[default]
    None = 0,
    /// Lossless: byte planes with an entropy coder.
    Lossless = 1,
    /// FP8 (e4m3fn) with a scale per 128 numbers.
    Fp8 = 2,
    /// 8-bit integers with a scale per 128 numbers.
    Int8 = 3,
    /// 4-bit integers between the smallest and the largest of 64 numbers.
    Int4 = 4,
    /// A few steps per token and layer, then an arithmetic coder per channel.
    CacheGen = 5,
}

impl Codec {
    /// Name in metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Lossless => "Lossless",
            Self::Fp8 => "FP8",
            Self::Int8 => "INT8",
            Self::Int4 => "INT4",
            Self::CacheGen => "CacheGen",
        }
    }

    /// The loss of this codec.
    pub fn fidelity(self) -> Fidelity {
        match self {
            Self::None | Self::Lossless => Fidelity::Exact,
            Self::Fp8 => Fidelity::Fp8,
            Self::Int8 => Fidelity::Int8,
            Self::Int4 => Fidelity::Int4,
            Self::CacheGen => Fidelity::CacheGen,
        }
    }
}

/// The loss since the engine wrote the KV. Ordered by increasing loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Fidelity {
    #[default]
    Exact = 0,
    /// At most the loss of [`Codec::Fp8`].
    Fp8 = 1,
    /// At most the loss of [`Codec::Int8`].
    Int8 = 2,
    /// At most the loss of [`Codec::Int4`].
    Int4 = 3,
    /// At most the loss of [`Codec::CacheGen`].
    CacheGen = 4,
}

impl Fidelity {
    pub const ALL: [Self; 5] = [
        Self::Exact,
        Self::Fp8,
        Self::Int8,
        Self::Int4,
        Self::CacheGen,
    ];

    /// Name in object names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::CacheGen => "cachegen",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|f| *f as u8 == number)
    }
}

/// How section bytes are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(u8)]
pub enum Cipher {
    /// Not encrypted.
    #[default]
    None = 0,
}

/// One section of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Section {
    pub group: u32,
    /// Shard of the group.
    pub shard: u32,
    /// Length of the stored bytes.
    pub stored_bytes: u64,
    /// Length of the bytes in the arena.
    pub raw_bytes: u64,
    /// xxh3-128 of the stored bytes, little-endian.
    pub stored_digest: [u8; 16],
    /// xxh3-128 of the bytes in the arena, little-endian.
    pub raw_digest: [u8; 16],
}

impl Section {
    /// A section with these bytes that is stored without packing.
    pub fn exact(group: u32, shard: u32, bytes: &[u8]) -> Self {
        Self::plain(group, shard, bytes.len() as u64, digest(bytes))
    }

    /// A section of this many bytes with this digest that is stored without packing.
    pub fn plain(group: u32, shard: u32, bytes: u64, digest: [u8; 16]) -> Self {
        Self {
            group,
            shard,
            stored_bytes: bytes,
            raw_bytes: bytes,
            stored_digest: digest,
            raw_digest: digest,
        }
    }
}

/// xxh3-128, little-endian: the digest of objects and slots.
pub fn digest(bytes: &[u8]) -> [u8; 16] {
    xxh3_128(bytes).to_le_bytes()
}

/// An object without the bytes of its sections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub kind: KeyKind,
    /// How sections are packed.
    pub codec: Codec,
    /// Loss since the engine wrote the KV.
    pub fidelity: Fidelity,
    /// Form of the raw bytes of all sections.
    pub form: Form,
    /// How sections are encrypted.
    pub cipher: Cipher,
    /// Identity of the KV values.
    pub model: ModelId,
    /// Identity of the layout.
    pub layout: LayoutId,
    /// Namespace of the chunk.
    pub namespace: NamespaceId,
    /// Engine hash of the chunk's last block. The key is made from it, the model, the namespace and the kind.
    pub last_hash: EngineHash,
    /// Key of the preceding chunk; all zero for the first.
    pub parent: ChunkKey,
    /// Index of this part of the chunk, from 0.
    pub part: u32,
    /// Number of parts of the chunk.
    pub parts: u32,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Position of its first token.
    pub first_token: u32,
    /// Time of writing, Unix milliseconds.
    pub created_unix_ms: u64,
    /// Expiry, Unix seconds; 0 = never.
    pub expires_unix_s: u64,
    /// Random id of the writing process.
    pub writer: [u8; 16],
    /// Name of the engine, at most 16 bytes.
    pub engine: String,
    /// Version of the engine, at most 32 bytes.
    pub engine_version: String,
    /// Nonce of the cipher; zero without one.
    pub nonce: [u8; 24],
    /// In order of (group, shard), at least one.
    pub sections: Vec<Section>,
    /// Engine hashes of the chunk's blocks; may be empty.
    pub block_hashes: Vec<EngineHash>,
    /// Token ids; empty = not kept, otherwise `tokens` of them.
    pub token_ids: Vec<u32>,
}

impl Object {
    /// The section of a group and shard.
    pub fn section(&self, group: u32, shard: u32) -> Option<&Section> {
        let mut sections = self.sections.iter();
        sections.find(|s| (s.group, s.shard) == (group, shard))
    }

    pub fn key(&self) -> ChunkKey {
        chunk_key(&self.model, &self.namespace, self.kind, &self.last_hash)
    }

    /// Name of the object in every tier.
    pub fn name(&self) -> ObjectName {
        ObjectName {
            model: self.model.hex16(),
            layout: self.layout.hex16(),
            key: self.key(),
            fidelity: self.fidelity,
        }
    }

    /// Bytes before the first section, padded to [`ALIGN`].
    pub fn head_bytes(&self) -> u64 {
        let meta =
            64 * self.sections.len() + 32 * self.block_hashes.len() + 4 * self.token_ids.len();
        (HEADER_BYTES as u64 + meta as u64).next_multiple_of(ALIGN)
    }

    /// Offset of each section, in order.
    pub fn offsets(&self) -> Vec<u64> {
        let mut next = self.head_bytes();
        self.sections
            .iter()
            .map(|section| {
                let offset = next;
                next = next
                    .saturating_add(section.stored_bytes)
                    .checked_next_multiple_of(ALIGN)
                    .unwrap_or(u64::MAX);
                offset
            })
            .collect()
    }

    /// Length of the whole object, up to the end of its last section.
    pub fn total_bytes(&self) -> u64 {
        match (self.offsets().last(), self.sections.last()) {
            (Some(offset), Some(section)) => offset.saturating_add(section.stored_bytes),
            _ => self.head_bytes(),
        }
    }
}
