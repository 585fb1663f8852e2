//! Layout change between the order of a rank's KV cache (*rank-verbatim*, the result of gather) and the *head-major canonical* order, which
//! is the same for every layout, block size and tensor-parallel (TP) size. Kernels: `cuda/layout.cu`.
//!
//! Canonical order is `[head][layer][token][content]`, with the tokens of all blocks in one row. A rank's heads are neighbours in the
//! model. So the canonical bytes of a whole model are those of its ranks, concatenated, and a rank of another TP size reads its heads as
//! one run ([`HeadMajor::heads`]). Pipeline stages have their own layers and are separate.

use super::PagesError;
use super::shape::{BlockShape, product, served};
use kvcachepool_protocol::layouts::{Dim, Layout};
use std::ops::Range;

/// The positions of each run of bytes in both orders: nested loops from the outermost, with strides in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadMajor {
    /// Heads, layers, blocks, kernel blocks and tokens, in canonical order.
    loops: [Loop; 5],
    /// Bytes that are contiguous in both orders.
    run: usize,
    heads: usize,
    section_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Loop {
    extent: usize,
    verbatim: usize,
    canonical: usize,
}

impl HeadMajor {
    /// The change for sections of `blocks` blocks gathered from a cache in `layout`.
    ///
    /// Errors: an unsupported layout, a size of zero, sizes that overflow.
    pub fn new(layout: &Layout, shape: &BlockShape, blocks: usize) -> Result<Self, PagesError> {
        served(layout)?;
        if blocks == 0 {
            return Err(PagesError::Zero { what: "blocks" });
        }
        let block_bytes = shape.block_bytes()?;
        let section_bytes = product("bytes of a section", block_bytes, blocks)?;
        let verbatim = |dim: Dim| -> usize {
            let inner = layout.order.iter().skip_while(|d| **d != dim).skip(1);
            inner.map(|d| shape.extent(*d)).product()
        };
        let mut canonical = section_bytes;
        let mut dimension = |extent: usize, verbatim: usize| {
            canonical /= extent;
            Loop {
                extent,
                verbatim,
                canonical,
            }
        };
        let mut loops = [
            dimension(shape.heads, verbatim(Dim::H)),
            dimension(shape.layers, verbatim(Dim::L)),
            dimension(blocks, block_bytes),
            dimension(shape.kernel_blocks, verbatim(Dim::B)),
            dimension(shape.tokens, verbatim(Dim::N)),
        ];
        let run = join(&mut loops, shape.state_bytes);
        Ok(Self {
            loops,
            run,
            heads: shape.heads,
            section_bytes,
        })
    }

    /// The loops as kernel arguments, outermost first: extent, and stride of the rank-verbatim side in bytes.
    pub fn loops(&self) -> [(u64, u64); 5] {
        self.loops
            .map(|one| (one.extent as u64, one.verbatim as u64))
    }

    /// Bytes that are contiguous in both orders, moved by the innermost loop.
    pub fn run_bytes(&self) -> usize {
        self.run
    }

    /// Bytes of a section, in either order.
    pub fn section_bytes(&self) -> usize {
        self.section_bytes
    }

    /// Byte range of some heads in canonical order. Errors: heads outside the section.
    pub fn heads(&self, heads: Range<usize>) -> Result<Range<usize>, PagesError> {
        if heads.start > heads.end || heads.end > self.heads {
            return Err(PagesError::HeadsOutOfRange {
                first: heads.start,
                end: heads.end,
                heads: self.heads,
            });
        }
        let bytes = self.section_bytes / self.heads;
        Ok(heads.start * bytes..heads.end * bytes)
    }

    /// Rank-verbatim to canonical. Errors: a buffer whose length is not `section_bytes()`.
    pub fn to_canonical(&self, verbatim: &[u8], canonical: &mut [u8]) -> Result<(), PagesError> {
        self.check(verbatim.len(), canonical.len())?;
        self.each_run(|from, to| {
            canonical[to..to + self.run].copy_from_slice(&verbatim[from..from + self.run]);
        });
        Ok(())
    }

    /// Canonical to rank-verbatim. Errors: a buffer whose length is not `section_bytes()`.
    pub fn to_verbatim(&self, canonical: &[u8], verbatim: &mut [u8]) -> Result<(), PagesError> {
        self.check(verbatim.len(), canonical.len())?;
        self.each_run(|to, from| {
            verbatim[to..to + self.run].copy_from_slice(&canonical[from..from + self.run]);
        });
        Ok(())
    }

    /// Number of rows of a section in rank-verbatim order: its blocks, or one if it is one run. A section that is in no single buffer is
    /// changed row by row.
    pub fn rows(&self) -> usize {
        self.loops[2].extent
    }

    pub fn row_bytes(&self) -> usize {
        self.section_bytes / self.rows()
    }

    /// Calls `copy` for every run of a row: its place in the row, and in canonical order. A row outside of the section has none.
    pub fn row(&self, row: usize, mut copy: impl FnMut(usize, usize)) {
        let [heads, layers, blocks, kernel_blocks, tokens] = &self.loops;
        if row >= blocks.extent {
            return;
        }
        for outer in Loop::places(heads, (0, row * blocks.canonical)) {
            for layer in Loop::places(layers, outer) {
                for kernel_block in Loop::places(kernel_blocks, layer) {
                    for (verbatim, canonical) in Loop::places(tokens, kernel_block) {
                        copy(verbatim, canonical);
                    }
                }
            }
        }
    }

    fn check(&self, verbatim: usize, canonical: usize) -> Result<(), PagesError> {
        let want = self.section_bytes;
        let sides = [
            ("a rank-verbatim section", verbatim),
            ("a canonical section", canonical),
        ];
        match sides.into_iter().find(|(_, got)| *got != want) {
            None => Ok(()),
            Some((what, got)) => Err(PagesError::Size { what, got, want }),
        }
    }

    /// Calls `copy` with the position of every run in verbatim and in canonical order.
    fn each_run(&self, mut copy: impl FnMut(usize, usize)) {
        let [heads, layers, blocks, kernel_blocks, tokens] = &self.loops;
        for outer in Loop::places(heads, (0, 0)) {
            for layer in Loop::places(layers, outer) {
                for block in Loop::places(blocks, layer) {
                    for kernel_block in Loop::places(kernel_blocks, block) {
                        for (verbatim, canonical) in Loop::places(tokens, kernel_block) {
                            copy(verbatim, canonical);
                        }
                    }
                }
            }
        }
    }
}

impl Loop {
    /// Positions in both orders, relative to `from`.
    fn places(&self, from: (usize, usize)) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Self {
            extent,
            verbatim,
            canonical,
        } = *self;
        (0..extent).map(move |i| (from.0 + i * verbatim, from.1 + i * canonical))
    }
}

/// Merges the innermost loops into the run while they are contiguous in both orders. Returns the bytes of the run.
fn join(loops: &mut [Loop], state_bytes: usize) -> usize {
    let mut run = state_bytes;
    for inner in loops.iter_mut().rev() {
        if inner.extent > 1 && (inner.verbatim != run || inner.canonical != run) {
            break;
        }
        run *= inner.extent;
        inner.extent = 1;
    }
    run
}
