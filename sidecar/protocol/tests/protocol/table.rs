//! Slot table and lock file: nothing is indexed by numbers that were not checked against the files' sizes.

use kvcachepool_protocol::key::*;
use kvcachepool_protocol::lockfile::{self, BadLockFile, LockFile, lock_offset};
use kvcachepool_protocol::table::*;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

const ARENA: u64 = 64 << 20;
const CHUNKS: u32 = 256;
const CHUNKS_AT: u64 = 4096 + 1024 * 64;
const TABLE: u64 = CHUNKS_AT + CHUNKS as u64 * 1024;

type Change<'a, T> = &'a dyn Fn(&mut T);

fn header() -> Header {
    Header {
        magic: MAGIC,
        version: VERSION,
        row_bytes: ROW_BYTES as u32,
        region: 3,
        arena_bytes: ARENA,
        rows: 1024,
        chunks: CHUNKS,
        segment_bytes: 4 << 20,
        rows_offset: 4096,
        chunks_offset: CHUNKS_AT,
        populated_rows: 1024,
        capacity_rows: 1024,
        shrinks: 0,
        lowest_rows: 1024,
        reserved: [0; 12],
    }
}

fn row() -> Row {
    Row {
        state: PUBLISHED,
        generation: 2,
        owner: 1,
        slot_rows: 4,
        chunk: 0,
        section: 0,
        length: 4 * ROW_BYTES,
        ..Row::default()
    }
}

fn record() -> ChunkRecord {
    let mut record = ChunkRecord::read_from_bytes(&[0; 1024]).unwrap();
    record.state = 1;
    record.kind = KeyKind::Prefix as u8;
    record.tokens = 256;
    record.needed = [1, 0];
    record.last_hash = [7; 32];
    record.key = chunk_key(
        &ModelId::default(),
        &NamespaceId::default(),
        KeyKind::Prefix,
        &EngineHash([7; 32]),
    )
    .0;
    record
}

#[test]
fn a_table_that_cannot_be_used_says_why() {
    assert_eq!(header().check(TABLE, ARENA), Ok(()));
    assert_eq!(header().check(TABLE + 4096, ARENA), Ok(()));
    let cases: [(Change<Header>, BadTable); 16] = [
        (&|h| h.magic[7] = 0, BadTable::NotATable),
        (&|h| h.version = 2, BadTable::OtherVersion(2)),
        (&|h| h.row_bytes = 4096, BadTable::RowBytes(4096)),
        (&|h| h.region = 0, BadTable::NoRegion),
        (
            &|h| h.arena_bytes = 1,
            BadTable::ArenaBytes {
                expected: 1,
                rows: 1024,
                got: ARENA,
            },
        ),
        (
            &|h| h.rows = 1025,
            BadTable::ArenaBytes {
                expected: ARENA,
                rows: 1025,
                got: ARENA,
            },
        ),
        (
            &|h| h.segment_bytes = 3 << 20,
            BadTable::SegmentBytes(3 << 20),
        ),
        (
            &|h| h.segment_bytes = 128 << 20,
            BadTable::SegmentBytes(128 << 20),
        ),
        (&|h| h.segment_bytes = 4096, BadTable::SegmentBytes(4096)),
        (&|h| h.rows_offset = 64, BadTable::OutOfBounds("rows")),
        (&|h| h.rows_offset = !63, BadTable::OutOfBounds("rows")),
        (&|h| h.rows_offset = 4100, BadTable::OutOfBounds("rows")),
        (
            &|h| h.chunks = CHUNKS + 1,
            BadTable::OutOfBounds("chunk records"),
        ),
        (
            &|h| h.chunks_offset = !63,
            BadTable::OutOfBounds("chunk records"),
        ),
        (
            &|h| h.populated_rows = 1025,
            BadTable::Populated {
                populated: 1025,
                capacity: 1024,
                rows: 1024,
            },
        ),
        (
            &|h| h.capacity_rows = 1025,
            BadTable::Populated {
                populated: 1024,
                capacity: 1025,
                rows: 1024,
            },
        ),
    ];
    for (change, error) in cases {
        let mut h = header();
        change(&mut h);
        assert_eq!(h.check(TABLE, ARENA), Err(error));
    }
    assert!(header().check(TABLE - 1, ARENA).is_err());
    assert!(header().check(TABLE, ARENA - 1).is_err());
}

#[test]
fn a_row_or_record_that_contradicts_the_table_is_refused() {
    let h = header();
    assert_eq!(row().check(&h, 60), Ok(()));
    let free = Row {
        state: FREE,
        slot_rows: 99,
        length: u64::MAX,
        ..row()
    };
    assert_eq!(
        free.check(&h, 0),
        Ok(()),
        "of a free row nothing else counts"
    );
    let cases: [(Change<Row>, u32, &str); 8] = [
        (&|r| r.state = 4, 0, "unknown state"),
        (&|r| r.slot_rows = 0, 0, "the slot has no rows"),
        (&|_| (), 61, "crosses its segment's end"),
        (&|r| r.slot_rows = u32::MAX, 0, "crosses its segment's end"),
        (&|_| (), 1024, "crosses its segment's end"),
        (&|r| r.length = 4 * ROW_BYTES + 1, 0, "exceeds the slot"),
        (&|r| r.length = 0, 0, "the length is 0 or exceeds"),
        (
            &|r| r.chunk = NO_CHUNK,
            0,
            "the chunk record does not exist",
        ),
    ];
    for (change, index, text) in cases {
        let mut r = row();
        change(&mut r);
        let error = r.check(&h, index).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    assert_eq!(record().check(0), Ok(()));
    let cases: [(Change<ChunkRecord>, &str); 7] = [
        (&|r| r.state = 2, "not used"),
        (&|r| r.kind = 0, "unknown kind"),
        (&|r| r.block_hash_count = 25, "too many block hashes"),
        (&|r| r.tokens = 0, "no tokens"),
        (&|r| r.needed = [0, 0], "no sections"),
        (&|r| r.key[31] ^= 1, "the key does not match"),
        (&|r| r.namespace[0] = 1, "the key does not match"),
    ];
    for (change, text) in cases {
        let mut r = record();
        change(&mut r);
        let error = r.check(0).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_lock_file_that_cannot_be_used_says_why() {
    let new = LockFile::new();
    assert_eq!(LockFile::parse(new.as_bytes()), Ok(new));
    let with = |change: &dyn Fn(&mut LockFile)| {
        let mut file = new;
        change(&mut file);
        LockFile::parse(file.as_bytes()).unwrap_err()
    };
    assert_eq!(with(&|f| f.magic[0] = 0), BadLockFile::NotALockFile);
    assert_eq!(
        with(&|f| f.version = 9.into()),
        BadLockFile::OtherVersion(9)
    );
    assert_eq!(
        with(&|f| f.next_lock = 0.into()),
        BadLockFile::ZeroCounter("next lock number")
    );
    assert_eq!(
        with(&|f| f.next_region = 0.into()),
        BadLockFile::ZeroCounter("next region number")
    );
    for cut in 0..32 {
        assert_eq!(
            LockFile::parse(&new.as_bytes()[..cut]),
            Err(BadLockFile::Torn(cut))
        );
    }
    assert_eq!(size_of::<LockFile>(), 32);
    assert_eq!(lock_offset(1), 4097);
    assert!(
        lock_offset(0) > lockfile::SIDECAR_BYTE,
        "no process gets the sidecar's byte"
    );
}

proptest! {
    #[test]
    fn a_header_that_passes_keeps_every_index_within_the_files(
        fields in any::<[u64; 5]>(), rows in 0u32..2048, chunks: u32, table in 0u64..(1 << 30), near: bool,
    ) {
        let mut h = header();
        if near {
            h.chunks_offset = fields[0] % (TABLE + 1);
            h.rows_offset = fields[1] % (TABLE + 1);
            h.chunks = chunks % 512;
        } else {
            (h.arena_bytes, h.segment_bytes, h.rows_offset, h.chunks_offset) = (fields[0], fields[1], fields[2], fields[3]);
            (h.rows, h.chunks) = (rows, chunks);
        }
        for arena in [ARENA, fields[4]] {
            if h.check(table, arena).is_ok() {
                prop_assert!(u128::from(h.rows_offset) + u128::from(h.rows) * 64 <= u128::from(h.chunks_offset));
                prop_assert!(u128::from(h.chunks_offset) + u128::from(h.chunks) * 1024 <= u128::from(table));
                prop_assert!(u128::from(h.rows) * u128::from(ROW_BYTES) <= u128::from(arena));
            }
        }
    }

    #[test]
    fn a_row_that_passes_lies_within_the_arena(index: u32, words in any::<[u32; 6]>(), length: u64) {
        let [state, generation, owner, slot_rows, chunk, section] = words;
        for (state, slot_rows, chunk) in [(state, slot_rows, chunk), (state % 4, slot_rows % 64, chunk % 300)] {
            let r = Row { state, generation, owner, slot_rows, chunk, section, length: length % (8 << 20), ..Row::default() };
            let index = index % 2048;
            if r.check(&header(), index).is_ok() && r.state != FREE {
                prop_assert!(u64::from(index) * ROW_BYTES + r.length <= ARENA);
                prop_assert!(r.chunk < CHUNKS);
            }
        }
    }

    #[test]
    fn any_bytes_are_a_table_or_not(bytes in prop::collection::vec(any::<u8>(), 1024)) {
        let _ = Header::read_from_prefix(&bytes).unwrap().0.check(TABLE, ARENA);
        let _ = Row::read_from_prefix(&bytes).unwrap().0.check(&header(), 0);
        let _ = ChunkRecord::read_from_bytes(&bytes).unwrap().check(0);
        let _ = LockFile::parse(&bytes);
    }
}
