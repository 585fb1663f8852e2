//! Slot table and lock file: nothing is indexed by numbers that were not checked against the files' sizes.

use kvcachepool_protocol::geometry::{Geometry, UnusableTable};
use kvcachepool_protocol::key::*;
use kvcachepool_protocol::lockfile::{self, LockFile, lock_offset};
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
    let of = |h: &Header, arena, table| Geometry::of_header(h, arena, table).map(|g| g.header());
    assert_eq!(
        of(&header(), ARENA, TABLE),
        Ok(Header {
            populated_rows: 0,
            ..header()
        })
    );
    let cases: [(Change<Header>, UnusableTable); 17] = [
        (&|h| h.magic[7] = 0, UnusableTable::NoTable),
        (&|h| h.version = 2, UnusableTable::OtherFormat(2)),
        (&|h| h.row_bytes = 4096, UnusableTable::OtherFormat(VERSION)),
        (&|h| h.region = 0, UnusableTable::OtherSizes),
        (&|h| h.arena_bytes = 1, UnusableTable::OtherSizes),
        (&|h| h.rows = 1025, UnusableTable::OtherSizes),
        (&|h| h.segment_bytes = 3 << 20, UnusableTable::OtherSizes),
        (&|h| h.segment_bytes = 128 << 20, UnusableTable::OtherSizes),
        (&|h| h.segment_bytes = 4096, UnusableTable::OtherSizes),
        (&|h| h.rows_offset = 64, UnusableTable::OtherSizes),
        (&|h| h.rows_offset = !63, UnusableTable::OtherSizes),
        (&|h| h.rows_offset = 4100, UnusableTable::OtherSizes),
        (&|h| h.chunks = CHUNKS + 1, UnusableTable::OtherSizes),
        (&|h| h.chunks_offset = !63, UnusableTable::OtherSizes),
        (&|h| h.chunks_offset += 64, UnusableTable::OtherSizes),
        (&|h| h.populated_rows = 1025, UnusableTable::OtherSizes),
        (&|h| h.capacity_rows = 1025, UnusableTable::OtherSizes),
    ];
    for (change, error) in cases {
        let mut h = header();
        change(&mut h);
        assert_eq!(of(&h, ARENA, TABLE), Err(error));
    }
    for (arena, table) in [
        (ARENA, TABLE - 1),
        (ARENA, TABLE + 4096),
        (ARENA - 1, TABLE),
    ] {
        assert_eq!(
            of(&header(), arena, table),
            Err(UnusableTable::OtherSizes),
            "{arena} {table}"
        );
    }
    let nothing = Geometry {
        region: 1,
        arena_bytes: 0,
        segment_bytes: 4 << 20,
        rows: 0,
        chunks: 0,
    };
    let refused = of(&nothing.header(), 0, nothing.table_bytes());
    assert_eq!(refused, Err(UnusableTable::OtherSizes), "an empty arena");
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
        let error = r.check(&h, index).unwrap_err();
        assert!(error.contains(text), "{error}");
    }
    assert_eq!(record().check(), Ok(()));
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
        let error = r.check().unwrap_err();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_lock_file_that_cannot_be_used_is_refused() {
    let new = LockFile::NEW;
    assert_eq!(LockFile::parse(new.as_bytes()), Some(new));
    let cases: [Change<LockFile>; 4] = [
        &|f| f.magic[0] = 0,
        &|f| f.version = 9.into(),
        &|f| f.next_lock = 0.into(),
        &|f| f.next_region = 0.into(),
    ];
    for change in cases {
        let mut file = new;
        change(&mut file);
        assert_eq!(LockFile::parse(file.as_bytes()), None, "{file:?}");
    }
    for cut in 0..32 {
        assert_eq!(LockFile::parse(&new.as_bytes()[..cut]), None);
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
        let mut files = vec![(ARENA, table), (fields[4], table)];
        if near {
            let geometry = Geometry {
                region: 1,
                arena_bytes: u64::from(rows) * ROW_BYTES,
                segment_bytes: ROW_BYTES << (fields[0] % 4),
                rows,
                chunks: chunks % 512,
            };
            h = geometry.header();
            // one field in two cases is wrong
            h.chunks_offset += fields[1] % 2 * 4096;
            files.push((geometry.arena_bytes, geometry.table_bytes()));
        } else {
            (h.arena_bytes, h.segment_bytes, h.rows_offset, h.chunks_offset) = (fields[0], fields[1], fields[2], fields[3]);
            (h.rows, h.chunks) = (rows, chunks);
        }
        for (arena, table) in files {
            if Geometry::of_header(&h, arena, table).is_ok() {
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
        let _ = Geometry::of_header(&Header::read_from_prefix(&bytes).unwrap().0, ARENA, TABLE);
        let _ = Row::read_from_prefix(&bytes).unwrap().0.check(&header(), 0);
        let _ = ChunkRecord::read_from_bytes(&bytes).unwrap().check();
        let _ = LockFile::parse(&bytes);
    }
}
