//! How often each level occurs in a channel, and the probabilities that follow from it.

use super::varint;
use crate::codec::CodecError;

/// Levels that a table has room for.
pub const LEVELS: usize = 32;
/// Channels that are coded together: so many that loops over them stay loops, of which the compiler makes vectors.
pub const LANES: usize = 64;

/// Cumulative frequencies in 65,536ths: those of level `n` are from place `n` to the next. Strictly increasing.
pub type Cumulative = [u16; LEVELS + 1];

/// The same of [`LANES`] channels.
pub type CumulativeLanes = [[u16; LANES]; LEVELS + 1];

/// How often each level occurs in a channel.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Counts([u32; LEVELS]);

impl Counts {
    /// Those of all levels.
    pub fn of(counts: [u32; LEVELS]) -> Self {
        Self(counts)
    }

    /// How often each level occurs.
    pub fn each(&self) -> &[u32; LEVELS] {
        &self.0
    }

    /// Counts a level.
    #[inline(always)]
    pub fn add(&mut self, level: u8) {
        self.0[usize::from(level) % LEVELS] += 1;
    }

    /// Cumulative frequencies, as LMCache has them: counts in 65,503rds, and one for every level, so that none is impossible.
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

    /// Puts them behind `out`.
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

    /// Takes the counts of a channel with so many levels at most and exactly so many tokens from the front.
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

/// The tables of all channels; lanes behind the last channel hold that of nothing.
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

/// Takes the counts of all channels from the front.
pub fn read(
    packed: &mut &[u8],
    levels: u8,
    tokens: u32,
    channels: usize,
) -> Result<Vec<Counts>, CodecError> {
    // Each channel takes two bytes or more: no more counts are made than there are bytes for.
    if packed.len() / 2 < channels {
        return Err(CodecError::StoredLength);
    }
    (0..channels)
        .map(|_| Counts::read(packed, levels, tokens))
        .collect()
}
