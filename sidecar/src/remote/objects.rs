//! Where the bytes of an object are in the arena, as the references of a reply name them.

use kvcachepool_protocol::domain::SectionPlan;
use kvcachepool_protocol::refs::{SectionRef, TornRefs, unpack};
use kvcachepool_protocol::table::ROW_BYTES;
use std::ops::Range;

/// A reply of the sidecar contradicts itself or its request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRefs {
    #[error(transparent)]
    Torn(#[from] TornRefs),
    #[error("references of {found} objects, expected {expected}")]
    Count { found: usize, expected: usize },
    #[error("an object of {bytes} bytes is not cut as its length says")]
    Pieces { bytes: u64 },
}

/// The pieces of one object, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    pub refs: Vec<SectionRef>,
    /// Bytes of the object.
    pub bytes: u64,
    /// Bytes of every piece except the last.
    full: u64,
}

/// Bytes of one piece that are contiguous in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub piece: SectionRef,
    /// Offset in the arena.
    pub at: u64,
    pub bytes: usize,
}

impl Pieces {
    /// The objects of packed references: section 0 begins the next one.
    pub fn of_refs(packed: &[u8], expected: usize) -> Result<Vec<Self>, BadRefs> {
        let mut objects: Vec<Vec<SectionRef>> = Vec::new();
        for piece in unpack(packed)? {
            match objects.last_mut() {
                Some(object) if piece.section.get() != 0 => object.push(piece),
                _ => objects.push(vec![piece]),
            }
        }
        if objects.len() != expected {
            return Err(BadRefs::Count {
                found: objects.len(),
                expected,
            });
        }
        objects.into_iter().map(Self::of_object).collect()
    }

    fn of_object(refs: Vec<SectionRef>) -> Result<Self, BadRefs> {
        let bytes = refs.iter().map(|piece| u64::from(piece.length.get())).sum();
        let bad = BadRefs::Pieces { bytes };
        let Some(plan) = SectionPlan::opaque(bytes) else {
            return Err(bad);
        };
        let lengths = (0..plan.sections()).map(|section| plan.section_bytes(section, 1));
        let named = refs.iter().enumerate().map(|(at, piece)| {
            let in_order = piece.section.get() as usize == at;
            in_order.then(|| u64::from(piece.length.get()))
        });
        if !named.eq(lengths.map(Some)) {
            return Err(bad);
        }
        let full = plan.section_bytes(0, 1);
        Ok(Self { refs, bytes, full })
    }

    /// Whether the object has these bytes.
    pub fn contains(&self, offset: u64, bytes: u64) -> bool {
        offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes)
    }

    /// The places of a range of the object, in order. Bytes beyond its end have none.
    pub fn runs(&self, range: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let mut at = range.start;
        let end = range.end.min(self.bytes);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let piece = *self.refs.get(usize::try_from(at / self.full).ok()?)?;
            let inside = at % self.full;
            let bytes = (end - at).min(self.full - inside);
            at += bytes;
            Some(Run {
                piece,
                at: u64::from(piece.slot.get()) * ROW_BYTES + inside,
                bytes: usize::try_from(bytes).ok()?,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_protocol::refs::pack;

    const PIECE: u32 = 4 << 20;

    fn object(first: u32, lengths: &[u32]) -> Vec<SectionRef> {
        let piece = |(at, length): (usize, &u32)| {
            SectionRef::new(first + 64 * at as u32, 1, *length, at as u32)
        };
        lengths.iter().enumerate().map(piece).collect()
    }

    #[test]
    fn references_are_split_into_their_objects() {
        let refs = [
            object(0, &[PIECE, PIECE, 5]),
            object(500, &[7]),
            object(600, &[PIECE]),
        ]
        .concat();
        let found = Pieces::of_refs(&pack(&refs), 3).unwrap();
        let bytes: Vec<u64> = found.iter().map(|object| object.bytes).collect();
        assert_eq!(bytes, [2 * u64::from(PIECE) + 5, 7, u64::from(PIECE)]);
        assert_eq!(Pieces::of_refs(&[], 0), Ok(vec![]));
    }

    #[test]
    fn references_that_contradict_the_request_or_themselves_are_refused() {
        let refs = pack(&object(0, &[PIECE, 5]));
        assert!(matches!(
            Pieces::of_refs(&refs, 2),
            Err(BadRefs::Count { .. })
        ));
        assert!(matches!(
            Pieces::of_refs(&refs[1..], 1),
            Err(BadRefs::Torn(_))
        ));
        for lengths in [&[5, PIECE][..], &[0], &[PIECE, 0], &[PIECE - 1, 1]] {
            let refs = pack(&object(0, lengths));
            assert!(
                matches!(Pieces::of_refs(&refs, 1), Err(BadRefs::Pieces { .. })),
                "{lengths:?}"
            );
        }
        let mut unordered = object(0, &[PIECE, PIECE, 5]);
        unordered.swap(1, 2);
        assert!(Pieces::of_refs(&pack(&unordered), 1).is_err());
    }

    #[test]
    fn a_range_is_found_in_the_pieces_that_hold_it() {
        let refs = object(10, &[PIECE, PIECE, 5]);
        let pieces = Pieces::of_refs(&pack(&refs), 1).unwrap().remove(0);
        let piece = u64::from(PIECE);
        let runs: Vec<(u64, usize)> = pieces
            .runs(piece - 2..2 * piece + 3)
            .map(|r| (r.at, r.bytes))
            .collect();
        let starts: Vec<u64> = refs
            .iter()
            .map(|r| u64::from(r.slot.get()) * ROW_BYTES)
            .collect();
        assert_eq!(
            runs,
            [
                (starts[0] + piece - 2, 2),
                (starts[1], PIECE as usize),
                (starts[2], 3)
            ]
        );
        assert_eq!(pieces.runs(0..0).count(), 0);
        assert_eq!(
            pieces
                .runs(2 * piece..u64::MAX)
                .map(|r| r.bytes)
                .sum::<usize>(),
            5
        );
        assert!(pieces.contains(2 * piece, 5) && !pieces.contains(2 * piece, 6));
        assert!(!pieces.contains(u64::MAX, 2));
    }
}
