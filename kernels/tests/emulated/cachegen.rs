//! `cachegen.cu`.

mod device;

use crate::host::host;
use crate::pages::pattern;
use device::{Device, places, planes_of, table_bytes};
use kvcachepool_kernels::codec::cachegen::{LEVELS, Parts, STREAM_BYTES};
use kvcachepool_kernels::codec::{Codec, CodecError, Element, HEADER_BYTES, Shape, decode, encode};
use proptest::collection::vec;
use proptest::prelude::*;

/// Numbers of four powers of two, here and there a zero or the largest number, and in some sections now and then infinity or any bits at all. The powers
/// are next to 1, or among the least numbers or very small ones.
fn any_raw(element: Element, count: usize) -> impl Strategy<Value = Vec<u8>> {
    let (width, infinite) = match element {
        Element::F16 => (2, 0x7c00u32),
        Element::F32 => (4, 0x7f80_0000),
        _ => (2, 0x7f80),
    };
    let power = prop_oneof![4 => Just(infinite >> 1), 1 => Just(0), 1 => Just(infinite >> 2)];
    let seldom = proptest::sample::select(vec![u32::MAX, u32::MAX, u32::MAX, 3, 100, 3_000]);
    let few = 3 << infinite.trailing_zeros();
    let kept = !infinite | few;
    (any::<u64>(), power, seldom).prop_map(move |(seed, power, seldom)| {
        let mut random = Random(seed);
        let mut number = || {
            let drawn = random.next() >> (32 - 8 * width);
            match random.next() {
                kind if kind % 500 == 0 => 0,
                kind if kind % 20_011 == 0 => infinite - 1,
                kind if kind % seldom == 1 => [drawn, infinite][kind as usize >> 16 & 1],
                _ => drawn & kept | power & infinite & !few,
            }
        };
        let words: Vec<u32> = (0..count).map(|_| number()).collect();
        let bytes = words
            .iter()
            .flat_map(|word| word.to_le_bytes().into_iter().take(width));
        bytes.collect()
    })
}

/// A generator after Knuth: numbers of a whole section are too many for a strategy each.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 32) as u32
    }
}

fn any_section() -> impl Strategy<Value = (Shape, Vec<u8>)> {
    let tokens = prop_oneof![6 => 1..70u32, 1 => 250..262u32, 1 => 500..520u32];
    let layers = prop_oneof![3 => 1..3u32, 1 => Just(11u32)];
    let element = proptest::sample::select(vec![Element::Bf16, Element::F16, Element::F32]);
    (element, layers, 1..3u32, tokens, 1..12u32).prop_flat_map(
        |(element, layers, halves, tokens, channels)| {
            let shape = Shape {
                element,
                layers,
                halves,
                tokens,
                channels,
            };
            let count = layers * halves * tokens * channels;
            (Just(shape), any_raw(element, count as usize))
        },
    )
}

fn any_device() -> impl Strategy<Value = Device> {
    (1..4u32, 1..3u32).prop_map(|(grid, rows)| Device {
        host: host(),
        grid,
        rows,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_kernels_pack_is_the_container_of_the_reference((shape, raw) in any_section(), device in any_device()) {
        let planes = planes_of(&shape);
        let mut stored = Vec::new();
        let wanted = encode(Codec::CacheGen, &shape, &raw, &mut stored);
        let empty = (vec![0; planes.rows() * shape.element.bytes()], vec![0; planes.numbers()]);
        let ([raw_after, rows, levels], refused) = device.levels("quantise", &planes, [&raw, &empty.0, &empty.1]);
        prop_assert_eq!(&raw_after, &raw);
        let first = refused.map(|row| CodecError::NotFinite { at: row as usize * shape.channels as usize });
        prop_assert_eq!(wanted.err(), first);
        if refused.is_some() {
            return Ok(());
        }
        let (counts, tables) = device.count(&planes, &levels);
        let (streams, lengths) = device.encode(&planes, &levels, &tables);
        let parts = Parts { rows, counts, offsets: places(&planes), lengths, streams: &streams };
        prop_assert_eq!(tables, table_bytes(&parts.tables(&planes)));
        let mut container = Vec::new();
        parts.write(&planes, &mut container).unwrap();
        prop_assert!(container == stored[HEADER_BYTES..], "{} bytes, not {}", container.len(), stored.len() - HEADER_BYTES);
    }

    #[test]
    fn what_kernels_unpack_are_the_numbers_of_the_reference(
        (shape, raw) in any_section(), device in any_device(), damaged in proptest::option::of(any::<(prop::sample::Index, u8)>()),
    ) {
        let planes = planes_of(&shape);
        let mut stored = Vec::new();
        if encode(Codec::CacheGen, &shape, &raw, &mut stored).is_err() {
            return Ok(());
        }
        if let Some((at, byte)) = damaged {
            // A largest magnitude of the first plane.
            let rows = shape.tokens as usize * shape.element.bytes();
            stored[HEADER_BYTES + 8 * planes.steps().len() + at.index(rows)] = byte;
        }
        let mut wanted = vec![0; raw.len()];
        let decoded = decode(Codec::CacheGen, &shape, &stored, &mut wanted);
        let parts = Parts::of(&planes, &stored[HEADER_BYTES..]).unwrap();
        let levels = device.decode(&planes, &parts, &table_bytes(&parts.tables(&planes)));
        let empty = vec![0; raw.len()];
        let ([numbers, ..], refused) = device.levels("restore", &planes, [&empty, &parts.rows, &levels]);
        prop_assert_eq!(decoded.is_err(), refused.is_some());
        if decoded.is_ok() {
            prop_assert_eq!(numbers, wanted);
        }
    }

    #[test]
    fn hostile_streams_end_in_levels_of_their_table_and_no_byte_outside_of_them_counts(
        bytes in vec(any::<u8>(), 0..200), places in vec((0..220u64, 0..220u32), 12), seeds in vec(any::<u32>(), 6 * LEVELS),
        tokens in 1..300u32, sound: bool, device in any_device(),
    ) {
        // 11 layers of one half: the last one has fewer levels.
        let shape = Shape { element: Element::Bf16, layers: 11, halves: 1, tokens, channels: 1 };
        let planes = planes_of(&shape);
        let (mut offsets, mut lengths): (Vec<_>, Vec<_>) = places.into_iter().cycle().take(planes.streams()).unzip();
        offsets[0] = u64::MAX;
        lengths[1] = u32::MAX;
        // Of counts, or nothing that a table could be.
        let counts = seeds.iter().cycle().take(planes.tables() * LEVELS).map(|seed| seed % 1_000).collect();
        let mut parts = Parts { rows: Vec::new(), counts, offsets, lengths, streams: &bytes };
        let mut tables = table_bytes(&parts.tables(&planes));
        if !sound {
            for (byte, seed) in tables.iter_mut().zip(seeds.iter().cycle()) {
                *byte = *seed as u8;
            }
        }
        let levels = device.decode(&planes, &parts, &tables);
        for (levels, steps) in levels.chunks(tokens as usize).zip(planes.steps()) {
            prop_assert!(levels.iter().all(|level| *level <= 2 * steps), "{:?}", levels);
        }
        // Parts that reach beyond the bytes are read as if they ended with them.
        let mut inside = parts.clone();
        for (offset, length) in inside.offsets.iter_mut().zip(&mut inside.lengths) {
            *offset = (*offset).min(bytes.len() as u64);
            *length = (*length).min(bytes.len() as u32 - *offset as u32);
        }
        prop_assert_eq!(&device.decode(&planes, &inside, &tables), &levels);
        // And no byte beside the last one makes a difference to it.
        let last = planes.streams() - 1;
        let begin = inside.offsets[last] as usize;
        let kept = begin..begin + inside.lengths[last] as usize;
        let mut turned: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        turned[kept.clone()].copy_from_slice(&bytes[kept]);
        parts.streams = &turned;
        let again = device.decode(&planes, &parts, &tables);
        let begin = levels.len() - (tokens as usize - 1) % 256 - 1;
        prop_assert_eq!(&levels[begin..], &again[begin..]);
    }
}

/// Levels of one channel whose table is given, there and back.
fn there_and_back(table: &[u16; LEVELS + 1], levels: &[u8]) -> Vec<u32> {
    let device = Device {
        host: host(),
        grid: 1,
        rows: 1,
    };
    let shape = Shape {
        element: Element::Bf16,
        layers: 1,
        halves: 1,
        tokens: levels.len() as u32,
        channels: 1,
    };
    let planes = planes_of(&shape);
    let tables = table_bytes(table);
    let (streams, lengths) = device.encode(&planes, levels, &tables);
    let parts = Parts {
        rows: Vec::new(),
        counts: Vec::new(),
        offsets: places(&planes),
        lengths,
        streams: &streams,
    };
    assert_eq!(device.decode(&planes, &parts, &tables), levels);
    parts.lengths
}

#[test]
fn the_rarest_levels_fit_their_place_and_come_back() {
    // Every level but the last has one 65,536th.
    let mut rare: [u16; LEVELS + 1] = std::array::from_fn(|place| place as u16);
    rare[31..].fill(u16::MAX);
    let mixed: Vec<u8> = (0..256u32).map(|at| (at * at / 7 % 30) as u8).collect();
    let around: Vec<u8> = [[0; 128], [29; 128]].concat();
    for levels in [vec![0; 256], vec![29; 256], mixed, around] {
        let lengths = there_and_back(&rare, &levels);
        assert!((512..=513).contains(&lengths[0]), "{lengths:?}");
    }
    // And none where there is nothing to say.
    assert_eq!(there_and_back(&rare, &[30; 300]), [1, 1]);
}

#[test]
fn bits_that_are_known_late_come_back() {
    // One level has two 65,536ths around the middle: each time, 15 bits more wait for the next that is known.
    let mut around: [u16; LEVELS + 1] = std::array::from_fn(|place| match place {
        0..=14 => place as u16,
        15 => 0x7fff,
        _ => 0x7ff1 + place as u16,
    });
    around[31..].fill(u16::MAX);
    for end in [&[][..], &[0], &[30], &[16, 15, 15, 15, 7]] {
        for count in [1, 2, 3, 5, 200] {
            let levels = [&vec![15; count], end].concat();
            there_and_back(&around, &levels);
        }
    }
}

#[test]
fn a_level_that_all_tokens_have_is_counted() {
    let device = Device {
        host: host(),
        grid: 1,
        rows: 1,
    };
    let shape = Shape {
        element: Element::Bf16,
        layers: 1,
        halves: 2,
        tokens: 1_000,
        channels: 1,
    };
    let levels = [[30; 1_000], [0; 1_000]].concat();
    let (counts, _) = device.count(&planes_of(&shape), &levels);
    let mut wanted = vec![0; 2 * LEVELS];
    (wanted[30], wanted[LEVELS]) = (1_000, 1_000);
    assert_eq!(counts, wanted);
}

#[test]
fn levels_and_tables_that_no_section_has_stay_in_their_places() {
    let device = Device {
        host: host(),
        grid: 1,
        rows: 1,
    };
    let shape = Shape {
        element: Element::Bf16,
        layers: 1,
        halves: 1,
        tokens: 600,
        channels: 5,
    };
    let planes = planes_of(&shape);
    let levels: Vec<u8> = (0..planes.numbers()).map(|at| (at * 37) as u8).collect();
    let bytes = planes.tables() * (LEVELS + 1) * 2;
    for tables in [vec![0; bytes], vec![0xff; bytes], pattern(bytes, 1)] {
        let (_, lengths) = device.encode(&planes, &levels, &tables);
        assert!(lengths.iter().all(|bytes| *bytes as usize <= STREAM_BYTES));
    }
    // Guards around the buffers say that nothing else was written.
    let (counts, _) = device.count(&planes, &levels);
    assert_eq!(counts.iter().sum::<u32>(), 3_000);
}
