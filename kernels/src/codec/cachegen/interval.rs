//! The intervals of an arithmetic coder like torchac's, for many channels in lockstep. An interval of 32 bits is narrowed to a level's part
//! of it. The leading bits that both ends share are then known and dropped. Bits after the first are also dropped while the interval
//! surrounds the middle; their values are known later. torchac does this one bit at a time, this code many bits at a time; the resulting
//! bits are the same.

use super::table::{CumulativeLanes, LANES, LEVELS};

/// One number per channel.
pub type Each<T> = [T; LANES];

/// The intervals. Both ends are inclusive, and an interval is longer than 2^30.
pub struct Intervals {
    pub low: Each<u32>,
    pub high: Each<u32>,
}

/// The result of one narrowing.
#[derive(Clone)]
pub struct Found {
    /// The known bits, in the lowest places.
    pub bits: Each<u32>,
    /// Number of known bits, at most 31.
    pub known: Each<u32>,
    /// Number of bits dropped around the middle. Each will be the opposite of the next known bit.
    pub around: Each<u32>,
}

impl Intervals {
    /// Intervals that cover all 32-bit values.
    pub fn new() -> Self {
        Self {
            low: [0; LANES],
            high: [u32::MAX; LANES],
        }
    }

    /// Narrows each interval to a level's part of it.
    #[inline(always)]
    pub fn narrow(&mut self, table: &CumulativeLanes, levels: &Each<u8>) -> Found {
        let (mut from, mut to) = ([0; LANES], [0; LANES]);
        for lane in 0..LANES {
            let level = usize::from(levels[lane]) % LEVELS;
            (from[lane], to[lane]) = (table[level][lane], table[level + 1][lane]);
        }
        let (mut bits, mut known, mut around) = ([0; LANES], [0; LANES], [0; LANES]);
        for lane in 0..LANES {
            let low = self.low[lane];
            let less_one = self.high[lane].wrapping_sub(low);
            // The length times the position, without its lowest 16 bits. It is computed in two parts, because vector instructions multiply
            // 32 bits.
            let (above, below) = (less_one >> 16, (less_one & 0xffff) + 1);
            let part = |place: u16| {
                let place = u32::from(place);
                let carried = below.wrapping_mul(place) >> 16;
                above.wrapping_mul(place).wrapping_add(carried)
            };
            let high = low.wrapping_add(part(to[lane])).wrapping_sub(1);
            let low = low.wrapping_add(part(from[lane]));
            let agreed = (low ^ high).leading_zeros() % 32;
            bits[lane] = (low >> 1) >> (31 - agreed);
            let (low, high) = drop_bits(low, high, agreed);
            let middle = ((low & !high) << 1).leading_ones() % 32;
            let (low, high) = drop_bits(low, high, middle);
            (self.low[lane], self.high[lane]) = (low & !(1 << 31), high | 1 << 31);
            (known[lane], around[lane]) = (agreed, middle);
        }
        Found {
            bits,
            known,
            around,
        }
    }
}

/// Drops leading bits. The low end is refilled with zeros, the high end with ones.
#[inline(always)]
fn drop_bits(low: u32, high: u32, bits: u32) -> (u32, u32) {
    let filled = high.wrapping_shl(bits) | !u32::MAX.wrapping_shl(bits);
    (low.wrapping_shl(bits), filled)
}
