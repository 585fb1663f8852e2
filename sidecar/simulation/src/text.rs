//! What requests ask for: documents whose blocks have engine hashes, cut into chunks and tails.

use super::rng::mix;

/// Tokens of a block, a scheduler block and a hash block.
pub const BLOCK_TOKENS: u32 = 16;
/// Tokens of a full chunk.
pub const CHUNK_TOKENS: u32 = 64;
/// Blocks of a full chunk.
pub const CHUNK_BLOCKS: usize = 4;

/// Engine hash of a document's block. Documents share their first chunk in pairs.
pub fn block_hash(document: usize, block: usize) -> [u8; 32] {
    let document = if block < CHUNK_BLOCKS {
        document / 2
    } else {
        document
    };
    let mut state = mix((document as u64 + 1) << 32 | block as u64);
    let mut out = [0; 32];
    for word in out.chunks_exact_mut(8) {
        word.copy_from_slice(&state.to_le_bytes());
        state = mix(state);
    }
    out
}

/// One chunk of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Hash of its last block.
    pub hash: [u8; 32],
    /// Hash of the last block before it.
    pub parent: Option<[u8; 32]>,
    /// Position of its first token.
    pub first_token: u32,
    /// Tokens.
    pub tokens: u32,
    pub document: usize,
}

/// Chunk `at` of a document; `tail` blocks of it where it is a tail.
pub fn piece(document: usize, at: usize, tail: Option<usize>) -> Piece {
    let blocks = tail.unwrap_or(CHUNK_BLOCKS);
    let first = at * CHUNK_BLOCKS;
    Piece {
        hash: block_hash(document, first + blocks - 1),
        parent: first.checked_sub(1).map(|b| block_hash(document, b)),
        first_token: first as u32 * BLOCK_TOKENS,
        tokens: blocks as u32 * BLOCK_TOKENS,
        document,
    }
}

/// Hashes of all blocks of a chunk, packed.
pub fn block_hashes(piece: &Piece) -> Vec<u8> {
    let first = (piece.first_token / BLOCK_TOKENS) as usize;
    let count = (piece.tokens / BLOCK_TOKENS) as usize;
    (first..first + count)
        .flat_map(|b| block_hash(piece.document, b))
        .collect()
}
