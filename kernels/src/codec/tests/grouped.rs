//! Error bounds of FP8, INT8 and INT4. A bound is that of the code, plus rounding to the type of the numbers, plus a millionth for the
//! arithmetic in single precision.

use super::sections::{bytes, finite, there_and_back};
use crate::codec::{Codec, CodecError, Element, Shape, encode};
use crate::number::{Bf16, F16, F32, Number};
use proptest::prelude::*;

const GROUPS: [u16; 6] = [1, 2, 7, 32, 64, 128];

/// A type and its rounding error.
trait Rounded: Number + 'static {
    const ELEMENT: Element;
    /// The relative error of a normal number.
    const RELATIVE: f64;
    /// The absolute error of a subnormal number.
    const LEAST: f64;
}

impl Rounded for Bf16 {
    const ELEMENT: Element = Element::Bf16;
    const RELATIVE: f64 = 1.0 / 256.0;
    const LEAST: f64 = 4.6e-41;
}

impl Rounded for F16 {
    const ELEMENT: Element = Element::F16;
    const RELATIVE: f64 = 1.0 / 2_048.0;
    const LEAST: f64 = 3.0e-8;
}

impl Rounded for F32 {
    const ELEMENT: Element = Element::F32;
    const RELATIVE: f64 = 1.0 / 16_777_216.0;
    const LEAST: f64 = 1.5e-45;
}

fn values<N: Number>(raw: &[u8]) -> Vec<f64> {
    N::all(raw)
        .iter()
        .map(|n| f64::from(N::value(*n)))
        .collect()
}

/// Compares errors with a bound, which maps (smallest, largest, value) of a number in its group to the largest error of its code.
fn holds<N: Rounded>(
    codec: Codec,
    group: u16,
    numbers: &[N::Bytes],
    bound: impl Fn(f64, f64, f64) -> f64,
) -> Result<(), TestCaseError> {
    let raw = bytes::<N>(numbers);
    let back = there_and_back(codec, &Shape::flat(N::ELEMENT), &raw);
    let (raw, back) = (values::<N>(&raw), values::<N>(&back));
    let groups = raw.chunks(group.into()).zip(back.chunks(group.into()));
    for (raw, back) in groups {
        let least = raw.iter().copied().fold(f64::INFINITY, f64::min);
        let greatest = raw.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let largest = greatest.max(-least);
        for (raw, back) in raw.iter().zip(back) {
            let rounding = N::RELATIVE * back.abs() + N::LEAST + largest * 1e-6;
            let most = bound(least, greatest, *raw) + rounding;
            prop_assert!(
                (raw - back).abs() <= most,
                "{raw} -> {back}, at most {most}, in {least}..{greatest}"
            );
            prop_assert!(back.abs() <= largest);
        }
    }
    Ok(())
}

fn fp8<N: Rounded>(group: u16, numbers: &[N::Bytes]) -> Result<(), TestCaseError> {
    holds::<N>(
        Codec::Fp8 { group },
        group,
        numbers,
        |least, greatest, value| {
            let largest = greatest.max(-least);
            (value.abs() / 16.0).max(largest / 448.0 / 1_024.0)
        },
    )
}

fn int8<N: Rounded>(group: u16, numbers: &[N::Bytes]) -> Result<(), TestCaseError> {
    holds::<N>(
        Codec::Int8 { group },
        group,
        numbers,
        |least, greatest, _| greatest.max(-least) / 254.0,
    )
}

fn int4<N: Rounded>(group: u16, numbers: &[N::Bytes]) -> Result<(), TestCaseError> {
    holds::<N>(
        Codec::Int4 { group },
        group,
        numbers,
        |least, greatest, _| (greatest - least) / 30.0,
    )
}

fn group() -> impl Strategy<Value = u16> {
    proptest::sample::select(&GROUPS[..])
}

proptest! {
    #[test]
    fn fp8_errs_by_a_sixteenth_or_half_a_step(
        group in group(), halves in finite::<F16>(0..300), brains in finite::<Bf16>(0..300), singles in finite::<F32>(0..300)
    ) {
        fp8::<F16>(group, &halves)?;
        fp8::<Bf16>(group, &brains)?;
        fp8::<F32>(group, &singles)?;
    }

    #[test]
    fn int8_errs_by_half_a_step(
        group in group(), halves in finite::<F16>(0..300), brains in finite::<Bf16>(0..300), singles in finite::<F32>(0..300)
    ) {
        int8::<F16>(group, &halves)?;
        int8::<Bf16>(group, &brains)?;
        int8::<F32>(group, &singles)?;
    }

    #[test]
    fn int4_errs_by_half_a_step(
        group in group(), halves in finite::<F16>(0..300), brains in finite::<Bf16>(0..300), singles in finite::<F32>(0..300)
    ) {
        int4::<F16>(group, &halves)?;
        int4::<Bf16>(group, &brains)?;
        int4::<F32>(group, &singles)?;
    }
}

#[test]
fn ends_of_every_range_come_back() {
    fn extremes<N: Rounded>(max: f32, subnormal: f32) {
        for numbers in [
            [max, -max, 0.0, 1.0],
            [subnormal, 0.0, -subnormal, subnormal],
            [max, max, max, max],
            [subnormal; 4],
            [0.0, -0.0, 0.0, 0.0],
        ] {
            let numbers = numbers.map(N::nearest);
            fp8::<N>(4, &numbers).unwrap();
            int8::<N>(4, &numbers).unwrap();
            int4::<N>(4, &numbers).unwrap();
        }
    }
    extremes::<Bf16>(3.389_531_4e38, 1e-40);
    extremes::<F16>(65_504.0, 6e-8);
    extremes::<F32>(f32::MAX, 1.4e-45);
}

#[test]
fn a_group_of_one_number_is_exact() {
    let numbers: Vec<_> = (0..2_000u32)
        .map(|n| Bf16::nearest((n as f32 - 1_000.0) * 0.37))
        .collect();
    let raw = bytes::<Bf16>(&numbers);
    for codec in [
        Codec::Int8 { group: 1 },
        Codec::Int4 { group: 1 },
        Codec::Fp8 { group: 1 },
    ] {
        assert_eq!(
            there_and_back(codec, &Shape::flat(Element::Bf16), &raw),
            raw
        );
    }
}

#[test]
fn fp8_keeps_nan_and_bounds_infinity() {
    let numbers = [f32::NAN, f32::INFINITY, 3.0, f32::NEG_INFINITY, -1.5, 0.0].map(F16::nearest);
    let back = there_and_back(
        Codec::Fp8 { group: 6 },
        &Shape::flat(Element::F16),
        &bytes::<F16>(&numbers),
    );
    let back = values::<F16>(&back);
    assert!(back[0].is_nan());
    assert_eq!(back[1..], [3.0, 3.0, -3.0, -1.5, 0.0]);

    let numbers = [f32::NAN, f32::NEG_INFINITY].map(F16::nearest);
    let back = there_and_back(
        Codec::Fp8 { group: 2 },
        &Shape::flat(Element::F16),
        &bytes::<F16>(&numbers),
    );
    assert!(values::<F16>(&back)[0].is_nan());
    assert_eq!(values::<F16>(&back)[1], 0.0);
}

#[test]
fn whole_number_codecs_name_the_group_that_is_not_finite() {
    for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut numbers = [Bf16::nearest(1.0); 300];
        numbers[200] = Bf16::nearest(wrong);
        for codec in [Codec::Int8 { group: 64 }, Codec::Int4 { group: 64 }] {
            let mut out = b"before".to_vec();
            let raw = bytes::<Bf16>(&numbers);
            let packed = encode(codec, &Shape::flat(Element::Bf16), &raw, &mut out);
            assert_eq!(packed, Err(CodecError::NotFinite { at: 192 }));
            assert_eq!(out, b"before");
        }
    }
}

#[test]
fn sizes_are_a_code_per_number_and_ends_per_group() {
    let raw = [0; 2 * 300];
    for (codec, bytes) in [
        (Codec::Fp8 { group: 128 }, 300 + 3 * 2),
        (Codec::Int8 { group: 128 }, 300 + 3 * 2),
        (Codec::Int4 { group: 64 }, 150 + 5 * 4),
        (Codec::Int4 { group: 7 }, 42 * 4 + 3 + 43 * 4),
    ] {
        let mut out = Vec::new();
        encode(codec, &Shape::flat(Element::F16), &raw, &mut out).unwrap();
        assert_eq!(out.len(), 32 + bytes);
    }
}
