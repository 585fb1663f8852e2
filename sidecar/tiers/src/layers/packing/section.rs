//! Packs and unpacks the bytes of one section.

use kvcachepool_kernels::codec::{
    self, CodecError, Element, Shape, arrange, relative_error, restore, shape_of,
};
use kvcachepool_protocol::object::{Codec, Form, Section, digest};
use std::borrow::Cow;

/// The error is measured on this many evenly spaced pieces of a section: layers, keys and values differ.
const MEASURED_PIECES: usize = 16;
/// Bytes of a piece: a whole number of elements of any type.
const MEASURED_BYTES: usize = 4 << 10;
/// Fewest tokens: with fewer, a table per channel outweighs its benefit.
const TOKENS_MIN: u32 = 16;
/// Fewest numbers of a layer's half: with fewer, creating tables dominates.
const PLANE_MIN: u64 = 1 << 10;
/// Numbers that share a scale, as measured in docs/internals/codecs.md.
const GROUP: u16 = 128;
/// The same for numbers of 4 bits.
const GROUP_OF_INT4: u16 = 64;

/// Largest packed size for this many raw bytes.
pub fn longest(raw_bytes: u64) -> u64 {
    raw_bytes + raw_bytes / 16 + 4096
}

/// Most memory for packing sections of these lengths: all of them packed, and one of them raw and copied. The reordered bytes of a codec
/// use the space of the packed ones.
pub fn packing_bytes(lengths: &[u64]) -> u64 {
    lengths.iter().sum::<u64>() + 2 * lengths.iter().max().unwrap_or(&0)
}

/// Most memory for unpacking sections: all of them packed, and for one at a time the decoded bytes, the result, and the codec's
/// reordered bytes.
pub fn unpacking_bytes(codec: Codec, sections: &[Section]) -> u64 {
    let stored = sections.iter().map(|s| s.stored_bytes);
    let raw = sections.iter().map(|s| s.raw_bytes).max().unwrap_or(0);
    let copies = if codec == Codec::CacheGen { 2 } else { 1 };
    stored.clone().sum::<u64>() + stored.max().unwrap_or(0) + copies * raw
}

pub struct Packed {
    /// Its section table entry.
    pub section: Section,
    pub stored: Vec<u8>,
    /// Relative error after unpacking; 0 for a lossless codec.
    pub error: f64,
}

/// How a codec packs raw bytes.
struct How {
    codec: codec::Codec,
    shape: Shape,
    /// Form by which the bytes are reordered first, if the codec needs it.
    form: Option<Form>,
}

impl How {
    /// `None`: the codec does not pack these bytes.
    fn new(codec: Codec, form: &Form, raw_bytes: u64) -> Option<Self> {
        let flat = |codec, element| Self {
            codec,
            shape: Shape::flat(element),
            form: None,
        };
        let element = form.element();
        let group = GROUP;
        Some(match codec {
            Codec::None => return None,
            // Most KV caches contain numbers of two bytes, and other bytes can be packed too.
            Codec::Lossless if raw_bytes.is_multiple_of(2) => {
                flat(codec::Codec::Lossless, Element::Bf16)
            }
            Codec::Lossless => flat(codec::Codec::Lossless, Element::Opaque),
            Codec::Fp8 => flat(codec::Codec::Fp8 { group }, element),
            Codec::Int8 => flat(codec::Codec::Int8 { group }, element),
            Codec::Int4 => {
                let group = GROUP_OF_INT4;
                flat(codec::Codec::Int4 { group }, element)
            }
            Codec::CacheGen => {
                let shape = shape_of(form, usize::try_from(raw_bytes).ok()?)?;
                let plane = u64::from(shape.tokens) * u64::from(shape.channels);
                let worth = shape.tokens >= TOKENS_MIN && plane >= PLANE_MIN;
                (element != Element::Opaque && worth).then_some(Self {
                    codec: codec::Codec::CacheGen,
                    shape,
                    form: Some(*form),
                })?
            }
        })
    }

    fn encode(&self, raw: &[u8], stored: &mut Vec<u8>) -> Result<(), CodecError> {
        let mut ordered = Cow::Borrowed(raw);
        if let Some(form) = &self.form {
            let mut arranged = vec![0; raw.len()];
            arrange(form, raw, &mut arranged);
            ordered = Cow::Owned(arranged);
        }
        codec::encode(self.codec, &self.shape, &ordered, stored)
    }

    fn decode(&self, stored: &[u8], raw: &mut [u8]) -> Result<(), CodecError> {
        let Some(form) = &self.form else {
            return codec::decode(self.codec, &self.shape, stored, raw);
        };
        let mut arranged = vec![0; raw.len()];
        codec::decode(self.codec, &self.shape, stored, &mut arranged)?;
        restore(form, &arranged, raw);
        Ok(())
    }
}

/// Packs raw bytes. The section's raw digest becomes that of the unpacked bytes. Fails if the codec does not support the bytes.
pub fn pack(
    codec: Codec,
    form: &Form,
    section: &Section,
    mut raw: Vec<u8>,
) -> Result<Packed, CodecError> {
    let how = How::new(codec, form, section.raw_bytes).ok_or(CodecError::NotNumbers)?;
    // Untouched memory takes no room.
    let mut stored = Vec::with_capacity(longest(section.raw_bytes) as usize);
    how.encode(&raw, &mut stored)?;
    let (mut section, mut error) = (*section, 0.0);
    if !how.codec.is_lossless() {
        let before = measured(&raw);
        how.decode(&stored, &mut raw)?;
        section.raw_digest = digest(&raw);
        error = relative_error(form.element(), &before, &measured(&raw));
    }
    section.stored_bytes = stored.len() as u64;
    section.stored_digest = digest(&stored);
    Ok(Packed {
        section,
        stored,
        error,
    })
}

/// Pieces from all over a section; a short section as a whole.
fn measured(raw: &[u8]) -> Vec<u8> {
    let apart = (raw.len() / MEASURED_PIECES).next_multiple_of(MEASURED_BYTES);
    let pieces = raw.chunks(apart.max(MEASURED_BYTES));
    let piece = |piece: &[u8]| piece[..piece.len().min(MEASURED_BYTES)].to_vec();
    pieces.flat_map(piece).collect()
}

/// Unpacks the result of [`pack`]. Fails if the result does not match the section's digest.
pub fn unpack(
    codec: Codec,
    form: &Form,
    section: &Section,
    stored: &[u8],
) -> Result<Vec<u8>, String> {
    let how =
        How::new(codec, form, section.raw_bytes).ok_or("its codec does not support its form")?;
    let mut raw = vec![0; section.raw_bytes as usize];
    how.decode(stored, &mut raw).map_err(|e| e.to_string())?;
    match digest(&raw) == section.raw_digest {
        true => Ok(raw),
        false => Err("the unpacked bytes do not match the digest".into()),
    }
}
