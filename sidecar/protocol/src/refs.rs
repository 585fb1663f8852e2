//! Packed references to sections in the arena, used by PROBE, GRANT, COMMIT, ABORT and HELLO. They have 16 bytes each, little-endian;
//! Python reads them with `memoryview.cast("I")` or `numpy.frombuffer`.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian::U32};

/// Slot number of an absent section.
pub const NO_SLOT: u32 = u32::MAX;

/// One section in the arena. A message has one region, which is sent beside the packed array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SectionRef {
    /// First row of the slot. Byte offset in the arena = `slot * 64 KiB`. [`NO_SLOT`] = absent.
    pub slot: U32,
    /// Generation of the slot when the reference was made.
    pub generation: U32,
    /// Stored bytes of the section.
    pub length: U32,
    /// Index of the section in the domain's section order (groups in order, shards within a group).
    pub section: U32,
}

impl SectionRef {
    /// Creates a reference. The fields document the units.
    pub fn new(slot: u32, generation: u32, length: u32, section: u32) -> Self {
        Self {
            slot: slot.into(),
            generation: generation.into(),
            length: length.into(),
            section: section.into(),
        }
    }
}

/// The bytes are not a whole number of 16-byte references.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("section references are 16 bytes each, got {0} bytes")]
pub struct TornRefs(pub usize);

/// Reads packed references of any alignment.
pub fn unpack(packed: &[u8]) -> Result<Vec<SectionRef>, TornRefs> {
    if !packed.len().is_multiple_of(16) {
        return Err(TornRefs(packed.len()));
    }
    Ok(packed
        .chunks_exact(16)
        .filter_map(|c| SectionRef::read_from_bytes(c).ok())
        .collect())
}

pub fn pack(refs: &[SectionRef]) -> Vec<u8> {
    refs.as_bytes().to_vec()
}
