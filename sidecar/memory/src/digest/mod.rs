//! xxh3-128 of mapped memory, read where it lies.
//!
//! The library takes slices, and memory that others may write must not be one. It would have to be copied out first, which takes as long
//! as the digest of the copy. So with AVX2 long runs are summed by `sums`, from loads that the compiler knows nothing of; what is short
//! goes through the library, and everything does on other CPUs.

use super::mapping::Mapping;
#[cfg(target_arch = "x86_64")]
use sums::Sums;
use xxhash_rust::xxh3::Xxh3;

#[cfg(target_arch = "x86_64")]
mod sums;
#[cfg(test)]
mod tests;

/// Bytes that are copied out at a time for the library: they stay in the L1 cache on the way.
const COPY_BYTES: usize = 16 << 10;

/// The digest of runs of mappings, one after the other, under way.
pub struct Digest(Way);

enum Way {
    Copied(Xxh3),
    #[cfg(target_arch = "x86_64")]
    InPlace(Sums),
}

impl Default for Digest {
    fn default() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(sums) = Sums::new() {
            return Self(Way::InPlace(sums));
        }
        Self(Way::Copied(Xxh3::new()))
    }
}

impl Digest {
    /// Adds `length` bytes at `offset`; false and nothing done when out of range. A writer beside it changes the result, nothing else.
    pub fn add(&mut self, mapping: &Mapping, offset: u64, length: u64) -> bool {
        let mapped = mapping.address(offset, length).is_some();
        if mapped {
            match &mut self.0 {
                Way::Copied(hash) => copied(hash, mapping, offset, length),
                #[cfg(target_arch = "x86_64")]
                Way::InPlace(sums) => sums.add(mapping, offset, length),
            }
        }
        mapped
    }

    /// xxh3-128 of all that was added, little-endian.
    pub fn value(&self) -> [u8; 16] {
        let value = match &self.0 {
            Way::Copied(hash) => hash.digest128(),
            #[cfg(target_arch = "x86_64")]
            Way::InPlace(sums) => sums.value(),
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
