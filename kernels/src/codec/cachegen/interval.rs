//! The intervals of an arithmetic coder as torchac has it, for many channels in step. An interval of 32 bits is narrowed to a level's part
//! of it; the leading bits on which its ends agree are known then, and dropped, and so are the bits after the first where it is just around
//! the middle, whose values are known later. What are steps of one bit there are steps of many here; the bits are the same.

use super::table::{CumulativeLanes, LANES, LEVELS};

/// A number for each channel.
pub type Each<T> = [T; LANES];

/// The intervals; both ends belong to them, and they are longer than 2^30.
pub struct Intervals {
    pub low: Each<u32>,
    pub high: Each<u32>,
}

/// What was found out by narrowing.
#[derive(Clone)]
pub struct Found {
    /// The bits that are known, in the lowest places.
    pub bits: Each<u32>,
    /// How many, at most 31.
    pub known: Each<u32>,
    /// How many were dropped around the middle: each will be the opposite of the next one that is known.
    pub around: Each<u32>,
}

impl Intervals {
    /// All that 32 bits can be.
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
            // The length times the place, without its lowest 16 bits: in two parts, because vectors have products of 32 bits.
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

/// Drops leading bits; behind the last, an interval begins with zeros and ends with ones.
#[inline(always)]
fn drop_bits(low: u32, high: u32, bits: u32) -> (u32, u32) {
    let filled = high.wrapping_shl(bits) | !u32::MAX.wrapping_shl(bits);
    (low.wrapping_shl(bits), filled)
}
