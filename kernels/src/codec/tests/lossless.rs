//! Lossless codecs restore every bit of any input.

use super::sections::{bytes, there_and_back};
use crate::codec::{Codec, Element, HEADER_BYTES, Shape, encode};
use crate::number::{Bf16, Number};
use proptest::collection::vec;
use proptest::prelude::*;

const ELEMENTS: [Element; 4] = [Element::Opaque, Element::Bf16, Element::F16, Element::F32];
const BLOCK: usize = 128 << 10;

fn stored_bytes(element: Element, raw: &[u8]) -> usize {
    let mut out = Vec::new();
    encode(Codec::Lossless, &Shape::flat(element), raw, &mut out).unwrap();
    out.len()
}

/// Random bytes.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

proptest! {
    #[test]
    fn any_bytes_come_back(raw in vec(any::<u8>(), 0..3_000)) {
        for element in ELEMENTS {
            prop_assert_eq!(&there_and_back(Codec::Lossless, &Shape::flat(element), &raw), &raw);
        }
    }

    #[test]
    fn few_values_come_back(raw in vec(0u8..4, 0..3_000)) {
        for element in ELEMENTS {
            prop_assert_eq!(&there_and_back(Codec::Lossless, &Shape::flat(element), &raw), &raw);
        }
    }
}

#[test]
fn lengths_around_a_block_come_back_and_grow_by_a_byte_per_plane() {
    let noise = noise(2 * BLOCK + 9);
    for length in [
        0,
        1,
        2,
        3,
        5,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        BLOCK + 3,
        2 * BLOCK + 9,
    ] {
        let raw = &noise[..length];
        for element in ELEMENTS {
            assert!(there_and_back(Codec::Lossless, &Shape::flat(element), raw) == raw);
            let planes = element.bytes() * length.div_ceil(BLOCK);
            assert!(stored_bytes(element, raw) <= HEADER_BYTES + length + planes);
        }
    }
}

#[test]
fn exponents_and_zeros_are_packed() {
    let waves: Vec<_> = (0..100_000)
        .map(|n| Bf16::nearest((n as f32).sin()))
        .collect();
    let raw = bytes::<Bf16>(&waves);
    let stored = stored_bytes(Element::Bf16, &raw);
    assert!(stored * 100 < raw.len() * 70, "{stored}");
    assert_eq!(
        there_and_back(Codec::Lossless, &Shape::flat(Element::Bf16), &raw),
        raw
    );
    assert!(stored_bytes(Element::F32, &vec![0; 1 << 20]) < 8 * 4 * 200);
}
