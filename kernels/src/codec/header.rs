//! The header of every packed section, little-endian:
//!
//! ```text
//! 0    4   magic "KVK1"; the last letter is the version
//! 4    u8  codec       5  u8 element      6  u16 group, 0 without
//! 8    u32 layers     12  u32 halves     16  u32 tokens     20  u32 channels
//! 24   u64 raw bytes
//! ```
//! A codec, a shape and a length determine all bytes of the header, so it is compared and not parsed.

use super::{Codec, CodecError, Shape};

pub const HEADER_BYTES: usize = 32;
const MAGIC: &[u8; 4] = b"KVK1";

/// The header for `raw` raw bytes.
pub fn header(codec: Codec, shape: &Shape, raw: usize) -> [u8; HEADER_BYTES] {
    let (id, group) = match codec {
        Codec::Lossless => (1u8, 0),
        Codec::Fp8 { group } => (2, group),
        Codec::Int8 { group } => (3, group),
        Codec::Int4 { group } => (4, group),
        Codec::CacheGen => (5, 0),
    };
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(MAGIC);
    header[4] = id;
    header[5] = shape.element as u8;
    header[6..8].copy_from_slice(&group.to_le_bytes());
    header[8..12].copy_from_slice(&shape.layers.to_le_bytes());
    header[12..16].copy_from_slice(&shape.halves.to_le_bytes());
    header[16..20].copy_from_slice(&shape.tokens.to_le_bytes());
    header[20..24].copy_from_slice(&shape.channels.to_le_bytes());
    header[24..].copy_from_slice(&(raw as u64).to_le_bytes());
    header
}

/// The bytes after the header, if the header is the expected one.
pub fn body<'a>(
    codec: Codec,
    shape: &Shape,
    raw: usize,
    stored: &'a [u8],
) -> Result<&'a [u8], CodecError> {
    let (found, body) = stored
        .split_at_checked(HEADER_BYTES)
        .ok_or(CodecError::StoredLength)?;
    if !found.starts_with(MAGIC) {
        Err(CodecError::NotOurs)
    } else if found != header(codec, shape, raw) {
        Err(CodecError::OtherShape)
    } else {
        Ok(body)
    }
}
