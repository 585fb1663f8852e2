use super::*;
use crate::layers::scripted::{Scripted, unguarded};
use crate::layers::{Guarded, Op};
use crate::testing::shelf::Shelf;
use crate::testing::suite::{Memory, Sample, bytes_of};
use crate::{Kind, Stored};
use kvcachepool_protocol::config::UNPACKING_BYTES;
use std::time::Duration;

fn tier(inner: Arc<dyn Tier>) -> Guarded {
    Guarded::new(inner, &unguarded())
}

struct Rig {
    shelf: Shelf,
    tier: Guarded,
    memory: Memory,
}

impl Rig {
    fn new() -> Self {
        let shelf = Shelf::new(Kind::Disk, 0);
        Self {
            tier: tier(Arc::new(shelf.clone())),
            shelf,
            memory: Memory::new(64 << 20),
        }
    }

    async fn holds(&self, sample: &Sample) -> bool {
        self.shelf.lookup(&[sample.name()]).await.unwrap()[0]
    }
}

/// Below and above what is hashed on the spot.
const LENGTHS: [&[u64]; 2] = [&[5_000, 7_001], &[3_000_000, 5]];

#[tokio::test]
async fn one_changed_byte_at_rest_is_found_named_and_removed() {
    for lengths in LENGTHS {
        let rig = Rig::new();
        let sample = Sample::new(1, 0, lengths);
        rig.tier.put(sample.put(&rig.memory)).await.unwrap();
        let get = sample.get_all(&rig.memory);
        assert_eq!(rig.tier.get(get.clone()).await, Ok(sample.object.clone()));
        assert!(sample.lies_in(&get.places));
        let last = lengths[1] as usize - 1;
        assert!(rig.shelf.spoil(&sample.name(), 1, last));
        let error = rig.tier.get(get.clone()).await.unwrap_err();
        assert_eq!((error.tier, error.cause), (Kind::Disk, Cause::Corrupt));
        assert_eq!(error.object, Some(sample.name().s3("")));
        assert!(error.detail.contains("0/1"), "{error}");
        assert!(!rig.holds(&sample).await);
        let again = rig.tier.get(get).await.unwrap_err();
        assert_eq!(again.cause, Cause::Missing);
        assert_eq!(rig.tier.corrupt(), 1);
        let stored = rig.tier.put(sample.put(&rig.memory)).await;
        assert_eq!(stored, Ok(Stored::New));
    }
}

#[tokio::test]
async fn sections_that_nobody_asked_for_are_not_looked_at() {
    let rig = Rig::new();
    let sample = Sample::new(1, 0, LENGTHS[0]);
    rig.tier.put(sample.put(&rig.memory)).await.unwrap();
    assert!(rig.shelf.spoil(&sample.name(), 1, 0));
    assert!(rig.tier.get(sample.get(&rig.memory, &[0])).await.is_ok());
    assert!(rig.holds(&sample).await);
}

#[tokio::test]
async fn what_changed_in_memory_since_its_head_was_made_is_not_written() {
    for lengths in LENGTHS {
        let rig = Rig::new();
        let sample = Sample::new(1, 0, lengths);
        let put = sample.put(&rig.memory);
        let byte = bytes_of(&put.spans[1])[3];
        put.spans[1].write(3, &[!byte]);
        let error = rig.tier.put(put).await.unwrap_err();
        assert_eq!(error.cause, Cause::Corrupt);
        assert!(!rig.holds(&sample).await);
        assert_eq!(rig.tier.corrupt(), 0, "the tier is not to blame");
    }
}

#[tokio::test]
async fn a_head_of_another_object_is_foreign_and_stays_where_it_is() {
    let scripted = Scripted::new();
    let (tier, memory) = (tier(scripted.clone()), Memory::new(1 << 20));
    // The scripted tier answers with object 0, whatever it is asked for.
    let asked = Sample::new(1, 5, &[100]);
    let error = tier.get(asked.get_all(&memory)).await.unwrap_err();
    assert_eq!(error.cause, Cause::Foreign);
    let error = tier.head(&asked.name()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Foreign);
    assert_eq!(scripted.calls().len(), 2, "nothing was removed");
}

#[tokio::test]
async fn what_the_tier_itself_calls_corrupt_is_removed_once() {
    let scripted = Scripted::new();
    let (tier, memory) = (tier(scripted.clone()), Memory::new(1 << 20));
    scripted.fail(Cause::Corrupt);
    scripted.fail(Cause::Unreachable);
    let error = tier
        .get(Sample::new(1, 0, &[100]).get_all(&memory))
        .await
        .unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt, "not that of the removal");
    assert_eq!(scripted.calls(), [Op::Get, Op::Remove]);
}

#[tokio::test]
async fn what_another_process_wrote_to_is_not_let_through_and_the_object_stays() {
    for lengths in LENGTHS {
        let (rig, room) = (Rig::new(), Room::new(UNPACKING_BYTES));
        let verify = Verify::new(Arc::new(rig.shelf.clone()), room.clone());
        let counted = || [verify.corrupt.load(Relaxed), verify.scribbled.load(Relaxed)];
        let sample = Sample::new(1, 0, lengths);
        rig.tier.put(sample.put(&rig.memory)).await.unwrap();
        // Another process writes to the arena when a get has filled it.
        let error = async || {
            let get = sample.get_all(&rig.memory);
            let (name, places) = (get.name.clone(), get.places.clone());
            let got = rig.shelf.get(get).await;
            assert!(places[0].span.write(0, b"not what was here"));
            verify.check_get(&name, &places, got).await.unwrap_err()
        };
        let scribbled = error().await;
        assert_eq!(scribbled.cause, Cause::Corrupt);
        assert!(
            scribbled.detail.contains("0/0") && scribbled.detail.contains("in the tier"),
            "{scribbled}"
        );
        assert_eq!(counted(), [0, 1]);
        assert!(rig.holds(&sample).await);
        // Where it cannot be told who is to blame nothing is removed.
        assert!(rig.shelf.spoil(&sample.name(), 0, 0));
        let held = room.take(UNPACKING_BYTES).await;
        let kept = error().await;
        assert_eq!(kept.cause, Cause::Corrupt);
        assert!(kept.detail.contains("no room"), "{kept}");
        assert!(rig.holds(&sample).await);
        drop(held);
        assert_eq!(error().await.cause, Cause::Corrupt);
        assert_eq!(counted(), [1, 1]);
        assert!(!rig.holds(&sample).await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_get_that_is_dropped_while_it_reads_again_gives_its_room_back() {
    let (scripted, room) = (Scripted::new(), Room::new(UNPACKING_BYTES));
    let verify = Verify::new(scripted.clone(), room.clone());
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, &[100]));
    let get = sample.get_all(&memory);
    scripted.hang();
    let got = Ok(sample.object.clone());
    let mut checked = Box::pin(verify.check_get(&get.name, &get.places, got));
    let early = tokio::time::timeout(Duration::from_millis(1), &mut checked).await;
    assert!(early.is_err());
    assert_eq!(scripted.calls(), [Op::Get]);
    assert!(room.try_take(UNPACKING_BYTES).is_none());
    drop(checked);
    assert!(room.try_take(UNPACKING_BYTES).is_some());
}

#[tokio::test]
async fn a_place_without_a_digest_is_wrong() {
    let scripted = Scripted::new();
    let (tier, memory) = (tier(scripted.clone()), Memory::new(1 << 20));
    let sample = Sample::new(1, 0, &[100, 200]);
    let mut get = sample.get_all(&memory);
    for (place, bytes) in get.places.iter().zip(&sample.bytes) {
        assert!(place.span.write(0, bytes));
    }
    assert_eq!(tier.get(get.clone()).await, Ok(sample.object));
    get.places[1].span.offset = get.places[1].span.arena.length();
    let error = tier.get(get).await.unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt);
    assert!(error.detail.contains("0/1"), "{error}");
}
