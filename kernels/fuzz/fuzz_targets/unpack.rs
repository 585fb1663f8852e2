//! Any packed bytes, for whatever codec, shape and length their header speaks of, give numbers or a named error: each time the same, whatever
//! lay where they are put.
#![no_main]

mod asked;

use asked::{asked, finite, known};
use kvcachepool_kernels::codec::{Codec, Shape, decode};
use libfuzzer_sys::fuzz_target;

const RAW_MAX: u64 = 64 << 10;

fuzz_target!(|bytes: &[u8]| {
    let Some((header, packed)) = bytes.split_first_chunk() else {
        return;
    };
    let mut header = known(*header);
    let (codec, shape) = asked(&header);
    let length = header
        .last_chunk()
        .map_or(0, |length| u64::from_le_bytes(*length));
    // CacheGen takes as many bytes as its shape has, and the others any number.
    let whole = whole(&shape).filter(|bytes| codec == Codec::CacheGen && *bytes <= RAW_MAX);
    let raw = whole.unwrap_or(length % (RAW_MAX + 1));
    check(codec, &shape, bytes, raw as usize);
    header[24..].copy_from_slice(&raw.to_le_bytes());
    check(codec, &shape, &[&header, packed].concat(), raw as usize);
});

fn whole(shape: &Shape) -> Option<u64> {
    let sizes = [shape.layers, shape.halves, shape.tokens, shape.channels];
    let bytes = shape.element.bytes() as u64;
    sizes
        .iter()
        .try_fold(bytes, |bytes, size| bytes.checked_mul((*size).into()))
}

fn check(codec: Codec, shape: &Shape, stored: &[u8], raw: usize) {
    let (mut once, mut twice) = (vec![0; raw], vec![0xff; raw]);
    let found = decode(codec, shape, stored, &mut once);
    assert_eq!(decode(codec, shape, stored, &mut twice), found);
    if found.is_ok() {
        assert!(once == twice);
        let any = matches!(codec, Codec::Lossless | Codec::Fp8 { .. });
        assert!(any || finite(shape.element, &once));
    }
}
