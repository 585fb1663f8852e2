//! The frequency of each byte value, in 4096ths.

use crate::codec::CodecError;

pub const BITS: u32 = 12;
/// The sum of all frequencies.
pub const TOTAL: u32 = 1 << BITS;
/// Bytes of the bitmap of values that occur.
const OCCURS_BYTES: usize = 32;

/// Frequencies of byte values that add up to [`TOTAL`]. Every value that occurs has a nonzero one.
pub struct Frequencies([u32; 256]);

impl Frequencies {
    /// The frequencies of `bytes`, or `None` if coding with them would save less than a 64th.
    pub fn worth_it(bytes: &[u8]) -> Option<Self> {
        let counts = counts(bytes);
        let frequencies = Self::scaled(&counts, bytes.len() as u64)?;
        let bits: f32 = counts
            .iter()
            .zip(frequencies.0)
            .filter(|(count, _)| **count > 0)
            .map(|(count, frequency)| *count as f32 * (TOTAL as f32 / frequency as f32).log2())
            .sum();
        let most = bytes.len() as f32 * (8.0 * 63.0 / 64.0);
        (bits < most).then_some(frequencies)
    }

    /// Scales counts to [`TOTAL`]. `None` if `count` is 0.
    fn scaled(counts: &[u32; 256], count: u64) -> Option<Self> {
        if count == 0 {
            return None;
        }
        let mut scaled = counts.map(|of_value| {
            let share = u64::from(of_value) * u64::from(TOTAL) / count;
            if of_value > 0 { share.max(1) as u32 } else { 0 }
        });
        // Rounding leaves a remainder, which costs least at the most frequent value. Values that were raised to one may take too many.
        loop {
            let sum: u32 = scaled.iter().sum();
            let most = scaled.iter_mut().max()?;
            match sum {
                ..TOTAL => *most += TOTAL - sum,
                TOTAL => return Some(Self(scaled)),
                _ => *most -= 1,
            }
        }
    }

    /// Appends the frequencies to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut occurs = [0u8; OCCURS_BYTES];
        for (value, _) in self.with_starts() {
            occurs[value / 8] |= 1 << (value % 8);
        }
        out.extend_from_slice(&occurs);
        for frequency in self.0.iter().filter(|frequency| **frequency > 0) {
            out.extend_from_slice(&(*frequency as u16).to_le_bytes());
        }
    }

    /// Parses what [`Self::write`] wrote. Returns the rest of the input too.
    pub fn read(packed: &[u8]) -> Result<(Self, &[u8]), CodecError> {
        let (occurs, rest) = packed
            .split_at_checked(OCCURS_BYTES)
            .ok_or(CodecError::StoredLength)?;
        let values: u32 = occurs.iter().map(|byte| byte.count_ones()).sum();
        let (stored, rest) = rest
            .split_at_checked(2 * values as usize)
            .ok_or(CodecError::StoredLength)?;
        let mut frequencies = [0; 256];
        let occurring = (0..256).filter(|value| occurs[value / 8] >> (value % 8) & 1 == 1);
        for (value, stored) in occurring.zip(stored.as_chunks().0) {
            frequencies[value] = u32::from(u16::from_le_bytes(*stored));
            if frequencies[value] == 0 {
                return Err(CodecError::Damaged("a frequency of zero"));
            }
        }
        // The sum of 256 numbers of 16 bits cannot overflow.
        if frequencies.iter().sum::<u32>() != TOTAL {
            return Err(CodecError::Damaged("sum of frequencies"));
        }
        Ok((Self(frequencies), rest))
    }

    /// The values that occur, each with its slots.
    pub fn with_starts(&self) -> impl Iterator<Item = (usize, std::ops::Range<u32>)> {
        let mut next = 0;
        let ranges = self.0.iter().map(move |frequency| {
            let start = next;
            next += frequency;
            start..next
        });
        ranges.enumerate().filter(|(_, range)| !range.is_empty())
    }

    /// The decoding table, indexed by the lowest bits of a state.
    pub fn slots(&self) -> Box<Slots> {
        let mut slots = Box::new([0; TOTAL as usize]);
        for (value, range) in self.with_starts() {
            let less_one = range.len() as u32 - 1;
            for (above_start, slot) in slots[range.start as usize..range.end as usize]
                .iter_mut()
                .enumerate()
            {
                *slot = value as u32 | less_one << 8 | (above_start as u32) << 20;
            }
        }
        slots
    }
}

/// Per slot: the value (8 bits), its frequency less one (12 bits), and the distance of the slot from the value's first slot (12 bits).
pub type Slots = [u32; TOTAL as usize];

/// Counts each byte value. Four tables avoid a dependency between consecutive additions to the same count.
fn counts(bytes: &[u8]) -> [u32; 256] {
    let mut counts = [[0u32; 256]; 4];
    let (fours, rest) = bytes.as_chunks::<4>();
    for four in fours {
        for (counts, byte) in counts.iter_mut().zip(four) {
            counts[usize::from(*byte)] += 1;
        }
    }
    for byte in rest {
        counts[0][usize::from(*byte)] += 1;
    }
    std::array::from_fn(|value| counts.iter().map(|counts| counts[value]).sum())
}
