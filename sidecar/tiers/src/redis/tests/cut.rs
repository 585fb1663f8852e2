//! Connections that end in the middle of an answer, and bytes that are not those that were written.

use super::proxy::Proxy;
use crate::redis::record::Record;
use crate::testing::redis_server::{Scripted, Server, Spot, open};
use crate::testing::suite::{LATER, Sample, sealed_again, untouched};
use crate::{Cause, Removal, Stored, Tier};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Longest that it may take to notice.
const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut_inside_a_value_fails_at_once() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port).await;
    let spot = Spot::new(open(&[proxy.url()]));
    let sample = Sample::new(1, 0, &[2_500_000, 70_000]);
    spot.put(&sample).await;
    let before = proxy.left().1;
    spot.check(&sample).await;
    let bytes = before - proxy.left().1;
    assert!(bytes > 2_570_000);
    for cut in (0..bytes).step_by(bytes / 9).chain([1, 90, 700, bytes - 1]) {
        proxy.cut_down(cut);
        let get = spot.tier.get(sample.get_all(&spot.memory));
        let got = tokio::time::timeout(SOON, get).await;
        let error = got
            .unwrap_or_else(|_| panic!("it hangs at byte {cut}"))
            .unwrap_err();
        assert_eq!(error.cause, Cause::Unreachable, "{cut}: {error}");
        proxy.cut_down(usize::MAX);
        spot.check(&sample).await;
    }
}

#[tokio::test]
async fn a_changed_byte_of_what_lies_before_a_head_or_of_the_head_is_never_a_hit() {
    let server = Server::start(&[]);
    let (spot, layered) = (
        Spot::new(open(&[server.unix()])),
        Spot::layered(open(&[server.unix()])),
    );
    let sample = Sample::new(1, 0, &[5_000]);
    spot.put(&sample).await;
    let key = sample.name().redis();
    let length: usize = server.say(&["STRLEN", &key]).parse().unwrap();
    // When it was written is of no account; all else is. Numbers in it are not letters.
    for at in [0, 3, 17, 25, 29, 33, 47, 48, 60, length / 2, length - 1] {
        server.say(&["SETRANGE", &key, &at.to_string(), "x"]);
        for spot in [&spot, &layered] {
            let get = spot.tier.get(sample.get_all(&spot.memory)).await;
            let error = get.unwrap_err();
            assert_eq!(error.cause, Cause::Corrupt, "byte {at}: {error}");
        }
        // Found once, it was taken away.
        assert_eq!(spot.tier.lookup(&[sample.name()]).await, Ok(vec![false]));
        server.say(&["FLUSHALL"]);
        spot.put(&sample).await;
    }
    // What a later version of this program wrote stays where it is.
    server.say(&["SETRANGE", &key, "7", "2"]);
    let get = layered.tier.get(sample.get_all(&layered.memory)).await;
    assert_eq!(get.unwrap_err().cause, Cause::Foreign);
    assert_eq!(spot.tier.lookup(&[sample.name()]).await, Ok(vec![true]));
    server.say(&["SETRANGE", &key, "7", "1"]);
    // A byte of a segment is noticed by who compares digests, and removed by it.
    let segment = server.say(&["KEYS", "*:0"]);
    server.say(&["SETRANGE", &segment, "4000", "xx"]);
    let get = layered.tier.get(sample.get_all(&layered.memory)).await;
    assert_eq!(get.unwrap_err().cause, Cause::Corrupt);
    assert_eq!(server.say(&["DBSIZE"]), "0");
}

#[tokio::test]
async fn what_only_a_later_build_knows_of_a_head_is_foreign_and_stays() {
    let server = Server::start(&[]);
    let layered = Spot::layered(open(&[server.unix()]));
    let sample = Sample::new(1, 0, &[5_000]);
    layered.put(&sample).await;
    let head = sample.object.encode().unwrap();
    for (what, change) in LATER {
        let mut later = head.clone();
        sealed_again(&mut later, change);
        set(&server, &sample, &later);
        let get = layered.tier.get(sample.get_all(&layered.memory)).await;
        let error = get.unwrap_err();
        assert_eq!(error.cause, Cause::Foreign, "{error}");
        assert!(error.detail.ends_with(what), "{error}");
        assert_eq!(layered.tier.head(&sample.name()).await, Err(error));
        let lookup = layered.tier.lookup(&[sample.name()]).await;
        assert_eq!(lookup, Ok(vec![true]), "{what}");
        assert_eq!(server.say(&["DBSIZE"]), "2", "{what}");
        set(&server, &sample, &head);
        layered.check(&sample).await;
    }
}

#[tokio::test]
async fn another_object_under_our_name_is_foreign_and_stays_until_the_name_is_removed() {
    let server = Server::start(&[]);
    let (spot, layered) = (
        Spot::new(open(&[server.unix()])),
        Spot::layered(open(&[server.unix()])),
    );
    let ours = Sample::new(1, 0, &[5_000, 600_000]);
    // Of the same pool, of another one.
    for theirs in [(1, 1), (2, 0)].map(|(seed, n)| Sample::new(seed, n, &[5_000, 600_000])) {
        spot.put(&theirs).await;
        let keys = server.say(&["KEYS", "*"]);
        let (from, to) = (theirs.name().redis(), ours.name().redis());
        for key in keys.lines() {
            let copied = server.say(&["COPY", key, &key.replace(&from, &to)]);
            assert_eq!(copied, "1", "{key}");
        }
        let value = server.say(&["GET", &to]);
        for spot in [&spot, &layered] {
            let get = ours.get_all(&spot.memory);
            let error = spot.tier.get(get.clone()).await.unwrap_err();
            assert_eq!(error.cause, Cause::Foreign, "{error}");
            assert!(error.detail.contains(&theirs.name().s3("")), "{error}");
            assert!(get.places.iter().all(|place| untouched(&place.span)));
            assert_eq!(spot.tier.head(&ours.name()).await, Err(error));
            let put = spot.tier.put(ours.put(&spot.memory)).await;
            assert_eq!(put, Ok(Stored::Already));
        }
        assert_eq!(server.say(&["GET", &to]), value);
        assert_eq!(server.say(&["DBSIZE"]), "8");
        spot.check(&theirs).await;
        let both = [ours.name(), theirs.name()];
        assert_eq!(spot.tier.remove(Removal::Named(&both)).await, Ok(2));
        assert_eq!(server.say(&["DBSIZE"]), "0");
    }
}

/// Sets the value of an object: its record, and this head. The segments are those of the head that the object was put with.
fn set(server: &Server, sample: &Sample, head: &[u8]) {
    let record = Record::new(&sample.object, head, 77);
    let (key, value) = (sample.name().redis(), [record.as_bytes(), head].concat());
    let (keys, values) = (key.len(), value.len());
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    write!(
        stream,
        "*3\r\n$3\r\nSET\r\n${keys}\r\n{key}\r\n${values}\r\n"
    )
    .unwrap();
    stream.write_all(&value).unwrap();
    stream.write_all(b"\r\n").unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+OK\r\n");
}

#[tokio::test]
async fn an_answer_that_nobody_asked_for_answers_no_later_question() {
    let scripted = Scripted::start(":1\r\n:0").await;
    let tier = open(&[scripted.url()]);
    let names = [Sample::new(1, 0, &[1]).name()];
    for _ in 0..4 {
        assert_eq!(tier.lookup(&names).await, Ok(vec![true]));
    }
}
