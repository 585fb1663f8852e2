//! A table that passes its check keeps every index within the files; rows, records and lock files are taken or refused by name.
#![no_main]

use kvcachepool_protocol::geometry::Geometry;
use kvcachepool_protocol::lockfile::LockFile;
use kvcachepool_protocol::table::*;
use libfuzzer_sys::fuzz_target;
use zerocopy::FromBytes;

fuzz_target!(|bytes: &[u8]| {
    let _ = LockFile::parse(bytes);
    let Ok((header, rest)) = Header::read_from_prefix(bytes) else {
        return;
    };
    // The header's unused words choose the sizes of the files.
    let word = |i: usize| u64::from(header.reserved[i]) << 32 | u64::from(header.reserved[i + 1]);
    check(&header, rest, word(0), word(2));
    let (header, table_bytes) = plausible(header);
    check(&header, rest, table_bytes, header.arena_bytes);
});

/// The same header with the fields right that are hard to guess, and the bytes of its table.
fn plausible(header: Header) -> (Header, u64) {
    let rows = header.rows % 4096;
    let geometry = Geometry {
        region: header.region,
        arena_bytes: u64::from(rows) * ROW_BYTES,
        segment_bytes: ROW_BYTES << (header.segment_bytes % 8),
        rows,
        chunks: header.chunks % 4096,
    };
    let plausible = Header {
        populated_rows: header.populated_rows,
        capacity_rows: header.capacity_rows,
        ..geometry.header()
    };
    (plausible, geometry.table_bytes())
}

fn check(header: &Header, rest: &[u8], table_bytes: u64, arena_bytes: u64) {
    if Geometry::of_header(header, arena_bytes, table_bytes).is_err() {
        return;
    }
    let rows_end = u128::from(header.rows_offset) + u128::from(header.rows) * 64;
    let records_end = u128::from(header.chunks_offset) + u128::from(header.chunks) * 1024;
    assert!(rows_end <= u128::from(header.chunks_offset) && records_end <= u128::from(table_bytes));
    for (index, raw) in (0..).zip(rest.chunks_exact(64)) {
        let Ok(row) = Row::read_from_bytes(raw) else {
            continue;
        };
        if row.check(header, index).is_ok() && row.state != FREE {
            assert!(u64::from(index) * ROW_BYTES + row.length <= arena_bytes);
            assert!(row.chunk < header.chunks);
        }
    }
    for raw in rest.chunks_exact(1024) {
        if let Ok(record) = ChunkRecord::read_from_bytes(raw) {
            let _ = record.check();
        }
    }
}
