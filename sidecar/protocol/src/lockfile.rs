//! The lock file in the pod's volume (`sidecar.lock` beside the socket). It proves the death of processes across boots, and holds the
//! counters that must never repeat.
//!
//! ```text
//! 0  8 bytes magic "KVCPLOCK"   8  u32 version   12 u32 next lock number
//! 16 u64 next region number     24 u32 boots without 60 s of health     28 u32 reserved
//! ```
//! A connector process holds an exclusive fcntl record lock on the one byte at [`lock_offset`] (F_SETLK, not flock: a forked child would
//! inherit that). The sidecar only queries it (F_GETLK). Lock numbers count up from 1 and are unique. The slot table uses the number as
//! owner; 0 is the engine itself.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

/// First bytes of the file.
pub const MAGIC: [u8; 8] = *b"KVCPLOCK";
/// Version of this format.
pub const VERSION: u32 = 1;
/// The byte that the sidecar's supervisor locks. A second sidecar on the same volume finds it locked.
pub const SIDECAR_BYTE: u64 = 4095;

/// Offset of the byte of lock `number`.
pub fn lock_offset(number: u32) -> u64 {
    4096 + u64::from(number)
}

/// The first 32 bytes of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LockFile {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U32,
    /// Number of the next process.
    pub next_lock: U32,
    /// Region number of the next arena.
    pub next_region: U64,
    /// Engine starts since the engine was last healthy for 60 s.
    pub unhealthy_boots: U32,
    /// Always zero.
    pub reserved: U32,
}

impl LockFile {
    /// The content of a new file.
    pub const NEW: Self = Self {
        magic: MAGIC,
        version: U32::new(VERSION),
        next_lock: U32::new(1),
        next_region: U64::new(1),
        unhealthy_boots: U32::new(0),
        reserved: U32::new(0),
    };

    /// Parses the first bytes of the file. `None`: they are not a lock file of this version, or a counter is 0, which is never assigned.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (file, _) = Self::read_from_prefix(bytes).ok()?;
        let sound = file.magic == MAGIC
            && file.version.get() == VERSION
            && file.next_lock.get() != 0
            && file.next_region.get() != 0;
        sound.then_some(file)
    }
}
