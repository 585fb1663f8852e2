//! Room to pack and unpack: who waits for it, and for how long.

use super::*;
use crate::configured;
use futures::FutureExt;
use kvcachepool_protocol::config::{Config, UNPACKING_BYTES};
use std::time::Duration;
use tokio::time::Instant;

const MI: u64 = 1 << 20;

/// The rooms of three tiers of a sidecar that packs nothing.
fn three() -> [Room; 3] {
    let mut config = Config::default();
    config.disk.path = Some("/no-such-folder".into());
    config.redis.urls = vec!["redis://127.0.0.1".into()];
    config.s3.bucket = "kv-cache".into();
    let rooms = configured(&config).into_iter();
    let rooms: Vec<_> = rooms.map(|of| of.layers.packing.room()).collect();
    rooms.try_into().unwrap()
}

/// As much as is to be had at once, so many MiB at a time.
fn all(room: &Room, mib: u64) -> Vec<Hold> {
    let take = || room.take(mib * MI).now_or_never().flatten();
    std::iter::from_fn(take).collect()
}

#[test]
fn a_tier_that_is_slow_leaves_the_others_their_shares() {
    let [slow, one, other] = three();
    let share = (UNPACKING_BYTES / MI / 3) as usize;
    let held = all(&slow, 1);
    assert_eq!(held.len(), share);
    let mut more = Box::pin(slow.take(MI));
    assert!((&mut more).now_or_never().is_none());
    let others = [&one, &other].map(|room| all(room, 1));
    assert_eq!(others.map(|held| held.len()), [share; 2]);
    drop(held);
    assert!(more.now_or_never().is_some());
}

#[test]
fn what_needs_more_than_a_share_gets_it_where_its_tier_has_nothing_else_and_others_have_their_turns()
 {
    let [slow, other, _] = three();
    let small = slow.take(MI).now_or_never();
    let mut large = Box::pin(slow.take(75 * MI));
    assert!((&mut large).now_or_never().is_none());
    drop(small);
    let large = large.now_or_never().flatten();
    assert!(large.is_some());
    let (mut next, mut others) = (Box::pin(slow.take(75 * MI)), Box::pin(other.take(10 * MI)));
    assert!((&mut next).now_or_never().is_none());
    assert!((&mut others).now_or_never().is_none());
    drop(large);
    assert!((&mut next).now_or_never().is_none());
    let others = others.now_or_never().flatten();
    assert!(others.is_some());
    drop(others);
    assert!(next.now_or_never().flatten().is_some());
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_room_longer_than_an_operation_may_take() {
    let (rig, sample) = (Rig::new(), Sample::new(1, 0, LENGTHS));
    rig.packing.put(sample.put(&rig.memory)).await.unwrap();
    let sections = rig.at_rest(&sample).await.sections;
    let sum = |bytes: fn(&Section) -> u64| sections.iter().map(bytes).sum::<u64>();
    let (stored, raw) = (sum(|s| s.stored_bytes), sum(|s| s.raw_bytes));
    let get = sample.get_all(&rig.memory);
    for (tier, room) in [(&rig.packing, PACKING_BYTES), (&rig.plain, UNPACKING_BYTES)] {
        let held = tier.room.take(room).await;
        assert!(held.is_some());
        for (op, moved) in [(Op::Get, stored), (Op::Put, raw)] {
            let began = Instant::now();
            let ends = async {
                match op {
                    Op::Put => tier.put(sample.put(&rig.memory)).await.map(drop),
                    _ => tier.get(get.clone()).await.map(drop),
                }
            };
            let ended = tokio::time::timeout(Duration::from_secs(600), ends).await;
            if op == Op::Put && tier.codec == Codec::None {
                assert_eq!(ended, Ok(Ok(())), "it needs none");
                continue;
            }
            let error = ended.expect("it ended").unwrap_err();
            assert_eq!(error.cause, Cause::Busy, "{error}");
            assert!(error.detail.contains("room"), "{error}");
            assert_eq!(error.object, Some(sample.name().s3("")));
            let longest = tier.deadline.longest(op, moved, 1);
            let late = began.elapsed().checked_sub(longest);
            assert!(late.is_some_and(|late| late < Duration::from_millis(5)));
        }
        drop(held);
        tier.get(get.clone()).await.unwrap();
        assert!(sample.lies_in(&get.places));
    }
}
