//! `digest.cu`.

use crate::host::{Argument, Launch, host, run};
use crate::pages::{pattern, words};
use kvcachepool_protocol::object::digest;
use proptest::prelude::*;
use std::ops::Range;
use std::path::Path;

/// Bytes that sections are cut from: three times what a warp reads at a time, and some more.
const BYTES: usize = (24 << 10) + 300;

/// Lengths of every form of XXH3, whole blocks and their neighbours among them.
fn any_length() -> impl Strategy<Value = usize> {
    prop_oneof![
        0..=16usize,
        17..=240usize,
        241..=2_100usize,
        2_100..=BYTES - 16,
        (1..=24usize, 0..3usize).prop_map(|(blocks, beside)| (blocks << 10) + beside - 1),
    ]
}

/// What the kernel says of all sections of some bytes that lie `beyond` a multiple of 64.
fn digests(
    host: &Path,
    launch: Launch,
    bytes: &[u8],
    beyond: u64,
    list: &[Range<usize>],
) -> Vec<u8> {
    let rows = list
        .iter()
        .flat_map(|section| [section.start, section.len()]);
    let rows = words(rows.map(|word| word as u64));
    let empty = vec![0; 16 * list.len()];
    let after = run(
        host,
        "kv_digest",
        launch,
        &[
            Argument::Buffer(&rows, 0),
            Argument::Number(list.len() as u64),
            Argument::Buffer(&empty, 8),
            Argument::Buffer(bytes, beyond),
        ],
    );
    let [rows_after, digests, bytes_after] = after.try_into().unwrap();
    assert!(
        rows_after == rows && bytes_after == bytes,
        "only digests are written"
    );
    digests
}

fn wanted(bytes: &[u8], list: &[Range<usize>]) -> Vec<u8> {
    let sections = list.iter().map(|section| &bytes[section.clone()]);
    sections.flat_map(digest).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn digests_are_those_of_the_reference_for_any_lengths_and_places(
        seed: u32, beyond in 0..64u64,
        cuts in proptest::collection::vec((any_length(), 0..16usize), 0..12),
        grid in 1..4u32, rows in 1..4u32,
    ) {
        let host = host();
        let bytes = pattern(BYTES, seed);
        let list: Vec<Range<usize>> = cuts.into_iter().map(|(length, at)| at..at + length).collect();
        let launch = Launch { grid: [grid, 1], block: [32, rows] };
        prop_assert_eq!(digests(host, launch, &bytes, beyond, &list), wanted(&bytes, &list));
    }
}

#[test]
fn digests_of_every_length_up_to_two_blocks_are_those_of_the_reference() {
    let host = host();
    let bytes = pattern(2_200, 1);
    let launch = Launch {
        grid: [5, 1],
        block: [32, 2],
    };
    for start in [0, 3] {
        let list: Vec<Range<usize>> = (0..=2_100).map(|length| start..start + length).collect();
        let (found, wanted) = (
            digests(host, launch, &bytes, 0, &list),
            wanted(&bytes, &list),
        );
        let differs = found
            .chunks(16)
            .zip(wanted.chunks(16))
            .position(|(one, other)| one != other);
        assert_eq!(differs, None, "length, from byte {start} on");
    }
}
