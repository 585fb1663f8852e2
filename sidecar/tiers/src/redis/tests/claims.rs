//! What a value claims of its object takes no more memory here than what is there.

use crate::redis::record::{NAMES_MAX, RECORD_BYTES, Record, SEGMENTS_MAX};
use crate::testing::redis_server::{Server, Spot, open, with_ttl};
use crate::testing::suite::Sample;
use crate::{Cause, Removal};
use kvcachepool_protocol::object::REDIS_SEGMENT_BYTES;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use zerocopy::IntoBytes;

/// Where a record says how many segments there are.
const SEGMENTS_AT: usize = 24;

/// Sets a value.
fn set(server: &Server, key: &str, value: &[u8]) {
    let (keys, bytes) = (key.len(), value.len());
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    let begin = format!("*3\r\n$3\r\nSET\r\n${keys}\r\n{key}\r\n${bytes}\r\n");
    let all = [begin.as_bytes(), value, b"\r\n"].concat();
    stream.write_all(&all).unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+OK\r\n");
}

/// Segments of an object are there, of which its record says that there are so many; returns the key of its head.
fn claims(server: &Server, sample: &Sample, segments: u32) -> String {
    let head = sample.object.encode().unwrap();
    let mut record = Record::new(&sample.object, &head, 77);
    record.bytes = u64::MAX.into();
    record.segments = segments.into();
    for segment in [0, NAMES_MAX as u32, segments - 1] {
        let key = sample.name().redis_segment(&record.head, segment);
        server.say(&["SET", &key, "x"]);
    }
    let (key, value) = (sample.name().redis(), [record.as_bytes(), &head].concat());
    assert_eq!(value[SEGMENTS_AT..][..4], segments.to_le_bytes());
    set(server, &key, &value);
    server.say(&["CONFIG", "RESETSTAT"]);
    key
}

#[tokio::test]
async fn what_claims_as_many_segments_as_can_be_is_removed_some_at_a_time() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let samples: Vec<_> = (0..3).map(|n| Sample::new(1, n, &[5_000])).collect();
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    for sample in [&samples[0], &samples[2]] {
        spot.put(sample).await;
    }
    claims(&server, &samples[1], SEGMENTS_MAX as u32);
    assert_eq!(spot.tier.remove(Removal::Named(&names)).await, Ok(3));
    assert_eq!(server.say(&["DBSIZE"]), "0");
    // And one for each that is short, and the head of the long one.
    let batches = SEGMENTS_MAX.div_ceil(NAMES_MAX as u64);
    assert_eq!(server.calls("del"), batches + 3);
    assert_eq!(spot.tier.remove(Removal::Named(&names)).await, Ok(0));
}

#[tokio::test]
async fn what_claims_more_segments_than_can_be_is_removed_as_what_has_no_record() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let sample = Sample::new(1, 0, &[5_000]);
    let key = claims(&server, &sample, 1 << 21);
    let get = spot.tier.get(sample.get_all(&spot.memory)).await;
    assert_eq!(get.unwrap_err().cause, Cause::Corrupt);
    assert_eq!(
        spot.tier.remove(Removal::Named(&[sample.name()])).await,
        Ok(1)
    );
    assert_eq!(server.say(&["EXISTS", &key]), "0");
    // They are nobody's.
    assert_eq!(server.say(&["DBSIZE"]), "3");
}

#[tokio::test]
async fn of_many_objects_that_are_removed_each_goes_by_one_command() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let segments = NAMES_MAX as u32 / 4;
    let samples: Vec<_> = (0..9).map(|n| Sample::new(1, n, &[5_000])).collect();
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    for sample in &samples {
        claims(&server, sample, segments);
    }
    assert_eq!(spot.tier.remove(Removal::Named(&names)).await, Ok(9));
    assert_eq!(server.calls("del"), 9);
    // One of those of each is no segment of it.
    assert_eq!(server.say(&["DBSIZE"]), "9");
}

/// A head of such an object, with the first of its sections.
fn long(server: &Server) -> Sample {
    let mut sample = Sample::new(1, 0, &[5_000, 9]);
    let section = &mut sample.object.sections[1];
    section.stored_bytes = (SEGMENTS_MAX - 1) * REDIS_SEGMENT_BYTES;
    section.raw_bytes = section.stored_bytes;
    let head = sample.object.encode().unwrap();
    let record = Record::new(&sample.object, &head, 77);
    assert_eq!(u64::from(record.segments.get()), SEGMENTS_MAX);
    let segment = sample.name().redis_segment(&record.head, 0);
    set(server, &segment, &sample.bytes[0]);
    let value = [record.as_bytes(), &head].concat();
    assert_eq!(value.len(), RECORD_BYTES + head.len());
    set(server, &sample.name().redis(), &value);
    server.say(&["CONFIG", "RESETSTAT"]);
    sample
}

#[tokio::test]
async fn of_a_long_object_with_a_hole_the_rest_goes_some_at_a_time() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let sample = long(&server);
    server.say(&["DEL", &server.say(&["KEYS", "*:0"])]);
    server.say(&["CONFIG", "RESETSTAT"]);
    let get = spot.tier.get(sample.get(&spot.memory, &[0])).await;
    assert_eq!(get.unwrap_err().cause, Cause::Missing);
    assert_eq!(server.say(&["DBSIZE"]), "0");
    let batches = SEGMENTS_MAX.div_ceil(NAMES_MAX as u64);
    assert_eq!(server.calls("del"), batches + 1);
}

#[tokio::test]
async fn a_long_object_lives_on_by_being_read() {
    let server = Server::start(&[]);
    let spot = Spot::new(with_ttl(&[server.unix()]));
    let sample = long(&server);
    let get = sample.get(&spot.memory, &[0]);
    spot.tier.get(get.clone()).await.unwrap();
    assert_eq!(server.calls("pexpire"), SEGMENTS_MAX + 1);
    for key in server.say(&["KEYS", "*"]).lines() {
        let lives: i64 = server.say(&["TTL", key]).parse().unwrap();
        assert!((900..=1_000).contains(&lives), "{key}: {lives}");
    }
}
