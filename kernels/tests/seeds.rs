//! Seeds for the fuzzers of the codecs, `fuzz/seeds`, are written by this test and must not drift: what is packed today must be read tomorrow.
//! `UPDATE_VECTORS=1 cargo test -p kvcachepool-kernels --test seeds` writes them anew after a wanted change.
#![allow(clippy::unwrap_used, reason = "a test")]

use kvcachepool_kernels::codec::{Codec, Element, HEADER_BYTES, Shape, decode, encode};
use std::path::Path;

const CODECS: [(&str, Codec); 5] = [
    ("lossless", Codec::Lossless),
    ("fp8", Codec::Fp8 { group: 128 }),
    ("int8", Codec::Int8 { group: 128 }),
    ("int4", Codec::Int4 { group: 63 }),
    ("cachegen", Codec::CacheGen),
];

fn must_be(name: &str, wanted: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/seeds")
        .join(name);
    if std::env::var_os("UPDATE_VECTORS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, wanted).unwrap();
    }
    let found = std::fs::read(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "{name} is not what the code writes: can what older versions packed still be read? See this file's first lines."
    );
}

/// Shapes of 960 numbers each: of few layers, of so many that the later ones get fewer steps, and with more tokens than a stream has.
fn shapes() -> [(&'static str, Shape); 3] {
    [
        ("bf16", Element::Bf16, [2, 2, 40, 6]),
        ("f16", Element::F16, [12, 2, 10, 4]),
        ("f32", Element::F32, [1, 1, 320, 3]),
    ]
    .map(|(name, element, [layers, halves, tokens, channels])| {
        let shape = Shape {
            element,
            layers,
            halves,
            tokens,
            channels,
        };
        (name, shape)
    })
}

/// Numbers of which small ones are frequent.
fn raw(element: Element) -> Vec<u8> {
    let numbers = (0..960i32).map(|n| n * n % 31 * (n % 7) - 90);
    let bytes = numbers.map(|n| (n, (n as f32).to_bits().to_le_bytes()));
    match element {
        // Numbers from 1 on, in steps of a 1,024th.
        Element::F16 => bytes.flat_map(|(n, _)| [n as u8, 0x3c]).collect(),
        Element::F32 => bytes.flat_map(|(_, bytes)| bytes).collect(),
        _ => bytes.flat_map(|(_, [_, _, bytes @ ..])| bytes).collect(),
    }
}

#[test]
fn seeds_of_the_fuzzers() {
    for (element, shape) in shapes() {
        let raw = raw(shape.element);
        for (name, codec) in CODECS {
            let mut stored = Vec::new();
            encode(codec, &shape, &raw, &mut stored).unwrap();
            must_be(&format!("unpack/{name}-{element}"), &stored);
            let plain = [&stored[..HEADER_BYTES], &raw].concat();
            must_be(&format!("pack/{name}-{element}"), &plain);
            decode(codec, &shape, &stored, &mut vec![0; raw.len()]).unwrap();
        }
    }
    // Two blocks with a token's keys and values side by side, heads before tokens: layer 2, channel 2, token 4, half 2, channel 3.
    let dims = [(0, 2), (3, 2), (2, 4), (1, 2), (3, 3u32)];
    let dims = dims.map(|(axis, size)| [&[axis], &size.to_le_bytes()[..]].concat());
    let raw = &raw(Element::Bf16)[..2 * 96 * 2];
    let form = [&[1, dims.len() as u8], dims.concat().as_slice(), raw].concat();
    must_be("arrange/heads-first", &form);
}
