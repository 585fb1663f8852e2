//! The straight line between the numbers of a group and their codes.

/// 2^64.
const LIFT: f32 = 18_446_744_073_709_551_616.0;
/// 2^-60: narrower groups are lifted, so that no factor overflows or loses bits to subnormal numbers.
const NARROW: f32 = 1.0 / (1u64 << 60) as f32;

/// Added to a number of less than 2^22 it rounds that to a whole number, ties to even, which then stands in the lowest bits; a negative one
/// as two's complement.
pub const ROUND: f32 = 12_582_912.0;

/// Brings numbers from `low` to `high` to codes from 0 to `top`, and back.
#[derive(Clone, Copy)]
pub struct Scale {
    lift: f32,
    drop: f32,
    base: f32,
    up: f32,
    down: f32,
}

impl Scale {
    /// Of finite numbers, `low` not above `high`. Where they are the same, every number in between, which is that one, has code 0.
    #[inline(always)]
    pub fn new(low: f32, high: f32, top: f32) -> Self {
        let width = high - low;
        let lift = if width < NARROW && low.abs().max(high.abs()) < 1.0 {
            LIFT
        } else if width == f32::INFINITY {
            0.5
        } else {
            1.0
        };
        let base = low * lift;
        let lifted = high * lift - base;
        Self {
            lift,
            drop: 1.0 / lift,
            base,
            up: if lifted > 0.0 { top / lifted } else { 1.0 },
            down: lifted / top,
        }
    }

    /// To a code, not yet rounded.
    #[inline(always)]
    pub fn up(&self, value: f32) -> f32 {
        (value * self.lift - self.base) * self.up
    }

    /// From a code.
    #[inline(always)]
    pub fn down(&self, code: f32) -> f32 {
        (code * self.down + self.base) * self.drop
    }
}

/// The value, or the end that it is beyond: rounding must not lead out of a type's range. NaN stays NaN.
#[inline(always)]
pub fn within(value: f32, least: f32, greatest: f32) -> f32 {
    if value > greatest {
        greatest
    } else if value < least {
        least
    } else {
        value
    }
}
