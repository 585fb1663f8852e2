//! Any bytes give an object or a named error, also where both digests of the head are right; what is taken is the one encoding of it.
#![no_main]

use kvcachepool_protocol::object::{
    HEADER_BYTES, HeaderRecord, Object, ObjectName, digest, head_bytes,
};
use libfuzzer_sys::fuzz_target;
use zerocopy::{FromBytes, IntoBytes};

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(sealed) = sealed(bytes) {
        check(&sealed);
    }
    if let Ok(name) = std::str::from_utf8(bytes) {
        if let Ok(read) = ObjectName::from_s3("", name) {
            assert_eq!(read.s3(""), name);
        }
        if let Ok((read, false)) = ObjectName::from_redis(name) {
            assert_eq!(read.redis(), name);
        }
    }
});

fn check(bytes: &[u8]) {
    if let Ok(object) = Object::decode(bytes) {
        let again = object.encode().expect("what was read can be written");
        assert_eq!(head_bytes(bytes), Ok(again.len() as u64));
        assert!(bytes.starts_with(&again));
    }
}

/// The same bytes as an object whose magic, version and digests are right, so that all other checks are reached.
fn sealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let (mut header, _) = HeaderRecord::read_from_prefix(bytes).ok()?;
    let mut bytes = bytes.to_vec();
    header.magic = kvcachepool_protocol::object::MAGIC;
    header.version = 1.into();
    header.flags = 0.into();
    header.reserved.fill(0);
    header.element %= 4;
    for dim in &mut header.dims {
        dim.axis %= 5;
    }
    header.head_bytes = ((header.head_bytes.get() % 16 + 1) * 4096).into();
    bytes.resize(bytes.len().max(header.head_bytes.get() as usize), 0);
    let counts = [
        (header.sections, 64),
        (header.block_hashes, 32),
        (header.token_ids, 4),
    ];
    let meta: usize = counts.iter().map(|(n, size)| n.get() as usize * size).sum();
    if let Some(table) = bytes.get(HEADER_BYTES..HEADER_BYTES + meta) {
        header.table_digest = digest(table);
    }
    header.digest = digest(&header.as_bytes()[..HEADER_BYTES - 16]);
    bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    Some(bytes)
}
