//! A run of the arena that a tier reads from or writes into.

use crate::shm::mapping::Mapping;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Bytes of the arena, and a hold on their slot. Whatever may still read or write them keeps a clone: a task, a thread, a request in the
/// kernel. The slot is free when the last clone is gone, not when somebody stops to wait for an answer.
#[derive(Clone)]
pub struct Span {
    /// The arena.
    pub arena: Arc<Mapping>,
    /// Where it begins.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    hold: Arc<dyn Any + Send + Sync>,
}

impl Span {
    /// A run of the arena; `hold` is dropped with its last clone. None: it does not lie in the arena.
    pub fn new(
        arena: Arc<Mapping>,
        offset: u64,
        length: u64,
        hold: Arc<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        let end = offset.checked_add(length)?;
        (end <= arena.length()).then_some(Self {
            arena,
            offset,
            length,
            hold,
        })
    }

    /// xxh3-128 of its bytes now, little-endian.
    pub fn digest(&self) -> Option<[u8; 16]> {
        self.arena.xxh3_128(self.offset, self.length)
    }

    /// Copies bytes out, from `at` on; false and nothing done where they would end behind its end.
    pub fn read(&self, at: u64, into: &mut [u8]) -> bool {
        self.has(at, into.len()) && self.arena.read(self.offset + at, into)
    }

    /// Copies bytes in, from `at` on; false and nothing done where they would end behind its end.
    pub fn write(&self, at: u64, from: &[u8]) -> bool {
        self.has(at, from.len()) && self.arena.write(self.offset + at, from)
    }

    fn has(&self, at: u64, bytes: usize) -> bool {
        at.checked_add(bytes as u64)
            .is_some_and(|end| end <= self.length)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holders = Arc::strong_count(&self.hold);
        write!(
            f,
            "Span({}..{}, {holders} holders)",
            self.offset,
            self.offset + self.length
        )
    }
}
