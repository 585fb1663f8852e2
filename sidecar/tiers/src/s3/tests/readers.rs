//! A sidecar whose policy is to write nothing: credentials that may only read are enough, and nothing in the bucket changes.

use super::Server;
use super::bucket::{files, open};
use super::errors::stored;
use crate::Writes;
use crate::census::Shared;
use crate::s3::turns::COUNTED;
use crate::s3::{Options, S3};
use crate::testing::faulty::{Asked, Faulty, Reply};
use crate::testing::redis_server;
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Kind, Removal, Tier, configured};
use kvcachepool_protocol::config::{self, Config, WritePolicy};
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3_600);

fn reader() -> Options {
    Options {
        census: None,
        writes: Writes::new(false),
        ..Options::default()
    }
}

fn config(s3: config::S3, policy: WritePolicy) -> Config {
    Config {
        s3,
        write: config::Write {
            policy,
            ..config::Write::default()
        },
        ..Config::default()
    }
}

#[tokio::test]
async fn who_writes_nothing_reads_from_a_server_that_only_lets_read() {
    let server = Server::start_with(&["--readonly"]);
    let (sample, bytes) = stored();
    let file = server.data().join(sample.name().s3(""));
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, bytes).unwrap();
    let before = files(&server.data());
    let openings = configured(&config(server.config(), WritePolicy::None));
    let tier = openings[0].open().await.unwrap();
    assert_eq!(tier.usage().await.unwrap().objects, 1);
    let get = sample.get_all(&Memory::new(1 << 20));
    tier.get(get.clone()).await.unwrap();
    assert!(sample.lies_in(&get.places));
    assert_eq!(files(&server.data()), before);
    // The policy may change without a restart.
    let [reads, writes] =
        [WritePolicy::None, WritePolicy::WriteBack].map(|policy| config(server.config(), policy));
    openings[0].change(&reads, &writes).unwrap();
    let error = openings[0].open().await.unwrap_err();
    assert_eq!(error.cause, Cause::Denied);
    assert!(error.detail.starts_with("s3:PutObject denied"), "{error}");
    openings[0].change(&writes, &reads).unwrap();
    openings[0].open().await.unwrap();
}

#[tokio::test]
async fn who_writes_nothing_leaves_no_mark_in_redis_until_the_policy_is_another_one() {
    let (server, redis) = (Server::start(), redis_server::Server::start(&[]));
    let (memory, samples) = (
        Memory::new(1 << 20),
        [0, 1].map(|n| Sample::new(1, n, &[9_000])),
    );
    let writer = open(&server.config()).await;
    for sample in &samples {
        writer.put(sample.put(&memory)).await.unwrap();
    }
    let [reads, writes] = [WritePolicy::None, WritePolicy::WriteThrough].map(|policy| Config {
        redis: config::Redis {
            urls: vec![redis.unix()],
            ..config::Redis::default()
        },
        ..config(server.config(), policy)
    });
    let openings = configured(&reads);
    let bucket = openings.iter().find(|o| o.kind == Kind::S3).unwrap();
    let tier = bucket.open().await.unwrap();
    tier.get(samples[0].get_all(&memory)).await.unwrap();
    bucket.change(&reads, &writes).unwrap();
    tier.get(samples[1].get_all(&memory)).await.unwrap();
    redis_server::until("a mark", async || redis.say(&["DBSIZE"]) != "0").await;
    let marks = redis.say(&["KEYS", "*"]);
    let marked = samples.map(|sample| marks.contains(&sample.name().redis()));
    assert_eq!(marked, [false, true], "{marks}");
}

#[tokio::test]
async fn what_reading_takes_is_named_where_it_is_missing() {
    for (denied, permission) in [
        ("list", Some("s3:ListBucket")),
        ("get", Some("s3:GetObject")),
        ("write", None),
    ] {
        let server = Faulty::start(move |asked: &Asked| {
            let what = match asked.method.as_str() {
                "GET" if asked.target.contains("list-type") => "list",
                "GET" => "get",
                _ => "write",
            };
            match what {
                what if what == denied => Reply::error(403, "AccessDenied"),
                "list" => Reply::Full(200, vec![], b"<ListBucketResult/>".to_vec()),
                _ => Reply::error(404, "NoSuchKey"),
            }
        })
        .await;
        let opened = S3::open(&server.config(), reader()).await;
        match (opened, permission) {
            (Ok(_), None) => {}
            (Err(e), Some(permission)) => {
                assert_eq!(e.cause, Cause::Denied, "{denied}: {e}");
                let wanted = format!("{permission} denied on bucket kv-bucket");
                assert!(e.detail.starts_with(&wanted), "{denied}: {e}");
            }
            (opened, _) => panic!("{denied}: {opened:?}"),
        }
        assert_eq!(server.count("GET"), server.asked().len(), "{denied}");
    }
}

#[tokio::test]
async fn who_writes_nothing_takes_over_what_others_counted_or_counts_for_itself() {
    let server = Server::start();
    let writer = open(&server.config()).await;
    let (memory, samples) = (
        Memory::new(1 << 20),
        [0, 1].map(|n| Sample::new(1, n, &[9_000])),
    );
    writer.put(samples[0].put(&memory)).await.unwrap();
    let bounded = config::S3 {
        capacity: config::ByteSize(1),
        ..server.config()
    };
    let reader = S3::open(&bounded, reader()).await.unwrap();
    writer.put(samples[1].put(&memory)).await.unwrap();
    let before = files(&server.data());
    let objects = async || reader.usage().await.unwrap().objects;
    assert_eq!(objects().await, 1);
    assert_eq!(reader.live.look(HOUR, HOUR).await, Ok(true));
    assert_eq!(objects().await, 2, "and none goes");
    assert_eq!(files(&server.data()), before);
    // What another one counts is as good, until it is too old.
    let names = samples.each_ref().map(Sample::name);
    assert_eq!(writer.live.look(Duration::ZERO, HOUR).await, Ok(true));
    assert_eq!(writer.remove(Removal::Named(&names)).await, Ok(2));
    assert_eq!(reader.live.look(HOUR, HOUR).await, Ok(true));
    assert_eq!(objects().await, 2);
    assert_eq!(reader.live.look(Duration::ZERO, HOUR).await, Ok(true));
    assert_eq!(objects().await, 0);
    // Where nobody does, it lists no more often either.
    std::fs::remove_file(server.data().join(COUNTED)).unwrap();
    writer.put(samples[0].put(&memory)).await.unwrap();
    assert_eq!(reader.live.look(HOUR, HOUR).await, Ok(true));
    assert_eq!(objects().await, 0);
}
