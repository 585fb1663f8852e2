//! CacheGen: what kernels pack, put together on the host, is the container of the reference; what they unpack are its numbers.

use crate::Rig;
use crate::data::{Data, FINITE};
use crate::report::{Check, Why, holds, same};
use kvcachepool_gpu::cuda::buffer::Buffer;
use kvcachepool_gpu::cuda::launch::Kernels;
use kvcachepool_kernels::codec::cachegen::{LEVELS, Parts, Planes, STREAM_BYTES};
use kvcachepool_kernels::codec::{Codec, CodecError, Element, HEADER_BYTES, Shape, decode, encode};
use kvcachepool_kernels::launch::Packing;
use kvcachepool_kernels::launch::cachegen::{CacheGen, Rows, Streams};

/// Layers, halves, tokens and channels: small models, both numbers of steps, more tokens than a stream has, and what a section has.
const SIZES: [[u32; 4]; 4] = [
    [1, 1, 1, 1],
    [11, 2, 3, 33],
    [2, 1, 513, 40],
    [4, 2, 256, 128],
];

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for (name, element) in [
        ("bf16", Element::Bf16),
        ("f16", Element::F16),
        ("f32", Element::F32),
    ] {
        for data in FINITE.into_iter().chain([Data::NotFinite]) {
            let said = |way| format!("kernels/kv_cachegen_{way}_{name}/{data:?}");
            checks.push(Check::new(said("pack"), move |rig| {
                each(element, data, |shape, raw| packed(rig, shape, raw))
            }));
            checks.push(Check::new(said("unpack"), move |rig| {
                each(element, data, |shape, raw| unpacked(rig, shape, raw))
            }));
        }
    }
    let hostile = "kernels/kv_cachegen_decode/hostile streams";
    checks.push(Check::new(hostile, hostile_streams));
    checks
}

/// Calls `one` with sections of all sizes.
fn each(
    element: Element,
    data: Data,
    one: impl Fn(&Shape, &[u8]) -> Result<(), Why>,
) -> Result<String, Why> {
    let mut bytes = 0;
    for sizes in SIZES {
        let shape = shape(element, sizes);
        let count = sizes.iter().product::<u32>() as usize;
        let raw: Vec<u8> = match element {
            Element::F32 => words(&data.wholes(count, 7), u32::to_le_bytes),
            Element::F16 => words(&data.halves(count, 10, 0x7c00, 7), u16::to_le_bytes),
            _ => words(&data.halves(count, 7, 0x7f80, 7), u16::to_le_bytes),
        };
        one(&shape, &raw)?;
        bytes += raw.len();
    }
    Ok(format!("{bytes} bytes"))
}

fn shape(element: Element, [layers, halves, tokens, channels]: [u32; 4]) -> Shape {
    Shape {
        element,
        layers,
        halves,
        tokens,
        channels,
    }
}

fn words<T: Copy, const N: usize>(numbers: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    numbers.iter().flat_map(|number| bytes(*number)).collect()
}

/// Numbers, largest magnitudes and levels after a kernel, and the first row that it left out.
fn run_rows(
    rig: &Rig,
    way: Packing,
    section: &CacheGen<Kernels>,
    buffers: [&[u8]; 3],
) -> Result<([Vec<u8>; 3], Option<usize>), Why> {
    let [raw, largest, levels] = buffers.map(|bytes| Buffer::of(&rig.context, bytes));
    let (raw, largest, levels) = (raw?, largest?, levels?);
    let refused = Buffer::of(&rig.context, &[0xff; 8])?;
    let rows = Rows {
        raw: &raw,
        largest: &largest,
        levels: &levels,
        refused: &refused,
    };
    section.rows(rig.kernels()?, &rig.stream, way, &rows)?;
    rig.stream.synchronize()?;
    let first = refused.content()?;
    let first = u64::from_ne_bytes(first.as_slice().try_into().unwrap());
    let after = [raw.content()?, largest.content()?, levels.content()?];
    Ok((after, (first != u64::MAX).then_some(first as usize)))
}

fn packed(rig: &Rig, shape: &Shape, raw: &[u8]) -> Result<(), Why> {
    let kernels = rig.kernels()?;
    let planes = Planes::of(shape, raw.len()).unwrap();
    let section = CacheGen::new(kernels, planes.clone())?;
    let empty = (
        vec![0; planes.rows() * shape.element.bytes()],
        vec![0; planes.numbers()],
    );
    let (after, refused) = run_rows(rig, Packing::Pack, &section, [raw, &empty.0, &empty.1])?;
    let [raw_after, rows, levels] = after;
    same("the numbers", &raw_after, raw)?;
    let mut stored = Vec::new();
    let wanted = encode(Codec::CacheGen, shape, raw, &mut stored);
    let first = refused.map(|row| CodecError::NotFinite {
        at: row * shape.channels as usize,
    });
    holds(
        wanted.err() == first,
        format!("row {refused:?} was refused, the reference says {wanted:?}"),
    )?;
    if wanted.is_err() {
        return Ok(());
    }
    let levels = Buffer::of(&rig.context, &levels)?;
    let room = |bytes: usize| Buffer::of(&rig.context, &vec![0xa5; bytes]);
    let counts = room(planes.tables() * LEVELS * 4)?;
    let tables = room(planes.tables() * (LEVELS + 1) * 2)?;
    let streams = room(planes.streams() * STREAM_BYTES)?;
    let lengths = room(planes.streams() * 4)?;
    section.count(kernels, &rig.stream, &levels, &counts, &tables)?;
    section.encode(kernels, &rig.stream, &levels, &tables, &streams, &lengths)?;
    rig.stream.synchronize()?;
    let places = (0..planes.streams()).map(|at| (at * STREAM_BYTES) as u64);
    let parts = Parts {
        rows,
        counts: u32s(&counts.content()?),
        offsets: places.collect(),
        lengths: u32s(&lengths.content()?),
        streams: &streams.content()?,
    };
    let mut container = Vec::new();
    let written = parts.write(&planes, &mut container);
    holds(written.is_ok(), format!("the parts: {written:?}"))?;
    same("the container", &container, &stored[HEADER_BYTES..])?;
    let want = words(&parts.tables(&planes), u16::to_ne_bytes);
    same("the tables", &tables.content()?, &want)
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.as_chunks().0.iter();
    words.map(|word| u32::from_ne_bytes(*word)).collect()
}

/// Levels of streams.
fn decoded(
    rig: &Rig,
    section: &CacheGen<Kernels>,
    parts: &Parts<'_>,
    tables: &[u8],
) -> Result<Vec<u8>, Why> {
    let on_device = |bytes: &[u8]| Buffer::of(&rig.context, bytes);
    let streams = Streams {
        packed: &on_device(parts.streams)?,
        offsets: &on_device(&words(&parts.offsets, u64::to_ne_bytes))?,
        lengths: &on_device(&words(&parts.lengths, u32::to_ne_bytes))?,
    };
    let tables = on_device(tables)?;
    let levels = on_device(&vec![0xa5; section.planes().numbers()])?;
    section.decode(rig.kernels()?, &rig.stream, &streams, &tables, &levels)?;
    rig.stream.synchronize()?;
    Ok(levels.content()?)
}

fn unpacked(rig: &Rig, shape: &Shape, raw: &[u8]) -> Result<(), Why> {
    let planes = Planes::of(shape, raw.len()).unwrap();
    let section = CacheGen::new(rig.kernels()?, planes.clone())?;
    let mut stored = Vec::new();
    if encode(Codec::CacheGen, shape, raw, &mut stored).is_err() {
        // What no codec packs: rows that none has, which both refuse.
        let largest = vec![0xff; planes.rows() * shape.element.bytes()];
        let levels = vec![0; planes.numbers()];
        let (_, refused) = run_rows(rig, Packing::Unpack, &section, [raw, &largest, &levels])?;
        return holds(refused == Some(0), format!("{refused:?} was refused"));
    }
    let mut want = vec![0; raw.len()];
    decode(Codec::CacheGen, shape, &stored, &mut want).unwrap();
    let parts = Parts::of(&planes, &stored[HEADER_BYTES..]).unwrap();
    let tables = words(&parts.tables(&planes), u16::to_ne_bytes);
    let levels = decoded(rig, &section, &parts, &tables)?;
    let empty = vec![0; raw.len()];
    let (after, refused) = run_rows(
        rig,
        Packing::Unpack,
        &section,
        [&empty, &parts.rows, &levels],
    )?;
    holds(refused.is_none(), format!("row {refused:?} was refused"))?;
    same("the numbers", &after[0], &want)
}

/// Any bytes, tables that no counts give, and places outside of what there is.
fn hostile_streams(rig: &Rig) -> Result<String, Why> {
    let shape = shape(Element::Bf16, [11, 2, 513, 40]);
    let numbers = 11 * 2 * 513 * 40;
    let planes = Planes::of(&shape, 2 * numbers).unwrap();
    let section = CacheGen::new(rig.kernels()?, planes.clone())?;
    let bytes = Data::Random.bytes(1 << 16, 3);
    let at = 0..planes.streams() as u64;
    let parts = Parts {
        rows: Vec::new(),
        counts: Vec::new(),
        offsets: at.clone().map(|at| at * at * 31 % (1 << 17)).collect(),
        lengths: at.map(|at| (at * 997 % 700) as u32).collect(),
        streams: &bytes,
    };
    for data in [Data::Random, Data::Edge, Data::Equal] {
        let tables = data.bytes(planes.tables() * (LEVELS + 1) * 2, 4);
        let levels = decoded(rig, &section, &parts, &tables)?;
        let each = levels.chunks(numbers / planes.steps().len());
        for (levels, steps) in each.zip(planes.steps()) {
            let highest = levels.iter().max();
            holds(
                highest <= Some(&(2 * steps)),
                format!("a level of {highest:?} among {steps} steps"),
            )?;
        }
    }
    Ok(format!("{} streams", planes.streams()))
}
