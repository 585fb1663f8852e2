//! The arithmetic coder of one channel, as in torchac: an interval of 32 bits is narrowed to a level's part of it, and the leading bits on
//! which its ends agree are written. Steps of one bit there are steps of many here; the bits are the same.

use super::table::Cumulative;

/// Puts the stream of the levels behind `out`: the highest bit of a byte first, the last byte filled with zeros.
pub fn encode(table: &Cumulative, levels: impl Iterator<Item = u8>, out: &mut Vec<u8>) {
    let mut bits = Bits::new(out);
    let (mut low, mut high) = (0u32, u32::MAX);
    // Bits that will be the opposite of the next one that is known: the interval is around the middle.
    let mut pending = 0;
    for level in levels {
        (low, high) = narrow(low, high, places(table, level));
        let known = (low ^ high).leading_zeros();
        if known > 0 {
            bits.put_known(low, known, &mut pending);
            (low, high) = shift(low, high, known);
        }
        let around = around_the_middle(low, high);
        pending += around;
        (low, high) = unfold(low, high, around);
    }
    pending += 1;
    let half = if low < 1 << 30 { 0 } else { u32::MAX };
    bits.put_known(half, 1, &mut pending);
    bits.finish();
}

/// Where a level's part begins and ends. 65,536 does not fit a table: the last level's end is its own.
fn places(table: &Cumulative, level: u8) -> (u32, u32) {
    let level = usize::from(level) % (table.len() - 1);
    let end = if level + 2 == table.len() {
        1 << 16
    } else {
        u32::from(table[level + 1])
    };
    (u32::from(table[level]), end)
}

/// The part of an interval, both ends of which belong to it.
fn narrow(low: u32, high: u32, (from, to): (u32, u32)) -> (u32, u32) {
    let span = u64::from(high - low) + 1;
    let part = |place: u32| ((span * u64::from(place)) >> 16) as u32;
    // At the end of all this may go around twice.
    let high = low.wrapping_add(part(to)).wrapping_sub(1);
    (low + part(from), high)
}

/// Drops leading bits; the interval ends where it ended.
#[inline(always)]
pub fn shift(low: u32, high: u32, bits: u32) -> (u32, u32) {
    (
        low.wrapping_shl(bits),
        high.wrapping_shl(bits) | !u32::MAX.wrapping_shl(bits),
    )
}

/// How many bits after the first are 1 in the low end and 0 in the high one.
#[inline(always)]
pub fn around_the_middle(low: u32, high: u32) -> u32 {
    ((low & !high) << 1).leading_ones()
}

/// Drops these bits.
#[inline(always)]
pub fn unfold(low: u32, high: u32, bits: u32) -> (u32, u32) {
    let (low, high) = shift(low, high, bits);
    (low & !(1 << 31), high | 1 << 31)
}

/// Bits on their way to bytes.
struct Bits<'a> {
    out: &'a mut Vec<u8>,
    /// The last `count` of these are still to be written; fewer than 32 between calls.
    held: u64,
    count: u32,
}

impl<'a> Bits<'a> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        Self {
            out,
            held: 0,
            count: 0,
        }
    }

    /// The first bit, the opposite of it as often as is pending, and the other ones of so many leading bits.
    fn put_known(&mut self, leading: u32, bits: u32, pending: &mut u32) {
        if *pending == 0 {
            self.put(leading >> (32 - bits), bits);
            return;
        }
        let first = leading >> 31;
        self.put(first, 1);
        while *pending > 0 {
            let some = (*pending).min(31);
            self.put(if first == 0 { (1 << some) - 1 } else { 0 }, some);
            *pending -= some;
        }
        if bits > 1 {
            self.put(leading << 1 >> (33 - bits), bits - 1);
        }
    }

    /// The lowest 1 to 32 bits of a number without higher ones.
    fn put(&mut self, number: u32, bits: u32) {
        self.held = self.held << bits | u64::from(number);
        self.count += bits;
        if self.count >= 32 {
            self.count -= 32;
            let word = (self.held >> self.count) as u32;
            self.out.extend_from_slice(&word.to_be_bytes());
        }
    }

    fn finish(self) {
        let word = (self.held << (32 - self.count)) as u32;
        let bytes = self.count.div_ceil(8) as usize;
        self.out.extend_from_slice(&word.to_be_bytes()[..bytes]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::decoder;
    use super::super::table::{self, Counts};
    use super::super::varint;
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// torchac's encoder, bit by bit.
    fn bit_by_bit(table: &Cumulative, levels: &[u8]) -> Vec<u8> {
        let (mut bits, mut low, mut high, mut pending) = (Vec::new(), 0u32, u32::MAX, 0);
        let put = |bits: &mut Vec<bool>, bit: bool, pending: &mut usize| {
            bits.push(bit);
            bits.extend(std::iter::repeat_n(!bit, std::mem::take(pending)));
        };
        for level in levels {
            let span = u64::from(high) - u64::from(low) + 1;
            let (from, to) = places(table, *level);
            high = (u64::from(low) + ((span * u64::from(to)) >> 16) - 1) as u32;
            low += ((span * u64::from(from)) >> 16) as u32;
            loop {
                if high < 0x8000_0000 || low >= 0x8000_0000 {
                    put(&mut bits, low >= 0x8000_0000, &mut pending);
                    (low, high) = (low << 1, high << 1 | 1);
                } else if low >= 0x4000_0000 && high < 0xc000_0000 {
                    pending += 1;
                    (low, high) = (low << 1 & 0x7fff_ffff, high << 1 | 0x8000_0001);
                } else {
                    break;
                }
            }
        }
        pending += 1;
        put(&mut bits, low >= 0x4000_0000, &mut pending);
        let byte = |bits: &[bool]| {
            (0..8).fold(0, |byte, n| {
                byte << 1 | u8::from(bits.get(n) == Some(&true))
            })
        };
        bits.chunks(8).map(byte).collect()
    }

    fn counted(levels: &[u8]) -> Counts {
        let mut counts = Counts::default();
        levels.iter().for_each(|level| counts.add(*level));
        counts
    }

    /// Levels of one channel through the decoder.
    fn decoded(counts: &Counts, stream: &[u8], tokens: usize, highest: u8) -> Vec<u8> {
        let mut packed = Vec::new();
        counts.write(&mut packed);
        let all = counts.0.iter().sum();
        let tables = table::read(&mut packed.as_slice(), highest + 1, all, 1).unwrap();
        let (mut packed, mut levels) = (Vec::new(), vec![0xa5; tokens]);
        varint::write(stream.len() as u32, &mut packed);
        packed.extend(stream);
        decoder::decode(&tables, highest, &mut packed.as_slice(), 1, &mut levels).unwrap();
        levels
    }

    proptest! {
        #[test]
        fn streams_are_those_of_torchac(levels in vec((0u8..=30, 0u8..=30), 0..256), more in vec(0u8..=30, 0..100)) {
            // The lesser of two makes some levels rarer than others.
            let levels: Vec<_> = levels.into_iter().map(|(one, other)| one.min(other)).collect();
            let counts = counted(&[levels.clone(), more].concat());
            let mut stream = Vec::new();
            encode(&counts.cumulative(), levels.iter().copied(), &mut stream);
            prop_assert_eq!(&stream, &bit_by_bit(&counts.cumulative(), &levels));
            prop_assert_eq!(decoded(&counts, &stream, levels.len(), 30), levels);
        }
    }

    #[test]
    fn rare_levels_cost_what_they_must_and_come_back() {
        let mut counts = counted(&[7; 60_000]);
        let levels = [[0; 128], [14; 128]].concat();
        levels.iter().for_each(|level| counts.add(*level));
        for rare in [levels, vec![7; 256], [[7; 64], [6; 64]].concat()] {
            let mut stream = Vec::new();
            encode(&counts.cumulative(), rare.iter().copied(), &mut stream);
            assert_eq!(stream, bit_by_bit(&counts.cumulative(), &rare));
            assert_eq!(decoded(&counts, &stream, rare.len(), 14), rare);
        }
    }
}
