//! CacheGen (Liu et al., SIGCOMM 2024, arXiv:2310.07240) as implemented by LMCache. A row is one token of one half of one layer. It is
//! quantised by its largest magnitude, with more levels in the first layers. The levels of a channel are similar from token to token, so an
//! arithmetic coder packs them with the channel's level frequencies.
//!
//! ```text
//! planes x u64                                          bytes of each plane: [layers][halves]
//! per plane:
//!   tokens x number                                     the largest magnitude of each row
//!   channels x { u8 first, u8 n, n x varint }           frequencies of the channel's levels from `first` on
//!   per 256 tokens: channels x varint, then streams     bytes of each channel's stream, then the streams
//! ```
//! Levels, probabilities and streams equal LMCache's, bit for bit. The container differs: LMCache stores 33 cumulative frequencies per
//! channel (66 bytes), while the underlying counts take about 20 bytes; and rows are numbers of the section's type.

mod decoder;
mod encoder;
mod interval;
mod level;
mod parts;
mod table;
mod varint;

pub use parts::{Parts, Planes, STREAM_BYTES};
pub use table::LEVELS;

use super::{CodecError, Element, Shape, nothing_left, take};
use crate::number::{Bf16, F16, F32, Number};
use level::{quantise, restore, steps};
use table::Counts;

/// Maximum number of channels. The tables of a channel take about 200 bytes.
const CHANNELS_MAX: u32 = 1 << 16;
/// Number of tokens per stream.
const STREAM_TOKENS: usize = 256;

/// Packs numbers of a shape whose sizes are all set.
pub(super) fn pack(shape: &Shape, raw: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError> {
    match shape.element {
        Element::Opaque => Err(CodecError::NotNumbers),
        Element::Bf16 => pack_numbers::<Bf16>(shape, raw, out),
        Element::F16 => pack_numbers::<F16>(shape, raw, out),
        Element::F32 => pack_numbers::<F32>(shape, raw, out),
    }
}

/// Unpacks numbers of a shape whose sizes are all set.
pub(super) fn unpack(shape: &Shape, packed: &[u8], raw: &mut [u8]) -> Result<(), CodecError> {
    match shape.element {
        Element::Opaque => Err(CodecError::NotNumbers),
        Element::Bf16 => unpack_numbers::<Bf16>(shape, packed, raw),
        Element::F16 => unpack_numbers::<F16>(shape, packed, raw),
        Element::F32 => unpack_numbers::<F32>(shape, packed, raw),
    }
}

/// Sizes of a nonempty section.
struct Sizes {
    planes: usize,
    tokens: usize,
    channels: usize,
}

impl Sizes {
    /// `None` if the section has no numbers.
    fn new(shape: &Shape, raw: usize) -> Result<Option<Self>, CodecError> {
        let sizes = [shape.layers, shape.halves, shape.tokens, shape.channels];
        let bytes = sizes.iter().try_fold(shape.element.bytes(), |bytes, size| {
            bytes.checked_mul(*size as usize)
        });
        if bytes != Some(raw) {
            return Err(CodecError::RawLength { raw });
        }
        if shape.channels > CHANNELS_MAX {
            return Err(CodecError::TooWide(shape.channels));
        }
        // The product of these factors equals `raw`, so it cannot overflow.
        Ok((raw > 0).then(|| Self {
            planes: shape.layers as usize * shape.halves as usize,
            tokens: shape.tokens as usize,
            channels: shape.channels as usize,
        }))
    }
}

fn pack_numbers<N: Number>(shape: &Shape, raw: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError> {
    let Some(sizes) = Sizes::new(shape, raw.len())? else {
        return Ok(());
    };
    let mut lengths_at = out.len();
    out.resize(lengths_at + 8 * sizes.planes, 0);
    let numbers = N::all(raw);
    let planes = numbers.chunks(sizes.tokens * sizes.channels);
    let mut levels = vec![0; sizes.tokens * sizes.channels];
    for (plane, numbers) in planes.enumerate() {
        let begun = out.len();
        let steps = steps(shape, plane);
        if let Some(row) = quantise::<N>(steps, sizes.channels, numbers, &mut levels, out) {
            let at = (plane * sizes.tokens + row) * sizes.channels;
            return Err(CodecError::NotFinite { at });
        }
        pack_plane(sizes.channels, &levels, out);
        let length = (out.len() - begun) as u64;
        out[lengths_at..lengths_at + 8].copy_from_slice(&length.to_le_bytes());
        lengths_at += 8;
    }
    Ok(())
}

/// Appends the counts and streams of a plane's levels to `out`.
fn pack_plane(channels: usize, levels: &[u8], out: &mut Vec<u8>) {
    let mut counts = vec![Counts::default(); channels];
    for row in levels.chunks_exact(channels) {
        for (counts, level) in counts.iter_mut().zip(row) {
            counts.add(*level);
        }
    }
    for counts in &counts {
        counts.write(out);
    }
    let tables = table::lanes(&counts);
    for levels in levels.chunks(STREAM_TOKENS * channels) {
        encoder::encode(&tables, channels, levels, out);
    }
}

fn unpack_numbers<N: Number>(
    shape: &Shape,
    packed: &[u8],
    raw: &mut [u8],
) -> Result<(), CodecError> {
    let Some(sizes) = Sizes::new(shape, raw.len())? else {
        return nothing_left(packed);
    };
    let (lengths, mut packed) = packed
        .split_at_checked(sizes.planes.saturating_mul(8))
        .ok_or(CodecError::StoredLength)?;
    let planes = N::all_mut(raw).chunks_mut(sizes.tokens * sizes.channels);
    for (plane, (numbers, length)) in planes.zip(lengths.as_chunks().0).enumerate() {
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let packed = take(&mut packed, length)?;
        unpack_plane::<N>(steps(shape, plane), sizes.channels, packed, numbers)?;
    }
    nothing_left(packed)
}

fn unpack_plane<N: Number>(
    steps: u8,
    channels: usize,
    mut packed: &[u8],
    numbers: &mut [N::Bytes],
) -> Result<(), CodecError> {
    let tokens = numbers.len() / channels;
    let rows = N::all(take(&mut packed, tokens * size_of::<N::Bytes>())?);
    let counts = table::read(&mut packed, 2 * steps + 1, tokens as u32, channels)?;
    let tables = table::lanes(&counts);
    let mut levels = vec![0; tokens.min(STREAM_TOKENS) * channels];
    let parts = numbers.chunks_mut(STREAM_TOKENS * channels);
    for (numbers, rows) in parts.zip(rows.chunks(STREAM_TOKENS)) {
        let levels = &mut levels[..numbers.len()];
        decoder::decode(&tables, 2 * steps, &mut packed, channels, levels)?;
        restore::<N>(steps, channels, rows, levels, numbers)?;
    }
    nothing_left(packed)
}
