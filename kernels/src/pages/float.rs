//! Element types of KV states as bytes, little endian as in memory, and their conversion to and from f32.
//!
//! Branch-free, so that a compiler turns a loop of them into vectors on any CPU.

/// Type of the elements of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
}

impl Dtype {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// An element type as the loops take it.
pub(super) trait Element<const BYTES: usize> {
    /// Exact.
    fn read(bytes: [u8; BYTES]) -> f32;
    /// Rounds to nearest, ties to even.
    fn write(value: f32) -> [u8; BYTES];
}

pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct F32;

impl Element<2> for Bf16 {
    #[inline]
    fn read(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
    }

    #[inline]
    fn write(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // Rounding could carry a NaN with a small payload into an infinity.
        let quiet = bits >> 16 | 0x40;
        let bits = if value.is_nan() { quiet } else { rounded };
        (bits as u16).to_le_bytes()
    }
}

impl Element<2> for F16 {
    #[inline]
    fn read(bytes: [u8; 2]) -> f32 {
        let half = u32::from(u16::from_le_bytes(bytes));
        // Exponent and mantissa in f32's places, then scaled by the difference of the exponents' biases: right for subnormals too.
        let scaled = f32::from_bits((half & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
        let special = (half & 0x7fff) << 13 | 0x7f80_0000;
        let finite = half & 0x7c00 != 0x7c00;
        let bits = if finite { scaled.to_bits() } else { special };
        f32::from_bits(bits | (half & 0x8000) << 16)
    }

    #[inline]
    fn write(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        // Normal halves: rebias the exponent, round away 13 bits of mantissa; a carry moves into the exponent, as it must.
        let rebiased = magnitude.wrapping_sub(112 << 23);
        let normal = rebiased.wrapping_add(0xfff + (rebiased >> 13 & 1)) >> 13;
        // Subnormal halves: adding 0.5 leaves the half's last place as the f32's last place, rounded by the addition itself.
        let half = 0.5f32.to_bits();
        let tiny = (f32::from_bits(magnitude) + 0.5)
            .to_bits()
            .wrapping_sub(half);
        let finite = if magnitude < 113 << 23 { tiny } else { normal };
        // From 65520 on, the nearest half is infinity.
        let large = if magnitude >= 0x477f_f000 {
            0x7c00
        } else {
            finite
        };
        let kept = if magnitude > 0x7f80_0000 {
            0x7e00
        } else {
            large
        };
        ((kept | bits >> 16 & 0x8000) as u16).to_le_bytes()
    }
}

impl Element<4> for F32 {
    #[inline]
    fn read(bytes: [u8; 4]) -> f32 {
        f32::from_le_bytes(bytes)
    }

    #[inline]
    fn write(value: f32) -> [u8; 4] {
        value.to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value of a half by its definition.
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
            let read = F16::read(bits.to_le_bytes());
            let want = half(bits);
            if want.is_nan() {
                assert!(read.is_nan());
                assert!(F16::read(F16::write(read)).is_nan());
            } else {
                assert_eq!(f64::from(read), want, "{bits:#06x}");
                assert_eq!(F16::write(read), bits.to_le_bytes(), "{bits:#06x}");
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_and_ties_to_even() {
        for bits in 0..0x7bffu16 {
            let (low, high) = (half(bits), half(bits + 1));
            let middle = ((low + high) / 2.0) as f32;
            let even = if bits & 1 == 0 { bits } else { bits + 1 };
            assert_eq!(F16::write(middle), even.to_le_bytes(), "{bits:#06x}");
            assert_eq!(F16::write(middle.next_down()), bits.to_le_bytes());
            assert_eq!(F16::write(middle.next_up()), (bits + 1).to_le_bytes());
        }
        assert_eq!(F16::write(65519.99), 0x7bffu16.to_le_bytes());
        assert_eq!(F16::write(-65520.0), 0xfc00u16.to_le_bytes());
        assert_eq!(F16::write(1e-20), [0, 0]);
    }

    #[test]
    fn every_bfloat16_writes_back_as_itself_and_rounds_to_nearest_even() {
        for bits in 0..=u16::MAX {
            let read = Bf16::read(bits.to_le_bytes());
            if read.is_nan() {
                assert!(Bf16::read(Bf16::write(read)).is_nan());
                continue;
            }
            assert_eq!(Bf16::write(read), bits.to_le_bytes(), "{bits:#06x}");
            if read.is_finite() {
                let middle = f32::from_bits(read.to_bits() | 0x8000);
                let even = if bits & 1 == 0 { bits } else { bits + 1 };
                assert_eq!(Bf16::write(middle), even.to_le_bytes(), "{bits:#06x}");
            }
        }
        assert!(Bf16::read(Bf16::write(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
