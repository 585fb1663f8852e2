//! The linear map between the numbers of a group and their codes.

const LIFT: f32 = 18_446_744_073_709_551_616.0;
/// 2^-60. Narrower groups are scaled up, so that no factor overflows or loses bits to subnormal numbers.
const NARROW: f32 = 1.0 / (1u64 << 60) as f32;

/// Added to a number of magnitude below 2^22, it rounds that number to an integer, ties to even. The integer is in the lowest bits, in
/// two's complement.
pub const ROUND: f32 = 12_582_912.0;

/// Maps numbers from `low` to `high` to codes from 0 to `top`, and back.
#[derive(Clone, Copy)]
pub struct Scale {
    lift: f32,
    drop: f32,
    base: f32,
    up: f32,
    down: f32,
}

impl Scale {
    /// Takes finite numbers with `low <= high`. If they are equal, every number of the group has code 0.
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

    /// The code of a number, not yet rounded.
    #[inline(always)]
    pub fn up(&self, value: f32) -> f32 {
        (value * self.lift - self.base) * self.up
    }

    /// The number of a code.
    #[inline(always)]
    pub fn down(&self, code: f32) -> f32 {
        (code * self.down + self.base) * self.drop
    }
}

/// Clamps a value to the ends, because rounding must not leave a type's range. NaN stays NaN.
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
