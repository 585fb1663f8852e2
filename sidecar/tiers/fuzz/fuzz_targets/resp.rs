//! Any bytes of a Redis give a reply that takes exactly its own bytes, a wish for more, or a named error; any value a record with no more
//! segments than it can have, or none.
#![no_main]
// Both are built here by themselves: the sidecar's clients and TLS would take minutes to build with sanitizers.
#![allow(dead_code)]

#[path = "../../src/redis/record.rs"]
mod record;
#[path = "../../src/redis/resp.rs"]
mod resp;

use kvcachepool_protocol::object::{MAX_SECTIONS, REDIS_SEGMENT_BYTES};
use libfuzzer_sys::fuzz_target;
use record::Record;
use resp::{BadReply, Reader, Reply};

fuzz_target!(|bytes: &[u8]| {
    in_pieces(bytes);
    match reply(bytes) {
        Ok(Some((read, used))) => {
            assert_eq!(reply(&bytes[..used - 1]), Ok(None));
            values(&read);
            assert_eq!(reply(&bytes[..used]), Ok(Some((read, used))));
        }
        // Fewer bytes are no reply either, and more mend none.
        Ok(None) => assert_eq!(reply(&bytes[..bytes.len() / 2]), Ok(None)),
        Err(error) => assert_eq!(reply(&[bytes, b"\r\n"].concat()), Err(error)),
    }
    value(bytes);
});

/// A whole reply and how many bytes it takes.
fn reply(bytes: &[u8]) -> Result<Option<(Reply, usize)>, BadReply> {
    let (reply, used) = Reader::default().read(bytes)?;
    Ok(reply.map(|reply| (reply, used)))
}

/// Pieces make the same reply, or the same error, as all bytes at once.
fn in_pieces(bytes: &[u8]) {
    let mut reader = Reader::default();
    let mut start = 0;
    for end in 0..=bytes.len() {
        match reader.read(&bytes[start..end]) {
            Ok((None, used)) => start += used,
            Ok((Some(read), used)) => {
                assert_eq!(reply(bytes), Ok(Some((read, start + used))));
                return;
            }
            Err(error) => {
                assert_eq!(reply(bytes), Err(error));
                return;
            }
        }
    }
    assert_eq!(reply(bytes), Ok(None));
}

fn values(read: &Reply) {
    match read {
        Reply::Array(parts) => parts.iter().for_each(values),
        Reply::Bulk(bytes) => value(bytes),
        _ => {}
    }
}

fn value(bytes: &[u8]) {
    if let Some(record) = Record::read(bytes) {
        let full = record.bytes.get().div_ceil(REDIS_SEGMENT_BYTES);
        assert!(u64::from(record.segments.get()) <= full + MAX_SECTIONS as u64);
        assert!(!Record::is_of_another_version(bytes));
    }
}
