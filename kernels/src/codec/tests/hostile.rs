//! Decoding untrusted bytes ends with an error or with other numbers.

use super::sections::there_and_back;
use crate::codec::{Codec, CodecError, Element, GROUP_MAX, HEADER_BYTES, Shape, decode, encode};
use proptest::collection::vec;
use proptest::prelude::*;

const ELEMENTS: [Element; 3] = [Element::Bf16, Element::F16, Element::F32];
const CODECS: [Codec; 6] = [
    Codec::CacheGen,
    Codec::Lossless,
    Codec::Fp8 { group: 16 },
    Codec::Int8 { group: 16 },
    Codec::Int4 { group: 16 },
    Codec::Int4 { group: 5 },
];

fn codec() -> impl Strategy<Value = Codec> {
    proptest::sample::select(&CODECS[..])
}

/// A shape of 240 numbers that every codec accepts, and its numbers.
fn section() -> impl Strategy<Value = (Shape, Vec<u8>)> {
    (
        proptest::sample::select(&ELEMENTS[..]),
        vec(-100i8..100, 240),
    )
        .prop_map(|(element, numbers)| {
            let shape = Shape {
                element,
                layers: 2,
                halves: 2,
                tokens: 10,
                channels: 6,
            };
            let raw = numbers.iter().flat_map(|n| {
                let bits = f32::from(*n).to_bits();
                match element {
                    Element::F32 => bits.to_le_bytes().to_vec(),
                    Element::F16 => vec![*n as u8, 0x3c],
                    _ => bits.to_le_bytes()[2..].to_vec(),
                }
            });
            (shape, raw.collect())
        })
}

fn packed(codec: Codec, shape: &Shape, raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    encode(codec, shape, raw, &mut out).unwrap();
    out
}

proptest! {
    #[test]
    fn a_part_is_refused(codec in codec(), (shape, raw) in section(), part in any::<proptest::sample::Index>()) {
        let stored = packed(codec, &shape, &raw);
        let mut back = raw.clone();
        prop_assert!(decode(codec, &shape, &stored[..part.index(stored.len())], &mut back).is_err());
    }

    #[test]
    fn more_is_refused(codec in codec(), (shape, raw) in section(), more in vec(any::<u8>(), 1..40)) {
        let mut stored = packed(codec, &shape, &raw);
        stored.extend(more);
        let mut back = raw.clone();
        prop_assert!(decode(codec, &shape, &stored, &mut back).is_err());
    }

    #[test]
    fn changed_bytes_give_an_error_or_other_numbers(
        codec in codec(), (shape, raw) in section(), changes in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8)
    ) {
        let mut stored = packed(codec, &shape, &raw);
        for (at, change) in changes {
            let at = at.index(stored.len());
            stored[at] ^= change;
        }
        let _ = decode(codec, &shape, &stored, &mut raw.clone());
    }

    #[test]
    fn random_bytes_behind_a_sound_header_give_an_error_or_other_numbers(
        codec in codec(), (shape, raw) in section(), body in vec(any::<u8>(), 0..1_500)
    ) {
        let mut stored = packed(codec, &shape, &raw);
        stored.truncate(HEADER_BYTES);
        stored.extend(body);
        let _ = decode(codec, &shape, &stored, &mut raw.clone());
    }

    #[test]
    fn random_bytes_are_refused(codec in codec(), (shape, raw) in section(), stored in vec(any::<u8>(), 0..500)) {
        prop_assert!(decode(codec, &shape, &stored, &mut raw.clone()).is_err());
    }

    #[test]
    fn a_changed_header_is_refused(codec in codec(), (shape, raw) in section(), at in 0..HEADER_BYTES, change in 1u8..) {
        let mut stored = packed(codec, &shape, &raw);
        stored[at] ^= change;
        let error = if at < 4 { CodecError::NotOurs } else { CodecError::OtherShape };
        prop_assert_eq!(decode(codec, &shape, &stored, &mut raw.clone()), Err(error));
    }
}

#[test]
fn asking_for_something_else_is_refused() {
    let shape = Shape::flat(Element::Bf16);
    let stored = packed(Codec::Int8 { group: 16 }, &shape, &[0; 128]);
    for (codec, shape, raw) in [
        (Codec::Fp8 { group: 16 }, shape, 128),
        (Codec::Int8 { group: 32 }, shape, 128),
        (Codec::Int8 { group: 16 }, Shape::flat(Element::F16), 128),
        (Codec::Int8 { group: 16 }, Shape { layers: 1, ..shape }, 128),
        (Codec::Int8 { group: 16 }, shape, 126),
    ] {
        let found = decode(codec, &shape, &stored, &mut vec![0; raw]);
        assert_eq!(found, Err(CodecError::OtherShape));
    }
}

#[test]
fn what_cannot_be_packed_is_named() {
    let numbers = Shape::flat(Element::F32);
    for (codec, shape, raw, error) in [
        (Codec::Fp8 { group: 0 }, numbers, 8, CodecError::Group(0)),
        (
            Codec::Int4 {
                group: GROUP_MAX + 1,
            },
            numbers,
            8,
            CodecError::Group(GROUP_MAX + 1),
        ),
        (
            Codec::Int8 { group: 8 },
            numbers,
            7,
            CodecError::RawLength { raw: 7 },
        ),
        (
            Codec::Int8 { group: 8 },
            Shape::flat(Element::Opaque),
            8,
            CodecError::NotNumbers,
        ),
    ] {
        let mut out = Vec::new();
        assert_eq!(encode(codec, &shape, &vec![0; raw], &mut out), Err(error));
        assert!(out.is_empty());
    }
}

#[test]
fn nothing_is_packed_as_nothing() {
    for codec in CODECS {
        assert!(there_and_back(codec, &Shape::flat(Element::Bf16), &[]).is_empty());
    }
}
