//! Level frequencies of a channel, and the probabilities derived from them.

use super::varint;
use crate::codec::CodecError;

/// Maximum number of levels in a table.
pub const LEVELS: usize = 32;
/// Channels that are coded together. Loops of this length are not unrolled and are vectorised.
pub const LANES: usize = 64;

/// Cumulative frequencies in 65,536ths. Level `n` has the range from entry `n` to entry `n + 1`. Strictly increasing.
pub type Cumulative = [u16; LEVELS + 1];

/// The cumulative frequencies of [`LANES`] channels.
pub type CumulativeLanes = [[u16; LANES]; LEVELS + 1];

/// The frequency of each level in a channel.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Counts([u32; LEVELS]);

impl Counts {
    pub fn of(counts: [u32; LEVELS]) -> Self {
        Self(counts)
    }

    pub fn each(&self) -> &[u32; LEVELS] {
        &self.0
    }

    #[inline(always)]
    pub fn add(&mut self, level: u8) {
        self.0[usize::from(level) % LEVELS] += 1;
    }

    /// Cumulative frequencies as computed by LMCache: counts in 65,503rds, plus one for every level, so that no level is impossible.
    pub fn cumulative(&self) -> Cumulative {
        let all: u32 = self.0.iter().sum();
        let mut cumulative = [0; LEVELS + 1];
        let mut sum = 0;
        for (level, place) in cumulative.iter_mut().enumerate() {
            *place = (65_503 * u64::from(sum) / u64::from(all.max(1))) as u16 + level as u16;
            sum += self.0.get(level).copied().unwrap_or_default();
        }
        cumulative
    }

    /// Appends the counts to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let occurs = |count: &u32| *count > 0;
        let first = self.0.iter().position(occurs).unwrap_or(0);
        let end = self
            .0
            .iter()
            .rposition(occurs)
            .map_or(first, |last| last + 1);
        out.extend([first as u8, (end - first) as u8]);
        for count in &self.0[first..end] {
            varint::write(*count, out);
        }
    }

    /// Reads the counts of a channel from the front. There are at most `levels` levels, and the counts add up to `tokens`.
    fn read(packed: &mut &[u8], levels: u8, tokens: u32) -> Result<Self, CodecError> {
        let head: [u8; 2] = *packed
            .split_off(..2)
            .and_then(<[u8]>::first_chunk)
            .ok_or(CodecError::StoredLength)?;
        let [first, count] = head.map(usize::from);
        if first + count > usize::from(levels) {
            return Err(CodecError::Damaged("levels of a channel"));
        }
        let (mut counts, mut left) = (Self::default(), tokens);
        for place in &mut counts.0[first..first + count] {
            *place = varint::read(packed)?;
            left = left
                .checked_sub(*place)
                .ok_or(CodecError::Damaged("counts of a channel"))?;
        }
        if left == 0 {
            Ok(counts)
        } else {
            Err(CodecError::Damaged("counts of a channel"))
        }
    }
}

/// The tables of all channels. Lanes after the last channel have the table of empty counts.
pub fn lanes(counts: &[Counts]) -> Vec<CumulativeLanes> {
    let nothing = Counts::default().cumulative();
    let table = |counts: &[Counts]| {
        let mut table = nothing.map(|place| [place; LANES]);
        for (lane, counts) in counts.iter().enumerate() {
            for (lanes, place) in table.iter_mut().zip(counts.cumulative()) {
                lanes[lane] = place;
            }
        }
        table
    };
    counts.chunks(LANES).map(table).collect()
}

/// Reads the counts of all channels from the front.
pub fn read(
    packed: &mut &[u8],
    levels: u8,
    tokens: u32,
    channels: usize,
) -> Result<Vec<Counts>, CodecError> {
    // Each channel takes at least two bytes, so this bounds the allocation by the input.
    if packed.len() / 2 < channels {
        return Err(CodecError::StoredLength);
    }
    (0..channels)
        .map(|_| Counts::read(packed, levels, tokens))
        .collect()
}
