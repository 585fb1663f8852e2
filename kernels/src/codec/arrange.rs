//! Reorders a section from an engine's block order, described by a [`Form`], to the order of [`Shape`]
//! (`[layers][halves][tokens][channels]`), and back.

use super::Shape;
use kvcachepool_protocol::object::{Axis, Form, MAX_DIMS};

/// The shape of `bytes` bytes of a form. `None` if the form is unknown, or `bytes` is not a whole number of its blocks.
pub fn shape_of(form: &Form, bytes: usize) -> Option<Shape> {
    let block = form.block_bytes()? as usize;
    let blocks = u32::try_from(bytes / block).ok()?;
    let shape = Shape {
        element: form.element(),
        layers: form.size(Axis::Layer),
        halves: form.size(Axis::Half),
        tokens: form.size(Axis::Token).checked_mul(blocks)?,
        channels: form.size(Axis::Channel),
    };
    bytes.is_multiple_of(block).then_some(shape)
}

/// Reorders a section. Both buffers have the length of a section accepted by [`shape_of`].
pub fn arrange(form: &Form, raw: &[u8], arranged: &mut [u8]) {
    runs(form, raw.len(), |from, to, run| {
        arranged[to..to + run].copy_from_slice(&raw[from..from + run]);
    });
}

/// The inverse of [`arrange`].
pub fn restore(form: &Form, arranged: &[u8], raw: &mut [u8]) {
    runs(form, raw.len(), |to, from, run| {
        raw[to..to + run].copy_from_slice(&arranged[from..from + run]);
    });
}

/// A dimension of a section.
#[derive(Debug, Clone, Copy)]
struct Step {
    size: usize,
    /// Distance between neighbours, in elements of a shape's order.
    stride: usize,
}

/// Calls `each` for every run of bytes that is contiguous in both orders: its offset in the section, its offset in the shape's order, its
/// length.
fn runs(form: &Form, bytes: usize, mut each: impl FnMut(usize, usize, usize)) {
    let Some(shape) = shape_of(form, bytes).filter(|_| bytes > 0) else {
        return;
    };
    let channel = shape.element.bytes();
    let token = channel * shape.channels as usize;
    let half = token * shape.tokens as usize;
    let layer = half * shape.halves as usize;
    // The stride of the next dimension that is added to each axis, from the innermost outwards.
    let mut next = [layer, half, token, channel];
    let mut steps: Vec<Step> = Vec::with_capacity(MAX_DIMS + 1);
    for dim in form.dims().rev() {
        let stride = &mut next[dim.axis as usize - 1];
        steps.push(Step {
            size: dim.size as usize,
            stride: *stride,
        });
        *stride *= dim.size as usize;
    }
    steps.push(Step {
        size: shape.tokens as usize / form.size(Axis::Token) as usize,
        stride: next[Axis::Token as usize - 1],
    });
    // Dimensions that are innermost in both orders are copied as one run.
    let mut run = channel;
    let inner = steps.iter().take_while(|step| {
        let follows = step.size == 1 || step.stride == run;
        run *= if follows { step.size } else { 1 };
        follows
    });
    let outer = steps.split_off(inner.count());
    let mut at = [0; MAX_DIMS + 1];
    let mut arranged = 0;
    for from in (0..bytes).step_by(run) {
        each(from, arranged, run);
        for (at, step) in at.iter_mut().zip(&outer) {
            *at += 1;
            arranged += step.stride;
            if *at < step.size {
                break;
            }
            arranged -= step.stride * step.size;
            *at = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_protocol::object::{Dim, Element};
    use proptest::prelude::*;

    fn form(list: &[(Axis, u32)]) -> Form {
        let dim = |(axis, size): &(Axis, u32)| Dim {
            axis: *axis,
            size: *size,
        };
        let dims: Vec<_> = list.iter().map(dim).collect();
        Form::new(Element::Bf16, &dims).unwrap()
    }

    fn numbers(bytes: &[u8]) -> Vec<u16> {
        let pairs = bytes.as_chunks().0.iter();
        pairs.map(|pair| u16::from_le_bytes(*pair)).collect()
    }

    #[test]
    fn heads_before_tokens_with_keys_and_values_of_a_token_side_by_side() {
        // [blocks 2][layer 1][head 2][token 2][half 2][2 numbers]
        let form = form(&[
            (Axis::Layer, 1),
            (Axis::Channel, 2),
            (Axis::Token, 2),
            (Axis::Half, 2),
            (Axis::Channel, 2),
        ]);
        let raw: Vec<u8> = (0..32u16).flat_map(u16::to_le_bytes).collect();
        let shape = shape_of(&form, raw.len()).unwrap();
        let sizes = [shape.layers, shape.halves, shape.tokens, shape.channels];
        assert_eq!(sizes, [1, 2, 4, 4]);
        let mut arranged = vec![0; raw.len()];
        arrange(&form, &raw, &mut arranged);
        let keys = [
            [0, 1, 8, 9],
            [4, 5, 12, 13],
            [16, 17, 24, 25],
            [20, 21, 28, 29],
        ];
        let values = keys.map(|token| token.map(|number| number + 2));
        let wanted: Vec<u16> = [keys, values].concat().concat();
        assert_eq!(numbers(&arranged), wanted);
        let mut back = vec![0; raw.len()];
        restore(&form, &arranged, &mut back);
        assert_eq!(back, raw);
    }

    #[test]
    fn what_is_no_whole_number_of_blocks_has_no_shape() {
        let form = form(&[(Axis::Token, 4), (Axis::Channel, 3)]);
        for (bytes, tokens) in [(0, Some(0)), (24, Some(4)), (72, Some(12)), (36, None)] {
            assert_eq!(shape_of(&form, bytes).map(|shape| shape.tokens), tokens);
        }
        assert_eq!(shape_of(&Form::flat(Element::Bf16), 24), None);
        arrange(&form, &[], &mut []);
    }

    proptest! {
        #[test]
        fn any_order_comes_back_and_every_number_is_where_its_indices_say(
            order in prop::collection::vec((0usize..4, 1u32..4), 1..=MAX_DIMS), blocks in 1usize..4,
        ) {
            let mut halves = 0;
            let list: Vec<_> = order.into_iter().map(|(axis, size)| (Axis::ALL[axis], size)).map(|(axis, size)| {
                halves += u32::from(axis == Axis::Half);
                (axis, if axis != Axis::Half { size } else if halves == 1 { size.min(2) } else { 1 })
            }).collect();
            let form = form(&list);
            let count = blocks * form.block_bytes().unwrap() as usize / 2;
            prop_assume!(count < 1 << 16);
            let raw: Vec<u8> = (0..count).flat_map(|n| (n as u16).to_le_bytes()).collect();
            let mut arranged = vec![0; raw.len()];
            arrange(&form, &raw, &mut arranged);
            let shape = shape_of(&form, raw.len()).unwrap();
            let arranged_numbers = numbers(&arranged);
            for (number, _) in raw.as_chunks::<2>().0.iter().enumerate() {
                // Indices along the axes, outer dimensions first.
                let (mut rest, mut index, mut scale) = (number, [0; 4], [1; 4]);
                for (axis, size) in list.iter().rev() {
                    let axis = *axis as usize - 1;
                    index[axis] += rest % *size as usize * scale[axis];
                    scale[axis] *= *size as usize;
                    rest /= *size as usize;
                }
                index[2] += rest * scale[2];
                let sizes = [shape.layers, shape.halves, shape.tokens, shape.channels];
                let at = index.iter().zip(sizes).fold(0, |at, (index, size)| at * size as usize + index);
                prop_assert_eq!(arranged_numbers[at], number as u16);
            }
            let mut back = vec![0; raw.len()];
            restore(&form, &arranged, &mut back);
            prop_assert_eq!(back, raw);
        }
    }
}
