//! A range of the arena that a tier reads or writes.

use kvcachepool_memory::digest::Digest;
use kvcachepool_memory::mapping::Mapping;
use parking_lot::Mutex;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Bytes of the arena, and a hold on their slot. Everything that may still read or write them keeps a clone: a task, a thread, a request
/// in the kernel. The slot is free when the last clone is dropped, not when a caller stops waiting.
#[derive(Clone)]
pub struct Span {
    pub arena: Arc<Mapping>,
    /// Offset in the arena.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    hold: Arc<dyn Any + Send + Sync>,
    seen: Option<Arc<Mutex<Option<[u8; 16]>>>>,
}

impl Span {
    /// A range of the arena; `hold` is dropped with its last clone. `None`: it is not inside the arena.
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
            seen: None,
        })
    }

    /// xxh3-128 of its current bytes, little-endian.
    pub fn digest(&self) -> Option<[u8; 16]> {
        self.arena.xxh3_128(self.offset, self.length)
    }

    /// The same bytes, for a writer that may record their digest while it fills them: [`Self::seen`].
    pub fn watched(&self) -> Self {
        Self {
            seen: Some(Arc::default()),
            ..self.clone()
        }
    }

    /// Records the digest of the whole span; `None`: the writer starts again.
    pub fn saw(&self, digest: Option<[u8; 16]>) {
        if let Some(seen) = &self.seen {
            *seen.lock() = digest;
        }
    }

    /// The digest recorded last.
    pub fn seen(&self) -> Option<[u8; 16]> {
        self.seen.as_ref().and_then(|seen| *seen.lock())
    }

    /// Copies bytes out from `at` on; false, without a copy, if they would exceed the span.
    pub fn read(&self, at: u64, into: &mut [u8]) -> bool {
        self.has(at, into.len()) && self.arena.read(self.offset + at, into)
    }

    /// Copies bytes in from `at` on; false, without a copy, if they would exceed the span.
    pub fn write(&self, at: u64, from: &[u8]) -> bool {
        self.has(at, from.len()) && self.arena.write(self.offset + at, from)
    }

    fn has(&self, at: u64, bytes: usize) -> bool {
        at.checked_add(bytes as u64)
            .is_some_and(|end| end <= self.length)
    }
}

/// The digest of a span that is filled in order, computed while the bytes are in the CPU cache.
#[derive(Default)]
pub struct Running {
    /// Offset of the span in the arena.
    offset: u64,
    /// End of the bytes in the digest.
    to: u64,
    digest: Digest,
}

impl Running {
    /// Adds bytes of a span from `at` on. With the last ones it records the digest; a span that is filled in another order gets none.
    pub fn came(&mut self, span: &Span, at: u64, bytes: u64) {
        if at == 0 {
            (self.offset, self.to) = (span.offset, 0);
            self.digest = Digest::default();
        }
        let next =
            (self.offset, self.to) == (span.offset, at) && bytes <= span.length.saturating_sub(at);
        if next && self.digest.add(&span.arena, span.offset + at, bytes) {
            self.to += bytes;
            if self.to == span.length {
                span.saw(Some(self.digest.value()));
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::Memory;

    #[test]
    fn a_digest_is_seen_when_a_span_was_filled_in_order_and_only_then() {
        let memory = Memory::new(1 << 20);
        let span = memory.filled(b"0123456789").watched();
        for (pieces, seen) in [
            (&[(0, 4), (4, 6)][..], true),
            (&[(0, 10)], true),
            (&[(0, 3), (0, 4), (4, 6)], true),
            (&[(0, 4)], false),
            (&[(4, 6), (0, 4)], false),
            (&[(0, 4), (5, 5)], false),
            (&[(0, 4), (4, 7)], false),
        ] {
            span.saw(None);
            let mut running = Running::default();
            for (at, bytes) in pieces {
                running.came(&span, *at, *bytes);
            }
            let expected = span.digest().filter(|_| seen);
            assert_eq!(span.seen(), expected, "{pieces:?}");
        }
    }

    #[test]
    fn two_spans_that_are_filled_in_turns_are_not_taken_for_one() {
        let memory = Memory::new(1 << 20);
        let (one, other) = (memory.filled(b"01234567"), memory.filled(b"abcdefgh"));
        let (one, other) = (one.watched(), other.watched());
        let mut running = Running::default();
        running.came(&one, 0, 4);
        running.came(&other, 0, 4);
        running.came(&one, 4, 4);
        assert_eq!(one.seen(), None);
        running.came(&other, 4, 4);
        assert_eq!(other.seen(), other.digest());
    }
}
