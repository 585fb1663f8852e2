//! What the folder holds, and what goes when it is too much or too old.

use super::{Rig, age, quiet};
use crate::census::{Shared, Sum, Turn};
use crate::filesystem::{FileSystem, Options};
use crate::testing::suite::Sample;
use crate::{Tier, Writes, sweep_all};
use kvcachepool_protocol::config::{self, ByteSize};
use std::time::{Duration, SystemTime};

const HOUR: Duration = Duration::from_secs(3_600);

#[tokio::test]
async fn the_oldest_objects_go_when_there_are_too_many() {
    let rig = Rig::new();
    drop(rig.open().await);
    let samples: Vec<_> = (0..10).map(|n| Sample::new(1, n, &[100_000])).collect();
    let one = samples[0].object.total_bytes();
    let config = config::FileSystem {
        capacity: ByteSize(10 * one),
        evict_at_percent: 80,
        evict_to_percent: 50,
        ..rig.config()
    };
    let tier = FileSystem::open(&config, quiet()).await.unwrap();
    for (minutes, sample) in (0u64..).zip(&samples) {
        rig.put(&tier, sample).await;
        age(&rig.file(sample), HOUR - Duration::from_secs(60 * minutes));
    }
    assert_eq!(tier.usage().await.unwrap().capacity_bytes, 10 * one);
    tier.live.pass().await.unwrap();
    let left = tier.usage().await.unwrap();
    assert_eq!((left.objects, left.bytes), (5, 5 * one));
    for (number, sample) in samples.iter().enumerate() {
        assert_eq!(rig.file(sample).exists(), number >= 5, "{number}");
    }
}

#[tokio::test]
async fn objects_expire_by_the_time_of_their_file() {
    let rig = Rig::new();
    drop(rig.open().await);
    let config = config::FileSystem {
        expire_after: config::Duration::from_ms(3_600_000),
        ..rig.config()
    };
    let tier = FileSystem::open(&config, quiet()).await.unwrap();
    let (old, young) = (Sample::new(1, 0, &[3_000]), Sample::new(1, 1, &[3_000]));
    for sample in [&old, &young] {
        rig.put(&tier, sample).await;
    }
    age(&rig.file(&old), HOUR + Duration::from_secs(60));
    age(&rig.file(&young), HOUR - Duration::from_secs(60));
    tier.live.pass().await.unwrap();
    assert!(!rig.file(&old).exists() && rig.file(&young).exists());
    assert_eq!(tier.usage().await.unwrap().objects, 1);
}

#[tokio::test]
async fn one_of_all_sidecars_lists_and_the_others_take_over_what_it_counted() {
    let rig = Rig::new();
    let (one, other) = (rig.open().await, rig.open().await);
    let counted = Sum {
        objects: 7,
        bytes: 7_000,
    };
    assert_eq!(one.live.turn(HOUR).await, Ok(Turn::Mine));
    assert_eq!(other.live.turn(HOUR).await, Ok(Turn::Counting));
    one.live.publish(counted).await.unwrap();
    assert_eq!(other.live.turn(HOUR).await, Ok(Turn::Counted(counted)));
    assert_eq!(other.live.look(HOUR, HOUR).await, Ok(true));
    assert_eq!(other.usage().await.unwrap().objects, 7);
    // A count that is too old is not waited for.
    age(&rig.path().join("counted"), 2 * HOUR);
    assert_eq!(other.live.turn(HOUR).await, Ok(Turn::Mine));
    assert_eq!(one.live.turn(HOUR).await, Ok(Turn::Counted(counted)));
    std::fs::write(rig.path().join("counted"), "a web page").unwrap();
    assert_eq!(one.live.turn(HOUR).await, Ok(Turn::Counting));
    // One of a node whose clock was wrong keeps nobody from it.
    let marker = std::fs::File::options()
        .write(true)
        .open(rig.path().join("counted"));
    let tomorrow = SystemTime::now() + 24 * HOUR;
    marker.unwrap().set_modified(tomorrow).unwrap();
    assert_eq!(one.live.turn(HOUR).await, Ok(Turn::Mine));
    assert_eq!(other.live.turn(HOUR).await, Ok(Turn::Counting));
}

#[tokio::test]
async fn what_one_sidecar_listed_is_known_to_another_that_may_not_write() {
    let rig = Rig::new();
    let one = rig.open().await;
    let options = Options {
        writes: Writes::new(false),
        ..quiet()
    };
    let reader = FileSystem::open(&rig.config(), options).await.unwrap();
    let sample = Sample::new(1, 0, &[9_000]);
    rig.put(&one, &sample).await;
    assert_eq!(one.live.look(Duration::ZERO, HOUR).await, Ok(true));
    assert_eq!(reader.usage().await.unwrap().objects, 0);
    assert_eq!(reader.live.look(HOUR, HOUR).await, Ok(true));
    let usage = reader.usage().await.unwrap();
    let bytes = sample.object.total_bytes();
    assert_eq!((usage.objects, usage.bytes), (1, bytes));
}

#[tokio::test]
async fn a_sweep_removes_everything_and_every_page_is_seen() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let samples: Vec<_> = (0..2_100).map(|n| Sample::new(1, n, &[10])).collect();
    for sample in &samples {
        rig.put(&tier, sample).await;
    }
    let tier: &dyn Tier = &tier;
    let (swept, ended) = sweep_all(tier, |_| true).await.unwrap();
    assert_eq!((swept.objects, swept.foreign, ended), (2_100, 0, true));
    assert_eq!(tier.usage().await.unwrap().objects, 0);
}
