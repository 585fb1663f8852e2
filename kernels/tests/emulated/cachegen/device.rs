//! The kernels of `cachegen.cu` as functions.

use crate::host::{Argument, Launch, run};
use crate::pages::words;
use kvcachepool_kernels::codec::cachegen::{LEVELS, Parts, Planes, STREAM_BYTES};
use kvcachepool_kernels::codec::{Element, Shape};
use std::path::Path;

/// Kernels and what they run on.
#[derive(Debug, Clone, Copy)]
pub struct Device {
    pub host: &'static Path,
    pub grid: u32,
    pub rows: u32,
}

impl Device {
    fn run(&self, kernel: &str, threads: u32, arguments: &[Argument<'_>]) -> Vec<Vec<u8>> {
        let launch = Launch {
            grid: [self.grid, 1],
            block: [threads, self.rows],
        };
        run(self.host, kernel, launch, arguments)
    }

    /// Numbers, largest magnitudes and levels after a kernel, and the first row that it refused.
    pub fn levels(
        &self,
        way: &str,
        planes: &Planes,
        buffers: [&[u8]; 3],
    ) -> ([Vec<u8>; 3], Option<u64>) {
        let [raw, rows, levels] = buffers;
        let number = match planes.element() {
            Element::F16 => "f16",
            Element::F32 => "f32",
            _ => "bf16",
        };
        let after = self.run(
            &format!("kv_cachegen_{way}_{number}"),
            32,
            &[
                Argument::Buffer(raw, 4),
                Argument::Number(planes.rows() as u64),
                Argument::Number(planes.tokens().into()),
                Argument::Number(planes.channels().into()),
                Argument::Buffer(planes.steps(), 1),
                Argument::Buffer(rows, 4),
                Argument::Buffer(levels, 3),
                Argument::Buffer(&[0xff; 8], 8),
            ],
        );
        let [raw, _, rows, levels, refused] = after.try_into().unwrap();
        let refused = u64::from_ne_bytes(refused.try_into().unwrap());
        (
            [raw, rows, levels],
            (refused != u64::MAX).then_some(refused),
        )
    }

    /// Counts and tables.
    pub fn count(&self, planes: &Planes, levels: &[u8]) -> (Vec<u32>, Vec<u8>) {
        // Whatever was there before.
        let counts = vec![0xa5; planes.tables() * LEVELS * 4];
        let tables = vec![0xa5; planes.tables() * (LEVELS + 1) * 2];
        let mut arguments = vec![Argument::Buffer(levels, 1)];
        arguments.extend(sizes(planes));
        arguments.extend([Argument::Buffer(&counts, 4), Argument::Buffer(&tables, 2)]);
        let after = self.run("kv_cachegen_count", 128, &arguments);
        let [_, counts, tables] = after.try_into().unwrap();
        (u32s(&counts), tables)
    }

    /// The places of all streams, and how many bytes each has.
    pub fn encode(&self, planes: &Planes, levels: &[u8], tables: &[u8]) -> (Vec<u8>, Vec<u32>) {
        let streams = vec![0xa5; planes.streams() * STREAM_BYTES];
        let lengths = vec![0xa5; planes.streams() * 4];
        let mut arguments = vec![Argument::Buffer(levels, 1)];
        arguments.extend(sizes(planes));
        arguments.extend([tables, &streams, &lengths].map(|bytes| Argument::Buffer(bytes, 4)));
        let after = self.run("kv_cachegen_encode", 128, &arguments);
        let [_, _, streams, lengths] = after.try_into().unwrap();
        (streams, u32s(&lengths))
    }

    /// Levels of streams.
    pub fn decode(&self, planes: &Planes, parts: &Parts<'_>, tables: &[u8]) -> Vec<u8> {
        let offsets = words(parts.offsets.iter().copied());
        let lengths: Vec<u8> = parts.lengths.iter().flat_map(|n| n.to_ne_bytes()).collect();
        // A value that no level has.
        let levels = vec![0xa5; planes.numbers()];
        let mut arguments = vec![
            Argument::Buffer(parts.streams, 1),
            Argument::Number(parts.streams.len() as u64),
            Argument::Buffer(&offsets, 8),
            Argument::Buffer(&lengths, 4),
        ];
        arguments.extend(sizes(planes));
        arguments.extend([
            Argument::Buffer(planes.steps(), 1),
            Argument::Buffer(tables, 2),
            Argument::Buffer(&levels, 3),
        ]);
        let after = self.run("kv_cachegen_decode", 128, &arguments);
        let [.., levels] = after.as_slice() else {
            panic!("no levels")
        };
        levels.clone()
    }
}

pub fn planes_of(shape: &Shape) -> Planes {
    let numbers = shape.layers * shape.halves * shape.tokens * shape.channels;
    Planes::of(shape, numbers as usize * shape.element.bytes()).unwrap()
}

fn sizes(planes: &Planes) -> [Argument<'static>; 3] {
    let count = u64::from(planes.count());
    [count, planes.tokens().into(), planes.channels().into()].map(Argument::Number)
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| u32::from_ne_bytes(*word))
        .collect()
}

pub fn table_bytes(tables: &[u16]) -> Vec<u8> {
    tables
        .iter()
        .flat_map(|place| place.to_ne_bytes())
        .collect()
}

/// Where kernels put streams.
pub fn places(planes: &Planes) -> Vec<u64> {
    (0..planes.streams())
        .map(|at| (at * STREAM_BYTES) as u64)
        .collect()
}
