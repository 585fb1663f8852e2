//! Launchers of `cachegen.cu`: rows of numbers to levels and back, levels to counts and tables, levels to streams and back. The host builds
//! the container around them with [`Parts`](crate::codec::cachegen::Parts).

use super::{Device, Packing, Value, pointer};
use crate::codec::Element;
use crate::codec::cachegen::{LEVELS, Planes, STREAM_BYTES};
use crate::manifest::Count;

/// The numbers of a section and their quantised form.
pub struct Rows<'a, M> {
    pub raw: &'a M,
    /// The largest magnitude of each row.
    pub largest: &'a M,
    /// One byte per number.
    pub levels: &'a M,
    /// 8 bytes: the kernel lowers this to the first row that it refused.
    pub refused: &'a M,
}

/// Streams within a buffer.
pub struct Streams<'a, M> {
    pub packed: &'a M,
    /// The offset of each stream (`u64`).
    pub offsets: &'a M,
    /// The length of each stream (`u32`).
    pub lengths: &'a M,
}

/// Sizes of a section, and the steps of its planes in device memory.
pub struct CacheGen<D: Device> {
    planes: Planes,
    steps: D::Memory,
}

impl<D: Device> CacheGen<D> {
    /// Uploads the steps of a section's planes.
    pub fn new(device: &D, planes: Planes) -> Result<Self, D::Error> {
        Ok(Self {
            steps: device.upload(planes.steps())?,
            planes,
        })
    }

    pub fn planes(&self) -> &Planes {
        &self.planes
    }

    /// Quantises the rows of a section, or restores them.
    pub fn rows(
        &self,
        device: &D,
        stream: &D::Stream,
        packing: Packing,
        rows: &Rows<'_, D::Memory>,
    ) -> Result<(), D::Error> {
        let planes = &self.planes;
        let (count, bytes) = (planes.rows() as u64, planes.element().bytes() as u64);
        let raw_bytes = planes.numbers() as u64 * bytes;
        let packing = match packing {
            Packing::Pack => "quantise",
            Packing::Unpack => "restore",
        };
        let number = match planes.element() {
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::F32 => "f32",
            Element::Opaque => "opaque",
        };
        let raw = pointer(device, "raw numbers", rows.raw, raw_bytes)?;
        let largest = pointer(device, "largest magnitudes", rows.largest, count * bytes)?;
        let refused = pointer(device, "the first refused row", rows.refused, 8)?;
        let [_, tokens, channels] = self.sizes();
        let arguments = [
            ("raw", raw),
            ("row_count", Value::U64(count)),
            tokens,
            channels,
            self.steps(device)?,
            ("rows", largest),
            self.levels(device, rows.levels)?,
            ("refused", refused),
        ];
        let name = format!("kv_cachegen_{packing}_{number}");
        // SAFETY: the buffers hold the numbers and levels of all rows and the steps of all planes; memory is freed only after the device
        // has finished.
        unsafe { device.launch(stream, &name, &arguments, |work| self.work(work)) }
    }

    /// Counts levels and builds tables from the counts.
    pub fn count(
        &self,
        device: &D,
        stream: &D::Stream,
        levels: &D::Memory,
        counts: &D::Memory,
        tables: &D::Memory,
    ) -> Result<(), D::Error> {
        let count_bytes = 4 * (self.planes.tables() * LEVELS) as u64;
        let [planes, tokens, channels] = self.sizes();
        let arguments = [
            self.levels(device, levels)?,
            planes,
            tokens,
            channels,
            ("counts", pointer(device, "counts", counts, count_bytes)?),
            self.tables(device, tables)?,
        ];
        let name = "kv_cachegen_count";
        // SAFETY: the buffers hold the levels of all numbers and have room for the counts and table of every channel; memory is freed only
        // after the device has finished.
        unsafe { device.launch(stream, name, &arguments, |work| self.work(work)) }
    }

    /// Encodes levels, each stream into its own [`STREAM_BYTES`] bytes.
    pub fn encode(
        &self,
        device: &D,
        stream: &D::Stream,
        levels: &D::Memory,
        tables: &D::Memory,
        streams: &D::Memory,
        lengths: &D::Memory,
    ) -> Result<(), D::Error> {
        let bytes = self.planes.streams() as u64 * STREAM_BYTES as u64;
        let [planes, tokens, channels] = self.sizes();
        let places = pointer(device, "the places of streams", streams, bytes)?;
        let arguments = [
            self.levels(device, levels)?,
            planes,
            tokens,
            channels,
            self.tables(device, tables)?,
            ("streams", places),
            self.lengths(device, lengths)?,
        ];
        let name = "kv_cachegen_encode";
        // SAFETY: the buffers hold levels, tables, and the places and lengths of all streams, and the kernel stays inside them for any
        // levels and tables; memory is freed only after the device has finished.
        unsafe { device.launch(stream, name, &arguments, |work| self.work(work)) }
    }

    /// Decodes streams. Damaged streams give arbitrary levels.
    pub fn decode(
        &self,
        device: &D,
        stream: &D::Stream,
        streams: &Streams<'_, D::Memory>,
        tables: &D::Memory,
        levels: &D::Memory,
    ) -> Result<(), D::Error> {
        let offset_bytes = 8 * self.planes.streams() as u64;
        let (packed, packed_bytes) = device.range(streams.packed)?;
        let offsets = pointer(device, "where streams begin", streams.offsets, offset_bytes)?;
        let [planes, tokens, channels] = self.sizes();
        let arguments = [
            ("packed", Value::Pointer(packed)),
            ("packed_bytes", Value::U64(packed_bytes)),
            ("offsets", offsets),
            self.lengths(device, streams.lengths)?,
            planes,
            tokens,
            channels,
            self.steps(device)?,
            self.tables(device, tables)?,
            self.levels(device, levels)?,
        ];
        let name = "kv_cachegen_decode";
        // SAFETY: the buffers hold offsets, lengths, tables and levels; the kernel skips streams that are out of bounds; memory is freed
        // only after the device has finished.
        unsafe { device.launch(stream, name, &arguments, |work| self.work(work)) }
    }

    fn sizes(&self) -> [(&'static str, Value); 3] {
        [
            ("planes", Value::U32(self.planes.count())),
            ("tokens", Value::U32(self.planes.tokens())),
            ("channels", Value::U32(self.planes.channels())),
        ]
    }

    fn steps(&self, device: &D) -> Result<(&'static str, Value), D::Error> {
        Ok(("steps", pointer(device, "steps", &self.steps, 0)?))
    }

    /// One byte per number.
    fn levels(&self, device: &D, levels: &D::Memory) -> Result<(&'static str, Value), D::Error> {
        let bytes = self.planes.numbers() as u64;
        Ok(("levels", pointer(device, "levels", levels, bytes)?))
    }

    fn tables(&self, device: &D, tables: &D::Memory) -> Result<(&'static str, Value), D::Error> {
        let places = self.planes.tables() * (LEVELS + 1);
        let bytes = 2 * places as u64;
        Ok(("tables", pointer(device, "tables", tables, bytes)?))
    }

    fn lengths(&self, device: &D, lengths: &D::Memory) -> Result<(&'static str, Value), D::Error> {
        let bytes = 4 * self.planes.streams() as u64;
        let lengths = pointer(device, "the lengths of streams", lengths, bytes)?;
        Ok(("lengths", lengths))
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
