//! Bytes of any length that an engine has in any form are put in order, packed, unpacked and put back to where they were; or they have no shape.
#![no_main]

use kvcachepool_kernels::codec::{Codec, arrange, decode, encode, restore, shape_of};
use kvcachepool_protocol::object::{Axis, Dim, Element, Form, MAX_DIMS};
use libfuzzer_sys::fuzz_target;

/// An axis and a size.
const DIM_BYTES: usize = 5;

// An element, the number of dimensions, the dimensions, and the bytes of a section.
fuzz_target!(|bytes: &[u8]| {
    let Some(([element, count], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let elements = [Element::Opaque, Element::Bf16, Element::F16, Element::F32];
    let element = elements[usize::from(element % 4)];
    // One dimension more than there may be.
    let count = usize::from(*count) % (MAX_DIMS + 2);
    let Some((dims, raw)) = rest.split_at_checked(count * DIM_BYTES) else {
        return;
    };
    let dims: Vec<Dim> = dims.as_chunks().0.iter().map(dim).collect();
    let small = |dim: &Dim| Dim {
        size: dim.size % 8 + 1,
        ..*dim
    };
    let smaller: Vec<Dim> = dims.iter().map(small).collect();
    for dims in [dims, smaller] {
        if let Some(form) = Form::new(element, &dims) {
            check(&form, raw);
            let block = form.block_bytes().map_or(1, |bytes| bytes as usize);
            check(&form, &raw[..raw.len() / block * block]);
        }
    }
});

fn dim([axis, size @ ..]: &[u8; DIM_BYTES]) -> Dim {
    Dim {
        axis: Axis::ALL[usize::from(axis % 4)],
        size: u32::from_le_bytes(*size),
    }
}

fn check(form: &Form, raw: &[u8]) {
    let Some(shape) = shape_of(form, raw.len()) else {
        let whole = form
            .block_bytes()
            .map(|block| raw.len() % block as usize == 0);
        let tokens = raw.len() as u64 * u64::from(form.size(Axis::Token));
        assert!(whole != Some(true) || tokens > u32::MAX.into());
        return;
    };
    let sizes = [shape.layers, shape.halves, shape.tokens, shape.channels];
    let numbers: u64 = sizes.iter().map(|size| u64::from(*size)).product();
    assert_eq!(numbers * shape.element.bytes() as u64, raw.len() as u64);
    let (mut ordered, mut back) = (vec![0; raw.len()], vec![0; raw.len()]);
    arrange(form, raw, &mut ordered);
    restore(form, &ordered, &mut back);
    assert!(back == raw);
    // The other way round too: nothing is left out of either.
    restore(form, raw, &mut ordered);
    arrange(form, &ordered, &mut back);
    assert!(back == raw);
    let mut stored = Vec::new();
    if encode(Codec::CacheGen, &shape, &ordered, &mut stored).is_ok() {
        assert_eq!(decode(Codec::CacheGen, &shape, &stored, &mut back), Ok(()));
    }
}
