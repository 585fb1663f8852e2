//! CacheGen: rows of numbers to levels and back, levels to counts and tables, levels to streams and back. The container around them is made by
//! `codec::cachegen::Parts`, on the host.

use super::{Way, holds};
use crate::gpu::cuda::buffer::Buffer;
use crate::gpu::cuda::launch::{Kernels, LaunchError, Value};
use crate::gpu::cuda::stream::Stream;
use kvcachepool_kernels::codec::Element;
use kvcachepool_kernels::codec::cachegen::{LEVELS, Planes, STREAM_BYTES};
use kvcachepool_kernels::manifest::Count;

/// Sizes of a section, and on the device its planes' steps.
pub struct CacheGen {
    planes: Planes,
    steps: Buffer,
}

impl CacheGen {
    /// Those of a section.
    pub fn new(kernels: &Kernels, planes: Planes) -> Result<Self, LaunchError> {
        Ok(Self {
            steps: Buffer::of(kernels.context(), planes.steps())?,
            planes,
        })
    }

    /// Sizes of the section.
    pub fn planes(&self) -> &Planes {
        &self.planes
    }

    fn sizes(&self) -> [(&'static str, Value); 3] {
        [
            ("planes", Value::U32(self.planes.count())),
            ("tokens", Value::U32(self.planes.tokens())),
            ("channels", Value::U32(self.planes.channels())),
        ]
    }

    /// A byte for each number.
    fn holds_levels(&self, levels: &Buffer) -> Result<(), LaunchError> {
        holds("levels", levels, self.planes.numbers() as u64)
    }

    fn holds_tables(&self, tables: &Buffer) -> Result<(), LaunchError> {
        let places = self.planes.tables() * (LEVELS + 1);
        holds("tables", tables, 2 * places as u64)
    }

    fn holds_lengths(&self, lengths: &Buffer) -> Result<(), LaunchError> {
        let streams = self.planes.streams() as u64;
        holds("the lengths of streams", lengths, 4 * streams)
    }

    fn work(&self, count: Count) -> u64 {
        let work = match count {
            Count::Rows => self.planes.rows(),
            Count::Channels => self.planes.tables(),
            Count::Streams => self.planes.streams(),
            _ => 1,
        };
        work as u64
    }
}

/// Numbers of a section and what they are quantised to.
pub struct Rows<'a> {
    /// The numbers.
    pub raw: &'a Buffer,
    /// The largest magnitude of each row.
    pub largest: &'a Buffer,
    /// A byte for each number.
    pub levels: &'a Buffer,
    /// 8 bytes: the first row that was left out, where that is less than what was there.
    pub refused: &'a Buffer,
}

/// Streams anywhere in some bytes.
pub struct Streams<'a> {
    /// The bytes.
    pub packed: &'a Buffer,
    /// Where each stream begins (`u64`).
    pub offsets: &'a Buffer,
    /// How long each is (`u32`).
    pub lengths: &'a Buffer,
}

impl Kernels {
    /// Quantises the rows of a section, or restores them.
    pub fn cachegen_rows(
        &self,
        stream: &Stream,
        way: Way,
        section: &CacheGen,
        rows: &Rows<'_>,
    ) -> Result<(), LaunchError> {
        let planes = &section.planes;
        let (count, bytes) = (planes.rows() as u64, planes.element().bytes() as u64);
        holds("raw numbers", rows.raw, planes.numbers() as u64 * bytes)?;
        holds("largest magnitudes", rows.largest, count * bytes)?;
        section.holds_levels(rows.levels)?;
        holds("the first refused row", rows.refused, 8)?;
        let way = match way {
            Way::Pack => "quantise",
            Way::Unpack => "restore",
        };
        let number = match planes.element() {
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::F32 => "f32",
            Element::Opaque => "opaque",
        };
        let [_, tokens, channels] = section.sizes();
        let arguments = [
            ("raw", self.pointer(rows.raw)?),
            ("row_count", Value::U64(count)),
            tokens,
            channels,
            ("steps", self.pointer(&section.steps)?),
            ("rows", self.pointer(rows.largest)?),
            ("levels", self.pointer(rows.levels)?),
            ("refused", self.pointer(rows.refused)?),
        ];
        let name = format!("kv_cachegen_{way}_{number}");
        // SAFETY: numbers and levels of all rows are there, and steps of all planes; buffers wait for the device before they go.
        unsafe { self.launch(stream, &name, &arguments, |work| section.work(work)) }
    }

    /// Counts levels, and makes tables of the counts.
    pub fn cachegen_count(
        &self,
        stream: &Stream,
        section: &CacheGen,
        levels: &Buffer,
        counts: &Buffer,
        tables: &Buffer,
    ) -> Result<(), LaunchError> {
        section.holds_levels(levels)?;
        let count = section.planes.tables() * LEVELS;
        holds("counts", counts, 4 * count as u64)?;
        section.holds_tables(tables)?;
        let [planes, tokens, channels] = section.sizes();
        let arguments = [
            ("levels", self.pointer(levels)?),
            planes,
            tokens,
            channels,
            ("counts", self.pointer(counts)?),
            ("tables", self.pointer(tables)?),
        ];
        let name = "kv_cachegen_count";
        // SAFETY: levels of all numbers are there, and room for counts and table of every channel; buffers wait for the device before
        // they go.
        unsafe { self.launch(stream, name, &arguments, |work| section.work(work)) }
    }

    /// Codes levels, each stream to a place of [`STREAM_BYTES`].
    pub fn cachegen_encode(
        &self,
        stream: &Stream,
        section: &CacheGen,
        levels: &Buffer,
        tables: &Buffer,
        streams: &Buffer,
        lengths: &Buffer,
    ) -> Result<(), LaunchError> {
        section.holds_levels(levels)?;
        section.holds_tables(tables)?;
        let bytes = section.planes.streams() as u64 * STREAM_BYTES as u64;
        holds("the places of streams", streams, bytes)?;
        section.holds_lengths(lengths)?;
        let [planes, tokens, channels] = section.sizes();
        let arguments = [
            ("levels", self.pointer(levels)?),
            planes,
            tokens,
            channels,
            ("tables", self.pointer(tables)?),
            ("streams", self.pointer(streams)?),
            ("lengths", self.pointer(lengths)?),
        ];
        let name = "kv_cachegen_encode";
        // SAFETY: levels and tables are there, and places and lengths of all streams, which the kernel does not write beyond whatever the
        // levels and tables are; buffers wait for the device before they go.
        unsafe { self.launch(stream, name, &arguments, |work| section.work(work)) }
    }

    /// Decodes streams. Whatever they hold, there are levels afterwards.
    pub fn cachegen_decode(
        &self,
        stream: &Stream,
        section: &CacheGen,
        streams: &Streams<'_>,
        tables: &Buffer,
        levels: &Buffer,
    ) -> Result<(), LaunchError> {
        let count = section.planes.streams() as u64;
        holds("where streams begin", streams.offsets, 8 * count)?;
        section.holds_lengths(streams.lengths)?;
        section.holds_tables(tables)?;
        section.holds_levels(levels)?;
        let [planes, tokens, channels] = section.sizes();
        let arguments = [
            ("packed", self.pointer(streams.packed)?),
            ("packed_bytes", Value::U64(streams.packed.bytes())),
            ("offsets", self.pointer(streams.offsets)?),
            ("lengths", self.pointer(streams.lengths)?),
            planes,
            tokens,
            channels,
            ("steps", self.pointer(&section.steps)?),
            ("tables", self.pointer(tables)?),
            ("levels", self.pointer(levels)?),
        ];
        let name = "kv_cachegen_decode";
        // SAFETY: offsets, lengths, tables and levels are there; what they say of bytes that are not is left out by the kernel; buffers
        // wait for the device before they go.
        unsafe { self.launch(stream, name, &arguments, |work| section.work(work)) }
    }
}
