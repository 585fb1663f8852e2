//! Any bytes are packed or refused for a named reason, and what was packed comes back: every bit of it, or numbers that can be packed again.
#![no_main]

mod asked;

use asked::{asked, finite, known};
use kvcachepool_kernels::codec::{
    Codec, CodecError, Element, GROUP_MAX, Shape, decode, encode, relative_error,
};
use libfuzzer_sys::fuzz_target;

// As packed bytes, with raw ones behind the header.
fuzz_target!(|bytes: &[u8]| {
    let Some((header, mut raw)) = bytes.split_first_chunk() else {
        return;
    };
    let (codec, mut shape) = asked(&known(*header));
    if codec == Codec::CacheGen {
        raw = fitted(&mut shape, raw);
    }
    check(codec, &shape, raw);
});

/// As many bytes as a shape of moderate sizes has.
fn fitted<'a>(shape: &mut Shape, raw: &'a [u8]) -> &'a [u8] {
    shape.layers = shape.layers.clamp(1, 12);
    shape.halves = shape.halves.clamp(1, 2);
    shape.channels = shape.channels.clamp(1, 130);
    let token = shape.layers * shape.halves * shape.channels * shape.element.bytes() as u32;
    shape.tokens = raw.len() as u32 / token;
    &raw[..(shape.tokens * token) as usize]
}

fn check(codec: Codec, shape: &Shape, raw: &[u8]) {
    let Some(back) = there_and_back(codec, shape, raw) else {
        return;
    };
    if codec == Codec::Lossless {
        assert!(back == raw);
        return;
    }
    let loss = relative_error(shape.element, raw, &back);
    assert!(loss.is_finite(), "{loss}");
    assert!(there_and_back(codec, shape, &back).is_some());
}

fn there_and_back(codec: Codec, shape: &Shape, raw: &[u8]) -> Option<Vec<u8>> {
    let mut stored = Vec::new();
    if let Err(error) = encode(codec, shape, raw, &mut stored) {
        assert!(
            stored.is_empty() && is_due(error, codec, shape, raw),
            "{error}"
        );
        return None;
    }
    let (mut once, mut twice) = (vec![0; raw.len()], vec![0xff; raw.len()]);
    for back in [&mut once, &mut twice] {
        assert_eq!(decode(codec, shape, &stored, back), Ok(()));
    }
    assert!(once == twice);
    assert!(finite(shape.element, &once) || !finite(shape.element, raw));
    Some(once)
}

/// Is this why such bytes are not packed?
fn is_due(error: CodecError, codec: Codec, shape: &Shape, raw: &[u8]) -> bool {
    match (error, codec) {
        (_, Codec::Lossless) => false,
        (CodecError::NotNumbers, _) => shape.element == Element::Opaque,
        (CodecError::Group(group), _) => !(1..=GROUP_MAX).contains(&group),
        (CodecError::RawLength { .. }, _) => !raw.len().is_multiple_of(shape.element.bytes()),
        (CodecError::NotFinite { .. }, Codec::Fp8 { .. }) => false,
        (CodecError::NotFinite { .. }, _) => !finite(shape.element, raw),
        _ => false,
    }
}
