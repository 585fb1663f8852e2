//! Gather and scatter: copies blocks of a KV cache into a section, and back. Kernels: `cuda/pages.cu`.

use super::{PageMap, PagesError};

impl PageMap {
    /// Copies blocks into a section. `section` becomes `[block][plane][bytes]` in the order of `blocks`, and must have exactly
    /// `blocks.len() * block_bytes()` bytes. `storages` are the allocations that the planes refer to.
    ///
    /// Errors: a block id out of range, a missing or short storage, a section of another length.
    pub fn gather(
        &self,
        storages: &[&[u8]],
        blocks: &[u32],
        section: &mut [u8],
    ) -> Result<(), PagesError> {
        self.check(blocks, section.len(), storages.iter().map(|s| s.len()))?;
        for (block, mut bytes) in blocks
            .iter()
            .zip(section.chunks_exact_mut(self.block_bytes()))
        {
            for plane in self.planes() {
                let start = plane.offset + *block as usize * plane.block_stride;
                let (piece, rest) = bytes.split_at_mut(plane.bytes);
                piece.copy_from_slice(&storages[plane.storage][start..start + plane.bytes]);
                bytes = rest;
            }
        }
        Ok(())
    }

    /// Copies a section back into blocks, the inverse of [`PageMap::gather`]. Bytes of other blocks are unchanged.
    ///
    /// Errors: those of `gather`, and a block that is written twice.
    pub fn scatter(
        &self,
        section: &[u8],
        blocks: &[u32],
        storages: &mut [&mut [u8]],
    ) -> Result<(), PagesError> {
        self.check(blocks, section.len(), storages.iter().map(|s| s.len()))?;
        once(blocks)?;
        for (block, mut bytes) in blocks.iter().zip(section.chunks_exact(self.block_bytes())) {
            for plane in self.planes() {
                let start = plane.offset + *block as usize * plane.block_stride;
                let (piece, rest) = bytes.split_at(plane.bytes);
                storages[plane.storage][start..start + plane.bytes].copy_from_slice(piece);
                bytes = rest;
            }
        }
        Ok(())
    }

    /// Checks everything that the loops rely on.
    fn check(
        &self,
        blocks: &[u32],
        section: usize,
        storages: impl ExactSizeIterator<Item = usize>,
    ) -> Result<(), PagesError> {
        if let Some(&block) = blocks.iter().find(|block| **block >= self.blocks()) {
            return Err(PagesError::BlockOutOfRange {
                block,
                blocks: self.blocks(),
            });
        }
        let want = blocks.len().checked_mul(self.block_bytes());
        let want = want.ok_or(PagesError::Overflow {
            what: "bytes of a section",
        })?;
        if section != want {
            return Err(PagesError::Size {
                what: "a section",
                got: section,
                want,
            });
        }
        let given = storages.len();
        for (storage, (got, want)) in storages.zip(self.storage_bytes()).enumerate() {
            if got < *want {
                return Err(PagesError::StorageTooSmall {
                    storage,
                    got,
                    want: *want,
                });
            }
        }
        match self.planes().iter().position(|p| p.storage >= given) {
            None => Ok(()),
            Some(plane) => Err(PagesError::StorageMissing {
                plane,
                storage: self.planes()[plane].storage,
                got: given,
            }),
        }
    }
}

/// Refuses duplicate ids.
fn once(blocks: &[u32]) -> Result<(), PagesError> {
    let mut sorted = blocks.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(PagesError::BlockTwice { block: pair[0] }),
    }
}
