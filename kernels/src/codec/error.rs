//! The reconstruction error of a codec.

use super::Element;
use crate::number::{Bf16, F16, F32, Number};

/// The root mean square of the error divided by that of the numbers; 0 for opaque bytes or if all numbers are zero. Inputs of different
/// lengths are compared up to the shorter one.
pub fn relative_error(element: Element, raw: &[u8], restored: &[u8]) -> f64 {
    match element {
        Element::Opaque => 0.0,
        Element::Bf16 => of::<Bf16>(raw, restored),
        Element::F16 => of::<F16>(raw, restored),
        Element::F32 => of::<F32>(raw, restored),
    }
}

fn of<N: Number>(raw: &[u8], restored: &[u8]) -> f64 {
    let (mut lost, mut all) = (0.0, 0.0);
    for (raw, restored) in N::all(raw).iter().zip(N::all(restored)) {
        let (raw, restored) = (f64::from(N::value(*raw)), f64::from(N::value(*restored)));
        if raw.is_finite() && restored.is_finite() {
            lost += (raw - restored).powi(2);
            all += raw.powi(2);
        }
    }
    match all > 0.0 {
        true => (lost / all).sqrt(),
        false => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_relative_to_the_numbers_and_none_where_nothing_is_known() {
        let bytes = |values: [f32; 2]| values.map(f32::to_le_bytes).concat();
        let (raw, restored) = (bytes([3.0, 4.0]), bytes([3.0, 3.5]));
        let error = relative_error(Element::F32, &raw, &restored);
        assert!((error - 0.1).abs() < 1e-9, "{error}");
        assert_eq!(relative_error(Element::F32, &raw, &raw), 0.0);
        assert_eq!(relative_error(Element::Opaque, &raw, &restored), 0.0);
        let zeros = bytes([0.0, 0.0]);
        assert_eq!(relative_error(Element::F32, &zeros, &zeros), 0.0);
    }
}
