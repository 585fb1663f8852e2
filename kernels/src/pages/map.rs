//! The positions of blocks in a rank's KV cache, as planes. They are checked once at construction, so that transfers need no further
//! checks.

use super::PagesError;
use super::shape::{BlockShape, product, served};
use kvcachepool_protocol::layouts::{Dim, Layout};

/// One run of bytes per block: block `b` is at `offset + b * block_stride`. The connector's `Plane`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// Index of the allocation.
    pub storage: usize,
    /// Offset of block 0 from the start of the storage, in bytes.
    pub offset: usize,
    /// Distance between consecutive blocks, in bytes.
    pub block_stride: usize,
    /// Length of the run.
    pub bytes: usize,
}

impl Plane {
    /// End of the last byte of `blocks` blocks, exclusive. `None` on overflow.
    fn end(&self, blocks: u32) -> Option<usize> {
        let last = self.block_stride.checked_mul(blocks as usize - 1)?;
        self.offset.checked_add(last)?.checked_add(self.bytes)
    }
}

/// The planes of a group in section order, for a fixed number of blocks. No byte belongs to two blocks or planes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageMap {
    blocks: u32,
    planes: Vec<Plane>,
    block_bytes: usize,
    /// Per storage, the length in bytes that its planes need.
    reach: Vec<usize>,
}

impl PageMap {
    /// A map of planes of a KV cache with `blocks` block ids.
    ///
    /// Errors: no planes or blocks, an empty plane, positions that overflow, planes or blocks that share bytes.
    pub fn new(blocks: u32, planes: Vec<Plane>) -> Result<Self, PagesError> {
        let what = "places of blocks";
        if blocks == 0 || planes.is_empty() {
            return Err(PagesError::Zero {
                what: "number of blocks or planes",
            });
        }
        let mut block_bytes = 0usize;
        let mut reach: Vec<usize> = Vec::new();
        for (index, plane) in planes.iter().enumerate() {
            if plane.bytes == 0 {
                return Err(PagesError::Zero {
                    what: "bytes of a plane",
                });
            }
            if blocks > 1 && plane.block_stride < plane.bytes {
                return Err(PagesError::PlanesOverlap {
                    first: index,
                    second: index,
                });
            }
            block_bytes = block_bytes
                .checked_add(plane.bytes)
                .ok_or(PagesError::Overflow { what })?;
            let end = plane.end(blocks).ok_or(PagesError::Overflow { what })?;
            // Every storage has at least one plane. A larger index would only waste memory.
            if plane.storage >= planes.len() {
                return Err(PagesError::StorageMissing {
                    plane: index,
                    storage: plane.storage,
                    got: planes.len(),
                });
            }
            if reach.len() <= plane.storage {
                reach.resize(plane.storage + 1, 0);
            }
            reach[plane.storage] = reach[plane.storage].max(end);
        }
        disjoint(blocks, &planes)?;
        Ok(Self {
            blocks,
            planes,
            block_bytes,
            reach,
        })
    }

    /// The map of one allocation that is densely filled in a layout of the table. The dimensions left of `B` select a plane; those right of
    /// it are the plane's bytes.
    ///
    /// Errors: an unsupported layout, a size of zero, sizes that overflow.
    pub fn dense(layout: &Layout, shape: &BlockShape, blocks: u32) -> Result<Self, PagesError> {
        served(layout)?;
        shape.block_bytes()?;
        let count = layout.order.iter().take_while(|dim| **dim != Dim::B);
        let count: usize = count.map(|dim| shape.extent(*dim)).product();
        let bytes = shape.block_bytes()? / count;
        let span = product("bytes of a plane", bytes, blocks as usize)?;
        product("bytes of a KV cache", span, count)?;
        let plane = |index: usize| Plane {
            storage: 0,
            offset: index * span,
            block_stride: bytes,
            bytes,
        };
        Self::new(blocks, (0..count).map(plane).collect())
    }

    /// Block ids are below this.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Planes in section order.
    pub fn planes(&self) -> &[Plane] {
        &self.planes
    }

    /// Bytes of one block over all planes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Minimum length of each storage in bytes.
    pub fn storage_bytes(&self) -> &[usize] {
        &self.reach
    }
}

/// Whether no two planes share a byte of any two blocks.
fn disjoint(blocks: u32, planes: &[Plane]) -> Result<(), PagesError> {
    let mut order: Vec<usize> = (0..planes.len()).collect();
    order.sort_unstable_by_key(|i| (planes[*i].storage, planes[*i].offset));
    for (at, &first) in order.iter().enumerate() {
        let a = &planes[first];
        for &second in &order[at + 1..] {
            let b = &planes[second];
            let reaches = a.end(blocks).is_some_and(|end| end > b.offset);
            if a.storage != b.storage || !reaches {
                break;
            }
            if overlap(blocks, a, b) {
                return Err(PagesError::PlanesOverlap { first, second });
            }
        }
    }
    Ok(())
}

/// Whether two planes of one storage share bytes; `a` starts first. Interleaved planes with different strides count as overlapping, because
/// no layout has them.
fn overlap(blocks: u32, a: &Plane, b: &Plane) -> bool {
    let ahead = b.offset - a.offset;
    if blocks == 1 {
        return ahead < a.bytes;
    }
    if a.block_stride != b.block_stride {
        return true;
    }
    // The last block of `a` that does not start after `b`'s block 0, and the next one.
    let stride = a.block_stride;
    let within = ahead % stride;
    let next = ahead / stride + 1 < blocks as usize;
    within < a.bytes || (next && stride - within < b.bytes)
}
