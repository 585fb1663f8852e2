//! The inverse of [`super::encoder`]. A channel decodes its levels one after another, so the arithmetic of many channels is vectorised.

use super::interval::{Each, Intervals};
use super::table::{CumulativeLanes, LANES};
use super::varint;
use crate::codec::CodecError;
use crate::lanes::{Work, widest};

const WHOLE: f64 = (1u64 << 52) as f64;

/// Decodes the streams of one group of tokens of a plane from the front of the input into `[tokens][channels]` levels. No level exceeds the
/// highest one.
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

/// A batch of up to [`LANES`] channels.
struct Together<'a> {
    table: &'a CumulativeLanes,
    highest: u8,
    streams: &'a [u8],
    /// The offset of each channel's stream.
    starts: &'a [usize],
    rows: std::slice::ChunksExactMut<'a, u8>,
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

/// The decoder's position in each stream.
struct Lanes<'a> {
    streams: &'a [u8],
    starts: Each<usize>,
    /// Number of bits consumed.
    taken: Each<u32>,
    intervals: Intervals,
    /// The window of the stream that is compared with the interval. In a valid stream it is inside the interval.
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

    /// Decodes the next level of each channel.
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
            // Each bit around the middle is inverted when it becomes the first one. All but the last of them are dropped.
            let turned = u32::from(found.around[lane] > 0) << 31;
            self.value[lane] = (both.wrapping_shl(dropped) >> 32) as u32 ^ turned;
            self.taken[lane] = self.taken[lane].wrapping_add(dropped);
        }
        levels
    }

    /// The position of each value in its interval, in 65,536ths.
    #[inline(always)]
    fn places(&self) -> Each<u16> {
        let mut places = [0u16; LANES];
        for (lane, found) in places.iter_mut().enumerate() {
            let low = self.intervals.low[lane];
            let above = self.value[lane].wrapping_sub(low);
            let span = self.intervals.high[lane].wrapping_sub(low);
            // The dividend is an integer of 48 bits and the divisor one of 33 bits. If the quotient is below an integer, the difference is
            // larger than the error of rounding to 53 bits.
            let dividend = (f64::from(above) + 1.0) * 65_536.0 - 1.0;
            let place = (dividend / (f64::from(span) + 1.0)).min(65_535.0);
            // Next to 2^52 a double holds only integers, so the result is in the lowest bits.
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

/// Reads 32 bits of a stream, starting at a bit. Bits past its end belong to another stream, or are zero. They do not change the result:
/// the encoder ends a stream with bits that keep the value in the last interval, whatever follows.
#[inline(always)]
fn bits(streams: &[u8], start: usize, bit: u32) -> u32 {
    let from = start.saturating_add(bit as usize / 8);
    let bytes = streams.get(from..).and_then(<[u8]>::first_chunk);
    let eight = u64::from_be_bytes(*bytes.unwrap_or(&[0; 8]));
    ((eight << (bit % 8)) >> 32) as u32
}
