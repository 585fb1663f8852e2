//! Encodes the levels of channels as bit streams, with the intervals of [`super::interval`].

use super::interval::{Each, Found, Intervals};
use super::table::{CumulativeLanes, LANES};
use super::varint;
use crate::lanes::{Work, widest};

/// Appends the lengths of the streams of `[tokens][channels]` levels to `out`, then the streams.
pub fn encode(tables: &[CumulativeLanes], channels: usize, levels: &[u8], out: &mut Vec<u8>) {
    let (mut streams, mut found) = (Vec::new(), Vec::new());
    for (table, first) in tables.iter().zip((0..channels).step_by(LANES)) {
        found.clear();
        let used = (channels - first).min(LANES);
        let intervals = widest(Narrow {
            table,
            rows: levels.chunks_exact(channels),
            first,
            used,
            found: &mut found,
        });
        for lane in 0..used {
            let begun = streams.len();
            write(&intervals, &found, lane, &mut streams);
            varint::write((streams.len() - begun) as u32, out);
        }
    }
    out.extend_from_slice(&streams);
}

/// Narrows the intervals of a batch of channels by all their levels.
struct Narrow<'a> {
    table: &'a CumulativeLanes,
    rows: std::slice::ChunksExact<'a, u8>,
    /// The first channel of the batch, and the number of channels.
    first: usize,
    used: usize,
    /// One entry per token.
    found: &'a mut Vec<Found>,
}

impl Work for Narrow<'_> {
    type Done = Intervals;

    #[inline(always)]
    fn run(self) -> Intervals {
        let mut intervals = Intervals::new();
        let mut levels: Each<u8> = [0; LANES];
        for row in self.rows {
            levels[..self.used].copy_from_slice(&row[self.first..][..self.used]);
            self.found.push(intervals.narrow(self.table, &levels));
        }
        intervals
    }
}

/// Appends the stream of one channel to `out`. The highest bit of a byte comes first; the last byte is padded with zeros.
fn write(intervals: &Intervals, found: &[Found], lane: usize, out: &mut Vec<u8>) {
    let mut stream = Stream {
        out,
        held: 0,
        count: 0,
        pending: 0,
    };
    for found in found {
        stream.put_known(found.bits[lane], found.known[lane]);
        stream.pending += found.around[lane];
    }
    // Writes the bit of the quarter that is entirely inside the interval, then its opposite. Whatever follows, the value stays in the
    // interval.
    stream.pending += 1;
    stream.put_known(u32::from(intervals.low[lane] >= 1 << 30), 1);
    stream.finish();
}

/// A bit writer.
struct Stream<'a> {
    out: &'a mut Vec<u8>,
    /// Only the lowest `count` bits are not written yet; fewer than 32 between calls.
    held: u64,
    count: u32,
    /// Number of pending bits. They will be the opposite of the next known bit.
    pending: u32,
}

impl Stream<'_> {
    /// Writes known bits, with the pending bits inserted after the first. Their number is unpredictable, so there is no branch for zero.
    #[inline(always)]
    fn put_known(&mut self, bits: u32, known: u32) {
        if known + self.pending > 32 {
            self.put_slowly(bits, known);
            return;
        }
        // Puts the opposite of the first bit behind it, for 0 and for 1: 0 + 0111 = 0111, 0001 + 0111 = 1000.
        let opposite = (((1 << self.pending) - 1) << known) >> 1;
        let all = u64::from(bits) + opposite;
        let (all, count, pending) = if known > 0 {
            (all, known + self.pending, 0)
        } else {
            (0, 0, self.pending)
        };
        self.pending = pending;
        self.put(all, count);
    }

    /// Handles any number of pending bits.
    #[cold]
    fn put_slowly(&mut self, bits: u32, known: u32) {
        let Some(others) = known.checked_sub(1) else {
            return;
        };
        let first = u64::from(bits >> others);
        self.put(first, 1);
        while self.pending > 0 {
            let some = self.pending.min(32);
            self.put((1 - first) * ((1 << some) - 1), some);
            self.pending -= some;
        }
        self.put(u64::from(bits) - (first << others), others);
    }

    /// Writes the lowest bits of a number, at most 32. Its higher bits must be zero.
    #[inline(always)]
    fn put(&mut self, bits: u64, count: u32) {
        self.held = self.held << count | bits;
        self.count += count;
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
    use super::super::decoder::decode;
    use super::super::table::{Counts, Cumulative, lanes};
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A bit-by-bit port of torchac's encoder.
    fn bit_by_bit(table: &Cumulative, levels: &[u8]) -> Vec<u8> {
        let (mut bits, mut low, mut high, mut pending) = (Vec::new(), 0u32, u32::MAX, 0);
        let put = |bits: &mut Vec<bool>, bit: bool, pending: &mut usize| {
            bits.push(bit);
            bits.extend(std::iter::repeat_n(!bit, std::mem::take(pending)));
        };
        for level in levels {
            let span = u64::from(high) - u64::from(low) + 1;
            let [from, to] = [0, 1].map(|next| table[usize::from(*level) + next]);
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

    /// Encodes the levels of one channel, compares the stream, decodes it and compares the levels.
    fn there_and_back(counts: &Counts, highest: u8, levels: &[u8]) {
        let tables = lanes(std::slice::from_ref(counts));
        let (mut packed, mut wanted) = (Vec::new(), Vec::new());
        encode(&tables, 1, levels, &mut packed);
        let stream = bit_by_bit(&counts.cumulative(), levels);
        varint::write(stream.len() as u32, &mut wanted);
        wanted.extend(stream);
        assert_eq!(packed, wanted);

        let (mut left, mut back) = (packed.as_slice(), vec![0xa5; levels.len()]);
        decode(&tables, highest, &mut left, 1, &mut back).unwrap();
        assert_eq!(back, levels);
        assert!(left.is_empty());
    }

    proptest! {
        #[test]
        fn streams_are_those_of_torchac(levels in vec((0u8..=30, 0u8..=30), 0..256), more in vec(0u8..=30, 0..100)) {
            // Taking the minimum of two values makes some levels rarer than others.
            let levels: Vec<_> = levels.into_iter().map(|(one, other)| one.min(other)).collect();
            let counts = counted(&[levels.clone(), more].concat());
            there_and_back(&counts, 30, &levels);
        }
    }

    #[test]
    fn rare_levels_cost_what_they_must_and_come_back() {
        let mut counts = counted(&[7; 60_000]);
        let levels = [[0; 128], [14; 128]].concat();
        levels.iter().for_each(|level| counts.add(*level));
        for rare in [levels, vec![7; 256], [[7; 64], [6; 64]].concat()] {
            there_and_back(&counts, 14, &rare);
        }
    }
}
