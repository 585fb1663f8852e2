//! Launchers of `pages.cu`, `layout.cu` and `rope.cu`.

use super::{Device, Packing, Refused, Value, address, pointer};
use crate::manifest::Count;
use crate::pages::{Dtype, HeadMajor, Keys, PageMap, PagesError, Style, Turn};

/// The planes of a KV cache in device memory, as read by gather and scatter.
pub struct Table<'a, D: Device> {
    rows: D::Memory,
    map: &'a PageMap,
    /// Keeps the allocations alive, because the rows contain their addresses.
    _storages: Vec<&'a D::Memory>,
}

impl<'a, D: Device> Table<'a, D> {
    /// Uploads the planes of a map whose storages are these allocations.
    pub fn new(
        device: &D,
        map: &'a PageMap,
        storages: Vec<&'a D::Memory>,
    ) -> Result<Self, D::Error> {
        let missing = |plane, storage| {
            Refused::from(PagesError::StorageMissing {
                plane,
                storage,
                got: storages.len(),
            })
        };
        let mut addresses = Vec::new();
        for (storage, bytes) in map.storage_bytes().iter().enumerate() {
            let memory = storages.get(storage).ok_or_else(|| missing(0, storage))?;
            addresses.push(address(device, "a storage", memory, *bytes as u64)?);
        }
        let mut at = 0;
        let mut rows = Vec::new();
        for (number, plane) in map.planes().iter().enumerate() {
            let storage = addresses.get(plane.storage);
            let storage = storage.ok_or_else(|| missing(number, plane.storage))?;
            let row = [
                storage + plane.offset as u64,
                plane.block_stride as u64,
                plane.bytes as u64,
                at,
            ];
            rows.extend(row.into_iter().flat_map(u64::to_ne_bytes));
            at += plane.bytes as u64;
        }
        Ok(Self {
            rows: device.upload(&rows)?,
            map,
            _storages: storages,
        })
    }

    /// Gathers the blocks with these ids (`u32`) into a section, or scatters the section to them. Ids outside the cache are skipped, and
    /// their pieces are added to the 4 bytes of `refused`.
    pub fn transfer(
        &self,
        device: &D,
        stream: &D::Stream,
        packing: Packing,
        ids: &D::Memory,
        section: &D::Memory,
        refused: &D::Memory,
    ) -> Result<(), D::Error> {
        let map = self.map;
        let (id_address, id_bytes) = device.range(ids)?;
        let (blocks, block_bytes) = (id_bytes / 4, map.block_bytes() as u64);
        let section_bytes = blocks.saturating_mul(block_bytes);
        let planes = map.planes().len() as u64;
        let longest = map.planes().iter().map(|p| p.bytes as u64).max();
        let name = match packing {
            Packing::Pack => "kv_gather",
            Packing::Unpack => "kv_scatter",
        };
        let section = pointer(device, "a section", section, section_bytes)?;
        let refused = pointer(device, "the count of refused pieces", refused, 4)?;
        let arguments = [
            ("planes", pointer(device, "planes", &self.rows, 0)?),
            ("plane_count", Value::U32(planes as u32)),
            ("blocks", Value::Pointer(id_address)),
            ("block_count", Value::U32(blocks as u32)),
            ("cache_blocks", Value::U32(map.blocks())),
            ("section", section),
            ("block_bytes", Value::U64(block_bytes)),
            ("refused", refused),
        ];
        let of = |count| match count {
            Count::Pieces => planes * blocks,
            Count::PieceBytes => longest.unwrap_or(0),
            _ => 1,
        };
        // SAFETY: the table's storages cover its planes, the kernel skips ids beyond the cache's blocks, the section holds all blocks, and
        // memory is freed only after the device has finished.
        unsafe { device.launch(stream, name, &arguments, of) }
    }
}

/// The loops of a layout change in device memory.
pub struct Loops<D: Device> {
    rows: D::Memory,
    change: HeadMajor,
}

impl<D: Device> Loops<D> {
    /// Uploads the loops of a change.
    pub fn new(device: &D, change: HeadMajor) -> Result<Self, D::Error> {
        let words = change.loops().into_iter();
        let rows: Vec<u8> = words
            .flat_map(|(extent, stride)| [extent, stride])
            .flat_map(u64::to_ne_bytes)
            .collect();
        Ok(Self {
            rows: device.upload(&rows)?,
            change,
        })
    }

    /// Changes a section from rank-verbatim to canonical order, or back.
    pub fn change(
        &self,
        device: &D,
        stream: &D::Stream,
        packing: Packing,
        verbatim: &D::Memory,
        canonical: &D::Memory,
    ) -> Result<(), D::Error> {
        let want = self.change.section_bytes() as u64;
        let name = match packing {
            Packing::Pack => "kv_to_canonical",
            Packing::Unpack => "kv_to_verbatim",
        };
        let verbatim = pointer(device, "a rank-verbatim section", verbatim, want)?;
        let canonical = pointer(device, "a canonical section", canonical, want)?;
        let arguments = [
            ("verbatim", verbatim),
            ("canonical", canonical),
            ("loops", pointer(device, "loops", &self.rows, 0)?),
            ("run_bytes", Value::U64(self.change.run_bytes() as u64)),
        ];
        let loops = self.change.loops();
        let runs: u64 = loops.iter().map(|(extent, _)| extent).product();
        let of = |count| match count {
            Count::Runs => runs,
            _ => 1,
        };
        // SAFETY: both sides hold a whole section, which is what the loops walk; memory is freed only after the device has finished.
        unsafe { device.launch(stream, name, &arguments, of) }
    }
}

/// Cosines and sines of a rotation in device memory.
pub struct Angles<D: Device> {
    cos: D::Memory,
    sin: D::Memory,
    pairs: usize,
}

impl<D: Device> Angles<D> {
    /// Uploads the angles of a rotation.
    pub fn new(device: &D, turn: &Turn) -> Result<Self, D::Error> {
        let floats =
            |list: &[f32]| -> Vec<u8> { list.iter().flat_map(|f| f.to_ne_bytes()).collect() };
        Ok(Self {
            cos: device.upload(&floats(turn.cos()))?,
            sin: device.upload(&floats(turn.sin()))?,
            pairs: turn.cos().len(),
        })
    }

    /// Rotates the keys of all whole states in place.
    pub fn turn(
        &self,
        device: &D,
        stream: &D::Stream,
        keys: &Keys,
        states: &D::Memory,
    ) -> Result<(), D::Error> {
        let bytes = keys.dtype.bytes();
        let end = keys
            .rotary
            .saturating_mul(bytes)
            .saturating_add(keys.offset);
        let aligned = keys.offset.is_multiple_of(bytes) && keys.state_bytes.is_multiple_of(bytes);
        if end > keys.state_bytes || keys.state_bytes == 0 || !aligned {
            let state_bytes = keys.state_bytes;
            return Err(Refused::from(PagesError::KeyOutsideState { end, state_bytes }).into());
        }
        if self.pairs * 2 != keys.rotary {
            let (cosines, pairs) = (self.pairs, keys.rotary / 2);
            return Err(Refused::from(PagesError::AngleCount {
                cosines,
                sines: cosines,
                pairs,
            })
            .into());
        }
        let (states, bytes) = device.range(states)?;
        let count = bytes / keys.state_bytes as u64;
        let style = match keys.style {
            Style::NeoX => "neox",
            Style::GptJ => "gptj",
        };
        let dtype = match keys.dtype {
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::F32 => "f32",
        };
        let name = format!("kv_turn_{style}_{dtype}");
        let arguments = [
            ("states", Value::Pointer(states)),
            ("state_count", Value::U64(count)),
            ("state_bytes", Value::U64(keys.state_bytes as u64)),
            ("key_offset", Value::U64(keys.offset as u64)),
            ("pairs", Value::U32(self.pairs as u32)),
            ("cos", pointer(device, "cosines", &self.cos, 0)?),
            ("sin", pointer(device, "sines", &self.sin, 0)?),
        ];
        let of = |work| match work {
            Count::States => count,
            _ => 1,
        };
        // SAFETY: only whole states of the memory are counted, keys are aligned and inside their states, and there is one angle per pair;
        // memory is freed only after the device has finished.
        unsafe { device.launch(stream, &name, &arguments, of) }
    }
}
