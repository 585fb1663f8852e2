//! One launcher for each family of kernels: it checks that all the memory a kernel would touch is there, so that calling it is safe.
//! What the arguments mean is said in `kernels/cuda`; the references in the crate `kernels` take the same and do the same.

#![allow(unsafe_code)]

pub mod cachegen;

use super::buffer::Buffer;
use super::context::Context;
use super::launch::{Kernels, LaunchError, Value};
use super::stream::Stream;
use kvcachepool_kernels::manifest::Count;
use kvcachepool_kernels::pages::{Dtype, HeadMajor, Keys, PageMap, PagesError, Style, Turn};
use std::sync::Arc;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Out of the cache, to the canonical order, to levels.
    Pack,
    /// Back.
    Unpack,
}

/// The planes of a KV cache on the device: what gather and scatter walk.
pub struct Table<'a> {
    rows: Buffer,
    map: &'a PageMap,
    /// Kept, since the rows have their addresses.
    _storages: Vec<&'a Buffer>,
}

impl<'a> Table<'a> {
    /// Of a map and the allocations that its planes name.
    pub fn new(map: &'a PageMap, storages: Vec<&'a Buffer>) -> Result<Self, LaunchError> {
        let missing = |storage: usize| PagesError::StorageMissing {
            plane: 0,
            storage,
            got: storages.len(),
        };
        let Some(first) = storages.first() else {
            return Err(missing(0).into());
        };
        let context = first.context();
        for (storage, bytes) in map.storage_bytes().iter().enumerate() {
            let buffer = storages.get(storage).ok_or_else(|| missing(storage))?;
            holds("a storage", buffer, *bytes as u64)?;
            same_device(context, buffer)?;
        }
        let mut at = 0;
        let mut rows = Vec::new();
        for plane in map.planes() {
            let storage = storages.get(plane.storage);
            let storage = storage.ok_or_else(|| missing(plane.storage))?;
            let row = [
                storage.at(plane.offset as u64, plane.bytes as u64)?,
                plane.block_stride as u64,
                plane.bytes as u64,
                at,
            ];
            rows.extend(row.into_iter().flat_map(u64::to_ne_bytes));
            at += plane.bytes as u64;
        }
        Ok(Self {
            rows: Buffer::of(context, &rows)?,
            map,
            _storages: storages,
        })
    }
}

/// The loops of a layout change on the device.
pub struct Loops {
    rows: Buffer,
    change: HeadMajor,
}

impl Loops {
    /// Those of a change.
    pub fn new(kernels: &Kernels, change: HeadMajor) -> Result<Self, LaunchError> {
        let words = change.loops().into_iter();
        let rows: Vec<u8> = words
            .flat_map(|(extent, stride)| [extent, stride])
            .flat_map(u64::to_ne_bytes)
            .collect();
        Ok(Self {
            rows: Buffer::of(kernels.context(), &rows)?,
            change,
        })
    }
}

/// A turn's cosines and sines on the device.
pub struct Angles {
    cos: Buffer,
    sin: Buffer,
    pairs: usize,
}

impl Angles {
    /// Those of a turn.
    pub fn new(kernels: &Kernels, turn: &Turn) -> Result<Self, LaunchError> {
        let floats =
            |list: &[f32]| -> Vec<u8> { list.iter().flat_map(|f| f.to_ne_bytes()).collect() };
        Ok(Self {
            cos: Buffer::of(kernels.context(), &floats(turn.cos()))?,
            sin: Buffer::of(kernels.context(), &floats(turn.sin()))?,
            pairs: turn.cos().len(),
        })
    }
}

impl Kernels {
    /// All of a buffer, as an argument.
    fn pointer(&self, buffer: &Buffer) -> Result<Value, LaunchError> {
        same_device(self.context(), buffer)?;
        Ok(Value::Pointer(buffer.at(0, buffer.bytes())?))
    }

    /// Gathers the blocks of these ids (`u32`) into a section, or scatters it to them. Ids that the cache has not are left out, and their
    /// pieces counted in the 4 bytes of `refused`.
    pub fn transfer(
        &self,
        stream: &Stream,
        way: Way,
        table: &Table<'_>,
        ids: &Buffer,
        section: &Buffer,
        refused: &Buffer,
    ) -> Result<(), LaunchError> {
        let map = table.map;
        let (blocks, block_bytes) = (ids.bytes() / 4, map.block_bytes() as u64);
        holds("a section", section, blocks.saturating_mul(block_bytes))?;
        holds("the count of refused pieces", refused, 4)?;
        let planes = map.planes().len() as u64;
        let longest = map.planes().iter().map(|p| p.bytes as u64).max();
        let name = match way {
            Way::Pack => "kv_gather",
            Way::Unpack => "kv_scatter",
        };
        let arguments = [
            ("planes", self.pointer(&table.rows)?),
            ("plane_count", Value::U32(planes as u32)),
            ("blocks", self.pointer(ids)?),
            ("block_count", Value::U32(blocks as u32)),
            ("cache_blocks", Value::U32(map.blocks())),
            ("section", self.pointer(section)?),
            ("block_bytes", Value::U64(block_bytes)),
            ("refused", self.pointer(refused)?),
        ];
        let of = |count| match count {
            Count::Pieces => planes * blocks,
            Count::PieceBytes => longest.unwrap_or(0),
            _ => 1,
        };
        // SAFETY: the table's storages reach as far as its planes, ids beyond the cache's blocks are left out by the kernel, the section
        // holds all blocks, and buffers wait for the device before they go.
        unsafe { self.launch(stream, name, &arguments, of) }
    }

    /// Changes a section from rank-verbatim to canonical order, or back.
    pub fn change(
        &self,
        stream: &Stream,
        way: Way,
        loops: &Loops,
        verbatim: &Buffer,
        canonical: &Buffer,
    ) -> Result<(), LaunchError> {
        let want = loops.change.section_bytes() as u64;
        holds("a rank-verbatim section", verbatim, want)?;
        holds("a canonical section", canonical, want)?;
        let name = match way {
            Way::Pack => "kv_to_canonical",
            Way::Unpack => "kv_to_verbatim",
        };
        let run_bytes = loops.change.run_bytes() as u64;
        let arguments = [
            ("verbatim", self.pointer(verbatim)?),
            ("canonical", self.pointer(canonical)?),
            ("loops", self.pointer(&loops.rows)?),
            ("run_bytes", Value::U64(run_bytes)),
        ];
        let runs: u64 = loops
            .change
            .loops()
            .iter()
            .map(|(extent, _)| extent)
            .product();
        let of = |count| match count {
            Count::Runs => runs,
            _ => 1,
        };
        // SAFETY: both sides hold a section, which is what these loops walk; buffers wait for the device before they go.
        unsafe { self.launch(stream, name, &arguments, of) }
    }

    /// Turns the keys of all whole states in place.
    pub fn turn(
        &self,
        stream: &Stream,
        keys: &Keys,
        states: &Buffer,
        angles: &Angles,
    ) -> Result<(), LaunchError> {
        let bytes = keys.dtype.bytes();
        let end = keys
            .rotary
            .saturating_mul(bytes)
            .saturating_add(keys.offset);
        let aligned = keys.offset.is_multiple_of(bytes) && keys.state_bytes.is_multiple_of(bytes);
        if end > keys.state_bytes || keys.state_bytes == 0 || !aligned {
            let state_bytes = keys.state_bytes;
            return Err(PagesError::KeyOutsideState { end, state_bytes }.into());
        }
        if angles.pairs * 2 != keys.rotary {
            let (cosines, pairs) = (angles.pairs, keys.rotary / 2);
            return Err(PagesError::AngleCount {
                cosines,
                sines: cosines,
                pairs,
            }
            .into());
        }
        let count = states.bytes() / keys.state_bytes as u64;
        let style = match keys.style {
            Style::NeoX => "neox",
            Style::GptJ => "gptj",
        };
        let name = format!("kv_turn_{style}_{}", suffix(keys.dtype));
        let arguments = [
            ("states", self.pointer(states)?),
            ("state_count", Value::U64(count)),
            ("state_bytes", Value::U64(keys.state_bytes as u64)),
            ("key_offset", Value::U64(keys.offset as u64)),
            ("pairs", Value::U32(angles.pairs as u32)),
            ("cos", self.pointer(&angles.cos)?),
            ("sin", self.pointer(&angles.sin)?),
        ];
        let of = |work| match work {
            Count::States => count,
            _ => 1,
        };
        // SAFETY: the states counted are whole ones of the buffer, keys lie inside of them and are aligned, and there are as many angles
        // as pairs; buffers wait for the device before they go.
        unsafe { self.launch(stream, &name, &arguments, of) }
    }
}

fn suffix(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::F32 => "f32",
    }
}

/// A device's kernels cannot be trusted to fault at another's memory: where both see each other they would use it.
fn same_device(context: &Arc<Context>, buffer: &Buffer) -> Result<(), LaunchError> {
    match Arc::ptr_eq(context, buffer.context()) {
        true => Ok(()),
        false => Err(LaunchError::OtherDevice {
            own: context.name.clone(),
            other: buffer.context().name.clone(),
        }),
    }
}

fn holds(what: &'static str, buffer: &Buffer, want: u64) -> Result<(), LaunchError> {
    match buffer.bytes() {
        got if got < want => Err(LaunchError::TooSmall { what, got, want }),
        _ => Ok(()),
    }
}
