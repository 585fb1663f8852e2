//! The number types of KV caches, as bytes. Conversions are branch-free, so that loops over them are vectorised, and round to nearest, ties
//! to even.

/// A number type, little-endian.
pub trait Number {
    type Bytes: Copy + Default + AsRef<[u8]>;
    /// The bits as an integer that orders like the numbers. The conversion is an involution.
    type Order: Copy + Ord + Default;
    /// The position of infinity in that order. NaNs are above it.
    const INFINITY: Self::Order;

    /// Bytes as numbers. An incomplete number at the end is dropped.
    fn all(bytes: &[u8]) -> &[Self::Bytes];
    /// The mutable variant of [`Number::all`].
    fn all_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    /// The number as `f32`.
    fn value(bytes: Self::Bytes) -> f32;
    /// The number nearest to a value.
    fn nearest(value: f32) -> Self::Bytes;
    /// The number's position in the order.
    fn order(bytes: Self::Bytes) -> Self::Order;
    /// The position of the number's magnitude.
    fn magnitude(bytes: Self::Bytes) -> Self::Order;
    /// The number at a position.
    fn at(order: Self::Order) -> Self::Bytes;

    /// Whether the number can be a largest magnitude: finite and not negative.
    #[inline(always)]
    fn is_bound(bytes: Self::Bytes) -> bool {
        (Self::Order::default()..Self::INFINITY).contains(&Self::order(bytes))
    }

    /// The position of the largest magnitude. At or above [`Number::INFINITY`] if a number is not finite.
    #[inline(always)]
    fn largest(numbers: &[Self::Bytes]) -> Self::Order {
        let mut largest = Self::Order::default();
        for number in numbers {
            largest = largest.max(Self::magnitude(*number));
        }
        largest
    }
}

pub struct Bf16;
pub struct F16;
pub struct F32;

/// Shared by the two 16-bit types.
macro_rules! sixteen_bits {
    ($infinity:expr) => {
        type Bytes = [u8; 2];
        type Order = i16;
        const INFINITY: i16 = $infinity;

        #[inline(always)]
        fn all(bytes: &[u8]) -> &[[u8; 2]] {
            bytes.as_chunks().0
        }
        #[inline(always)]
        fn all_mut(bytes: &mut [u8]) -> &mut [[u8; 2]] {
            bytes.as_chunks_mut().0
        }
        #[inline(always)]
        fn order(bytes: [u8; 2]) -> i16 {
            let bits = i16::from_le_bytes(bytes);
            bits ^ ((bits >> 15) & i16::MAX)
        }
        #[inline(always)]
        fn magnitude(bytes: [u8; 2]) -> i16 {
            i16::from_le_bytes(bytes) & i16::MAX
        }
        #[inline(always)]
        fn at(order: i16) -> [u8; 2] {
            (order ^ ((order >> 15) & i16::MAX)).to_le_bytes()
        }
    };
}

impl Number for Bf16 {
    sixteen_bits!(0x7f80);

    #[inline(always)]
    fn value(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
    }
    #[inline(always)]
    fn nearest(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
        // The addition could carry a NaN beyond all NaNs. Setting this bit keeps it one.
        let nan = (bits >> 16) | 0x40;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        (if is_nan { nan } else { rounded } as u16).to_le_bytes()
    }
}

/// 2^-14, the smallest normal half.
const F16_NORMAL: f32 = 1.0 / 16_384.0;

impl Number for F16 {
    sixteen_bits!(0x7c00);

    #[inline(always)]
    fn value(bytes: [u8; 2]) -> f32 {
        let bits = u32::from(u16::from_le_bytes(bytes));
        let (sign, shifted) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        let normal = shifted + (112 << 23);
        let special = shifted + (224 << 23);
        // Adding the smallest normal exponent and subtracting its implicit one leaves the mantissa.
        let subnormal = (f32::from_bits(shifted + (113 << 23)) - F16_NORMAL).to_bits();
        let magnitude = if shifted < 0x400 << 13 {
            subnormal
        } else if shifted >= 0x7c00 << 13 {
            special
        } else {
            normal
        };
        f32::from_bits(magnitude | sign)
    }
    #[inline(always)]
    fn nearest(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
        // Next to 0.5 single precision has steps of 2^-24, like subnormal halves, so the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 0.5)
            .to_bits()
            .wrapping_sub(0.5f32.to_bits());
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let half = if magnitude < F16_NORMAL.to_bits() {
            subnormal
        } else if magnitude > 0x7f80_0000 {
            0x7e00
        } else if magnitude >= 65_536f32.to_bits() {
            0x7c00
        } else {
            normal
        };
        ((half | sign) as u16).to_le_bytes()
    }
}

impl Number for F32 {
    type Bytes = [u8; 4];
    type Order = i32;
    const INFINITY: i32 = 0x7f80_0000;

    #[inline(always)]
    fn all(bytes: &[u8]) -> &[[u8; 4]] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn all_mut(bytes: &mut [u8]) -> &mut [[u8; 4]] {
        bytes.as_chunks_mut().0
    }
    #[inline(always)]
    fn value(bytes: [u8; 4]) -> f32 {
        f32::from_le_bytes(bytes)
    }
    #[inline(always)]
    fn nearest(value: f32) -> [u8; 4] {
        value.to_le_bytes()
    }
    #[inline(always)]
    fn order(bytes: [u8; 4]) -> i32 {
        let bits = i32::from_le_bytes(bytes);
        bits ^ ((bits >> 31) & i32::MAX)
    }
    #[inline(always)]
    fn magnitude(bytes: [u8; 4]) -> i32 {
        i32::from_le_bytes(bytes) & i32::MAX
    }
    #[inline(always)]
    fn at(order: i32) -> [u8; 4] {
        (order ^ ((order >> 31) & i32::MAX)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of all finite nonnegative 16-bit numbers in order, followed by the next power of two.
    fn ascending<N: Number<Bytes = [u8; 2], Order = i16>>() -> Vec<f32> {
        let mut values: Vec<_> = (0..N::INFINITY).map(|n| N::value(N::at(n))).collect();
        let last = values[values.len() - 1];
        values.push(last + (last - values[values.len() - 2]));
        values
    }

    fn rounds<N: Number<Bytes = [u8; 2], Order = i16>>() {
        let values = ascending::<N>();
        for (n, pair) in (0i16..).zip(values.windows(2)) {
            let (this, next) = (N::at(n), N::at(n + 1));
            let middle = pair[0] + (pair[1] - pair[0]) / 2.0;
            let even = if n % 2 == 0 { this } else { next };
            assert!(pair[0] < middle || pair[1] == f32::INFINITY);
            assert_eq!(N::nearest(pair[0]), this);
            if middle.is_finite() {
                assert_eq!(N::nearest(middle), even);
                assert_eq!(N::nearest(middle.next_down()), this);
                assert_eq!(N::nearest(middle.next_up()), next);
                assert_eq!(N::order(N::nearest(-middle)), -N::order(even) - 1);
            }
        }
    }

    #[test]
    fn sixteen_bits_round_to_nearest_and_ties_to_even() {
        rounds::<F16>();
        rounds::<Bf16>();
        assert_eq!(ascending::<F16>()[1], 2f32.powi(-24));
        assert_eq!(F16::value(F16::at(F16::INFINITY)), f32::INFINITY);
        assert_eq!(F16::nearest(f32::MAX), F16::at(F16::INFINITY));
    }

    #[test]
    fn nan_stays_nan() {
        for bits in [0x7f80_0001, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff] {
            let nan = f32::from_bits(bits);
            assert!(F16::value(F16::nearest(nan)).is_nan());
            assert!(Bf16::value(Bf16::nearest(nan)).is_nan());
            assert!(F32::value(F32::nearest(nan)).is_nan());
            assert!(Bf16::magnitude(Bf16::nearest(nan)) > Bf16::INFINITY);
        }
    }

    #[test]
    fn order_is_that_of_values() {
        for pair in [-3e4, -1.0, -1e-7, -0.0, 0.0, 1e-7, 1.0, 3e4f32].windows(2) {
            assert!(F16::order(F16::nearest(pair[0])) < F16::order(F16::nearest(pair[1])));
            assert!(Bf16::order(Bf16::nearest(pair[0])) < Bf16::order(Bf16::nearest(pair[1])));
            assert!(F32::order(F32::nearest(pair[0])) < F32::order(F32::nearest(pair[1])));
            assert_eq!(
                F32::at(F32::order(F32::nearest(pair[0]))),
                F32::nearest(pair[0])
            );
        }
    }

    /// The value of a half by its definition.
    fn half(bits: u16) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        match exponent {
            0 => sign * mantissa * 2f64.powi(-24),
            31 if mantissa > 0.0 => f64::NAN,
            31 => sign * f64::INFINITY,
            e => sign * (1024.0 + mantissa) * 2f64.powi(e - 25),
        }
    }

    #[test]
    fn every_half_reads_as_its_definition_and_writes_back_as_itself() {
        for bits in 0..=u16::MAX {
            let read = F16::value(bits.to_le_bytes());
            let want = half(bits);
            if want.is_nan() {
                assert!(read.is_nan());
                assert!(F16::value(F16::nearest(read)).is_nan());
            } else {
                assert_eq!(f64::from(read), want, "{bits:#06x}");
                assert_eq!(F16::nearest(read), bits.to_le_bytes(), "{bits:#06x}");
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_and_ties_to_even() {
        for bits in 0..0x7bffu16 {
            let (low, high) = (half(bits), half(bits + 1));
            let middle = ((low + high) / 2.0) as f32;
            let even = if bits & 1 == 0 { bits } else { bits + 1 };
            assert_eq!(F16::nearest(middle), even.to_le_bytes(), "{bits:#06x}");
            assert_eq!(F16::nearest(middle.next_down()), bits.to_le_bytes());
            assert_eq!(F16::nearest(middle.next_up()), (bits + 1).to_le_bytes());
        }
        assert_eq!(F16::nearest(65519.99), 0x7bffu16.to_le_bytes());
        assert_eq!(F16::nearest(-65520.0), 0xfc00u16.to_le_bytes());
        assert_eq!(F16::nearest(1e-20), [0, 0]);
    }

    #[test]
    fn every_bfloat16_writes_back_as_itself_and_rounds_to_nearest_even() {
        for bits in 0..=u16::MAX {
            let read = Bf16::value(bits.to_le_bytes());
            if read.is_nan() {
                assert!(Bf16::value(Bf16::nearest(read)).is_nan());
                continue;
            }
            assert_eq!(Bf16::nearest(read), bits.to_le_bytes(), "{bits:#06x}");
            if read.is_finite() {
                let middle = f32::from_bits(read.to_bits() | 0x8000);
                let even = if bits & 1 == 0 { bits } else { bits + 1 };
                assert_eq!(Bf16::nearest(middle), even.to_le_bytes(), "{bits:#06x}");
            }
        }
        assert!(Bf16::value(Bf16::nearest(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
