//! Tests of many objects and operations: lookups, listings, sums, and all of them concurrently.

use super::*;
use kvcachepool_tiers::{Removal, Stored, Usage};
use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::task::JoinSet;

pub async fn a_lookup_answers_every_name_in_order(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let samples: Vec<_> = (0..600).map(|n| rig.sample(n, &[1_000])).collect();
    let each = rig.asks_each_name();
    let there = |n: usize| match each {
        true => n % 3 != 1 && !(300..330).contains(&n),
        false => n < 301,
    };
    for (number, sample) in samples.iter().enumerate() {
        if there(number) {
            rig.put(sample).await;
        }
    }
    let mut names: Vec<_> = samples.iter().map(Sample::name).collect();
    let expected: Vec<_> = (0..600).map(there).collect();
    assert_eq!(rig.tier().lookup(&names).await, Ok(expected.clone()));
    if each {
        names.reverse();
        let reversed: Vec<_> = expected.into_iter().rev().collect();
        assert_eq!(rig.tier().lookup(&names).await, Ok(reversed));
    }
    // A repeated name gets two answers, and no name gets none.
    let absent = samples[1 + 399 * usize::from(!each)].name();
    let twice = [samples[0].name(), absent, samples[0].name()];
    assert_eq!(rig.tier().lookup(&twice).await, Ok(vec![true, false, true]));
    assert_eq!(rig.tier().lookup(&[]).await, Ok(vec![]));
}

pub async fn a_listing_has_every_object_once_whatever_its_pages(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    assert!(rig.listed(3).await.is_empty());
    let samples: Vec<_> = (0..25).map(|n| rig.sample(n, &[2_000 + n])).collect();
    let since = unix_s();
    for sample in &samples {
        rig.put(sample).await;
    }
    let expected = BTreeSet::from_iter(samples.iter().map(|s| s.name().s3("")));
    for limit in [1, 7, 25, 1_000] {
        let listed = rig.listed(limit).await;
        assert_eq!(listed.len(), samples.len(), "in pages of {limit}");
        let names = BTreeSet::from_iter(listed.iter().map(|l| l.name.s3("")));
        assert_eq!(names, expected, "in pages of {limit}");
        for object in listed {
            assert!(object.bytes >= 2_000, "{object:?}");
            let age_s = unix_s().abs_diff(object.written_unix_s);
            // Clocks of servers differ a little.
            assert!(age_s <= unix_s() - since + 60, "{object:?}");
        }
    }
}

pub async fn usage_is_the_sum_of_what_is_held(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let empty = rig.tier().usage().await.unwrap();
    assert_eq!(empty.objects, 0);
    let samples: Vec<_> = (0..12)
        .map(|n| rig.sample(n, &[9_000 * (n + 1), 1]))
        .collect();
    for sample in &samples {
        rig.put(sample).await;
    }
    let full = rig.tier().usage().await.unwrap();
    let lengths = |samples: &[Sample]| -> u64 {
        let sections = samples.iter().flat_map(|s| &s.object.sections);
        rig.at_least(sections.map(|s| s.stored_bytes).sum())
    };
    // A tier that cannot count objects returns 0.
    assert!([0, 12].contains(&full.objects), "{full:?}");
    let grew = |from: Usage, to: Usage| (to.bytes + rig.noise()).saturating_sub(from.bytes);
    assert!(grew(empty, full) >= lengths(&samples), "{full:?}");
    assert_eq!(full.capacity_bytes, empty.capacity_bytes);
    let gone: Vec<_> = samples[4..].iter().map(Sample::name).collect();
    assert_eq!(rig.tier().remove(Removal::Named(&gone)).await, Ok(8));
    let left = rig.tier().usage().await.unwrap();
    assert!([0, 4].contains(&left.objects), "{left:?}");
    assert!(grew(left, full) >= lengths(&samples[4..]), "{left:?}");
    assert!(grew(empty, left) >= lengths(&samples[..4]), "{left:?}");
}

pub async fn sixty_four_puts_and_gets_run_at_once(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let samples: Vec<_> = (0..64)
        .map(|n| rig.sample(n, &[100_000 + n, 4_096, 33_333]))
        .collect();
    let mut puts = JoinSet::new();
    for sample in &samples {
        let (tier, put) = (rig.tier().clone(), sample.put(&rig.memory));
        puts.spawn(async move { tier.put(put).await });
    }
    while let Some(stored) = puts.join_next().await {
        assert_eq!(stored.unwrap(), Ok(Stored::New));
    }
    let mut gets = JoinSet::new();
    for sample in samples.iter().cloned() {
        let (tier, get) = (rig.tier().clone(), sample.get_all(&rig.memory));
        gets.spawn(async move {
            let head = tier.get(get.clone()).await;
            assert_eq!(head, Ok(sample.object.clone()));
            assert!(sample.lies_in(&get.places));
        });
    }
    while let Some(got) = gets.join_next().await {
        got.unwrap();
    }
    assert_eq!(rig.listed(100).await.len(), 64);
}

pub async fn puts_of_one_name_at_once_leave_one_whole_object(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    for round in 0..20 {
        let sample = rig.sample(round, &[60_000, 5_001]);
        let mut puts = JoinSet::new();
        for writer in 0..4 {
            let mut mine = sample.clone();
            mine.object.writer = [writer; 16];
            let (tier, put) = (rig.tier().clone(), mine.put(&rig.memory));
            puts.spawn(async move { tier.put(put).await });
        }
        let stored = puts.join_all().await;
        assert!(stored.iter().all(Result::is_ok), "{stored:?}");
        assert!(stored.contains(&Ok(Stored::New)), "{stored:?}");
        let get = sample.get_all(&rig.memory);
        let head = rig.tier().get(get.clone()).await.unwrap();
        assert!(head.writer[0] < 4 && head.name() == sample.name());
        assert!(sample.lies_in(&get.places));
    }
    assert_eq!(rig.listed(100).await.len(), 20);
}

pub async fn a_get_beside_puts_and_removes_is_right_or_missing(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let sample = rig.sample(0, &[90_001, 4_096]);
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let (tier, put) = (rig.tier().clone(), sample.put(&rig.memory));
        let name = sample.name();
        tasks.spawn(async move {
            for _ in 0..20 {
                tier.put(put.clone()).await.unwrap();
                tier.remove(Removal::Named(std::slice::from_ref(&name)))
                    .await
                    .unwrap();
            }
        });
        for _ in 0..20 {
            let (tier, get) = (rig.tier().clone(), sample.get_all(&rig.memory));
            let sample = sample.clone();
            tasks.spawn(async move {
                match tier.get(get.clone()).await {
                    Ok(_) => assert!(sample.lies_in(&get.places)),
                    Err(e) => assert_eq!(e.cause, Cause::Missing, "{e}"),
                }
            });
        }
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    assert!(!rig.has(&sample).await);
}

fn unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap().as_secs()
}
