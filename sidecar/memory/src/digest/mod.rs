//! xxh3-128 of mapped memory, read in place.
//!
//! The library takes slices, but memory that other processes may write must not be a slice. Copying it out first takes as long as hashing
//! the copy.
//! With AVX2, `sums` therefore hashes long runs with loads that are opaque to the compiler. Short runs, and all runs on other CPUs, go
//! through the library.

use super::mapping::Mapping;
#[cfg(target_arch = "x86_64")]
use sums::Sums;
use xxhash_rust::xxh3::Xxh3;

#[cfg(target_arch = "x86_64")]
mod sums;
#[cfg(test)]
mod tests;

/// Bytes copied at a time for the library, so that they stay in the L1 cache.
const COPY_BYTES: usize = 16 << 10;

/// A running digest over consecutive runs of mappings.
pub struct Digest(Hasher);

enum Hasher {
    Copied(Xxh3),
    #[cfg(target_arch = "x86_64")]
    InPlace(Sums),
}

impl Default for Digest {
    fn default() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(sums) = Sums::new() {
            return Self(Hasher::InPlace(sums));
        }
        Self(Hasher::Copied(Xxh3::new()))
    }
}

impl Digest {
    /// Adds `length` bytes at `offset`. Returns false without effect if out of range. A concurrent writer only changes the result.
    pub fn add(&mut self, mapping: &Mapping, offset: u64, length: u64) -> bool {
        let mapped = mapping.address(offset, length).is_some();
        if mapped {
            match &mut self.0 {
                Hasher::Copied(hash) => copied(hash, mapping, offset, length),
                #[cfg(target_arch = "x86_64")]
                Hasher::InPlace(sums) => sums.add(mapping, offset, length),
            }
        }
        mapped
    }

    /// xxh3-128 of all added bytes, little-endian.
    pub fn value(&self) -> [u8; 16] {
        let value = match &self.0 {
            Hasher::Copied(hash) => hash.digest128(),
            #[cfg(target_arch = "x86_64")]
            Hasher::InPlace(sums) => sums.value(),
        };
        value.to_le_bytes()
    }
}

fn copied(hash: &mut Xxh3, mapping: &Mapping, offset: u64, length: u64) {
    let (mut copy, mut at, end) = ([0; COPY_BYTES], offset, offset + length);
    while at < end {
        let bytes = (end - at).min(COPY_BYTES as u64);
        let part = copy.split_at_mut(bytes as usize).0;
        mapping.read(at, part);
        hash.update(part);
        at += bytes;
    }
}
