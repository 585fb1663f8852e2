//! Sizes of a block of KV states and the orders of its dimensions.

use super::PagesError;
use kvcachepool_protocol::layouts::{Dim, Layout};

/// Sizes of what a rank keeps per block id. The block's bytes are the product of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// Layers of one `KVCacheTensor`.
    pub layers: usize,
    /// KV heads of this rank.
    pub heads: usize,
    /// Kernel blocks that make up one block id: 1 unless the attention backend uses smaller blocks than vLLM counts.
    pub kernel_blocks: usize,
    /// States (tokens) of a kernel block.
    pub tokens: usize,
    /// Bytes of one state of one head in one layer: its key, then its value.
    pub state_bytes: usize,
}

impl BlockShape {
    /// Bytes of a block over all layers. Errors: a size is zero, or the product overflows.
    pub fn block_bytes(&self) -> Result<usize, PagesError> {
        let sizes = [
            ("layers", self.layers),
            ("heads", self.heads),
            ("kernel blocks", self.kernel_blocks),
            ("tokens", self.tokens),
            ("state bytes", self.state_bytes),
        ];
        let mut bytes = 1;
        for (what, size) in sizes {
            if size == 0 {
                return Err(PagesError::Zero { what });
            }
            bytes = product("bytes of a block", bytes, size)?;
        }
        Ok(bytes)
    }

    /// How many of a dimension lie within one block. `B` counts kernel blocks: in memory, a block id is that many neighbours in `B`'s
    /// place, so a section of it is ordered like the cache with `B` cut down to them.
    pub(super) fn extent(&self, dim: Dim) -> usize {
        match dim {
            Dim::L => self.layers,
            Dim::B => self.kernel_blocks,
            Dim::H => self.heads,
            Dim::N => self.tokens,
            Dim::C => self.state_bytes,
        }
    }
}

/// Refuses layouts that are not served, and orders that do not name each dimension once with a state's bytes innermost.
pub(super) fn served(layout: &Layout) -> Result<(), PagesError> {
    let mut seen = layout.order.clone();
    seen.sort_unstable();
    let all = [Dim::L, Dim::B, Dim::H, Dim::N, Dim::C];
    if layout.served && seen == all && layout.order.last() == Some(&Dim::C) {
        return Ok(());
    }
    Err(PagesError::Unserved {
        layout: layout.name.clone(),
    })
}

/// `a * b`, or an error that names what it counts.
pub(super) fn product(what: &'static str, a: usize, b: usize) -> Result<usize, PagesError> {
    a.checked_mul(b).ok_or(PagesError::Overflow { what })
}
