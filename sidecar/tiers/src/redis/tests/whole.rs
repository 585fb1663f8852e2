//! Whole or not at all, whoever dies at whatever byte: what stays is whole, what is not whole goes by itself.

use super::proxy::Proxy;
use super::suite::valkey;
use crate::redis::Redis;
use crate::testing::redis_server::{Server, Spot, open, settings, with_ttl};
use crate::testing::suite::Sample;
use crate::{Cause, Removal, Stored};
use kvcachepool_protocol::object::REDIS_SEGMENT_BYTES;
use std::time::Duration;

/// Every key and its time to live in ms, in one question to the server.
const ALL: &str = "local all = {} \
     for _, key in ipairs(redis.call('KEYS', '*')) do all[#all + 1] = redis.call('PTTL', key) .. ' ' .. key end \
     return all";

/// Does nothing but somebody remove this key, or the time that objects live for?
pub fn stays(server: &Server, key: &str) -> bool {
    is_long(server.say(&["PTTL", key]).trim())
}

fn is_long(lives_ms: &str) -> bool {
    let lives: i64 = lives_ms.parse().unwrap();
    lives == -1 || lives > 130_000
}

/// Keys, and which of them stay.
pub fn keys(server: &Server) -> (Vec<String>, Vec<String>) {
    let said = server.say(&["EVAL", ALL, "0"]);
    let (mut all, mut staying) = (Vec::new(), Vec::new());
    for (lives_ms, key) in said.lines().filter_map(|line| line.split_once(' ')) {
        all.push(key.to_string());
        if is_long(lives_ms) {
            staying.push(key.to_string());
        }
    }
    (all, staying)
}

/// Waits until the server has done what was said to it over connections that are closed.
fn quiet(server: &Server) {
    server.wait(&["CLIENT", "LIST"], |list| list.lines().count() == 1);
}

/// Byte numbers of something that takes so many: all of its last `end`, and some before.
fn cuts(bytes: usize, end: usize) -> impl Iterator<Item = usize> {
    let before = (0..4).map(move |n| bytes / 5 * n);
    before.chain((bytes.saturating_sub(end)..bytes).step_by((end / 100).max(1)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_dies_anywhere_leaves_a_whole_object_or_what_goes_by_itself() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port).await;
    let other = Spot::new(open(&[server.unix()]));
    let (short, long) = ((1_060_000, 5), (4_500_000, 11));
    let url = [proxy.url()];
    let ways = [
        (open(&url), short),
        (open(&url), long),
        (with_ttl(&url), short),
    ];
    for (redis, (bytes, objects_keys)) in ways {
        let spot = Spot::new(redis);
        let sample = Sample::new(1, 0, &[bytes, 5_000]);
        let put = sample.put(&spot.memory);
        let get = sample.get_all(&other.memory);
        // Over a connection that exists, as those below.
        spot.tier.put(put.clone()).await.unwrap();
        server.say(&["FLUSHALL"]);
        proxy.cut_up(usize::MAX);
        proxy.cut_down(usize::MAX);
        spot.tier.put(put.clone()).await.unwrap();
        let (up, down) = proxy.left();
        let (up, down) = (usize::MAX - up, usize::MAX - down);
        let (mut whole, mut nothing) = (0, 0);
        let ways = cuts(up, 1_200).map(|up| (up, usize::MAX));
        let back = cuts(down, down).map(|down| (usize::MAX, down));
        for cut in ways.chain(back) {
            server.say(&["FLUSHALL"]);
            proxy.cut_up(cut.0);
            proxy.cut_down(cut.1);
            assert!(spot.tier.put(put.clone()).await.is_err(), "{cut:?}");
            server.say(&["CLIENT", "KILL", "TYPE", "normal"]);
            quiet(&server);
            let (all, staying) = keys(&server);
            assert!(
                staying.is_empty() || (staying.len(), all.len()) == (objects_keys, objects_keys),
                "cut at {cut:?} of {up} and {down}: {staying:?} of {all:?} stay"
            );
            match other.tier.get(get.clone()).await {
                Ok(_) => {
                    assert!(sample.lies_in(&get.places), "{cut:?}");
                    whole += 1;
                }
                Err(e) => {
                    assert_eq!(e.cause, Cause::Missing, "{cut:?}: {e}");
                    nothing += 1;
                }
            }
            // What it left is no reason for the next put to believe that all is there, and to stay.
            proxy.cut_up(usize::MAX);
            proxy.cut_down(usize::MAX);
            spot.tier.put(put.clone()).await.unwrap();
            let (all, staying) = keys(&server);
            assert_eq!((all.len(), staying.len()), (objects_keys, objects_keys));
            other.tier.get(get.clone()).await.unwrap();
            assert!(sample.lies_in(&get.places), "{cut:?}");
        }
        assert!(
            whole > 2 && nothing > 2,
            "{whole} whole, {nothing} not there"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_remover_that_dies_anywhere_leaves_all_or_nothing() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port).await;
    let (spot, other) = (
        Spot::new(open(&[proxy.url()])),
        Spot::new(open(&[server.unix()])),
    );
    let sample = Sample::new(1, 0, &[30_000, 5_000]);
    other.put(&sample).await;
    let before = proxy.left().0;
    assert_eq!(
        spot.tier.remove(Removal::Named(&[sample.name()])).await,
        Ok(1)
    );
    let bytes = before - proxy.left().0;
    for cut in cuts(bytes, bytes) {
        other.put(&sample).await;
        proxy.cut_up(cut);
        assert!(
            spot.tier
                .remove(Removal::Named(&[sample.name()]))
                .await
                .is_err()
        );
        server.say(&["CLIENT", "KILL", "TYPE", "normal"]);
        quiet(&server);
        let (all, _) = keys(&server);
        assert!(
            [0, 3].contains(&all.len()),
            "cut at {cut} of {bytes}: {all:?}"
        );
        proxy.cut_up(usize::MAX);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_segment_that_goes_before_everything_stays_is_written_again() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port).await;
    let spot = Spot::new(open(&[proxy.url()]));
    let sample = Sample::new(1, 0, &[5 << 20]);
    let mut held = proxy.hold_before(b"EXEC").await;
    let put = spot.tier.put(sample.put(&spot.memory));
    let evict = async {
        held.reached().await;
        // The head is there, and can be read; not for long, if nothing followed.
        let head = server.say(&["PTTL", &sample.name().redis()]);
        let head: i64 = head.parse().unwrap();
        assert!((1..=15_000).contains(&head), "{head}");
        let segment = server.say(&["KEYS", "*:1"]);
        let lives: i64 = server.say(&["PTTL", &segment]).parse().unwrap();
        assert!(lives > head, "its segments live longer: {lives}, {head}");
        assert_eq!(server.say(&["DEL", &segment]), "1");
        held.go_on();
    };
    let (put, ()) = tokio::join!(put, evict);
    assert_eq!(put, Ok(Stored::New));
    let (all, staying) = keys(&server);
    assert_eq!((all.len(), staying.len()), (12, 12));
    spot.check(&sample).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_renews_an_object_in_that_moment_does_no_harm() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port).await;
    let (writer, reader) = (
        Spot::new(with_ttl(&[proxy.url()])),
        Spot::new(with_ttl(&[server.unix()])),
    );
    let sample = Sample::new(1, 0, &[5 << 20]);
    let mut held = proxy.hold_before(b"EXEC").await;
    let put = writer.tier.put(sample.put(&writer.memory));
    let read = async {
        held.reached().await;
        reader.check(&sample).await;
        held.go_on();
    };
    let (put, ()) = tokio::join!(put, read);
    assert_eq!(put, Ok(Stored::New));
    reader.check(&sample).await;
}

#[tokio::test]
async fn a_put_that_was_refused_leaves_nothing_and_its_connection_watches_nothing() {
    let server = Server::start(&["--requirepass", "right"]);
    let say = |words: &[&str]| {
        let mut all = vec!["--no-auth-warning", "-a", "right"];
        all.extend(words);
        server.say(&all)
    };
    // Long objects stay by PERSIST, all by a transaction.
    for (lacks, bytes) in [("-persist", 5 << 20), ("-exec", 3_000), ("-multi", 3_000)] {
        let user = [
            "ACL", "SETUSER", "half", "on", ">half", "~kvcp:*", "+@all", lacks,
        ];
        say(&user);
        let spot = Spot::new(open(&[format!(
            "redis://half:half@127.0.0.1:{}",
            server.port
        )]));
        let sample = Sample::new(1, 0, &[bytes]);
        for _ in 0..3 {
            let put = spot.tier.put(sample.put(&spot.memory)).await.unwrap_err();
            assert_eq!(put.cause, Cause::Denied, "{put}");
            assert_eq!(say(&["DBSIZE"]), "0");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_who_write_an_object_one_does_and_the_other_leaves_nothing() {
    for bytes in [3_000, 5 << 20] {
        let server = Server::start(&[]);
        let proxy = Proxy::start(server.port).await;
        let (late, first) = (
            Spot::new(open(&[proxy.url()])),
            Spot::new(open(&[server.unix()])),
        );
        let sample = Sample::new(1, 0, &[bytes]);
        let mut other = sample.clone();
        other.object.created_unix_ms += 1_000;
        let mut held = proxy.hold_before(b"EXEC").await;
        let put = late.tier.put(other.put(&late.memory));
        let overtake = async {
            held.reached().await;
            if bytes > REDIS_SEGMENT_BYTES {
                // Its head is there, and lives no longer than it may take to say so.
                server.say(&["DEL", &sample.name().redis()]);
            }
            first.put(&sample).await;
            held.go_on();
        };
        let (put, ()) = tokio::join!(put, overtake);
        assert_eq!(put, Ok(Stored::Already), "{bytes}");
        first.check(&sample).await;
        let (all, staying) = keys(&server);
        let wanted = 2 + (bytes - 1) as usize / REDIS_SEGMENT_BYTES as usize;
        assert_eq!((all.len(), staying.len()), (wanted, wanted), "{all:?}");
    }
}

#[tokio::test]
async fn what_another_writer_staged_stays_where_it_is_put_in_one_go() {
    for ttl in [Duration::ZERO, Duration::from_secs(1_000)] {
        let server = Server::start(&[]);
        let mut with_ttl = settings(&[server.unix()]);
        with_ttl.ttl = ttl;
        let spot = Spot::new(Redis::open(&with_ttl).unwrap());
        let sample = Sample::new(1, 0, &[1_060_000, 5_000]);
        let head = sample.name().redis();
        spot.put(&sample).await;
        for (without, stored) in [(None, Stored::Already), (Some("*:1"), Stored::New)] {
            let staged = |key: &str| if key == head { "15000" } else { "120000" };
            for key in keys(&server).0 {
                assert_eq!(server.say(&["PEXPIRE", &key, staged(&key)]), "1");
            }
            if let Some(pattern) = without {
                let segment = server.say(&["KEYS", pattern]);
                assert_eq!(server.say(&["DEL", &segment]), "1");
            }
            let put = spot.tier.put(sample.put(&spot.memory)).await;
            assert_eq!(put, Ok(stored));
            let (all, staying) = keys(&server);
            assert_eq!(all.len(), 5, "{all:?}");
            match ttl {
                Duration::ZERO => assert_eq!(staying.len(), 5, "{staying:?}"),
                _ => {
                    let lives = |key: &String| server.say(&["TTL", key]).parse::<i64>().unwrap();
                    assert!(all.iter().all(|key| (900..=1_000).contains(&lives(key))));
                }
            }
            spot.check(&sample).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_away_while_it_is_written_was_not_stored() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port).await;
    let spot = Spot::new(open(&[proxy.url()]));
    let sample = Sample::new(1, 0, &[5 << 20]);
    let mut held = proxy.hold_before(b"EXEC").await;
    let put = spot.tier.put(sample.put(&spot.memory));
    let remove = async {
        held.reached().await;
        server.say(&["FLUSHALL"]);
        held.go_on();
    };
    let (put, ()) = tokio::join!(put, remove);
    assert_eq!(put.unwrap_err().cause, Cause::Throttled);
    assert_eq!(server.say(&["DBSIZE"]), "0");
}

#[tokio::test]
async fn bytes_that_are_not_what_the_head_says_leave_nothing() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let long = 2 * REDIS_SEGMENT_BYTES + 100;
    // Any byte of any section, written at once and in parts.
    let bytes = [(0, 0), (0, long - 1), (1, REDIS_SEGMENT_BYTES), (2, 6)];
    for ((section, at), last) in bytes
        .into_iter()
        .flat_map(|byte| [(byte, 7), (byte, 3 << 20)])
    {
        let sample = Sample::new(1, 0, &[long, long, last]);
        let put = sample.put(&spot.memory);
        let span = put.spans[section].clone();
        let mut byte = [0];
        assert!(span.read(at, &mut byte));
        assert!(span.write(at, &[!byte[0]]));
        let error = spot.tier.put(put).await.unwrap_err();
        assert_eq!(error.cause, Cause::Corrupt, "{error}");
        assert_eq!(server.say(&["DBSIZE"]), "0");
        assert_eq!(
            spot.tier.put(sample.put(&spot.memory)).await,
            Ok(Stored::New)
        );
        spot.check(&sample).await;
        spot.tier
            .remove(Removal::Named(&[sample.name()]))
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn short_objects_without_a_ttl_are_written_by_one_transaction_and_stay() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let commands = || ["watch", "exists", "multi", "mset", "exec"].map(|c| server.calls(c));
    let samples = [0, 1, 2].map(|n| Sample::new(1, n, &[1 << 20, 5_000]));
    for (sample, calls) in samples.iter().zip(1..) {
        spot.put(sample).await;
        assert_eq!(commands(), [calls; 5]);
    }
    // Segments whose head has gone are none of an object.
    server.say(&["DEL", &samples[1].name().redis()]);
    spot.put(&samples[1]).await;
    assert_eq!(commands(), [4; 5]);
    for sample in &samples {
        spot.check(sample).await;
    }
    let (all, staying) = keys(&server);
    assert_eq!((all.len(), staying.len()), (15, 15));
    for key in all {
        assert_eq!(server.say(&["TTL", &key]), "-1", "{key}");
    }
}

#[tokio::test]
async fn of_an_object_that_exists_nothing_is_sent() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let received = || -> u64 {
        let stats = server.say(&["INFO", "stats"]);
        let mut lines = stats.lines();
        let line = lines.find_map(|line| line.strip_prefix("total_net_input_bytes:"));
        line.unwrap().trim().parse().unwrap()
    };
    for segments in [1, 3, 12] {
        let sample = Sample::new(segments, 0, &[segments * REDIS_SEGMENT_BYTES]);
        spot.put(&sample).await;
        let keys = server.say(&["DBSIZE"]);
        let mut other = sample.clone();
        other.object.created_unix_ms += 1_000;
        let head = sample.name().redis();
        // By the same sidecar, by another one, and by one of another version.
        for (sample, version) in [(&sample, "1"), (&other, "1"), (&sample, "2")] {
            server.say(&["SETRANGE", &head, "7", version]);
            let before = received();
            assert_eq!(
                spot.tier.put(sample.put(&spot.memory)).await,
                Ok(Stored::Already)
            );
            assert!(received() - before < 8_192, "{segments}");
            assert_eq!(server.say(&["DBSIZE"]), keys);
        }
        server.say(&["SETRANGE", &head, "7", "1"]);
        spot.check(&sample).await;
    }
}

#[tokio::test]
async fn a_full_segment_costs_the_server_hardly_more_than_its_bytes() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let sample = Sample::new(1, 0, &[2 * REDIS_SEGMENT_BYTES]);
    spot.put(&sample).await;
    let (all, _) = keys(&server);
    let segments = all.iter().filter(|key| **key != sample.name().redis());
    let used = |key: &String| -> u64 {
        let said = server.say(&["MEMORY", "USAGE", key]);
        said.trim().parse().unwrap()
    };
    let used: Vec<u64> = segments.map(used).collect();
    assert_eq!(used.len(), 2);
    let most = REDIS_SEGMENT_BYTES + 1024;
    assert!(used.iter().all(|used| *used < most), "{used:?}");
}

#[tokio::test]
async fn what_has_up_to_4_mib_is_written_at_once() {
    let server = Server::start(&[]);
    let spot = Spot::new(open(&[server.unix()]));
    let mut at_once = 0;
    for (sections, short) in [
        (vec![4 << 20], true),
        (vec![(4 << 20) + 1], false),
        (vec![1 << 20; 4], true),
        (vec![20_000; 128], true),
        (vec![40_000; 128], false),
    ] {
        let sample = Sample::new(2, 0, &sections);
        spot.put(&sample).await;
        at_once += u64::from(short);
        assert_eq!(server.calls("mset"), at_once, "{sections:?}");
        spot.check(&sample).await;
        server.say(&["FLUSHALL"]);
    }
}

#[tokio::test]
async fn segments_without_a_header_expire_after_a_sweep_and_those_of_writers_as_they_would() {
    let programs = ["redis-server".into(), valkey()];
    for (program, ttl) in programs.iter().flat_map(|p| [(p, false), (p, true)]) {
        let server = Server::of(program, &[]);
        let url = [server.unix()];
        let spot = Spot::new(if ttl { with_ttl(&url) } else { open(&url) });
        let samples = [(1, 2 << 20), (2, 5 << 20), (3, 2 << 20)];
        let samples = samples.map(|(number, bytes)| Sample::new(1, number, &[bytes]));
        let [short, long, whole] = &samples;
        for sample in &samples {
            spot.put(sample).await;
        }
        let (all, _) = keys(&server);
        for evicted in [short, long] {
            server.say(&["DEL", &evicted.name().redis()]);
        }
        // As a writer leaves them that has not written the header yet.
        let staged = Sample::new(1, 4, &[1]).name().redis_segment(&[7; 16], 0);
        server.say(&["SET", &staged, "any", "PX", "60000"]);
        let page = spot.tier.list(None, 100).await.unwrap();
        assert_eq!((page.objects.len(), page.foreign), (1, 0));
        let (_, mut staying) = keys(&server);
        staying.sort();
        let of_whole = whole.name().redis();
        let mut expected: Vec<_> = all
            .iter()
            .filter(|key| key.starts_with(&of_whole))
            .collect();
        expected.sort();
        assert!(staying.iter().eq(expected), "{program}: {staying:?}");
        let lives: u64 = server.say(&["PTTL", &staged]).parse().unwrap();
        assert!((1..=60_000).contains(&lives), "{program}: {lives}");
        spot.check(whole).await;
        // A put that finds such segments makes them its own.
        spot.put(short).await;
        spot.check(short).await;
        let (all, staying) = keys(&server);
        let count = |keys: &[String]| {
            let of_short = |key: &&String| key.starts_with(&short.name().redis());
            keys.iter().filter(of_short).count()
        };
        assert_eq!(count(&all), count(&staying), "{program}");
    }
}
