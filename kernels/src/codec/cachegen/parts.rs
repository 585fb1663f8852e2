//! The parts of a packed section that the GPU kernels read and write: numbers, levels, counts and streams. The rest of a container
//! (varints, concatenated streams) is written and parsed here, on the host.

use super::table::{self, Counts, LEVELS};
use super::{Sizes, level, nothing_left, take, varint};
use crate::codec::{CodecError, Element, Shape};

/// Bytes reserved per stream by a kernel. The rarest levels take 16 bits; a stream has at most 256 levels and two bits more, rounded up to
/// whole words.
pub const STREAM_BYTES: usize = 516;

/// Sizes of a section that kernels pack or unpack. A section has planes (halves of layers), a plane has tokens, a token has channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planes {
    element: Element,
    steps: Vec<u8>,
    tokens: u32,
    channels: u32,
}

impl Planes {
    /// Sizes of a section of `raw` bytes whose shape is complete. A section without numbers is an error.
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

    pub fn element(&self) -> Element {
        self.element
    }

    /// Quantisation steps to either side of zero, per plane. No level exceeds twice that.
    pub fn steps(&self) -> &[u8] {
        &self.steps
    }

    /// Number of planes.
    pub fn count(&self) -> u32 {
        self.steps.len() as u32
    }

    /// Tokens per plane.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Numbers per token and plane.
    pub fn channels(&self) -> u32 {
        self.channels
    }

    /// Tokens of all planes. Each row has one largest magnitude.
    pub fn rows(&self) -> usize {
        self.steps.len() * self.tokens as usize
    }

    /// Count of numbers, which equals the count of levels.
    pub fn numbers(&self) -> usize {
        self.rows() * self.channels as usize
    }

    /// Channels of all planes. Each has counts and a table.
    pub fn tables(&self) -> usize {
        self.steps.len() * self.channels as usize
    }

    /// Number of streams: one per 256 tokens of a channel.
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
    /// The largest magnitude of each row, `[planes][tokens]`.
    pub rows: Vec<u8>,
    /// The frequency of each level, `[planes][channels][32]`.
    pub counts: Vec<u32>,
    /// The offset of each stream, `[planes][groups of 256 tokens][channels]`.
    pub offsets: Vec<u64>,
    /// The length of each stream in bytes.
    pub lengths: Vec<u32>,
    /// The bytes that contain the streams.
    pub streams: &'a [u8],
}

impl<'a> Parts<'a> {
    /// Parses a container of untrusted bytes. Streams are borrowed and are always within the container.
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

    /// Adds the parts of one plane, whose last byte in the container is given.
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

    /// The cumulative frequencies of all channels in the kernels' order, `[planes][33][channels]`.
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

    /// Appends the container to `out`. Fails if parts have other sizes than `planes`, or streams are out of bounds.
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
