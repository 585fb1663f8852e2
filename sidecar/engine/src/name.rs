//! The index's key type, and the hash of all maps of the engine.

use kvcachepool_protocol::key::ChunkKey;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A hasher for hashed keys and small numbers. It is deterministic, so that simulated histories can be repeated. Chunk keys are BLAKE3
/// hashes, so clients cannot choose colliding ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct FastHasher(u64);

/// Odd constant with well-spread bits (2^64 / golden ratio).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

impl Hasher for FastHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, v: u8) {
        self.write_u64(u64::from(v));
    }
    fn write_u32(&mut self, v: u32) {
        self.write_u64(u64::from(v));
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0.rotate_left(26) ^ v).wrapping_mul(SPREAD);
        self.0 ^= self.0 >> 32;
    }
    fn write_usize(&mut self, v: usize) {
        self.write_u64(v as u64);
    }
}

pub type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<FastHasher>>;

/// Name of an entry. The engine numbers the layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    pub layout: u32,
    pub key: ChunkKey,
}

impl std::hash::Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut word = [0; 8];
        word.copy_from_slice(&self.key.0[..8]);
        state.write_u64(u64::from_le_bytes(word) ^ u64::from(self.layout));
    }
}
