//! Sizes of a block of KV states, and orders of its dimensions.

use super::PagesError;
use kvcachepool_protocol::layouts::{Dim, Layout};

/// Sizes of a rank's data per block id. The bytes of a block are the product of all fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// Layers of one `KVCacheTensor`.
    pub layers: usize,
    /// KV heads of this rank.
    pub heads: usize,
    /// Kernel blocks per block id: 1 unless the attention backend uses smaller blocks than vLLM.
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

    /// The extent of a dimension within one block. `B` counts kernel blocks: those of one block id are neighbours in memory, so a section
    /// is ordered like the cache with `B` reduced to them.
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

/// Refuses unsupported layouts, and orders that do not name each dimension once with a state's bytes innermost.
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

/// `a * b`, or an error with the name `what`.
pub(super) fn product(what: &'static str, a: usize, b: usize) -> Result<usize, PagesError> {
    a.checked_mul(b).ok_or(PagesError::Overflow { what })
}
