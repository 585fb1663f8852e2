//! One launcher for each family of kernels: it checks that all the memory a kernel would touch is there, so that calling it is safe.
//! What the arguments mean is said in `kernels/cuda`; the references in the crate `kernels` take the same and do the same.

#![allow(unsafe_code)]

pub mod cachegen;

use super::buffer::Buffer;
use super::context::Context;
use super::launch::{Kernels, LaunchError, Value};
use super::stream::Stream;
use kvcachepool_kernels::codec::Codec;
use kvcachepool_kernels::manifest::Count;
use kvcachepool_kernels::pages::{Dtype, HeadMajor, Keys, PageMap, PagesError, Style, Turn};
use std::sync::Arc;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Out of the cache, to the canonical order, to codes.
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

/// Sections whose digests are taken: any ranges of device memory.
pub struct Sections<'a> {
    rows: Buffer,
    count: u64,
    /// Kept, since the rows have their addresses.
    _memory: Vec<&'a Buffer>,
}

impl<'a> Sections<'a> {
    /// So many bytes of a buffer from `at` on, each.
    pub fn new(kernels: &Kernels, list: &[(&'a Buffer, u64, u64)]) -> Result<Self, LaunchError> {
        let mut rows = Vec::new();
        for (buffer, at, bytes) in list {
            same_device(kernels.context(), buffer)?;
            let row = [buffer.at(*at, *bytes)?, *bytes];
            rows.extend(row.into_iter().flat_map(u64::to_ne_bytes));
        }
        Ok(Self {
            rows: Buffer::of(kernels.context(), &rows)?,
            count: list.len() as u64,
            _memory: list.iter().map(|(buffer, ..)| *buffer).collect(),
        })
    }
}

/// Numbers of 16 bits and what they are packed to.
pub struct Packed<'a> {
    /// FP8, INT8 or INT4 with its group.
    pub codec: Codec,
    /// Bf16 or F16.
    pub dtype: Dtype,
    /// How many.
    pub numbers: u64,
    /// The numbers.
    pub raw: &'a Buffer,
    /// Ends of all groups.
    pub ends: &'a Buffer,
    /// Codes of all groups.
    pub codes: &'a Buffer,
    /// 4 bytes, where groups that were left out are counted.
    pub refused: &'a Buffer,
}

/// Bytes of the ends and of the codes of so many numbers; none for a codec that no kernel has.
pub fn packed_bytes(codec: Codec, numbers: u64) -> Option<[u64; 2]> {
    let (_, group, ends) = quantiser(codec)?;
    let group = u64::from(group);
    let bytes = |numbers: u64| match ends {
        2 => numbers.div_ceil(2),
        _ => numbers,
    };
    let codes = numbers / group * bytes(group) + bytes(numbers % group);
    Some([numbers.div_ceil(group) * ends * 2, codes])
}

/// Part of the kernel's name, numbers of a group, and ends that are stored of each.
fn quantiser(codec: Codec) -> Option<(&'static str, u16, u64)> {
    match codec {
        Codec::Fp8 { group } if group > 0 => Some(("fp8", group, 1)),
        Codec::Int8 { group } if group > 0 => Some(("int8", group, 1)),
        Codec::Int4 { group } if group > 0 => Some(("int4", group, 2)),
        _ => None,
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

    /// Quantises numbers, or restores them.
    pub fn quantise(
        &self,
        stream: &Stream,
        way: Way,
        packed: &Packed<'_>,
    ) -> Result<(), LaunchError> {
        let none =
            || LaunchError::UnknownKernel(format!("{:?} of {:?}", packed.codec, packed.dtype));
        let (codec, group, _) = quantiser(packed.codec).ok_or_else(none)?;
        let [ends, codes] = packed_bytes(packed.codec, packed.numbers).ok_or_else(none)?;
        holds("raw numbers", packed.raw, packed.numbers.saturating_mul(2))?;
        holds("the ends of groups", packed.ends, ends)?;
        holds("codes", packed.codes, codes)?;
        holds("the count of refused groups", packed.refused, 4)?;
        let way = match way {
            Way::Pack => "pack",
            Way::Unpack => "unpack",
        };
        let name = format!("kv_{way}_{codec}_{}", suffix(packed.dtype));
        let arguments = [
            ("raw", self.pointer(packed.raw)?),
            ("numbers", Value::U64(packed.numbers)),
            ("group", Value::U32(group.into())),
            ("ends", self.pointer(packed.ends)?),
            ("codes", self.pointer(packed.codes)?),
            ("refused", self.pointer(packed.refused)?),
        ];
        let groups = packed.numbers.div_ceil(group.into());
        let of = |count| match count {
            Count::Groups => groups,
            _ => 1,
        };
        // SAFETY: numbers, ends and codes of all groups are there; buffers wait for the device before they go.
        unsafe { self.launch(stream, &name, &arguments, of) }
    }

    /// Takes the digests of sections, 16 bytes each.
    pub fn digest(
        &self,
        stream: &Stream,
        sections: &Sections<'_>,
        digests: &Buffer,
    ) -> Result<(), LaunchError> {
        let count = sections.count;
        holds("digests", digests, count.saturating_mul(16))?;
        let arguments = [
            ("sections", self.pointer(&sections.rows)?),
            ("section_count", Value::U64(count)),
            ("digests", self.pointer(digests)?),
        ];
        let of = |work| match work {
            Count::Sections => count,
            _ => 1,
        };
        // SAFETY: each row is a range of a buffer that the list keeps, and there is room for all digests; buffers wait for the device
        // before they go.
        unsafe { self.launch(stream, "kv_digest", &arguments, of) }
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
