//! Gather and scatter.

use super::super::{PageMap, PagesError, Plane};
use super::{address, any_blocks, any_layout, any_shape, dense, layouts, pattern, verbatim};
use proptest::prelude::*;

const BLOCKS: u32 = 7;

proptest! {
    #[test]
    fn gather_takes_each_byte_from_where_its_indices_say(
        layout in any_layout(), shape in any_shape(), ids in any_blocks(BLOCKS), seed: u32,
    ) {
        let map = dense(&layout, &shape, BLOCKS);
        let cache = pattern(map.storage_bytes()[0], seed);
        let mut section = vec![0; ids.len() * map.block_bytes()];
        map.gather(&[&cache], &ids, &mut section).unwrap();
        let places = verbatim(&layout, &shape);
        let want: Vec<u8> = ids
            .iter()
            .flat_map(|id| places.iter().map(|p| cache[address(&layout, &shape, BLOCKS, *id, *p)]))
            .collect();
        prop_assert_eq!(section, want);
    }

    #[test]
    fn scatter_undoes_gather_and_leaves_other_blocks_as_they_are(
        layout in any_layout(), shape in any_shape(), ids in any_blocks(BLOCKS), seed: u32,
    ) {
        let map = dense(&layout, &shape, BLOCKS);
        let cache = pattern(map.storage_bytes()[0], seed);
        let mut section = vec![0; ids.len() * map.block_bytes()];
        map.gather(&[&cache], &ids, &mut section).unwrap();

        let before = pattern(cache.len(), !seed);
        let mut other = before.clone();
        map.scatter(&section, &ids, &mut [&mut other]).unwrap();
        let mut want = before;
        for id in &ids {
            for place in verbatim(&layout, &shape) {
                let at = address(&layout, &shape, BLOCKS, *id, place);
                want[at] = cache[at];
            }
        }
        prop_assert_eq!(other, want);
    }

    #[test]
    fn planes_with_gaps_in_several_storages_come_back_and_the_gaps_stay(
        runs in proptest::collection::vec((1..40usize, 0..9usize, 0..9usize, 0..3usize), 1..6),
        ids in any_blocks(BLOCKS), seed: u32,
    ) {
        let mut ends = [0usize; 3];
        let planes: Vec<Plane> = runs
            .iter()
            .map(|(bytes, gap, ahead, storage)| {
                let storage = storage % runs.len().min(3);
                let plane = Plane { storage, offset: ends[storage] + ahead, block_stride: bytes + gap, bytes: *bytes };
                ends[storage] = plane.offset + BLOCKS as usize * plane.block_stride;
                plane
            })
            .collect();
        let map = PageMap::new(BLOCKS, planes.clone()).unwrap();
        let caches: Vec<Vec<u8>> = ends.iter().map(|end| pattern(*end, seed)).collect();
        let mut section = vec![0; ids.len() * map.block_bytes()];
        map.gather(&caches.iter().map(Vec::as_slice).collect::<Vec<_>>(), &ids, &mut section).unwrap();
        let mut rest = section.as_slice();
        for id in &ids {
            for plane in &planes {
                let start = plane.offset + *id as usize * plane.block_stride;
                let (piece, tail) = rest.split_at(plane.bytes);
                prop_assert_eq!(piece, &caches[plane.storage][start..start + plane.bytes]);
                rest = tail;
            }
        }
        let mut written: Vec<Vec<u8>> = ends.iter().map(|end| vec![0xee; *end]).collect();
        let mut views: Vec<&mut [u8]> = written.iter_mut().map(Vec::as_mut_slice).collect();
        map.scatter(&section, &ids, &mut views).unwrap();
        let mut want: Vec<Vec<u8>> = ends.iter().map(|end| vec![0xee; *end]).collect();
        for id in &ids {
            for plane in &planes {
                let start = plane.offset + *id as usize * plane.block_stride;
                let run = start..start + plane.bytes;
                want[plane.storage][run.clone()].copy_from_slice(&caches[plane.storage][run]);
            }
        }
        prop_assert_eq!(written, want);
    }

    #[test]
    fn any_call_ends_in_bytes_or_a_named_error(
        layout in any_layout(), shape in any_shape(),
        ids in proptest::collection::vec(0..2 * BLOCKS, 0..6),
        section in 0..3000usize, cache in 0..9000usize, storages in 0..3usize,
    ) {
        let map = dense(&layout, &shape, BLOCKS);
        let caches = vec![pattern(cache, 1); storages];
        let views: Vec<&[u8]> = caches.iter().map(Vec::as_slice).collect();
        let mut section = vec![0x55; section];
        let fits = ids.iter().all(|id| *id < BLOCKS)
            && section.len() == ids.len() * map.block_bytes()
            && storages > 0
            && cache >= map.storage_bytes()[0];
        prop_assert_eq!(map.gather(&views, &ids, &mut section).is_ok(), fits);
        if !fits {
            prop_assert!(section.iter().all(|byte| *byte == 0x55));
        }
        let mut written = caches.clone();
        let mut views: Vec<&mut [u8]> = written.iter_mut().map(Vec::as_mut_slice).collect();
        let twice = (1..ids.len()).any(|i| ids[..i].contains(&ids[i]));
        prop_assert_eq!(map.scatter(&section, &ids, &mut views).is_ok(), fits && !twice);
        if !fits || twice {
            prop_assert_eq!(written, caches);
        }
    }
}

#[test]
fn each_wrong_call_has_its_name() {
    let layout = &layouts()[0];
    let shape = super::super::BlockShape {
        layers: 2,
        heads: 1,
        kernel_blocks: 1,
        tokens: 2,
        state_bytes: 4,
    };
    let map = dense(layout, &shape, BLOCKS);
    let mut cache = pattern(map.storage_bytes()[0], 1);
    let mut section = [0; 32];
    let range = PagesError::BlockOutOfRange {
        block: 7,
        blocks: 7,
    };
    assert_eq!(map.gather(&[&cache], &[0, 7], &mut section), Err(range));
    let size = PagesError::Size {
        what: "a section",
        got: 32,
        want: 16,
    };
    assert_eq!(map.gather(&[&cache], &[0], &mut section), Err(size));
    let missing = PagesError::StorageMissing {
        plane: 0,
        storage: 0,
        got: 0,
    };
    assert_eq!(map.gather(&[], &[0, 1], &mut section), Err(missing));
    let small = PagesError::StorageTooSmall {
        storage: 0,
        got: 111,
        want: 112,
    };
    assert_eq!(
        map.gather(&[&cache[..111]], &[0, 1], &mut section),
        Err(small)
    );
    let twice = PagesError::BlockTwice { block: 3 };
    let wrote = map.scatter(&section, &[3, 3], &mut [&mut cache]);
    assert_eq!(wrote, Err(twice));
    assert_eq!(map.gather(&[&cache], &[3, 3], &mut section), Ok(()));
}
