//! CacheGen: error bounds, refused input, and compression.

use super::sections::{bytes, finite, there_and_back};
use crate::codec::cachegen::{LEVELS, Parts, Planes};
use crate::codec::{Codec, CodecError, Element, HEADER_BYTES, Shape, encode};
use crate::number::{Bf16, F16, F32, Number};
use proptest::prelude::*;

const CHANNELS: u32 = 19;

/// A shape of this many rows; 12 layers include both step counts.
fn shape(element: Element, layers: u32, tokens: u32) -> Shape {
    Shape {
        element,
        layers,
        halves: 2,
        tokens,
        channels: CHANNELS,
    }
}

fn steps(shape: &Shape, row: usize) -> f64 {
    let plane = row / shape.tokens as usize;
    let many = if plane.is_multiple_of(2) { 10 } else { 2 };
    if shape.layers < 10 || plane / 2 < many {
        15.0
    } else {
        7.0
    }
}

/// Asserts that errors are at most half a step plus rounding: `relative` of a number, `least` for a subnormal one.
fn holds<N: Number>(
    shape: &Shape,
    numbers: &[N::Bytes],
    relative: f64,
    least: f64,
) -> Result<(), TestCaseError> {
    let wanted = (shape.layers * 2 * shape.tokens * CHANNELS) as usize;
    let numbers: Vec<_> = numbers.iter().copied().cycle().take(wanted).collect();
    let raw = bytes::<N>(&numbers);
    let back = there_and_back(Codec::CacheGen, shape, &raw);
    let rows = numbers
        .chunks(CHANNELS as usize)
        .zip(N::all(&back).chunks(CHANNELS as usize));
    for (row, (raw, back)) in rows.enumerate() {
        let value = |number: &N::Bytes| f64::from(N::value(*number));
        let largest = raw
            .iter()
            .map(|number| value(number).abs())
            .fold(0.0, f64::max);
        for (raw, back) in raw.iter().map(value).zip(back.iter().map(value)) {
            let most = largest / (2.0 * steps(shape, row))
                + relative * back.abs()
                + least
                + largest * 1e-6;
            prop_assert!(
                (raw - back).abs() <= most,
                "{raw} -> {back}, at most {most}, in {largest}"
            );
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn errors_are_half_a_step(
        layers in prop_oneof![Just(1u32), Just(12)],
        tokens in 1u32..20,
        brains in finite::<Bf16>(1..1_000),
        halves in finite::<F16>(1..1_000),
        singles in finite::<F32>(1..1_000),
    ) {
        holds::<Bf16>(&shape(Element::Bf16, layers, tokens), &brains, 1.0 / 256.0, 4.6e-41)?;
        holds::<F16>(&shape(Element::F16, layers, tokens), &halves, 1.0 / 2_048.0, 3e-8)?;
        holds::<F32>(&shape(Element::F32, layers, tokens), &singles, 1.0 / 16_777_216.0, 1.5e-45)?;
    }
}

/// A packed section whose last tokens do not fill a group.
fn packed() -> (Planes, Vec<u8>) {
    let shape = shape(Element::Bf16, 1, 300);
    let numbers: Vec<_> = (0..2 * 300 * CHANNELS)
        .map(|n| Bf16::nearest((n as f32 * 0.7).sin()))
        .collect();
    let raw = bytes::<Bf16>(&numbers);
    let mut stored = Vec::new();
    encode(Codec::CacheGen, &shape, &raw, &mut stored).unwrap();
    let planes = Planes::of(&shape, raw.len()).unwrap();
    (planes, stored.split_off(HEADER_BYTES))
}

#[test]
fn parts_of_a_container_make_up_that_container() {
    let (planes, container) = packed();
    let parts = Parts::of(&planes, &container).unwrap();
    assert_eq!(parts.lengths.len(), planes.streams());
    assert_eq!(planes.streams(), 2 * 2 * CHANNELS as usize);
    for counts in parts.counts.chunks(LEVELS) {
        assert_eq!(counts.iter().sum::<u32>(), 300);
    }
    let mut again = b"before".to_vec();
    parts.write(&planes, &mut again).unwrap();
    assert_eq!(again.strip_prefix(b"before"), Some(container.as_slice()));

    let mut wrong = Parts::of(&planes, &container).unwrap();
    wrong.offsets[5] = u64::MAX;
    let written = wrong.write(&planes, &mut Vec::new());
    assert_eq!(written, Err(CodecError::StoredLength));
    wrong.offsets.pop();
    let written = wrong.write(&planes, &mut Vec::new());
    assert_eq!(written, Err(CodecError::StoredLength));
}

proptest! {
    #[test]
    fn streams_of_any_container_lie_inside_of_it(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8), cut in any::<proptest::sample::Index>(),
    ) {
        let (planes, mut container) = packed();
        prop_assert!(Parts::of(&planes, &container[..cut.index(container.len())]).is_err());
        for (at, change) in changes {
            let at = at.index(container.len());
            container[at] ^= change;
        }
        if let Ok(parts) = Parts::of(&planes, &container) {
            for (offset, length) in parts.offsets.iter().zip(&parts.lengths) {
                prop_assert!(offset + u64::from(*length) <= container.len() as u64);
            }
        }
    }
}

#[test]
fn streams_of_more_than_a_group_come_back() {
    let numbers: Vec<_> = (0..2 * 2 * 700 * CHANNELS)
        .map(|n| F32::nearest((n as f32 * 0.7).sin() * (n % CHANNELS) as f32))
        .collect();
    holds::<F32>(&shape(Element::F32, 2, 700), &numbers, 0.0, 0.0).unwrap();
}

#[test]
fn rows_of_zeros_stay_zeros() {
    let shape = shape(Element::Bf16, 1, 5);
    let raw = vec![0; 2 * 2 * 5 * CHANNELS as usize];
    assert_eq!(there_and_back(Codec::CacheGen, &shape, &raw), raw);
}

#[test]
fn the_row_that_is_not_finite_is_named() {
    let shape = shape(Element::Bf16, 2, 5);
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut numbers = vec![Bf16::nearest(1.0); 2 * 2 * 5 * CHANNELS as usize];
        numbers[(7 * CHANNELS + 3) as usize] = Bf16::nearest(wrong);
        let mut out = b"before".to_vec();
        let packed = encode(Codec::CacheGen, &shape, &bytes::<Bf16>(&numbers), &mut out);
        let at = (7 * CHANNELS) as usize;
        assert_eq!(packed, Err(CodecError::NotFinite { at }));
        assert_eq!(out, b"before");
    }
}

#[test]
fn a_shape_must_be_that_of_the_bytes() {
    let raw = vec![0; 2 * 2 * 5 * CHANNELS as usize];
    let huge = Shape {
        layers: u32::MAX,
        halves: u32::MAX,
        tokens: u32::MAX,
        channels: u32::MAX,
        element: Element::F32,
    };
    for shape in [
        shape(Element::Bf16, 1, 4),
        shape(Element::F32, 1, 5),
        Shape::flat(Element::Bf16),
        huge,
    ] {
        let packed = encode(Codec::CacheGen, &shape, &raw, &mut Vec::new());
        assert_eq!(packed, Err(CodecError::RawLength { raw: raw.len() }));
    }
    let wide = Shape {
        channels: 1 << 17,
        ..shape(Element::Bf16, 1, 1)
    };
    let packed = encode(Codec::CacheGen, &wide, &[0; 1 << 19], &mut Vec::new());
    assert_eq!(packed, Err(CodecError::TooWide(1 << 17)));
    let empty = Shape {
        layers: u32::MAX,
        tokens: 0,
        ..shape(Element::Bf16, 1, 1)
    };
    assert!(there_and_back(Codec::CacheGen, &empty, &[]).is_empty());
}
