//! Raw bytes for tests, and the round trip.

use crate::codec::{Codec, Shape, decode, encode};
use crate::number::Number;
use proptest::collection::vec;
use proptest::prelude::*;
use std::ops::Range;

/// Finite numbers of one magnitude with zeros of both signs; some vectors also contain numbers of any magnitude.
pub fn finite<N: Number + 'static>(count: Range<usize>) -> impl Strategy<Value = Vec<N::Bytes>>
where
    N::Bytes: std::fmt::Debug,
{
    let sizes = [1.0, 300.0, 1e-3, 1e-7, 2f32.powi(-130), 1e38];
    let drawn = vec((any::<u32>(), 0..40u8), count);
    (
        drawn,
        proptest::sample::select(sizes.to_vec()),
        any::<bool>(),
    )
        .prop_map(|(drawn, size, wild)| {
            let number = |(bits, kind): (u32, u8)| match kind {
                0 => N::nearest(0.0),
                1 => N::nearest(-0.0),
                2 if wild => some::<N>(bits),
                _ => bounded::<N>(bits as i32 as f32 / 2f32.powi(31) * size),
            };
            drawn.into_iter().map(number).collect()
        })
}

/// The number with these bits, or one with another exponent if that is not finite.
fn some<N: Number>(bits: u32) -> N::Bytes {
    let number = N::all(&bits.to_le_bytes())[0];
    bounded::<N>(N::value(number))
}

/// The number nearest to the value, or 1.
fn bounded<N: Number>(value: f32) -> N::Bytes {
    let number = N::nearest(value);
    if N::magnitude(number) < N::INFINITY {
        number
    } else {
        N::nearest(1.0)
    }
}

/// Numbers as bytes of a section.
pub fn bytes<N: Number>(numbers: &[N::Bytes]) -> Vec<u8> {
    numbers.iter().flat_map(AsRef::as_ref).copied().collect()
}

/// Packs and unpacks, and checks that earlier content of the output is kept.
pub fn there_and_back(codec: Codec, shape: &Shape, raw: &[u8]) -> Vec<u8> {
    let mut out = b"before".to_vec();
    encode(codec, shape, raw, &mut out).unwrap();
    let stored = out.strip_prefix(b"before").unwrap();
    let mut back = vec![0xa5; raw.len()];
    decode(codec, shape, stored, &mut back).unwrap();
    back
}
