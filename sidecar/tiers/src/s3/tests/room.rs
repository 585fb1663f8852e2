//! What the bucket holds, and what goes when it is too much or too old.

use super::Server;
use super::bucket::open;
use super::errors::stored;
use crate::Tier;
use crate::census::Shared;
use crate::directory::{Directory, Marks as _};
use crate::redis::Marks;
use crate::s3::{Options, S3};
use crate::testing::faulty::{Asked, Faulty, Reply, until, whole};
use crate::testing::redis_server;
use crate::testing::store::Store;
use crate::testing::suite::{Memory, Sample};
use crate::{Writes, census};
use kvcachepool_protocol::config;
use kvcachepool_protocol::object::ObjectName;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Barrier;

/// A tier that lists at every chance.
async fn watchful(config: &config::S3) -> S3 {
    let census = census::Options {
        bounded_every: Duration::from_millis(50),
        pause: Duration::from_millis(10),
        ..census::Options::default()
    };
    let options = Options {
        census: Some(census),
        known_for: Duration::ZERO,
        ..Options::default()
    };
    S3::open(config, options).await.unwrap()
}

async fn waited(what: &str, tier: &S3, there: impl Fn(&[bool]) -> bool, names: &[ObjectName]) {
    for _ in 0..2_000 {
        let answers: Vec<bool> = {
            let mut answers = Vec::new();
            for name in names {
                answers.extend(tier.lookup(std::slice::from_ref(name)).await.unwrap());
            }
            answers
        };
        if there(&answers) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("timed out waiting for {what}");
}

#[tokio::test]
async fn over_its_capacity_the_oldest_objects_go_and_not_what_is_read_here() {
    let server = Server::start();
    let samples: Vec<_> = (0..8).map(|n| Sample::new(1, n, &[100_000])).collect();
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    let each = samples[0].object.total_bytes();
    let memory = Memory::new(16 << 20);
    let writer = open(&server.config()).await;
    for (age, sample) in samples.iter().enumerate() {
        writer.put(sample.put(&memory)).await.unwrap();
        // The last is the youngest; the server tells ages by the files'.
        let file = server.data().join(sample.name().s3(""));
        let at = std::time::SystemTime::now() - Duration::from_secs(1_000 - 10 * age as u64);
        std::fs::File::open(file).unwrap().set_modified(at).unwrap();
    }
    let config = config::S3 {
        capacity: config::ByteSize(8 * each - 1),
        evict_at_percent: 100,
        evict_to_percent: 60,
        ..server.config()
    };
    // Held before anything is listed: number 1 is the second oldest.
    let tier = S3::open(
        &config,
        Options {
            census: None,
            known_for: Duration::ZERO,
            ..Options::default()
        },
    )
    .await
    .unwrap();
    let held = tier.live.census.hold(&names[1]);
    tier.live.pass().await.unwrap();
    let there =
        |numbers: &'static [usize]| move |a: &[bool]| (0..8).all(|n| a[n] == numbers.contains(&n));
    // To 60 % of 8 the four oldest have to go; one of them is read.
    waited("the oldest to go", &tier, there(&[1, 4, 5, 6, 7]), &names).await;
    assert_eq!(tier.usage().await.unwrap().bytes, 5 * each);
    drop(held);
    tier.live.pass().await.unwrap();
    waited("no more to go", &tier, there(&[1, 4, 5, 6, 7]), &names).await;
}

#[tokio::test]
async fn what_a_get_reads_stays_while_all_else_goes_and_goes_when_it_was_read() {
    let (sample, bytes) = stored();
    let key = sample.name().s3("");
    let (store, between) = (Arc::<Store>::default(), Arc::new(Barrier::new(2)));
    let (holds, pause, slow) = (store.clone(), between.clone(), key.clone());
    let server = Faulty::start(move |asked| match asked.method.as_str() {
        "GET" if asked.target.contains(&slow) => {
            let mut first = whole(asked, &bytes, "x-any: 1", b"");
            let rest = first.split_off(first.len() / 2);
            Reply::Twice(first, pause.clone(), rest)
        }
        _ => holds.answer(asked),
    })
    .await;
    let config = config::S3 {
        capacity: config::ByteSize(1),
        ..server.config()
    };
    let options = Options {
        census: None,
        ..Options::default()
    };
    let tier = Arc::new(S3::open(&config, options).await.unwrap());
    let memory = Memory::new(1 << 20);
    let others = (1..4).map(|n| Sample::new(1, n, &[9_000]));
    for sample in others.chain([sample.clone()]) {
        tier.put(sample.put(&memory)).await.unwrap();
    }
    let get = sample.get_all(&memory);
    let (reads, wanted) = (tier.clone(), get.clone());
    let got = tokio::spawn(async move { reads.get(wanted).await });
    let reads_it = |a: &Asked| a.method == "GET" && a.target.contains(&key);
    until("the get", || server.asked().iter().any(reads_it)).await;
    tier.live.pass().await.unwrap();
    assert_eq!(store.objects(), [key.as_str()]);
    between.wait().await;
    between.wait().await;
    assert_eq!(got.await.unwrap(), Ok(sample.object.clone()));
    assert!(sample.lies_in(&get.places));
    tier.live.pass().await.unwrap();
    assert_eq!(store.objects(), Vec::<String>::new());
}

#[tokio::test]
async fn what_goes_to_make_room_is_no_more_marked_and_what_stays_is() {
    let (server, redis) = (Server::start(), redis_server::Server::start(&[]));
    let config = config::S3 {
        capacity: config::ByteSize(250_000),
        ..server.config()
    };
    let marks = Arc::new(Marks::new(
        redis_server::open(&[redis.unix()]),
        &S3::place(&config),
    ));
    let options = Options {
        census: None,
        marks: Some(marks.clone()),
        ..Options::default()
    };
    let bucket = Arc::new(S3::open(&config, options).await.unwrap());
    let tier = Directory::new(bucket.clone(), marks.clone(), Writes::default());
    let samples: Vec<_> = (0..4).map(|n| Sample::new(1, n, &[100_000])).collect();
    let names: Vec<_> = samples.iter().map(Sample::name).collect();
    let memory = Memory::new(16 << 20);
    for sample in &samples {
        tier.put(sample.put(&memory)).await.unwrap();
    }
    marks.mark(&names).await.unwrap();
    bucket.live.pass().await.unwrap();
    let mut there = Vec::new();
    for name in &names {
        there.extend(bucket.lookup(std::slice::from_ref(name)).await.unwrap());
    }
    assert!(there.contains(&true) && there.contains(&false), "{there:?}");
    assert_eq!(marks.marked(&names).await, Ok(there));
}

#[tokio::test]
async fn what_is_put_over_the_capacity_makes_room_by_itself() {
    let server = Server::start();
    let sample = |n| Sample::new(1, n, &[100_000]);
    let each = sample(0).object.total_bytes();
    let config = config::S3 {
        capacity: config::ByteSize(4 * each),
        ..server.config()
    };
    let tier = watchful(&config).await;
    let memory = Memory::new(64 << 20);
    for n in 0..20 {
        tier.put(sample(n).put(&memory)).await.unwrap();
    }
    let names: Vec<_> = (0..20).map(|n| sample(n).name()).collect();
    let few = |a: &[bool]| a.iter().filter(|there| **there).count() <= 3;
    waited("room", &tier, few, &names).await;
}

#[tokio::test]
async fn what_was_written_longer_ago_than_it_may_be_kept_goes() {
    let server = Server::start();
    let (old, young) = (Sample::new(1, 0, &[9]), Sample::new(1, 1, &[9]));
    let memory = Memory::new(1 << 20);
    let config = config::S3 {
        expire_after: config::Duration::from_ms(3_600_000),
        ..server.config()
    };
    let tier = watchful(&config).await;
    for sample in [&old, &young] {
        tier.put(sample.put(&memory)).await.unwrap();
    }
    let at = std::time::SystemTime::now() - Duration::from_secs(7_200);
    let file = server.data().join(old.name().s3(""));
    std::fs::File::open(file).unwrap().set_modified(at).unwrap();
    let names = [old.name(), young.name()];
    waited("the old one to go", &tier, |a| a == [false, true], &names).await;
}

#[tokio::test]
async fn what_others_put_is_counted_when_the_bucket_is_listed() {
    let server = Server::start();
    let (mine, other) = (open(&server.config()).await, open(&server.config()).await);
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[9_000]));
    other.put(sample.put(&memory)).await.unwrap();
    assert_eq!(mine.usage().await.unwrap().objects, 0);
    mine.live.pass().await.unwrap();
    let usage = mine.usage().await.unwrap();
    assert_eq!(
        (usage.objects, usage.bytes),
        (1, sample.object.total_bytes())
    );
}
