//! What kernels make of a section, and what they take: numbers, levels, counts and streams each for themselves. What a container needs beside
//! them, short numbers and streams one behind the other, is written and read here, on the host.

use super::table::{self, Counts, LEVELS};
use super::{Sizes, level, nothing_left, take, varint};
use crate::codec::{CodecError, Element, Shape};

/// Bytes of the place that a kernel gives each stream. The rarest levels take 16 bits, a stream has at most 256 and two bits more, and
/// places are whole words.
pub const STREAM_BYTES: usize = 516;

/// Sizes of a section that is packed or unpacked by kernels: planes, which are halves of layers, of tokens, of channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planes {
    element: Element,
    steps: Vec<u8>,
    tokens: u32,
    channels: u32,
}

impl Planes {
    /// Those of so many raw bytes of a shape with all its sizes. A section without numbers has no parts.
    pub fn of(shape: &Shape, raw: usize) -> Result<Self, CodecError> {
        if shape.element == Element::Opaque {
            return Err(CodecError::NotNumbers);
        }
        let sizes = Sizes::new(shape, raw)?.ok_or(CodecError::RawLength { raw })?;
        let count = u32::try_from(sizes.planes).map_err(|_| CodecError::RawLength { raw })?;
        let steps = (0..count as usize).map(|plane| level::steps(shape, plane));
        Ok(Self {
            element: shape.element,
            steps: steps.collect(),
            tokens: shape.tokens,
            channels: shape.channels,
        })
    }

    /// What the numbers are.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Steps of each plane to either side of zero: no level is above twice that.
    pub fn steps(&self) -> &[u8] {
        &self.steps
    }

    /// How many planes there are.
    pub fn count(&self) -> u32 {
        self.steps.len() as u32
    }

    /// Tokens of a plane.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Numbers of a token in a plane.
    pub fn channels(&self) -> u32 {
        self.channels
    }

    /// Tokens of all planes: each has a largest magnitude.
    pub fn rows(&self) -> usize {
        self.steps.len() * self.tokens as usize
    }

    /// Numbers, and levels.
    pub fn numbers(&self) -> usize {
        self.rows() * self.channels as usize
    }

    /// Channels of all planes: each has counts and a table.
    pub fn tables(&self) -> usize {
        self.steps.len() * self.channels as usize
    }

    /// Streams: one for each 256 tokens of a channel.
    pub fn streams(&self) -> usize {
        self.tables() * self.groups()
    }

    fn groups(&self) -> usize {
        (self.tokens as usize).div_ceil(super::STREAM_TOKENS)
    }

    fn row_bytes(&self) -> usize {
        self.tokens as usize * self.element.bytes()
    }
}

/// The parts of a packed section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts<'a> {
    /// The largest magnitude of each row: `[planes][tokens]` numbers.
    pub rows: Vec<u8>,
    /// How often each level occurs: `[planes][channels][32]`.
    pub counts: Vec<u32>,
    /// Where each stream begins, `[planes][groups of 256 tokens][channels]`.
    pub offsets: Vec<u64>,
    /// How many bytes each has.
    pub lengths: Vec<u32>,
    /// Where the streams are.
    pub streams: &'a [u8],
}

impl<'a> Parts<'a> {
    /// Takes a container apart, which is any bytes. Streams stay where they are, and whatever they hold, they lie inside of it.
    pub fn of(planes: &Planes, container: &'a [u8]) -> Result<Self, CodecError> {
        let mut parts = Self {
            rows: Vec::new(),
            counts: Vec::new(),
            offsets: Vec::new(),
            lengths: Vec::new(),
            streams: container,
        };
        let mut rest = container;
        let lengths = take(&mut rest, planes.steps.len().saturating_mul(8))?;
        for (steps, length) in planes.steps.iter().zip(lengths.as_chunks().0) {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
            let plane = take(&mut rest, length)?;
            parts.add_plane(planes, *steps, plane, container.len() - rest.len())?;
        }
        nothing_left(rest)?;
        Ok(parts)
    }

    /// The parts of a plane that ends there in the container.
    fn add_plane(
        &mut self,
        planes: &Planes,
        steps: u8,
        mut plane: &[u8],
        end: usize,
    ) -> Result<(), CodecError> {
        self.rows
            .extend_from_slice(take(&mut plane, planes.row_bytes())?);
        let channels = planes.channels as usize;
        let counts = table::read(&mut plane, 2 * steps + 1, planes.tokens, channels)?;
        self.counts.extend(counts.iter().flat_map(Counts::each));
        for _ in 0..planes.groups() {
            let first = self.lengths.len();
            for _ in 0..channels {
                self.lengths.push(varint::read(&mut plane)?);
            }
            for length in &self.lengths[first..] {
                self.offsets.push((end - plane.len()) as u64);
                take(&mut plane, *length as usize)?;
            }
        }
        nothing_left(plane)
    }

    /// The cumulative frequencies of all channels, as kernels read them: `[planes][33][channels]`.
    pub fn tables(&self, planes: &Planes) -> Vec<u16> {
        let channels = planes.channels as usize;
        let mut tables = vec![0; planes.tables() * (LEVELS + 1)];
        let each = tables.chunks_exact_mut(channels * (LEVELS + 1));
        for (tables, counts) in each.zip(self.counts.as_chunks().0.chunks(channels)) {
            for (channel, counts) in counts.iter().enumerate() {
                let places = Counts::of(*counts).cumulative();
                for (tables, place) in tables.chunks_exact_mut(channels).zip(places) {
                    tables[channel] = place;
                }
            }
        }
        tables
    }

    /// Puts the container behind `out`. Parts that are not of these sizes, and streams that are not there, are refused.
    pub fn write(&self, planes: &Planes, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let found = [
            self.rows.len(),
            self.counts.len(),
            self.offsets.len(),
            self.lengths.len(),
        ];
        let wanted = [
            planes.rows() * planes.element.bytes(),
            planes.tables() * LEVELS,
            planes.streams(),
            planes.streams(),
        ];
        if found != wanted {
            return Err(CodecError::StoredLength);
        }
        let channels = planes.channels as usize;
        let rows = self.rows.chunks(planes.row_bytes());
        let counts = self.counts.as_chunks().0.chunks(channels);
        let mut lengths = self.lengths.chunks(channels);
        let mut offsets = self.offsets.chunks(channels);
        let mut length_at = out.len();
        out.resize(length_at + 8 * planes.steps.len(), 0);
        for (rows, counts) in rows.zip(counts) {
            let begun = out.len();
            out.extend_from_slice(rows);
            for counts in counts {
                Counts::of(*counts).write(out);
            }
            for (lengths, offsets) in lengths.by_ref().zip(&mut offsets).take(planes.groups()) {
                for length in lengths {
                    varint::write(*length, out);
                }
                for (offset, length) in offsets.iter().zip(lengths) {
                    out.extend_from_slice(self.stream(*offset, *length)?);
                }
            }
            let length = (out.len() - begun) as u64;
            out[length_at..length_at + 8].copy_from_slice(&length.to_le_bytes());
            length_at += 8;
        }
        Ok(())
    }

    fn stream(&self, offset: u64, length: u32) -> Result<&[u8], CodecError> {
        let begin = usize::try_from(offset).unwrap_or(usize::MAX);
        let stream = self.streams.get(begin..);
        stream
            .and_then(|rest| rest.get(..length as usize))
            .ok_or(CodecError::StoredLength)
    }
}
