//! Rank-verbatim to head-major canonical, and back.

use super::super::{BlockShape, HeadMajor, PagesError};
use super::{any_layout, any_shape, layout, pattern, verbatim};
use proptest::prelude::*;

proptest! {
    #[test]
    fn canonical_has_each_byte_where_head_layer_and_token_say(
        layout in any_layout(), shape in any_shape(), blocks in 1..4usize, seed: u32,
    ) {
        let change = HeadMajor::new(&layout, &shape, blocks).unwrap();
        let section = pattern(change.section_bytes(), seed);
        let mut canonical = vec![0; section.len()];
        change.to_canonical(&section, &mut canonical).unwrap();
        let places = verbatim(&layout, &shape);
        let block_tokens = shape.kernel_blocks * shape.tokens;
        for (at, byte) in section.iter().enumerate() {
            let place = places[at % places.len()];
            let token = at / places.len() * block_tokens + place.kernel_block * shape.tokens + place.token;
            let row = (place.head * shape.layers + place.layer) * blocks * block_tokens + token;
            prop_assert_eq!(canonical[row * shape.state_bytes + place.byte], *byte);
        }
        let mut back = vec![0; section.len()];
        change.to_verbatim(&canonical, &mut back).unwrap();
        prop_assert_eq!(&back, &section);
        // row by row, each byte of a row once
        let run = change.run_bytes();
        let mut copied = 0;
        back.fill(0);
        for (at, row) in back.chunks_mut(change.row_bytes()).enumerate() {
            change.row(at, |to, from| {
                row[to..to + run].copy_from_slice(&canonical[from..from + run]);
                copied += run;
            });
        }
        prop_assert_eq!((copied, back), (section.len(), section));
        change.row(change.rows(), |_, _| panic!("a row outside of the section"));
    }

    #[test]
    fn two_ranks_read_the_halves_of_what_one_rank_stored(
        layout in any_layout(), shape in any_shape(), blocks in 1..4usize, seed: u32,
    ) {
        let whole = BlockShape { heads: 2 * shape.heads, ..shape };
        let one = HeadMajor::new(&layout, &whole, blocks).unwrap();
        let half = HeadMajor::new(&layout, &shape, blocks).unwrap();
        let section = pattern(one.section_bytes(), seed);
        let mut canonical = vec![0; section.len()];
        one.to_canonical(&section, &mut canonical).unwrap();
        let block_bytes = whole.block_bytes().unwrap();
        for rank in 0..2 {
            let heads = rank * shape.heads..(rank + 1) * shape.heads;
            let mine = &canonical[one.heads(heads.clone()).unwrap()];
            let mut got = vec![0; half.section_bytes()];
            half.to_verbatim(mine, &mut got).unwrap();
            let places = verbatim(&layout, &whole);
            let want: Vec<u8> = (0..blocks)
                .flat_map(|block| places.iter().enumerate().map(move |(i, place)| (block * block_bytes + i, place)))
                .filter(|(_, place)| heads.contains(&place.head))
                .map(|(at, _)| section[at])
                .collect();
            prop_assert_eq!(got, want);
        }
    }

    #[test]
    fn every_layout_gives_the_same_canonical_bytes(
        first in any_layout(), second in any_layout(), shape in any_shape(), seed: u32,
    ) {
        let canonical = pattern(3 * shape.block_bytes().unwrap(), seed);
        let through = |layout| {
            let change = HeadMajor::new(layout, &shape, 3).unwrap();
            let mut section = vec![0; canonical.len()];
            change.to_verbatim(&canonical, &mut section).unwrap();
            let mut back = vec![0; canonical.len()];
            change.to_canonical(&section, &mut back).unwrap();
            back
        };
        prop_assert_eq!(through(&first), through(&second));
    }

    #[test]
    fn no_sizes_make_a_change_panic(layers: usize, heads: usize, tokens: usize, blocks: usize, layout in any_layout()) {
        let shape = BlockShape { layers, heads, kernel_blocks: 1, tokens, state_bytes: 2 };
        let _ = HeadMajor::new(&layout, &shape, blocks);
    }
}

#[test]
fn each_wrong_call_has_its_name() {
    let shape = BlockShape {
        layers: 2,
        heads: 4,
        kernel_blocks: 1,
        tokens: 2,
        state_bytes: 2,
    };
    let change = HeadMajor::new(&layout("LBNHC"), &shape, 1).unwrap();
    let wrong = |what, got| {
        Err(PagesError::Size {
            what,
            got,
            want: 32,
        })
    };
    let mut out = [0; 32];
    let short = change.to_canonical(&[0; 31], &mut out);
    assert_eq!(short, wrong("a rank-verbatim section", 31));
    let short = change.to_canonical(&[0; 32], &mut out[..30]);
    assert_eq!(short, wrong("a canonical section", 30));
    let heads = PagesError::HeadsOutOfRange {
        first: 3,
        end: 5,
        heads: 4,
    };
    assert_eq!(change.heads(3..5), Err(heads));
    assert_eq!(change.heads(1..3), Ok(8..24));
    let none = HeadMajor::new(&layout("LBNHC"), &shape, 0);
    assert_eq!(none, Err(PagesError::Zero { what: "blocks" }));
}
