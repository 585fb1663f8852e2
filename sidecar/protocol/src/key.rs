//! Keys: 32-byte names, each kind with its own type. See `docs/internals/protocol.md`, "Keys".

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A key or hash is not 32 bytes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected {expected} bytes, got {got}: hashes are 32 bytes each, packed without separators"
)]
pub struct WrongLength {
    pub expected: usize,
    pub got: usize,
}

/// A text is not 64 hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected 64 hex digits")]
pub struct NotHex;

macro_rules! name32 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default,
            FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Serialize, Deserialize,
        )]
        #[repr(transparent)]
        #[serde(transparent)]
        pub struct $name(#[serde(with = "serde_bytes")] pub [u8; 32]);

        impl $name {
            /// Lower-case hex of all 32 bytes.
            pub fn hex(&self) -> String {
                hex(&self.0)
            }

            /// Parses all 64 hex digits in lower or upper case.
            pub fn from_hex(text: &str) -> Result<Self, NotHex> {
                unhex32(text).map($name).ok_or(NotHex)
            }

            /// The first 8 bytes as 16 hex digits, as used in file and object names.
            pub fn hex16(&self) -> String {
                hex(&self.0[..8])
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.hex16())
            }
        }

        impl TryFrom<&[u8]> for $name {
            type Error = WrongLength;
            fn try_from(bytes: &[u8]) -> Result<Self, WrongLength> {
                bytes.try_into().map($name).map_err(|_| WrongLength { expected: 32, got: bytes.len() })
            }
        }
    };
}

name32!(
    /// Identity of the KV *values*: BLAKE3 of the canonical JSON of the model descriptor (`domain.rs`).
    ModelId
);
name32!(
    /// Identity of the *layout* of KV bytes: BLAKE3 of the canonical JSON of the layout descriptor.
    LayoutId
);
name32!(
    /// Separates chunks by tags, content of LoRA adapters and cache epoch. Made by the connector. All zero = the default namespace.
    NamespaceId
);

impl NamespaceId {
    /// Whether only the process that made the namespace can name it, because it contains an epoch from `reset_cache`. The connector sets
    /// the last bit for this.
    pub fn is_of_one_process(&self) -> bool {
        self.0[31] & 1 == 1
    }
}

name32!(
    /// vLLM's hash of a KV block with its whole prefix (`request.block_hashes[i]`, `sha256` or `sha256_cbor`).
    EngineHash
);
name32!(
    /// Key of a chunk, made by [`chunk_key`].
    ChunkKey
);

/// Kind of a key. Only [`KeyKind::Prefix`] is produced today; index, header and wire format already have the field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
#[repr(u8)]
pub enum KeyKind {
    /// A chunk implies all chunks before it.
    #[default]
    Prefix = 1,
    Segment = 2,
    /// A key of another plugin.
    Opaque = 3,
    /// Transfer of one request.
    Request = 4,
}

impl TryFrom<u8> for KeyKind {
    type Error = u8;
    fn try_from(v: u8) -> Result<Self, u8> {
        Ok(match v {
            1 => Self::Prefix,
            2 => Self::Segment,
            3 => Self::Opaque,
            4 => Self::Request,
            other => return Err(other),
        })
    }
}

/// `BLAKE3(ModelId || namespace || key kind || engine hash of the chunk's last block)`.
pub fn chunk_key(
    model: &ModelId,
    namespace: &NamespaceId,
    kind: KeyKind,
    last_block: &EngineHash,
) -> ChunkKey {
    let mut h = blake3::Hasher::new();
    h.update(&model.0);
    h.update(&namespace.0);
    h.update(&[kind as u8]);
    h.update(&last_block.0);
    ChunkKey(*h.finalize().as_bytes())
}

/// Splits packed 32-byte hashes.
pub fn unpack_hashes(packed: &[u8]) -> Result<&[EngineHash], WrongLength> {
    <[EngineHash]>::ref_from_bytes(packed).map_err(|_| WrongLength {
        expected: packed.len().next_multiple_of(32),
        got: packed.len(),
    })
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut s, b| {
            let _ = write!(s, "{b:02x}");
            s
        })
}

fn unhex32(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let mut out = [0u8; 32];
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |c: u8| char::from(c).to_digit(16);
        let value = digit(*pair.first()?)? * 16 + digit(*pair.get(1)?)?;
        *byte = u8::try_from(value).ok()?;
    }
    Some(out)
}
