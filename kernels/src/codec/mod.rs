//! Packs sections for the lower tiers and unpacks them. Input and output are byte buffers; the tiers decide what is packed with which
//! codec.
//!
//! Packed bytes begin with a header that identifies the codec and its options. Decoding accepts untrusted input: it returns numbers or a
//! [`CodecError`], in time and memory bounded by the expected raw length. This module computes no digests; objects have one of the packed
//! and one of the raw bytes.

mod arrange;
pub mod cachegen;
mod error;
mod fp8;
mod grouped;
mod header;
mod int4;
mod int8;
mod planes;
mod rans;
mod scale;
#[cfg(test)]
mod tests;

pub use arrange::{arrange, restore, shape_of};
pub use error::relative_error;
pub use header::HEADER_BYTES;
pub use kvcachepool_protocol::object::Element;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Lossless: byte planes, each packed by an entropy coder if that saves space.
    Lossless,
    /// FP8 (e4m3fn) with one scale per group. Infinities become the largest finite number of their group, NaN stays NaN.
    Fp8 {
        /// Numbers that share a scale, 1 to [`GROUP_MAX`]. With 128, a number takes 8 1/8 bits.
        group: u16,
    },
    /// Integers from -127 to 127 with one scale per group. Finite numbers only.
    Int8 {
        /// Numbers that share a scale, 1 to [`GROUP_MAX`].
        group: u16,
    },
    /// Integers from 0 to 15, two per byte, between the smallest and the largest number of a group. Finite numbers only.
    Int4 {
        /// Numbers that share a scale, 1 to [`GROUP_MAX`]. With 64, a number takes 4 1/2 bits.
        group: u16,
    },
    /// CacheGen: 15 or 7 steps to either side of zero per token and layer, then an arithmetic coder per channel. Requires finite numbers
    /// and a shape whose sizes are all set.
    CacheGen,
}

impl Codec {
    /// Whether decoded bytes equal the encoded ones.
    pub fn is_lossless(self) -> bool {
        self == Self::Lossless
    }
}

/// The layout of raw bytes: `[layers][halves][tokens][channels]` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    pub element: Element,
    pub layers: u32,
    /// 2 for keys followed by values; 1 for one tensor of both, as in multi-head latent attention.
    pub halves: u32,
    pub tokens: u32,
    /// Elements per token in one half of one layer: heads times head size.
    pub channels: u32,
}

impl Shape {
    /// One row of elements of any number. Every codec except CacheGen accepts it.
    pub fn flat(element: Element) -> Self {
        Self {
            element,
            layers: 0,
            halves: 0,
            tokens: 0,
            channels: 0,
        }
    }
}

/// Maximum of numbers that share a scale.
pub const GROUP_MAX: u16 = 1_024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// A lossy codec cannot pack opaque bytes.
    #[error("this codec packs numbers: name their type, or use a lossless codec")]
    NotNumbers,
    /// The group is outside the codec's range.
    #[error("a group is 1 to {GROUP_MAX} numbers, not {0}")]
    Group(u16),
    /// The length of the raw bytes is not that of the shape, or not a whole number of elements.
    #[error("{raw} raw bytes do not make up the shape: check the section's layout")]
    RawLength { raw: usize },
    /// CacheGen keeps a table per channel.
    #[error("a token of {0} numbers is too wide for this codec: use another one")]
    TooWide(u32),
    /// The codec has no code for NaN or infinity. The section should be stored without it.
    #[error("a number near element {at} is not finite: store this section without a lossy codec")]
    NotFinite {
        /// First element of the group or row.
        at: usize,
    },
    /// Stored bytes have another magic number.
    #[error("the stored bytes do not have this codec's header")]
    NotOurs,
    /// Stored bytes were packed by another codec, with other options, or from another shape.
    #[error("stored bytes were packed with another codec, group, shape or length than expected")]
    OtherShape,
    /// Stored bytes are shorter or longer than their content.
    #[error("the stored bytes are too short or too long")]
    StoredLength,
    /// Stored bytes contradict themselves.
    #[error("stored bytes are damaged: {0}")]
    Damaged(&'static str),
}

/// Packs `raw` and appends it to `out`. After an error `out` is unchanged.
pub fn encode(
    codec: Codec,
    shape: &Shape,
    raw: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let before = out.len();
    out.extend_from_slice(&header::header(codec, shape, raw.len()));
    let packed = match codec {
        Codec::Lossless => {
            planes::pack(shape.element, raw, out);
            Ok(())
        }
        Codec::Fp8 { group } => grouped::pack::<fp8::Fp8>(shape.element, group, raw, out),
        Codec::Int8 { group } => grouped::pack::<int8::Int8>(shape.element, group, raw, out),
        Codec::Int4 { group } => grouped::pack::<int4::Int4>(shape.element, group, raw, out),
        Codec::CacheGen => cachegen::pack(shape, raw, out),
    };
    if packed.is_err() {
        out.truncate(before);
    }
    packed
}

/// Unpacks `stored` into `raw`, which must be exactly as long as the packed section was. After an error the content of `raw` is
/// unspecified.
pub fn decode(
    codec: Codec,
    shape: &Shape,
    stored: &[u8],
    raw: &mut [u8],
) -> Result<(), CodecError> {
    let packed = header::body(codec, shape, raw.len(), stored)?;
    match codec {
        Codec::Lossless => planes::unpack(shape.element, packed, raw),
        Codec::Fp8 { group } => grouped::unpack::<fp8::Fp8>(shape.element, group, packed, raw),
        Codec::Int8 { group } => grouped::unpack::<int8::Int8>(shape.element, group, packed, raw),
        Codec::Int4 { group } => grouped::unpack::<int4::Int4>(shape.element, group, packed, raw),
        Codec::CacheGen => cachegen::unpack(shape, packed, raw),
    }
}

/// Takes `bytes` bytes from the front.
fn take<'a>(packed: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], CodecError> {
    packed.split_off(..bytes).ok_or(CodecError::StoredLength)
}

fn nothing_left(packed: &[u8]) -> Result<(), CodecError> {
    match packed {
        [] => Ok(()),
        _ => Err(CodecError::StoredLength),
    }
}
