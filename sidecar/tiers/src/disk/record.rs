//! Records of journals and snapshots: 88 bytes each, with a length and a checksum. Such files contain nothing else.

use super::files::ID_MAX;
use super::name::NameKey;
use super::space::At;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use xxhash_rust::xxh3::xxh3_64;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

pub const RECORD_BYTES: usize = size_of::<Packed>();
const SUMMED: usize = RECORD_BYTES - 8;
/// Records that are read at a time: 1.4 MB.
const READ_RECORDS: usize = 16 << 10;

/// Layout in the file.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Packed {
    /// [`RECORD_BYTES`].
    length: U16,
    what: u8,
    container: U32,
    slot: U32,
    bytes: U64,
    written_unix_s: U64,
    name: NameKey,
    zero: [u8; 4],
    /// xxh3-64 of all bytes before.
    checksum: U64,
}

const _: () = assert!(size_of::<Packed>() == 88);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The slot holds the object; older records of either are void.
    Put,
    /// The slot does not hold the object any more.
    Remove,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    pub what: What,
    pub name: NameKey,
    pub at: At,
    /// Bytes of the object.
    pub bytes: u64,
    /// Write time, Unix seconds.
    pub written_unix_s: u64,
}

impl Record {
    /// Appends its bytes to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut packed = Packed {
            length: (RECORD_BYTES as u16).into(),
            what: match self.what {
                What::Put => 1,
                What::Remove => 2,
            },
            container: self.at.container.into(),
            slot: self.at.slot.into(),
            bytes: self.bytes.into(),
            written_unix_s: self.written_unix_s.into(),
            name: self.name,
            zero: [0; 4],
            checksum: 0.into(),
        };
        packed.checksum = checksum(&packed).into();
        out.extend_from_slice(packed.as_bytes());
    }

    /// `None` if the bytes are not a valid record.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let packed = Packed::read_from_bytes(bytes).ok()?;
        let sound = packed.length.get() == RECORD_BYTES as u16
            && packed.checksum.get() == checksum(&packed)
            && packed.container.get() <= ID_MAX
            && packed.zero == [0; 4];
        let what = match packed.what {
            1 => What::Put,
            2 => What::Remove,
            _ => return None,
        };
        sound.then_some(Self {
            what,
            name: packed.name,
            at: At {
                container: packed.container.get(),
                slot: packed.slot.get(),
            },
            bytes: packed.bytes.get(),
            written_unix_s: packed.written_unix_s.get(),
        })
    }
}

fn checksum(packed: &Packed) -> u64 {
    let bytes = packed.as_bytes();
    xxh3_64(bytes.get(..SUMMED).unwrap_or(bytes))
}

/// Result of reading a file of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scan {
    pub records: u64,
    /// Invalid records between valid ones.
    pub corrupt: u64,
    /// End of the last record; the bytes after it were never finished.
    pub end: u64,
    /// Bytes after the end.
    pub torn_bytes: u64,
}

/// Calls `each` with every record of the file, in order.
pub fn scan(file: &File, mut each: impl FnMut(Record)) -> io::Result<Scan> {
    let mut scan = Scan::default();
    let (mut at, mut bad) = (0u64, 0u64);
    let mut buffer = vec![0u8; READ_RECORDS * RECORD_BYTES];
    loop {
        let got = fill(file, &mut buffer, at)?;
        let read = buffer.get(..got).unwrap_or_default();
        for bytes in read.chunks(RECORD_BYTES) {
            at += bytes.len() as u64;
            match Record::read(bytes) {
                Some(record) => {
                    scan.corrupt += std::mem::take(&mut bad);
                    scan.records += 1;
                    scan.end = at;
                    each(record);
                }
                None => bad += 1,
            }
        }
        if got < buffer.len() {
            scan.torn_bytes = at - scan.end;
            return Ok(scan);
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while let Some(rest) = buffer.get_mut(got..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, at + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::seeds::must_be;
    use proptest::prelude::*;
    use std::io::Write;

    fn name(i: u8) -> NameKey {
        NameKey::read_from_bytes(&[[i; 48].as_slice(), &[0]].concat()).unwrap()
    }

    fn record(i: u8) -> Record {
        Record {
            what: if i.is_multiple_of(3) {
                What::Remove
            } else {
                What::Put
            },
            name: name(i),
            at: At {
                container: i.into(),
                slot: u32::from(i) * 7,
            },
            bytes: u64::from(i) << 30,
            written_unix_s: 1_800_000_000,
        }
    }

    fn scanned(bytes: &[u8]) -> (Vec<Record>, Scan) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let mut records = Vec::new();
        let scan = scan(&file, |record| records.push(record)).unwrap();
        (records, scan)
    }

    fn file_of(records: &[Record]) -> Vec<u8> {
        let mut out = Vec::new();
        records.iter().for_each(|record| record.write(&mut out));
        out
    }

    #[test]
    fn every_prefix_is_read_up_to_its_last_whole_record() {
        let records: Vec<Record> = (0..5).map(record).collect();
        let bytes = file_of(&records);
        for cut in 0..=bytes.len() {
            let (read, scan) = scanned(&bytes[..cut]);
            let whole = cut / RECORD_BYTES;
            assert_eq!(read, records[..whole], "cut at {cut}");
            assert_eq!(scan.end, (whole * RECORD_BYTES) as u64);
            assert_eq!(scan.torn_bytes, (cut % RECORD_BYTES) as u64);
            assert_eq!(scan.corrupt, 0);
        }
    }

    #[test]
    fn a_tail_of_zeros_is_torn_and_not_corrupt() {
        let mut bytes = file_of(&[record(1)]);
        bytes.resize(RECORD_BYTES * 4 + 5, 0);
        let (read, scan) = scanned(&bytes);
        assert_eq!((read.len(), scan.corrupt), (1, 0));
        assert_eq!(scan.end, RECORD_BYTES as u64);
    }

    #[test]
    fn more_records_than_are_read_at_a_time_come_in_order() {
        let mut bytes = Vec::new();
        for i in 0..READ_RECORDS as u64 * 2 + 3 {
            Record {
                bytes: i,
                ..record(1)
            }
            .write(&mut bytes);
        }
        let (read, scan) = scanned(&bytes);
        assert!(read.iter().enumerate().all(|(i, r)| r.bytes == i as u64));
        assert_eq!(scan.records, READ_RECORDS as u64 * 2 + 3);
    }

    #[test]
    fn a_container_whose_file_is_none_of_ours_is_in_no_record() {
        for (container, there) in [(ID_MAX, true), (ID_MAX + 1, false), (u32::MAX, false)] {
            let at = At { container, slot: 0 };
            let bytes = file_of(&[Record { at, ..record(1) }]);
            assert_eq!(Record::read(&bytes).is_some(), there, "{container}");
        }
    }

    #[test]
    fn the_seed_of_the_fuzzer_has_two_containers_and_records_of_both() {
        // Number, units and slots of each; no room is wanted.
        let mut seed = vec![2, 0, 0, 0, 3, 1, 1, 3];
        for (i, container, slot) in [(1, 0, 0), (2, 1, 3), (1, 1, 0), (3, 1, 3)] {
            let at = At { container, slot };
            let bytes = 4000;
            seed.extend(file_of(&[Record {
                at,
                bytes,
                ..record(i)
            }]));
        }
        must_be("journal/records", &seed);
    }

    proptest! {
        #[test]
        fn a_flipped_bit_costs_its_record_and_no_other(
            at in 0usize..4 * RECORD_BYTES,
            bit in 0u8..8,
        ) {
            let records: Vec<Record> = (0..5).map(record).collect();
            let mut bytes = file_of(&records);
            bytes[at] ^= 1 << bit;
            let (read, scan) = scanned(&bytes);
            let mut expected = records.clone();
            expected.remove(at / RECORD_BYTES);
            prop_assert_eq!(read, expected);
            prop_assert_eq!(scan.corrupt, 1);
        }

        #[test]
        fn any_bytes_are_a_record_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            prop_assert_eq!(Record::read(&bytes), None);
        }
    }
}
