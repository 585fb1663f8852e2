//! Tests of one object: put, get, refusal, removal, and another put.

use super::*;
use kvcachepool_tiers::{Place, Removal, Stored};

/// Lengths that are no multiples of block sizes, and some that are.
const LENGTHS: &[&[u64]] = &[
    &[1],
    &[4096],
    &[4095, 4097],
    &[8192, 1, 12_288, 70_001],
    &[3_333_333, 1 << 20],
    &[(16 << 20) - 12_345],
];

pub async fn what_is_put_comes_back_whatever_its_length(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    for (number, lengths) in (0..).zip(LENGTHS) {
        let sample = rig.sample(number, lengths);
        let stored = rig.tier().put(sample.put(&rig.memory)).await;
        assert_eq!(stored, Ok(Stored::New), "{lengths:?}");
    }
    for (number, lengths) in (0..).zip(LENGTHS) {
        let sample = rig.sample(number, lengths);
        assert!(rig.has(&sample).await, "{lengths:?}");
        let head = rig.tier().head(&sample.name()).await;
        assert_eq!(head.as_ref(), Ok(&sample.object), "{lengths:?}");
        rig.check(&sample).await;
    }
}

pub async fn sections_that_are_not_wanted_are_left_where_they_are(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let sample = rig.sample(0, &[5_000, 4_096, 1, 300_007]);
    rig.put(&sample).await;
    for wanted in [&[0][..], &[1], &[2], &[3], &[1, 3], &[3, 0], &[]] {
        rig.check_some(&sample, wanted).await;
    }
}

pub async fn an_object_that_is_there_already_stays_as_it_is(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let first = rig.sample(0, &[6_000, 7_000]);
    rig.put(&first).await;
    // Another sidecar computed the same chunk: equal bytes, different metadata.
    let mut second = first.clone();
    second.object.created_unix_ms += 1_000;
    second.object.writer = [9; 16];
    assert_eq!(second.name(), first.name());
    let stored = rig.tier().put(second.put(&rig.memory)).await;
    assert_eq!(stored, Ok(Stored::Already));
    rig.check(&first).await;
    assert_eq!(rig.listed(10).await.len(), 1);
}

pub async fn what_was_never_put_is_missing(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let (there, not) = (rig.sample(0, &[5_000]), rig.sample(1, &[5_000]));
    rig.put(&there).await;
    let mut other_layout = there.clone();
    other_layout.object.layout.0[0] ^= 1;
    let mut other_model = there.clone();
    other_model.object.model.0[0] ^= 1;
    for absent in [&not, &other_layout, &other_model] {
        assert!(!rig.has(absent).await);
        let head = rig.tier().head(&absent.name()).await;
        assert_eq!(head.map_err(|e| e.cause), Err(Cause::Missing));
        let get = absent.get_all(&rig.memory);
        let span = get.places[0].span.clone();
        assert_eq!(rig.get_fails(get).await, Some(Cause::Missing));
        assert!(untouched(&span));
        assert_eq!(
            rig.tier().remove(Removal::Named(&[absent.name()])).await,
            Ok(0)
        );
    }
    rig.check(&there).await;
}

pub async fn a_place_of_another_length_or_section_is_refused_and_nothing_is_written(
    subject: &dyn Subject,
) {
    let rig = Rig::new(subject).await;
    let sample = rig.sample(0, &[5_000, 4_096]);
    rig.put(&sample).await;
    // The first place is valid each time, and must not be written either.
    for (group, shard, length) in [
        (0, 1, 4_095),
        (0, 1, 4_097),
        (0, 1, 8_192),
        (0, 1, 1),
        (0, 2, 4_096),
        (1, 0, 4_096),
    ] {
        let mut get = sample.get(&rig.memory, &[0]);
        get.places.push(Place {
            group,
            shard,
            span: rig.memory.span(length),
        });
        let spans: Vec<_> = get.places.iter().map(|place| place.span.clone()).collect();
        let cause = rig.get_fails(get).await;
        assert_eq!(cause, Some(Cause::Shape), "{group}/{shard} {length}");
        assert!(spans.iter().all(untouched), "{group}/{shard} {length}");
    }
    rig.check(&sample).await;
}

pub async fn a_put_whose_spans_are_not_its_sections_is_refused_and_nothing_is_visible(
    subject: &dyn Subject,
) {
    let rig = Rig::new(subject).await;
    let sample = rig.sample(0, &[5_000, 4_096]);
    let whole = sample.put(&rig.memory);
    let (first, second) = (whole.spans[0].clone(), whole.spans[1].clone());
    let longer = rig.memory.filled(&[1; 4_097]);
    let shorter = rig.memory.filled(&[1; 4_999]);
    for spans in [
        vec![],
        vec![first.clone()],
        vec![first.clone(), second.clone(), second.clone()],
        vec![second.clone(), first.clone()],
        vec![first, longer],
        vec![shorter, second],
    ] {
        let object = whole.object.clone();
        let cause = rig.put_fails(Put { object, spans }).await;
        assert_eq!(cause, Some(Cause::Shape));
        assert!(!rig.has(&sample).await);
    }
    assert!(rig.listed(10).await.is_empty());
    rig.put(&sample).await;
    rig.check(&sample).await;
}

pub async fn what_is_removed_is_gone_and_can_be_put_again(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let samples: Vec<_> = (0..4).map(|n| rig.sample(n, &[5_000, 9_000])).collect();
    for sample in &samples {
        rig.put(sample).await;
    }
    let gone = [samples[0].name(), samples[2].name()];
    assert_eq!(rig.tier().remove(Removal::Named(&gone)).await, Ok(2));
    assert_eq!(
        rig.tier().remove(Removal::Named(&gone)).await,
        Ok(0),
        "the second time"
    );
    let mixed = [samples[2].name(), samples[3].name()];
    assert_eq!(rig.tier().remove(Removal::Named(&mixed)).await, Ok(1));
    assert_eq!(rig.tier().remove(Removal::Named(&[])).await, Ok(0));
    for (sample, there) in samples.iter().zip([false, true, false, false]) {
        assert_eq!(rig.has(sample).await, there);
        if !there {
            let get = sample.get_all(&rig.memory);
            assert_eq!(rig.get_fails(get).await, Some(Cause::Missing));
        }
    }
    rig.check(&samples[1]).await;
    // Objects that reuse the freed room must not be mistaken for the removed ones.
    for number in 10..14 {
        rig.put(&rig.sample(number, &[5_000, 9_000])).await;
    }
    rig.put(&samples[0]).await;
    rig.check(&samples[0]).await;
    assert!(!rig.has(&samples[2]).await);
}

pub async fn what_another_wrote_since_it_was_read_is_removed_all_the_same(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let first = rig.sample(0, &[5_000, 9_000]);
    let mut second = first.clone();
    second.object.created_unix_ms += 1_000;
    second.object.writer = [9; 16];
    let name = [first.name()];
    rig.put(&first).await;
    rig.check(&first).await;
    assert_eq!(rig.tier().remove(Removal::Named(&name)).await, Ok(1));
    rig.put(&second).await;
    assert_eq!(rig.tier().remove(Removal::Named(&name)).await, Ok(1));
    assert!(!rig.has(&second).await);
    assert!(rig.listed(10).await.is_empty());
}

pub async fn what_a_listing_told_of_is_removed_and_nothing_else(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let samples: Vec<_> = (0..5).map(|n| rig.sample(n, &[5_000, 9_000])).collect();
    for sample in &samples {
        rig.put(sample).await;
    }
    rig.check(&samples[0]).await;
    let goes = [samples[0].name(), samples[3].name()];
    let mut listed = rig.listed(2).await;
    listed.retain(|listed| goes.contains(&listed.name));
    assert_eq!(rig.tier().remove(Removal::Listed(&listed)).await, Ok(2));
    assert_eq!(rig.tier().remove(Removal::Listed(&[])).await, Ok(0));
    for sample in &samples {
        assert_eq!(rig.has(sample).await, !goes.contains(&sample.name()));
    }
    assert_eq!(rig.listed(10).await.len(), 3);
    rig.put(&samples[3]).await;
    rig.check(&samples[3]).await;
}

pub async fn what_was_there_before_it_was_closed_is_there_after(subject: &dyn Subject) {
    let mut rig = Rig::new(subject).await;
    let samples: Vec<_> = (0..20)
        .map(|n| rig.sample(n, &[3_000 + n, 40_000]))
        .collect();
    for sample in &samples {
        rig.put(sample).await;
    }
    let gone: Vec<_> = samples[15..].iter().map(Sample::name).collect();
    assert_eq!(rig.tier().remove(Removal::Named(&gone)).await, Ok(5));
    let before = rig.tier().usage().await.unwrap();
    if !rig.again().await {
        return;
    }
    let after = rig.tier().usage().await.unwrap();
    let sums = (after.objects, after.capacity_bytes);
    assert_eq!(sums, (before.objects, before.capacity_bytes));
    assert!(after.bytes.abs_diff(before.bytes) <= rig.noise());
    for (number, sample) in samples.iter().enumerate() {
        assert_eq!(rig.has(sample).await, number < 15, "{number}");
    }
    for sample in &samples[..15] {
        rig.check(sample).await;
        let stored = rig.tier().put(sample.put(&rig.memory)).await;
        assert_eq!(stored, Ok(Stored::Already));
    }
    assert_eq!(rig.listed(100).await.len(), 15);
    rig.put(&samples[19]).await;
    rig.check(&samples[19]).await;
}
