//! What is asked of a codec, taken from where packed bytes have it: see the crate's `codec::header`.

use kvcachepool_kernels::codec::{Codec, Element, HEADER_BYTES, Shape};

/// The header with another codec and element in place of what is none.
pub fn known(mut header: [u8; HEADER_BYTES]) -> [u8; HEADER_BYTES] {
    header[..4].copy_from_slice(b"KVK1");
    header[4] = header[4].wrapping_sub(1) % 5 + 1;
    header[5] %= 4;
    if [1, 5].contains(&header[4]) {
        header[6..8].fill(0);
    }
    header
}

/// What a known header asks for.
pub fn asked(header: &[u8; HEADER_BYTES]) -> (Codec, Shape) {
    let group = u16::from_le_bytes([header[6], header[7]]);
    let codec = match header[4] {
        1 => Codec::Lossless,
        2 => Codec::Fp8 { group },
        3 => Codec::Int8 { group },
        4 => Codec::Int4 { group },
        _ => Codec::CacheGen,
    };
    let elements = [Element::Opaque, Element::Bf16, Element::F16, Element::F32];
    let size = |at| {
        header[at..]
            .first_chunk()
            .map_or(0, |b| u32::from_le_bytes(*b))
    };
    let shape = Shape {
        element: elements[usize::from(header[5])],
        layers: size(8),
        halves: size(12),
        tokens: size(16),
        channels: size(20),
    };
    (codec, shape)
}

/// Has it neither NaN nor infinity?
pub fn finite(element: Element, raw: &[u8]) -> bool {
    let sixteen = |infinity: u16| {
        let mut pairs = raw.as_chunks().0.iter();
        pairs.all(|pair| u16::from_le_bytes(*pair) & infinity != infinity)
    };
    match element {
        Element::Opaque => true,
        Element::Bf16 => sixteen(0x7f80),
        Element::F16 => sixteen(0x7c00),
        Element::F32 => raw
            .as_chunks()
            .0
            .iter()
            .all(|four| f32::from_le_bytes(*four).is_finite()),
    }
}
