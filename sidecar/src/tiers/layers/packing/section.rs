//! The bytes of one section, packed and unpacked.

use kvcachepool_kernels::codec::{
    self, CodecError, Element, Shape, arrange, relative_error, restore, shape_of,
};
use kvcachepool_protocol::object::{Codec, Form, Section, digest};
use std::borrow::Cow;

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

/// Times a section's bytes are held while it is packed or unpacked: raw, packed, and in the order that its codec wants.
pub fn copies(codec: Codec) -> u64 {
    match codec {
        Codec::CacheGen => 3,
        _ => 2,
    }
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

/// How a codec packs raw bytes.
struct How {
    codec: codec::Codec,
    shape: Shape,
    /// What puts them in the codec's order before, where that counts.
    form: Option<Form>,
}

impl How {
    /// None: not at all.
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
            // Most KV caches hold numbers of two bytes, and what is none is packed all the same.
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
            Codec::CacheGen => Self {
                codec: codec::Codec::CacheGen,
                shape: shape_of(form, usize::try_from(raw_bytes).ok()?)?,
                form: Some(*form),
            },
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

/// Packs raw bytes. The section's raw digest is that of the bytes which will come back. An error: the codec has nothing for such bytes.
pub fn pack(
    codec: Codec,
    form: &Form,
    section: &Section,
    mut raw: Vec<u8>,
) -> Result<Packed, CodecError> {
    let how = How::new(codec, form, section.raw_bytes).ok_or(CodecError::NotNumbers)?;
    let mut stored = Vec::new();
    how.encode(&raw, &mut stored)?;
    let (mut section, mut error) = (*section, 0.0);
    if !how.codec.is_lossless() {
        // Whole numbers of every element.
        let measured = raw.get(..raw.len().min(MEASURED_BYTES)).map(<[u8]>::to_vec);
        how.decode(&stored, &mut raw)?;
        section.raw_digest = digest(&raw);
        error = relative_error(form.element(), &measured.unwrap_or_default(), &raw);
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
    form: &Form,
    section: &Section,
    stored: &[u8],
) -> Result<Vec<u8>, String> {
    let how = How::new(codec, form, section.raw_bytes).ok_or("it is not packed")?;
    let mut raw = vec![0; section.raw_bytes as usize];
    how.decode(stored, &mut raw).map_err(|e| e.to_string())?;
    match digest(&raw) == section.raw_digest {
        true => Ok(raw),
        false => Err("what was unpacked is not what its digest says".into()),
    }
}
