//! Keys rotated to other positions.

use super::super::{Dtype, Keys, PagesError, Style, Turn};
use proptest::prelude::*;

const BASE: f64 = 10_000.0;

fn any_keys() -> impl Strategy<Value = Keys> {
    let dtypes = proptest::sample::select(vec![Dtype::Bf16, Dtype::F16, Dtype::F32]);
    let styles = proptest::sample::select(vec![Style::NeoX, Style::GptJ]);
    let sizes = (1..33usize, 0..5usize, 0..9usize);
    (sizes, dtypes, styles).prop_map(|((pairs, before, behind), dtype, style)| Keys {
        state_bytes: (before + 2 * pairs + behind) * dtype.bytes(),
        offset: before * dtype.bytes(),
        rotary: 2 * pairs,
        dtype,
        style,
    })
}

/// Elements of some states, of about unit size, like keys after normalisation.
fn any_values() -> impl Strategy<Value = Vec<f32>> {
    proptest::collection::vec(-8.0f32..8.0, 5 * 77)
}

/// The largest relative rounding error of the type, and its smallest difference.
fn rounding(dtype: Dtype) -> (f64, f64) {
    match dtype {
        Dtype::Bf16 => (2f64.powi(-8), 2f64.powi(-133)),
        Dtype::F16 => (2f64.powi(-11), 2f64.powi(-24)),
        Dtype::F32 => (2f64.powi(-24), 2f64.powi(-149)),
    }
}

/// Values as bytes of the type, truncated so that the tests need no rounding of their own.
fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let half = |v: &f32| {
        let bits = v.to_bits();
        let exponent = (bits >> 23 & 255) as i32 - 112;
        let magnitude = if exponent > 0 {
            (exponent as u32) << 10 | bits >> 13 & 1023
        } else {
            0
        };
        ((magnitude | bits >> 16 & 0x8000) as u16).to_le_bytes()
    };
    match dtype {
        Dtype::Bf16 => values
            .iter()
            .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
            .collect(),
        Dtype::F16 => values.iter().flat_map(half).collect(),
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let pair = |c: &[u8]| u16::from_le_bytes([c[0], c[1]]);
    let half = |bits: u16| {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        sign * if exponent == 0 {
            mantissa * 2f64.powi(-24)
        } else {
            (1024.0 + mantissa) * 2f64.powi(exponent - 25)
        }
    };
    let wide = |c: &[u8]| f64::from(f32::from_le_bytes([c[0], c[1], c[2], c[3]]));
    match dtype {
        Dtype::Bf16 => bytes
            .chunks(2)
            .map(|c| f64::from(f32::from_bits(u32::from(pair(c)) << 16)))
            .collect(),
        Dtype::F16 => bytes.chunks(2).map(|c| half(pair(c))).collect(),
        Dtype::F32 => bytes.chunks(4).map(wide).collect(),
    }
}

/// Indices of both elements of pair `i` in a state's elements.
fn pair(keys: &Keys, i: usize) -> (usize, usize) {
    let first = keys.offset / keys.dtype.bytes();
    match keys.style {
        Style::NeoX => (first + i, first + i + keys.rotary / 2),
        Style::GptJ => (first + 2 * i, first + 2 * i + 1),
    }
}

fn states(keys: &Keys, values: &[f32]) -> Vec<u8> {
    let elements = keys.state_bytes / keys.dtype.bytes();
    encode(keys.dtype, &values[..values.len() / elements * elements])
}

proptest! {
    #[test]
    fn a_turn_is_that_of_f64_within_one_rounding_and_touches_nothing_else(
        keys in any_keys(), values in any_values(), delta in -100_000i64..100_000,
    ) {
        let before = states(&keys, &values);
        let mut after = before.clone();
        keys.turn(&mut after, &Turn::by_base(BASE, keys.rotary, delta).unwrap()).unwrap();
        let (relative, least) = rounding(keys.dtype);
        let rows = before.chunks(keys.state_bytes).zip(after.chunks(keys.state_bytes));
        for (old, new) in rows {
            let end = keys.offset + keys.rotary * keys.dtype.bytes();
            prop_assert_eq!(&old[..keys.offset], &new[..keys.offset]);
            prop_assert_eq!(&old[end..], &new[end..]);
            let (x, y) = (decode(keys.dtype, old), decode(keys.dtype, new));
            for i in 0..keys.rotary / 2 {
                let (a, b) = pair(&keys, i);
                let angle = delta as f64 * BASE.powf(-2.0 * i as f64 / keys.rotary as f64);
                let (sin, cos) = angle.sin_cos();
                let length = x[a].hypot(x[b]);
                // One rounding to the type, and three intermediate f32 roundings.
                let bound = relative * length + 4.0 * 2f64.powi(-24) * length + least;
                prop_assert!((y[a] - (x[a] * cos - x[b] * sin)).abs() <= bound);
                prop_assert!((y[b] - (x[b] * cos + x[a] * sin)).abs() <= bound);
            }
        }
    }

    #[test]
    fn a_turn_and_its_opposite_give_back_the_key_within_three_roundings(
        keys in any_keys(), values in any_values(), delta in -100_000i64..100_000,
    ) {
        let before = states(&keys, &values);
        let mut after = before.clone();
        keys.turn(&mut after, &Turn::by_base(BASE, keys.rotary, delta).unwrap()).unwrap();
        keys.turn(&mut after, &Turn::by_base(BASE, keys.rotary, -delta).unwrap()).unwrap();
        let (relative, least) = rounding(keys.dtype);
        let (x, y) = (decode(keys.dtype, &before), decode(keys.dtype, &after));
        let elements = keys.state_bytes / keys.dtype.bytes();
        for row in 0..before.len() / keys.state_bytes {
            for i in 0..keys.rotary / 2 {
                let (a, b) = pair(&keys, i);
                let (a, b) = (row * elements + a, row * elements + b);
                let length = x[a].hypot(x[b]);
                let bound = 3.0 * (relative + 4.0 * 2f64.powi(-24)) * length + 3.0 * least;
                prop_assert!((x[a] - y[a]).abs() <= bound && (x[b] - y[b]).abs() <= bound);
            }
        }
    }

    #[test]
    fn any_call_ends_in_bytes_or_a_named_error(
        state_bytes in 0..64usize, offset: usize, near in 0..64usize, rotary in 0..40usize,
        bytes in 0..512usize, pairs in 1..20usize, far: bool,
    ) {
        let offset = if far { offset } else { near };
        let keys = Keys { state_bytes, offset, rotary, dtype: Dtype::F16, style: Style::NeoX };
        let turn = Turn::by_base(BASE, 2 * pairs, 3).unwrap();
        let fits = rotary == 2 * pairs
            && offset.checked_add(2 * rotary).is_some_and(|end| end <= state_bytes)
            && bytes % state_bytes == 0;
        prop_assert_eq!(keys.turn(&mut vec![0; bytes], &turn).is_ok(), fits);
    }
}

#[test]
fn a_turn_by_base_is_the_row_of_a_models_table() {
    let made = Turn::by_base(BASE, 4, 7).unwrap();
    let angles = [7.0f64, 7.0 / 100.0];
    let cos = angles.map(|a| a.cos() as f32);
    let sin = angles.map(|a| a.sin() as f32);
    assert_eq!(Turn::of_table(&cos, &sin).unwrap(), made);
}

#[test]
fn each_wrong_turn_has_its_name() {
    let odd = |elements| Err(PagesError::OddRotarySize { elements });
    assert_eq!(Turn::by_base(BASE, 5, 1), odd(5));
    assert_eq!(Turn::by_base(BASE, 0, 1), odd(0));
    assert_eq!(Turn::by_base(f64::NAN, 4, 1), Err(PagesError::BadFrequency));
    assert_eq!(Turn::by_base(-1.0, 4, 1), Err(PagesError::BadFrequency));
    let infinite = Turn::by_frequencies(&[f64::INFINITY], 1);
    assert_eq!(infinite, Err(PagesError::BadFrequency));
    let stretched = Turn::of_table(&[1.0, 1.1], &[0.0, 0.0]);
    assert_eq!(stretched, Err(PagesError::NotARotation { pair: 1 }));
    let count = |cosines, sines, pairs| {
        Err(PagesError::AngleCount {
            cosines,
            sines,
            pairs,
        })
    };
    assert_eq!(Turn::of_table(&[1.0], &[]), count(1, 0, 1));
    let keys = Keys {
        state_bytes: 16,
        offset: 0,
        rotary: 8,
        dtype: Dtype::Bf16,
        style: Style::NeoX,
    };
    let turn = Turn::by_base(BASE, 4, 1).unwrap();
    assert_eq!(
        keys.turn(&mut [0; 16], &turn),
        count(2, 2, 4).map(|_: Turn| ())
    );
    let turn = Turn::by_base(BASE, 8, 1).unwrap();
    let cut = PagesError::Size {
        what: "a row of states",
        got: 17,
        want: 16,
    };
    assert_eq!(keys.turn(&mut [0; 17], &turn), Err(cut));
    let outside = PagesError::KeyOutsideState {
        end: 18,
        state_bytes: 16,
    };
    let late = Keys { offset: 2, ..keys };
    assert_eq!(late.turn(&mut [0; 16], &turn), Err(outside));
}
