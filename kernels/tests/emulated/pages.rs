//! `pages.cu` and `layout.cu`.

use crate::host::{Argument, Launch, host, run};
use kvcachepool_kernels::pages::{BlockShape, HeadMajor, PageMap};
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, Layout, LayoutTable};
use proptest::prelude::*;

const BLOCKS: u32 = 5;

fn any_layout() -> impl Strategy<Value = Layout> {
    let table = LayoutTable::parse(LAYOUTS_JSON).unwrap();
    proptest::sample::select(table.layouts)
}

/// States of which some are whole words of 4, 8 and 16 bytes.
fn any_shape() -> impl Strategy<Value = BlockShape> {
    let state_bytes = proptest::sample::select(vec![1usize, 4, 6, 8, 16, 64, 80, 512]);
    let sizes = (1..4usize, 1..4usize, 1..3usize, 1..5usize, state_bytes);
    sizes.prop_map(
        |(layers, heads, kernel_blocks, tokens, state_bytes)| BlockShape {
            layers,
            heads,
            kernel_blocks,
            tokens,
            state_bytes,
        },
    )
}

fn any_launch(rows: u32) -> impl Strategy<Value = Launch> {
    (1..5u32, 1..4u32, 1..3u32, 1..=rows).prop_map(|(x, y, warps, rows)| Launch {
        grid: [x, y],
        block: [32 * warps, rows],
    })
}

pub fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    let mix = |i: usize| (i as u32 ^ seed).wrapping_mul(0x9e37_79b1) >> 24;
    (0..bytes).map(|i| mix(i) as u8).collect()
}

pub fn words(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    numbers.into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// The table of planes as the kernel reads it.
fn rows(map: &PageMap) -> Vec<u8> {
    let mut at = 0;
    let rows = map.planes().iter().flat_map(|plane| {
        let row = [plane.offset, plane.block_stride, plane.bytes, at];
        at += plane.bytes;
        row.map(|number| number as u64)
    });
    words(rows.collect::<Vec<_>>())
}

/// The kernel's arguments, with the cache last.
fn arguments<'a>(
    map: &PageMap,
    rows: &'a [u8],
    ids: &'a [u8],
    section: &'a [u8],
    cache: &'a [u8],
    beyond: [u64; 2],
) -> [Argument<'a>; 9] {
    [
        Argument::Buffer(rows, 0),
        Argument::Number(map.planes().len() as u64),
        Argument::Buffer(ids, 0),
        Argument::Number(ids.len() as u64 / 4),
        Argument::Number(u64::from(map.blocks())),
        Argument::Buffer(section, beyond[0]),
        Argument::Number(map.block_bytes() as u64),
        Argument::Buffer(&[0; 4], 0),
        Argument::Buffer(cache, beyond[1]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn transfers_are_those_of_the_reference_and_leave_out_blocks_that_are_not(
        layout in any_layout(), shape in any_shape(), launch in any_launch(1),
        ids in proptest::sample::subsequence((0..BLOCKS + 2).collect::<Vec<u32>>(), 0..6).prop_shuffle(),
        beyond in proptest::sample::select(vec![[0u64, 0], [0, 8], [4, 4], [1, 0]]), seed: u32,
    ) {
        let host = host();
        let map = PageMap::dense(&layout, &shape, BLOCKS).unwrap();
        let cache = pattern(map.storage_bytes()[0], seed);
        let section = pattern(ids.len() * map.block_bytes(), !seed);
        let (mut gathered, mut scattered) = (section.clone(), cache.clone());
        let mut refused = 0u32;
        for (id, bytes) in ids.iter().zip(gathered.chunks_exact_mut(map.block_bytes())) {
            if *id < BLOCKS {
                map.scatter(bytes, &[*id], &mut [&mut scattered]).unwrap();
                map.gather(&[&cache], &[*id], bytes).unwrap();
            } else {
                refused += map.planes().len() as u32;
            }
        }
        let rows = rows(&map);
        let id_bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
        let arguments = arguments(&map, &rows, &id_bytes, &section, &cache, beyond);

        let after = run(host, "kv_gather", launch, &arguments);
        let wanted = vec![rows.clone(), id_bytes.clone(), gathered, refused.to_ne_bytes().into(), cache.clone()];
        prop_assert!(after == wanted, "gather");
        let after = run(host, "kv_scatter", launch, &arguments);
        let wanted = vec![rows.clone(), id_bytes.clone(), section.clone(), refused.to_ne_bytes().into(), scattered];
        prop_assert!(after == wanted, "scatter");
    }

    #[test]
    fn layout_changes_are_those_of_the_reference(
        layout in any_layout(), shape in any_shape(), launch in any_launch(4), blocks in 1..4usize,
        beyond in proptest::sample::select(vec![0u64, 8, 4, 1]), seed: u32,
    ) {
        let host = host();
        let change = HeadMajor::new(&layout, &shape, blocks).unwrap();
        let verbatim = pattern(change.section_bytes(), seed);
        let mut canonical = vec![0; verbatim.len()];
        change.to_canonical(&verbatim, &mut canonical).unwrap();
        let loops = words(change.loops().into_iter().flat_map(|(extent, stride)| [extent, stride]));
        let empty = vec![0; verbatim.len()];
        let wanted = [verbatim.clone(), canonical.clone(), loops.clone()];
        for (kernel, from, to) in [("kv_to_canonical", &verbatim, &empty), ("kv_to_verbatim", &empty, &canonical)] {
            let after = run(host, kernel, launch, &[
                Argument::Buffer(from, beyond),
                Argument::Buffer(to, 0),
                Argument::Buffer(&loops, 0),
                Argument::Number(change.run_bytes() as u64),
            ]);
            prop_assert!(after == wanted, "{kernel}");
        }
    }
}
