//! Refused maps of planes.

use super::super::{BlockShape, PageMap, PagesError, Plane};
use super::{layout, layouts};
use kvcachepool_protocol::layouts::Dim;
use proptest::prelude::*;
use std::collections::HashSet;

const ONE: BlockShape = BlockShape {
    layers: 1,
    heads: 1,
    kernel_blocks: 1,
    tokens: 1,
    state_bytes: 1,
};

fn plane(offset: usize, block_stride: usize, bytes: usize) -> Plane {
    Plane {
        storage: 0,
        offset,
        block_stride,
        bytes,
    }
}

/// Whether a byte belongs to two blocks or planes, by enumeration.
fn shares(blocks: u32, planes: &[Plane]) -> bool {
    let mut seen = HashSet::new();
    planes.iter().any(|plane| {
        (0..blocks as usize).any(|block| {
            let start = plane.offset + block * plane.block_stride;
            (start..start + plane.bytes).any(|byte| !seen.insert((plane.storage, byte)))
        })
    })
}

proptest! {
    #[test]
    fn planes_of_one_stride_are_refused_exactly_when_they_share_a_byte(
        blocks in 1..5u32, stride in 1..12usize,
        planes in proptest::collection::vec((0..2usize, 0..40usize, 1..7usize), 1..5),
    ) {
        let planes: Vec<Plane> = planes
            .into_iter()
            .map(|(storage, offset, bytes)| Plane { storage, ..plane(offset, stride, bytes) })
            .collect();
        let made = PageMap::new(blocks, planes.clone());
        let too_many = planes.iter().any(|p| p.storage >= planes.len());
        prop_assert_eq!(made.is_err(), too_many || shares(blocks, &planes), "{:?}", made);
    }

    #[test]
    fn planes_of_many_strides_that_are_taken_share_no_byte(
        blocks in 1..5u32,
        planes in proptest::collection::vec((0..60usize, 0..12usize, 1..7usize), 1..5),
    ) {
        let planes: Vec<Plane> = planes.into_iter().map(|(o, s, b)| plane(o, s, b)).collect();
        if PageMap::new(blocks, planes.clone()).is_ok() {
            prop_assert!(!shares(blocks, &planes));
        }
    }

    #[test]
    fn no_sizes_make_a_map_panic(
        blocks: u32, storage: usize, offset: usize, block_stride: usize, bytes: usize,
    ) {
        let one = Plane { storage, offset, block_stride, bytes };
        let two = Plane { storage: 0, offset: !offset, block_stride, bytes };
        let _ = PageMap::new(blocks, vec![one, two]);
        let shape = BlockShape { state_bytes: bytes, tokens: block_stride, ..ONE };
        for layout in layouts() {
            let _ = PageMap::dense(&layout, &shape, blocks);
        }
    }
}

#[test]
fn planes_are_those_of_the_table() {
    let shape = BlockShape {
        layers: 3,
        heads: 2,
        kernel_blocks: 2,
        tokens: 4,
        state_bytes: 8,
    };
    let planes = |name| {
        PageMap::dense(&layout(name), &shape, 5)
            .unwrap()
            .planes()
            .to_vec()
    };
    let layers: Vec<Plane> = (0..3).map(|l| plane(l * 5 * 128, 128, 128)).collect();
    assert_eq!(planes("LBHNC"), layers);
    assert_eq!(planes("LBNHC"), layers);
    let heads: Vec<Plane> = (0..6).map(|i| plane(i * 5 * 64, 64, 64)).collect();
    assert_eq!(planes("LHBNC"), heads);
    for name in ["BLHNC", "BLNHC", "BHLNC"] {
        assert_eq!(planes(name), [plane(0, 384, 384)]);
    }
}

#[test]
fn each_wrong_description_has_its_name() {
    let zero = |what| Err(PagesError::Zero { what });
    assert_eq!(PageMap::new(1, vec![]), zero("number of blocks or planes"));
    assert_eq!(
        PageMap::new(0, vec![plane(0, 1, 1)]),
        zero("number of blocks or planes")
    );
    assert_eq!(
        PageMap::new(1, vec![plane(0, 1, 0)]),
        zero("bytes of a plane")
    );
    let overlap = |first, second| Err(PagesError::PlanesOverlap { first, second });
    assert_eq!(PageMap::new(2, vec![plane(0, 3, 4)]), overlap(0, 0));
    assert_eq!(
        PageMap::new(2, vec![plane(8, 8, 4), plane(0, 8, 4)]),
        overlap(1, 0)
    );
    let overflow = Err(PagesError::Overflow {
        what: "places of blocks",
    });
    assert_eq!(PageMap::new(3, vec![plane(2, usize::MAX / 2, 1)]), overflow);
    let far = Plane {
        storage: 1,
        ..plane(0, 1, 1)
    };
    let missing = PagesError::StorageMissing {
        plane: 0,
        storage: 1,
        got: 1,
    };
    assert_eq!(PageMap::new(1, vec![far]), Err(missing));

    let mut odd = layout("LBHNC");
    let unserved = Err(PagesError::Unserved {
        layout: "LBHNC".into(),
    });
    odd.order = vec![Dim::L, Dim::B, Dim::H, Dim::C, Dim::N];
    assert_eq!(PageMap::dense(&odd, &ONE, 1), unserved);
    odd.order = vec![Dim::L, Dim::B, Dim::H, Dim::C];
    assert_eq!(PageMap::dense(&odd, &ONE, 1), unserved);
    odd = layout("LBHNC");
    odd.served = false;
    assert_eq!(PageMap::dense(&odd, &ONE, 1), unserved);
    let none = BlockShape { heads: 0, ..ONE };
    assert_eq!(PageMap::dense(&layout("LBHNC"), &none, 1), zero("heads"));
}
