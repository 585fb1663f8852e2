//! The record before an object's header in its value: enough to list and remove the object without reading the header.
//!
//! ```text
//! kvcp:<model>:<layout>:{<key>}.<fidelity>                  record, 48 bytes; head as `protocol::object` has it
//! kvcp:<model>:<layout>:{<key>}.<fidelity>:<head>:<n>       segment n: bytes of one section; sections in order, each from a segment of its own
//! ```

use super::resp::PARTS_MAX;
use kvcachepool_protocol::object::{MAX_SECTIONS, Object, ObjectName, REDIS_SEGMENT_BYTES, digest};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub const RECORD_BYTES: usize = size_of::<Record>();
const MAGIC: [u8; 8] = *b"KVCPRDS1";
/// Common to all versions, which differ in the last byte.
const KIND: &[u8] = b"KVCPRDS";
/// Most segments that a record may claim. No longer object can be complete: the reply to the publishing transaction has a part per
/// segment, and one for the header.
pub const SEGMENTS_MAX: u64 = PARTS_MAX - 1;
/// Most segment names that are created at once from a record: some MiB.
pub const NAMES_MAX: usize = 1 << 14;

/// The stored form of the record.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Record {
    magic: [u8; 8],
    /// Write time, Unix seconds.
    pub written_unix_s: U64,
    /// Bytes of the value that contains the record, and of all segments.
    pub bytes: U64,
    pub segments: U32,
    zero: U32,
    /// xxh3-128 of the header: part of the segments' names.
    pub head: [u8; 16],
}

/// A part of a section, and the number of its segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub segment: u32,
    /// Offset in the section.
    pub at: u64,
    pub bytes: u64,
}

impl Record {
    /// The record of an object with this encoded header.
    pub fn new(object: &Object, head: &[u8], written_unix_s: u64) -> Self {
        let stored: u64 = object.sections.iter().map(|s| s.stored_bytes).sum();
        let segments = (0..object.sections.len()).map(|n| pieces(object, n).count() as u32);
        Self {
            magic: MAGIC,
            written_unix_s: written_unix_s.into(),
            bytes: (stored + (RECORD_BYTES + head.len()) as u64).into(),
            segments: segments.sum::<u32>().into(),
            zero: 0.into(),
            head: digest(head),
        }
    }

    /// The record at the start of a value; `None` if there is none.
    pub fn read(value: &[u8]) -> Option<Self> {
        let (record, _) = Self::read_from_prefix(value).ok()?;
        let known = record.magic == MAGIC && record.zero.get() == 0;
        // Each section's last segment may be short.
        let full = record.bytes.get().div_ceil(REDIS_SEGMENT_BYTES);
        let segments_max = (full + MAX_SECTIONS as u64).min(SEGMENTS_MAX);
        (known && u64::from(record.segments.get()) <= segments_max).then_some(record)
    }

    /// Whether a value begins with a record of another version of this program.
    pub fn is_of_another_version(value: &[u8]) -> bool {
        value.starts_with(KIND) && !value.starts_with(&MAGIC)
    }

    /// The names of its segments.
    pub fn keys<'a>(&'a self, name: &'a ObjectName) -> impl Iterator<Item = String> + 'a {
        (0..self.segments.get()).map(|n| name.redis_segment(&self.head, n))
    }

    /// The same, at most [`NAMES_MAX`] at a time.
    pub fn batches<'a>(&'a self, name: &'a ObjectName) -> impl Iterator<Item = Vec<String>> + 'a {
        let mut keys = self.keys(name);
        std::iter::from_fn(move || {
            let batch: Vec<String> = keys.by_ref().take(NAMES_MAX).collect();
            (!batch.is_empty()).then_some(batch)
        })
    }

    /// Whether it has more segments than that.
    pub fn is_long(&self) -> bool {
        self.segments.get() as usize > NAMES_MAX
    }
}

/// The parts of a section of an object.
pub fn pieces(object: &Object, section: usize) -> impl Iterator<Item = Piece> + use<> {
    let count = |bytes: u64| bytes.div_ceil(REDIS_SEGMENT_BYTES) as u32;
    let before = object.sections.iter().take(section);
    let first: u32 = before.map(|s| count(s.stored_bytes)).sum();
    let bytes = object.sections.get(section).map_or(0, |s| s.stored_bytes);
    (0..count(bytes)).map(move |n| {
        let at = u64::from(n) * REDIS_SEGMENT_BYTES;
        Piece {
            segment: first + n,
            at,
            bytes: REDIS_SEGMENT_BYTES.min(bytes - at),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::Sample;
    use crate::testing::suite::seeds::must_be;
    use proptest::prelude::*;

    #[test]
    fn a_record_reads_back_and_other_bytes_are_none() {
        let object = Sample::new(1, 0, &[1, 3 << 20, REDIS_SEGMENT_BYTES]).object;
        let head = object.encode().unwrap();
        let record = Record::new(&object, &head, 77);
        assert_eq!(record.segments.get(), 1 + 7 + 1);
        assert_eq!(record.keys(&object.name()).count(), 9);
        let value = [record.as_bytes(), &head].concat();
        assert_eq!(Record::read(&value), Some(record));
        assert_eq!(Record::read(&value[..RECORD_BYTES - 1]), None);
        assert_eq!(Record::read(&head), None);
        assert!(!Record::is_of_another_version(&value));
        assert!(Record::is_of_another_version(b"KVCPRDS2 and more"));
        assert!(!Record::is_of_another_version(b"KVCPRDx1"));
        // More segments than its bytes can have.
        for (bytes, segments_max) in [
            (record.bytes.get(), 9 + MAX_SECTIONS as u64 - 1),
            (0, MAX_SECTIONS as u64),
            (u64::MAX, SEGMENTS_MAX),
        ] {
            let mut many = record;
            many.bytes = bytes.into();
            many.segments = (segments_max as u32).into();
            assert_eq!(Record::read(many.as_bytes()), Some(many), "{bytes}");
            many.segments = (segments_max as u32 + 1).into();
            assert_eq!(Record::read(many.as_bytes()), None, "{bytes}");
        }
    }

    #[test]
    fn whatever_a_record_claims_few_names_are_made_of_it_at_once() {
        let object = Sample::new(1, 0, &[1]).object;
        let (name, mut record) = (object.name(), Record::new(&object, b"", 77));
        for segments in [0, 1, NAMES_MAX, NAMES_MAX + 1, SEGMENTS_MAX as usize] {
            record.segments = (segments as u32).into();
            let mut keys = record.keys(&name);
            for batch in record.batches(&name) {
                assert!((1..=NAMES_MAX).contains(&batch.len()));
                assert!(batch.iter().all(|key| keys.next().as_ref() == Some(key)));
            }
            assert_eq!(keys.next(), None);
            assert_eq!(record.is_long(), record.batches(&name).count() > 1);
        }
    }

    #[test]
    fn the_seed_of_the_fuzzer_is_an_answer_with_a_value() {
        let object = Sample::new(1, 0, &[1, 3 << 20]).object;
        let record = Record::new(&object, &object.encode().unwrap(), 77);
        let mut seed = b"*4\r\n:-7\r\n+OK\r\n$-1\r\n$48\r\n".to_vec();
        seed.extend_from_slice(record.as_bytes());
        seed.extend_from_slice(b"\r\n-ERR no\r\n");
        must_be("resp/answer", &seed);
    }

    proptest! {
        #[test]
        fn pieces_cover_every_section_once_in_order(lengths in prop::collection::vec(1..4_000_000u64, 1..6)) {
            let mut object = Sample::new(1, 0, &vec![1; lengths.len()]).object;
            for (section, length) in object.sections.iter_mut().zip(&lengths) {
                section.stored_bytes = *length;
            }
            let mut next = 0;
            for (section, length) in lengths.iter().enumerate() {
                let mut end = 0;
                for piece in pieces(&object, section) {
                    prop_assert_eq!((piece.segment, piece.at), (next, end));
                    prop_assert!((1..=REDIS_SEGMENT_BYTES).contains(&piece.bytes));
                    next += 1;
                    end += piece.bytes;
                }
                prop_assert_eq!(end, *length);
            }
        }
    }
}
