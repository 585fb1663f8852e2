//! The lock file in the pod's volume (`sidecar.lock` beside the socket): proof of death across boots, and the counters
//! that must never repeat.
//!
//! ```text
//! 0  8 bytes magic "KVCPLOCK"   8  u32 version   12 u32 next lock number
//! 16 u64 next region number     24 u32 boots without 60 s of health     28 u32 reserved
//! ```
//! A connector process holds an exclusive fcntl record lock (F_SETLK, never flock: a forked child would keep that) on the one
//! byte at [`lock_offset`]; the sidecar only ever asks (F_GETLK). Numbers count up from 1 and are never given twice; the number
//! is the owner in the slot table, 0 is the engine itself.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

/// First bytes of the file.
pub const MAGIC: [u8; 8] = *b"KVCPLOCK";
/// Version of this format.
pub const VERSION: u32 = 1;
/// Byte that the live sidecar's supervisor locks: a second sidecar on the same volume finds it held.
pub const SIDECAR_BYTE: u64 = 4095;

/// Offset of the byte of lock `number`.
pub fn lock_offset(number: u32) -> u64 {
    4096 + u64::from(number)
}

/// The file's first 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LockFile {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U32,
    /// Number that the next process gets.
    pub next_lock: U32,
    /// Region number that the next new arena gets.
    pub next_region: U64,
    /// Starts of the engine since it was last healthy for 60 s.
    pub unhealthy_boots: U32,
    /// Zero.
    pub reserved: U32,
}
