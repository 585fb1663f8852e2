//! Packing sections for the lower tiers, and back. One body of bytes in, one out: the tiers decide what is packed and how.
//!
//! Stored bytes begin with a header that says how they were packed. Decoding takes them from anywhere: whatever they are, it
//! ends with numbers or a [`CodecError`], in time and memory bounded by the raw bytes that were asked for. Here is no digest: objects have
//! one of the stored and one of the raw bytes.

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

/// How raw bytes are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Every bit comes back: planes of bytes, each packed by an entropy coder where that gains something.
    Lossless,
    /// FP8 (e4m3fn) with a scale per group. Infinities become the largest finite number of their group, NaN stays NaN.
    Fp8 {
        /// Numbers that share a scale, 1 to [`GROUP_MAX`]; with 128 they cost 8 1/8 bits each.
        group: u16,
    },
    /// Whole numbers from -127 to 127 with a scale per group. Finite numbers only.
    Int8 {
        /// As above.
        group: u16,
    },
    /// Whole numbers from 0 to 15, two per byte, between the least and the greatest of a group. Finite numbers only.
    Int4 {
        /// As above; with 64 they cost 4 1/2 bits each.
        group: u16,
    },
    /// CacheGen: 15 or 7 steps to either side of zero per token and layer, then an arithmetic coder per channel. Finite numbers only, and a
    /// shape with all its sizes.
    CacheGen,
}

impl Codec {
    /// Are decoded bytes those that were encoded?
    pub fn is_lossless(self) -> bool {
        self == Self::Lossless
    }
}

/// How raw bytes lie: `[layers][halves][tokens][channels]` of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// What they are.
    pub element: Element,
    /// Layers of the section.
    pub layers: u32,
    /// 2: keys, then values; 1: one tensor for both, as with multi-head latent attention.
    pub halves: u32,
    /// Tokens of the section.
    pub tokens: u32,
    /// Elements of a token in one half of one layer: heads times their size.
    pub channels: u32,
}

impl Shape {
    /// A row of elements, as many as there are: enough for every codec but CacheGen.
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

/// Most numbers that share a scale.
pub const GROUP_MAX: u16 = 1_024;

/// Why bytes were not packed or unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// A lossy codec was asked to pack opaque bytes.
    #[error("this codec packs numbers: name their type, or use a lossless codec")]
    NotNumbers,
    /// The group is outside the codec's range.
    #[error("a group is 1 to {GROUP_MAX} numbers, not {0}")]
    Group(u16),
    /// Raw bytes are not as long as the shape says, or not whole elements.
    #[error("{raw} raw bytes do not make up the shape: check the section's layout")]
    RawLength {
        /// Raw bytes.
        raw: usize,
    },
    /// CacheGen keeps a table per channel.
    #[error("a token of {0} numbers is too wide for this codec: use another one")]
    TooWide(u32),
    /// The codec has no code for NaN or infinity: the section is to be stored as it is.
    #[error("a number near element {at} is not finite: store this section without a lossy codec")]
    NotFinite {
        /// First element of the group or row.
        at: usize,
    },
    /// Stored bytes were packed by something else.
    #[error("stored bytes do not begin as this codec's do")]
    NotOurs,
    /// Stored bytes were packed by another codec, with other options, or from another shape.
    #[error(
        "stored bytes were packed with another codec, group, shape or length than was asked for"
    )]
    OtherShape,
    /// Stored bytes are shorter or longer than they say.
    #[error("stored bytes end too early or too late")]
    StoredLength,
    /// Stored bytes contradict themselves.
    #[error("stored bytes are damaged: {0}")]
    Damaged(&'static str),
}

/// Packs `raw` and puts it behind `out`; on an error `out` is as before.
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

/// Unpacks `stored` into `raw`, which is exactly as long as what was packed. All of it is written on success; on an error what it holds is
/// of no use.
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
