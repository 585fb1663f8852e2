//! Every kernel beside a copy within the device's memory that moves as many bytes.

use crate::{Rig, row};
use kvcachepool_gpu::cuda::buffer::Buffer;
use kvcachepool_gpu::cuda::launch::{Kernels, LaunchError};
use kvcachepool_gpu::cuda::measure::NotMeasured;
use kvcachepool_gpu::cuda::stream::Stream;
use kvcachepool_kernels::codec::cachegen::{LEVELS, Planes, STREAM_BYTES};
use kvcachepool_kernels::codec::{Element, Shape};
use kvcachepool_kernels::launch::Packing;
use kvcachepool_kernels::launch::cachegen::{CacheGen, Rows, Streams};
use kvcachepool_kernels::launch::pages::{Angles, Loops, Table};
use kvcachepool_kernels::pages::{BlockShape, Dtype, HeadMajor, Keys, PageMap, Style, Turn};
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, LayoutTable};
use std::time::Instant;

/// Launches that are asked for before the first is waited for.
const AHEAD: u64 = 16;
const REFERENCE: &str = "a copy within the device's memory, reads and writes";

/// Where rows are measured.
struct Bench<'a> {
    rig: &'a Rig,
    kernels: &'a Kernels,
    stream: Stream,
    /// Bytes per second that a copy reads and writes.
    roof: f64,
}

impl Bench<'_> {
    /// Bytes per second of something that moves so many bytes.
    fn rate(
        &self,
        moved: u64,
        one: impl Fn(&Stream) -> Result<(), LaunchError>,
    ) -> Result<f64, NotMeasured> {
        one(&self.stream)?;
        self.stream.synchronize()?;
        let (began, mut times) = (Instant::now(), 0);
        while began.elapsed() < self.rig.time / 4 || times == 0 {
            for _ in 0..AHEAD {
                one(&self.stream)?;
            }
            self.stream.synchronize()?;
            times += AHEAD;
        }
        Ok((moved * times) as f64 / began.elapsed().as_secs_f64())
    }

    fn row(
        &self,
        name: &str,
        moved: u64,
        one: impl Fn(&Stream) -> Result<(), LaunchError>,
    ) -> Result<(), NotMeasured> {
        let found = self.rate(moved, one)?;
        row(
            &format!("gpu_{name}_vs_memcpy"),
            found,
            REFERENCE,
            Some(self.roof),
        );
        Ok(())
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer, NotMeasured> {
        Ok(Buffer::of(&self.rig.context, &vec![0; bytes as usize])?)
    }
}

/// All rows.
pub fn measured(rig: &Rig, kernels: &Kernels) -> Result<(), NotMeasured> {
    let mut bench = Bench {
        rig,
        kernels,
        stream: Stream::new(&rig.context)?,
        roof: 0.0,
    };
    let bytes = rig.section_bytes as u64;
    let (from, to) = (bench.buffer(bytes)?, bench.buffer(bytes)?);
    bench.roof = bench.rate(2 * bytes, |stream| Ok(to.copy_from(stream, &from, bytes)?))?;
    row("gpu_memcpy", bench.roof, REFERENCE, None);
    pages(&bench, &from, &to)?;
    turns(&bench, &from)?;
    cachegen(&bench, bytes)
}

/// A block of 16 tokens of 8 heads of 128 in bfloat16, in each layout.
fn pages(bench: &Bench<'_>, cache: &Buffer, section: &Buffer) -> Result<(), NotMeasured> {
    let shape = BlockShape {
        layers: 4,
        heads: 8,
        kernel_blocks: 1,
        tokens: 16,
        state_bytes: 512,
    };
    let bytes = shape.block_bytes()?;
    let cache_blocks = (cache.bytes() / bytes as u64) as u32;
    // In no order, as after some hours of serving.
    let mut ids: Vec<u32> = (0..cache_blocks).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut ids);
    let words: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let there = Buffer::of(&bench.rig.context, &words)?;
    let refused = bench.buffer(4)?;
    let moved = 2 * u64::from(cache_blocks) * bytes as u64;
    let table = LayoutTable::parse(LAYOUTS_JSON).unwrap();
    for layout in table.layouts.iter().filter(|layout| layout.served) {
        let map = PageMap::dense(layout, &shape, cache_blocks)?;
        let planes = Table::new(bench.kernels, &map, vec![cache])?;
        for (name, way) in [
            ("kv_gather", Packing::Pack),
            ("kv_scatter", Packing::Unpack),
        ] {
            bench.row(&format!("{name}_{}", layout.name), moved, |stream| {
                planes.transfer(bench.kernels, stream, way, &there, section, &refused)
            })?;
        }
        let change = HeadMajor::new(layout, &shape, cache_blocks as usize)?;
        let loops = Loops::new(bench.kernels, change)?;
        for (name, way) in [
            ("kv_to_canonical", Packing::Pack),
            ("kv_to_verbatim", Packing::Unpack),
        ] {
            bench.row(&format!("{name}_{}", layout.name), moved, |stream| {
                loops.change(bench.kernels, stream, way, cache, section)
            })?;
        }
    }
    Ok(())
}

fn turns(bench: &Bench<'_>, states: &Buffer) -> Result<(), NotMeasured> {
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        for style in [Style::NeoX, Style::GptJ] {
            let keys = Keys {
                state_bytes: 256 * dtype.bytes(),
                offset: 0,
                rotary: 128,
                dtype,
                style,
            };
            let angles = Angles::new(bench.kernels, &Turn::by_base(500_000.0, 128, 1000)?)?;
            let name = format!("kv_turn_{style:?}_{dtype:?}").to_lowercase();
            // Half of a state is its key, which is read and written.
            bench.row(&name, states.bytes(), |stream| {
                angles.turn(bench.kernels, stream, &keys, states)
            })?;
        }
    }
    Ok(())
}

/// Channels of a plane that CacheGen packs: 8 heads of 128.
const CHANNELS: u32 = 1024;

/// A section of up to 32 layers, with numbers of four powers of two.
fn cachegen(bench: &Bench<'_>, bytes: u64) -> Result<(), NotMeasured> {
    let types = [
        ("f32", Element::F32, 0x7f80_0000u32, 4),
        ("f16", Element::F16, 0x7c00, 2),
        ("bf16", Element::Bf16, 0x7f80, 2),
    ];
    let layers = (bytes >> 23).clamp(1, 32) as u32;
    for (name, element, infinite, width) in types {
        let tokens = (bytes / width) as u32 / (2 * layers * CHANNELS);
        let shape = Shape {
            element,
            layers,
            halves: 2,
            tokens,
            channels: CHANNELS,
        };
        let mut random = fastrand::Rng::with_seed(2);
        let few = 3 << infinite.trailing_zeros();
        let mut number = || {
            let bits = random.u32(..) >> (32 - 8 * width);
            (bits & (!infinite | few) | infinite >> 1 & infinite & !few).to_le_bytes()
        };
        let numbers = (0..bytes / width).map(|_| number());
        let raw: Vec<u8> = numbers
            .flat_map(|word| word.into_iter().take(width as usize))
            .collect();
        let planes = Planes::of(&shape, raw.len()).unwrap();
        let section = CacheGen::new(bench.kernels, planes)?;
        let levels = bench.buffer(section.planes().numbers() as u64)?;
        rows_of_cachegen(bench, name, &section, &raw, &levels)?;
        if element == Element::Bf16 {
            streams_of_cachegen(bench, &section, &levels)?;
        }
    }
    Ok(())
}

fn rows_of_cachegen(
    bench: &Bench<'_>,
    name: &str,
    section: &CacheGen<Kernels>,
    raw: &[u8],
    levels: &Buffer,
) -> Result<(), NotMeasured> {
    let planes = section.planes();
    let raw = Buffer::of(&bench.rig.context, raw)?;
    let largest = bench.buffer((planes.rows() * planes.element().bytes()) as u64)?;
    let refused = bench.buffer(8)?;
    let rows = Rows {
        raw: &raw,
        largest: &largest,
        levels,
        refused: &refused,
    };
    let moved = raw.bytes() + levels.bytes() + largest.bytes();
    for (way_name, way) in [("quantise", Packing::Pack), ("restore", Packing::Unpack)] {
        bench.row(&format!("kv_cachegen_{way_name}_{name}"), moved, |stream| {
            section.rows(bench.kernels, stream, way, &rows)
        })?;
    }
    Ok(())
}

/// Counted, coded and decoded. Of the streams count the bytes that they have, not their places.
fn streams_of_cachegen(
    bench: &Bench<'_>,
    section: &CacheGen<Kernels>,
    levels: &Buffer,
) -> Result<(), NotMeasured> {
    let (kernels, planes) = (bench.kernels, section.planes());
    let counts = bench.buffer((planes.tables() * LEVELS * 4) as u64)?;
    let tables = bench.buffer((planes.tables() * (LEVELS + 1) * 2) as u64)?;
    let places = bench.buffer((planes.streams() * STREAM_BYTES) as u64)?;
    let lengths = bench.buffer((planes.streams() * 4) as u64)?;
    let moved = levels.bytes() + counts.bytes() + tables.bytes();
    bench.row("kv_cachegen_count", moved, |stream| {
        section.count(kernels, stream, levels, &counts, &tables)
    })?;
    let encode =
        |stream: &Stream| section.encode(kernels, stream, levels, &tables, &places, &lengths);
    encode(&bench.stream)?;
    bench.stream.synchronize()?;
    let found = lengths.content()?;
    let found = found.as_chunks().0.iter();
    let streams: u64 = found.map(|word| u64::from(u32::from_ne_bytes(*word))).sum();
    let moved = levels.bytes() + tables.bytes() + streams + lengths.bytes();
    bench.row("kv_cachegen_encode", moved, encode)?;
    let begin = (0..planes.streams()).map(|at| (at * STREAM_BYTES) as u64);
    let begin: Vec<u8> = begin.flat_map(u64::to_ne_bytes).collect();
    let streams = Streams {
        packed: &places,
        offsets: &Buffer::of(&bench.rig.context, &begin)?,
        lengths: &lengths,
    };
    let moved = moved + streams.offsets.bytes();
    bench.row("kv_cachegen_decode", moved, |stream| {
        section.decode(kernels, stream, &streams, &tables, levels)
    })
}
