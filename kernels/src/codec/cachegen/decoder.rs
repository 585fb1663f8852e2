//! The way back of [`super::encoder`]: each channel waits for its own last level, and vectors do the arithmetic of many.

use super::interval::{Each, Intervals};
use super::table::{CumulativeLanes, LANES};
use super::varint;
use crate::codec::CodecError;
use crate::lanes::{Work, widest};

/// 2^52.
const WHOLE: f64 = (1u64 << 52) as f64;

/// Takes the streams of some tokens of a plane from the front and decodes them into `[tokens][channels]` levels, none above the highest.
pub fn decode(
    tables: &[CumulativeLanes],
    highest: u8,
    packed: &mut &[u8],
    channels: usize,
    levels: &mut [u8],
) -> Result<(), CodecError> {
    let (mut starts, mut all) = (Vec::with_capacity(channels), 0usize);
    for _ in 0..channels {
        starts.push(all);
        all = all.saturating_add(varint::read(packed)? as usize);
    }
    let mut streams = super::take(packed, all)?.to_vec();
    streams.extend([0; 8]);
    for (n, (table, starts)) in tables.iter().zip(starts.chunks(LANES)).enumerate() {
        widest(Together {
            table,
            highest,
            streams: &streams,
            starts,
            rows: levels.chunks_exact_mut(channels),
            first: n * LANES,
        });
    }
    Ok(())
}

/// Up to [`LANES`] channels.
struct Together<'a> {
    table: &'a CumulativeLanes,
    highest: u8,
    streams: &'a [u8],
    /// Where each channel's stream begins.
    starts: &'a [usize],
    rows: std::slice::ChunksExactMut<'a, u8>,
    /// The first of the channels.
    first: usize,
}

impl Work for Together<'_> {
    type Done = ();

    #[inline(always)]
    fn run(self) {
        let mut lanes = Lanes::new(self.streams, self.starts);
        let channels = self.first..self.first + self.starts.len();
        for row in self.rows {
            let levels = lanes.next(self.table, self.highest);
            row[channels.clone()].copy_from_slice(&levels[..self.starts.len()]);
        }
    }
}

/// Where decoding stands in each stream.
struct Lanes<'a> {
    streams: &'a [u8],
    starts: Each<usize>,
    /// Bits that are taken.
    taken: Each<u32>,
    intervals: Intervals,
    /// What of the stream stands beside the ends of the interval: in between, if the stream is sound.
    value: Each<u32>,
}

impl<'a> Lanes<'a> {
    #[inline(always)]
    fn new(streams: &'a [u8], used: &[usize]) -> Self {
        let mut starts = [streams.len(); LANES];
        starts[..used.len()].copy_from_slice(used);
        Self {
            streams,
            starts,
            taken: [32; LANES],
            intervals: Intervals::new(),
            value: starts.map(|start| bits(streams, start, 0)),
        }
    }

    /// The next level of each channel.
    #[inline(always)]
    fn next(&mut self, table: &CumulativeLanes, highest: u8) -> Each<u8> {
        let places = self.places();
        let mut levels = [0u16; LANES];
        for ends in &table[1..=usize::from(highest)] {
            for lane in 0..LANES {
                levels[lane] = levels[lane].wrapping_add(u16::from(places[lane] >= ends[lane]));
            }
        }
        let levels = levels.map(|level| level as u8);
        let found = self.intervals.narrow(table, &levels);
        let mut next = [0; LANES];
        for (lane, next) in next.iter_mut().enumerate() {
            *next = bits(self.streams, self.starts[lane], self.taken[lane]);
        }
        for (lane, next) in next.iter().enumerate() {
            let both = u64::from(self.value[lane]) << 32 | u64::from(*next);
            let dropped = found.known[lane].wrapping_add(found.around[lane]);
            // Each bit of those around the middle is turned when it becomes the first; all but the last of them are dropped.
            let turned = u32::from(found.around[lane] > 0) << 31;
            self.value[lane] = (both.wrapping_shl(dropped) >> 32) as u32 ^ turned;
            self.taken[lane] = self.taken[lane].wrapping_add(dropped);
        }
        levels
    }

    /// In which 65,536th of its interval each value is.
    #[inline(always)]
    fn places(&self) -> Each<u16> {
        let mut places = [0u16; LANES];
        for (lane, found) in places.iter_mut().enumerate() {
            let low = self.intervals.low[lane];
            let above = self.value[lane].wrapping_sub(low);
            let span = self.intervals.high[lane].wrapping_sub(low);
            // The dividend is a whole number of 48 bits and the divisor one of 33: were the quotient below a whole number, it would be so
            // by more than rounding to 53 bits makes up for.
            let dividend = (f64::from(above) + 1.0) * 65_536.0 - 1.0;
            let place = (dividend / (f64::from(span) + 1.0)).min(65_535.0);
            // Beside 2^52 there are only whole numbers, which stand in the lowest bits.
            let nearest = place + WHOLE - WHOLE;
            let floor = if nearest > place {
                nearest - 1.0
            } else {
                nearest
            };
            *found = (floor + WHOLE).to_bits() as u16;
        }
        places
    }
}

/// 32 bits of a stream, from a bit on. Behind its end stand those of another stream, or zeros: they do not matter, because encoding ends
/// with the bits that keep the value in the last interval whatever follows.
#[inline(always)]
fn bits(streams: &[u8], start: usize, bit: u32) -> u32 {
    let from = start.saturating_add(bit as usize / 8);
    let bytes = streams.get(from..).and_then(<[u8]>::first_chunk);
    let eight = u64::from_be_bytes(*bytes.unwrap_or(&[0; 8]));
    ((eight << (bit % 8)) >> 32) as u32
}
