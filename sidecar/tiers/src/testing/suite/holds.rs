//! Tests of dropped operations: everything that may still access a span holds it, and nothing accesses it after the last hold is dropped.

use super::*;
use kvcachepool_tiers::{Place, Span};
use std::future::poll_fn;
use std::sync::Weak;
use std::task::Poll;
use std::time::Instant;

/// Longest time that a hold may outlive its operation.
const PATIENCE: Duration = Duration::from_secs(30);

/// Polls an operation at most `polls` times, then drops it. True: it had ended before.
async fn dropped_after<T>(polls: usize, operation: impl Future<Output = T>) -> bool {
    let mut operation = Box::pin(operation);
    for _ in 0..polls {
        let polled = poll_fn(|cx| Poll::Ready(operation.as_mut().poll(cx).is_ready())).await;
        if polled {
            return true;
        }
        tokio::task::yield_now().await;
    }
    false
}

/// Waits until the hold is dropped.
async fn nobody_holds(hold: &Weak<()>) {
    let began = Instant::now();
    while hold.strong_count() > 0 {
        assert!(began.elapsed() < PATIENCE, "a hold never ends");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub async fn a_get_that_is_dropped_writes_nothing_after_its_hold_is_gone(subject: &dyn Subject) {
    const MARK: u8 = 0x3C;
    let rig = Rig::new(subject).await;
    let sample = rig.sample(0, &[700_001, 300_000, 5]);
    rig.put(&sample).await;
    let mut reused: Vec<Span> = Vec::new();
    for round in 0..60 {
        let hold = Arc::new(());
        let watched = Arc::downgrade(&hold);
        let mut places = Vec::new();
        for section in &sample.object.sections {
            let span = rig.memory.held(section.stored_bytes, hold.clone());
            // The same bytes with another hold: the next user of the slot.
            let (arena, offset, length) = (span.arena.clone(), span.offset, span.length);
            reused.push(Span::new(arena, offset, length, Arc::new(())).unwrap());
            let (group, shard) = (section.group, section.shard);
            places.push(Place { group, shard, span });
        }
        drop(hold);
        let name = sample.name();
        dropped_after(round % 12, rig.tier().get(Get { name, places })).await;
        nobody_holds(&watched).await;
        for span in &reused[reused.len() - 3..] {
            assert!(span.write(0, &vec![MARK; span.length as usize]));
        }
    }
    // Earlier writes would arrive before these.
    for _ in 0..8 {
        rig.check(&sample).await;
    }
    for (index, span) in reused.iter().enumerate() {
        let marked = bytes_of(span).iter().all(|byte| *byte == MARK);
        assert!(marked, "round {} was written into", index / 3);
    }
}

pub async fn a_put_that_is_dropped_leaves_a_whole_object_or_none(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let samples: Vec<_> = (0..60)
        .map(|n| rig.sample(n, &[200_001, 90_000 + n]))
        .collect();
    for (round, sample) in samples.iter().enumerate() {
        let hold = Arc::new(());
        let watched = Arc::downgrade(&hold);
        let held = |bytes: &Vec<u8>| {
            let span = rig.memory.held(bytes.len() as u64, hold.clone());
            assert!(span.write(0, bytes));
            span
        };
        let spans: Vec<_> = sample.bytes.iter().map(held).collect();
        let reuse: Vec<_> = spans.iter().map(|s| (s.arena.clone(), s.offset)).collect();
        let object = sample.object.clone();
        drop(hold);
        dropped_after(round % 12, rig.tier().put(Put { object, spans })).await;
        nobody_holds(&watched).await;
        for ((arena, offset), bytes) in reuse.iter().zip(&sample.bytes) {
            assert!(arena.write(*offset, &vec![0xEE; bytes.len()]));
        }
    }
    for sample in &samples {
        let get = sample.get_all(&rig.memory);
        match rig.tier().get(get.clone()).await {
            Ok(_) => assert!(sample.lies_in(&get.places), "the slot was read too late"),
            Err(e) => assert_eq!(e.cause, Cause::Missing, "{e}"),
        }
        rig.put(sample).await;
        rig.check(sample).await;
    }
}

pub async fn an_operation_that_nobody_waits_for_holds_up_no_other(subject: &dyn Subject) {
    let rig = Rig::new(subject).await;
    let samples: Vec<_> = (0..8).map(|n| rig.sample(n, &[400_000, 10])).collect();
    for sample in &samples {
        rig.put(sample).await;
    }
    // Started, and never polled again while the others run.
    let mut stuck: Vec<_> = samples
        .iter()
        .map(|sample| rig.tier().get(sample.get_all(&rig.memory)))
        .collect();
    for get in &mut stuck {
        let _ = poll_fn(|cx| Poll::Ready(get.as_mut().poll(cx).is_ready())).await;
    }
    for sample in &samples {
        rig.check(sample).await;
    }
    rig.put(&rig.sample(100, &[5_000])).await;
    assert_eq!(rig.listed(100).await.len(), 9);
}
