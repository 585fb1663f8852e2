//! Pages compared with oracles that know neither planes nor runs: one byte at a time, by its indices.

mod map;
mod order;
mod rope;
mod transfer;

use super::{BlockShape, PageMap};
use kvcachepool_protocol::layouts::{Dim, LAYOUTS_JSON, Layout, LayoutTable};
use proptest::prelude::*;

/// Supported layouts of the table.
fn layouts() -> Vec<Layout> {
    let table = LayoutTable::parse(LAYOUTS_JSON).unwrap();
    table.layouts.into_iter().filter(|l| l.served).collect()
}

fn layout(name: &str) -> Layout {
    layouts().into_iter().find(|l| l.name == name).unwrap()
}

fn any_layout() -> impl Strategy<Value = Layout> {
    proptest::sample::select(layouts())
}

fn any_shape() -> impl Strategy<Value = BlockShape> {
    let sizes = (1..4usize, 1..5usize, 1..3usize, 1..5usize, 1..9usize);
    sizes.prop_map(
        |(layers, heads, kernel_blocks, tokens, state_bytes)| BlockShape {
            layers,
            heads,
            kernel_blocks,
            tokens,
            state_bytes,
        },
    )
}

/// Block ids below `blocks` in any order, without duplicates.
fn any_blocks(blocks: u32) -> impl Strategy<Value = Vec<u32>> {
    let all: Vec<u32> = (0..blocks).collect();
    proptest::sample::subsequence(all, 0..=blocks as usize).prop_shuffle()
}

/// Bytes with a long period whose neighbours differ.
fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    let mix = |i: usize| (i as u32 ^ seed).wrapping_mul(0x9e37_79b1) >> 24;
    (0..bytes).map(|i| mix(i) as u8).collect()
}

/// One byte of a block: layer, kernel block, head, token, byte of the state.
#[derive(Debug, Clone, Copy)]
struct Place {
    layer: usize,
    kernel_block: usize,
    head: usize,
    token: usize,
    byte: usize,
}

/// All bytes of a block in rank-verbatim order, with the layout's innermost dimension fastest.
fn verbatim(layout: &Layout, shape: &BlockShape) -> Vec<Place> {
    let extents: Vec<usize> = layout.order.iter().map(|d| extent(shape, *d)).collect();
    (0..extents.iter().product())
        .map(|number: usize| {
            let mut rest = number;
            let mut at = [0; 5];
            for (i, extent) in extents.iter().enumerate().rev() {
                at[i] = rest % extent;
                rest /= extent;
            }
            let of = |dim| at[layout.order.iter().position(|d| *d == dim).unwrap()];
            Place {
                layer: of(Dim::L),
                kernel_block: of(Dim::B),
                head: of(Dim::H),
                token: of(Dim::N),
                byte: of(Dim::C),
            }
        })
        .collect()
}

fn extent(shape: &BlockShape, dim: Dim) -> usize {
    match dim {
        Dim::L => shape.layers,
        Dim::B => shape.kernel_blocks,
        Dim::H => shape.heads,
        Dim::N => shape.tokens,
        Dim::C => shape.state_bytes,
    }
}

/// The address of a block's byte in a cache that is densely filled in `layout`.
fn address(layout: &Layout, shape: &BlockShape, blocks: u32, block: u32, place: Place) -> usize {
    layout.order.iter().fold(0, |at, dim| {
        let (extent, index) = match dim {
            Dim::L => (shape.layers, place.layer),
            Dim::B => (
                shape.kernel_blocks * blocks as usize,
                block as usize * shape.kernel_blocks + place.kernel_block,
            ),
            Dim::H => (shape.heads, place.head),
            Dim::N => (shape.tokens, place.token),
            Dim::C => (shape.state_bytes, place.byte),
        };
        at * extent + index
    })
}

fn dense(layout: &Layout, shape: &BlockShape, blocks: u32) -> PageMap {
    PageMap::dense(layout, shape, blocks).unwrap()
}
