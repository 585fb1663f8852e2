//! The bytes of one section, packed and unpacked.

use kvcachepool_kernels::codec::{self, CodecError, Element, Shape, relative_error};
use kvcachepool_protocol::object::{Codec, Section, digest};

/// Bytes of a section of which it is measured what was lost.
const MEASURED_BYTES: usize = 64 << 10;
/// Numbers that share a scale, as docs/codecs.md measures them.
const GROUP: u16 = 128;
/// The same where each has 4 bits.
const GROUP_OF_INT4: u16 = 64;

/// Most bytes that raw bytes are packed into.
pub fn longest(raw_bytes: u64) -> u64 {
    raw_bytes + raw_bytes / 16 + 4096
}

/// A packed section.
pub struct Packed {
    /// Its entry.
    pub section: Section,
    /// Its bytes.
    pub stored: Vec<u8>,
    /// Relative error of what comes back; 0 where nothing was lost.
    pub error: f64,
}

/// How a codec packs raw bytes. None: not at all.
fn how(codec: Codec, element: Element, raw_bytes: u64) -> Option<(codec::Codec, Shape)> {
    let (codec, element) = match codec {
        Codec::None => return None,
        // Most KV caches hold numbers of two bytes, and what is none is packed all the same.
        Codec::Lossless if raw_bytes.is_multiple_of(2) => (codec::Codec::Lossless, Element::Bf16),
        Codec::Lossless => (codec::Codec::Lossless, Element::Opaque),
        Codec::Fp8 => (codec::Codec::Fp8 { group: GROUP }, element),
        Codec::Int8 => (codec::Codec::Int8 { group: GROUP }, element),
        Codec::Int4 => (
            codec::Codec::Int4 {
                group: GROUP_OF_INT4,
            },
            element,
        ),
    };
    Some((codec, Shape::flat(element)))
}

/// Packs raw bytes. The section's raw digest is that of the bytes which will come back. An error: the codec has nothing for such bytes.
pub fn pack(
    codec: Codec,
    element: Element,
    section: &Section,
    mut raw: Vec<u8>,
) -> Result<Packed, CodecError> {
    let (how, shape) = how(codec, element, section.raw_bytes).ok_or(CodecError::NotNumbers)?;
    let mut stored = Vec::new();
    codec::encode(how, &shape, &raw, &mut stored)?;
    let (mut section, mut error) = (*section, 0.0);
    if !how.is_lossless() {
        // Whole numbers of every element.
        let measured = raw.get(..raw.len().min(MEASURED_BYTES)).map(<[u8]>::to_vec);
        codec::decode(how, &shape, &stored, &mut raw)?;
        section.raw_digest = digest(&raw);
        error = relative_error(element, &measured.unwrap_or_default(), &raw);
    }
    section.stored_bytes = stored.len() as u64;
    section.stored_digest = digest(&stored);
    Ok(Packed {
        section,
        stored,
        error,
    })
}

/// Unpacks what [`pack`] made; the digest of what comes out is that of the section, or it is an error.
pub fn unpack(
    codec: Codec,
    element: Element,
    section: &Section,
    stored: &[u8],
) -> Result<Vec<u8>, String> {
    let how = how(codec, element, section.raw_bytes);
    let (how, shape) = how.ok_or("it is not packed")?;
    let mut raw = vec![0; section.raw_bytes as usize];
    codec::decode(how, &shape, stored, &mut raw).map_err(|e| e.to_string())?;
    match digest(&raw) == section.raw_digest {
        true => Ok(raw),
        false => Err("what was unpacked is not what its digest says".into()),
    }
}
