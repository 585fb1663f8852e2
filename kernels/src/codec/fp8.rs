//! FP8 with four bits of exponent and three of mantissa (e4m3fn: OCP 8-bit floating point specification, section 5): up to 448, steps of
//! 2^-9 below 2^-6, no infinities, 0x7f is NaN. A group is scaled so that its largest finite magnitude becomes 448.

use super::grouped::Quantiser;
use super::scale::{Scale, within};
use crate::number::Number;

/// The largest finite number.
const LARGEST: f32 = 448.0;
/// The code of NaN.
const NAN: u32 = 0x7f;
/// 2^-6, the smallest normal number.
const NORMAL: f32 = 1.0 / 64.0;

pub struct Fp8;

impl Quantiser for Fp8 {
    #[inline(always)]
    fn ends<N: Number>(numbers: &[N::Bytes]) -> Option<[N::Bytes; 2]> {
        let mut largest = N::Order::default();
        for number in numbers {
            let magnitude = N::magnitude(*number);
            let finite = if magnitude < N::INFINITY {
                magnitude
            } else {
                N::Order::default()
            };
            largest = largest.max(finite);
        }
        Some([N::at(largest); 2])
    }

    #[inline(always)]
    fn quantise<N: Number>([low, high]: [f32; 2], numbers: &[N::Bytes], codes: &mut [u8]) {
        let scale = Scale::new(low, high, LARGEST);
        for (number, code) in numbers.iter().zip(codes) {
            *code = nearest(scale.up(N::value(*number)));
        }
    }

    #[inline(always)]
    fn restore<N: Number>([low, high]: [f32; 2], codes: &[u8], numbers: &mut [N::Bytes]) {
        let scale = Scale::new(low, high, LARGEST);
        for (number, code) in numbers.iter_mut().zip(codes) {
            *number = N::nearest(within(scale.down(value(*code)), -high, high));
        }
    }
}

/// The nearest code, ties to even. Saturates at the largest number; NaN stays NaN.
#[inline(always)]
fn nearest(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let bounded = magnitude.min(LARGEST.to_bits());
    // The power of two at or below the value, times 2^20. At that magnitude single precision has the same steps as FP8 at the value's, so
    // the addition rounds and its lowest bits count the steps.
    let power = (bounded & 0x7f80_0000).max(NORMAL.to_bits());
    let beside = power.wrapping_add(20 << 23);
    let sum = f32::from_bits(beside) + f32::from_bits(bounded);
    let steps = sum.to_bits().wrapping_sub(beside);
    // A normal number is 8 to 16 steps, and its exponent also counts in eights.
    let finite = steps.wrapping_add((power >> 20).wrapping_sub(NORMAL.to_bits() >> 20));
    let code = if magnitude > f32::INFINITY.to_bits() {
        NAN
    } else {
        finite
    };
    (code | ((bits >> 24) & 0x80)) as u8
}

#[inline(always)]
fn value(code: u8) -> f32 {
    let bits = u32::from(code);
    let (sign, magnitude) = ((bits & 0x80) << 24, bits & 0x7f);
    let normal = (magnitude << 20) + (120 << 23);
    // Adding the smallest normal exponent and subtracting its implicit one leaves the mantissa.
    let subnormal = (f32::from_bits((magnitude << 20) + (121 << 23)) - NORMAL).to_bits();
    let value = if magnitude == NAN {
        f32::NAN.to_bits()
    } else if magnitude < 8 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(value | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition in the specification.
    fn defined(code: u8) -> f32 {
        let (sign, exponent, mantissa) = (code >> 7, (code >> 3) & 15, f32::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa / 8.0 * 2f32.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(i32::from(exponent) - 7),
        };
        if sign == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn codes_mean_what_the_specification_says() {
        for code in 0..=255 {
            assert!(value(code) == defined(code) || (code & 0x7f == 0x7f && value(code).is_nan()));
            assert_eq!(value(code).is_sign_negative(), code >= 0x80);
        }
    }

    #[test]
    fn every_value_gets_the_nearest_code_and_ties_the_even_one() {
        for code in 0..0x7e {
            let (this, next) = (defined(code), defined(code + 1));
            let middle = (this + next) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            for sign in [0, 0x80] {
                let signed = |value: f32| if sign == 0 { value } else { -value };
                assert_eq!(nearest(signed(this)), code | sign);
                assert_eq!(nearest(signed(middle)), even | sign);
                assert_eq!(nearest(signed(middle.next_down())), code | sign);
                assert_eq!(nearest(signed(middle.next_up())), (code + 1) | sign);
            }
        }
        for large in [448.0, 460.0, 464.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!((nearest(large), nearest(-large)), (0x7e, 0xfe));
        }
        assert_eq!(nearest(f32::NAN) & 0x7f, 0x7f);
    }
}
