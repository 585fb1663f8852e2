mod lossy;
mod room;

use super::*;
use crate::layers::{Options, layered};
use crate::testing::shelf::Shelf;
use crate::testing::suite::{Memory, Sample, bytes_of, untouched};
use kvcachepool_protocol::config::PACKING_BYTES;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::task::JoinSet;

struct Rig {
    shelf: Shelf,
    packing: Packing,
    plain: Packing,
    memory: Memory,
}

impl Rig {
    fn new() -> Self {
        Self::of(deadline::Options::default())
    }

    fn of(deadline: deadline::Options) -> Self {
        let shelf = Shelf::new(Kind::Disk, 0);
        let around = |codec| {
            let (inner, options) = (Arc::new(shelf.clone()), PackingOptions::new(codec));
            Packing::new(inner, options, deadline, Arc::default())
        };
        Self {
            packing: around(Codec::Lossless),
            plain: around(Codec::None),
            shelf,
            memory: Memory::new(256 << 20),
        }
    }

    async fn at_rest(&self, sample: &Sample) -> Object {
        self.shelf.head(&sample.name()).await.unwrap()
    }
}

const LENGTHS: &[u64] = &[300_000, 7_001, 65_536];

#[tokio::test]
async fn what_is_packed_takes_less_and_comes_back_as_it_was_through_every_sidecar() {
    let (rig, sample) = (Rig::new(), Sample::new(1, 0, LENGTHS));
    let put = rig.packing.put(sample.put(&rig.memory)).await;
    assert_eq!(put, Ok(Stored::New));
    let packed = rig.at_rest(&sample).await;
    assert_eq!(packed.codec, Codec::Lossless);
    assert_eq!(packed.name(), sample.name());
    let [put, none] = rig.packing.packed().amounts();
    assert_eq!(put.raw_bytes, LENGTHS.iter().sum::<u64>());
    assert!(put.stored_bytes * 4 < put.raw_bytes * 3, "{put:?}");
    assert_eq!(none.raw_bytes, 0);
    for tier in [&rig.packing, &rig.plain] {
        let head = tier.head(&sample.name()).await;
        assert_eq!(head, Ok(sample.object.clone()), "nobody learns of it");
        for get in [
            sample.get_all(&rig.memory),
            sample.get(&rig.memory, &[2, 0]),
        ] {
            assert_eq!(tier.get(get.clone()).await, Ok(sample.object.clone()));
            assert!(sample.lies_in(&get.places));
        }
    }
    let [_, get] = rig.plain.packed().amounts();
    assert_eq!(get.raw_bytes, 2 * LENGTHS[0] + LENGTHS[1] + 2 * LENGTHS[2]);
}

#[tokio::test]
async fn what_is_not_packed_is_read_as_it_is_and_what_would_not_shrink_is_not_packed() {
    let (rig, sample) = (Rig::new(), Sample::new(1, 0, LENGTHS));
    rig.plain.put(sample.put(&rig.memory)).await.unwrap();
    assert_eq!(rig.at_rest(&sample).await, sample.object);
    let get = sample.get_all(&rig.memory);
    assert!(rig.packing.get(get.clone()).await.is_ok());
    assert!(sample.lies_in(&get.places));
    let short = Sample::new(1, 1, &[3]);
    rig.packing.put(short.put(&rig.memory)).await.unwrap();
    assert_eq!(rig.at_rest(&short).await, short.object);
}

#[tokio::test]
async fn packed_bytes_that_changed_are_never_a_hit_and_are_taken_away() {
    let (rig, sample) = (Rig::new(), Sample::new(1, 0, &[20_000]));
    for tier in [&rig.packing, &rig.plain] {
        for byte in (0..9_000).step_by(331) {
            rig.packing.put(sample.put(&rig.memory)).await.unwrap();
            // No layer within compares anything here.
            assert!(rig.shelf.spoil(&sample.name(), 0, byte));
            let get = sample.get_all(&rig.memory);
            let error = tier.get(get.clone()).await.unwrap_err();
            assert_eq!(error.cause, Cause::Corrupt, "byte {byte}: {error}");
            assert!(untouched(&get.places[0].span), "{byte}");
            let there = rig.shelf.lookup(&[sample.name()]).await;
            assert_eq!(there, Ok(vec![false]));
        }
        assert_eq!(tier.corrupt.load(Relaxed), 28);
    }
}

#[tokio::test]
async fn a_section_that_claims_more_than_can_be_is_refused_before_memory_is_taken_for_it() {
    let (rig, sample) = (Rig::new(), Sample::new(1, 0, &[20_000]));
    let body = vec![7; 64 << 10];
    let mut object = sample.object.clone();
    object.codec = Codec::Lossless;
    object.sections[0].stored_bytes = body.len() as u64;
    object.sections[0].stored_digest = digest(&body);
    let spans = vec![rig.memory.filled(&body)];
    rig.shelf.put(Put { object, spans }).await.unwrap();
    let error = rig.packing.get(sample.get_all(&rig.memory)).await;
    let error = error.unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt);
    assert!(error.detail.contains("longer"), "{error}");
}

#[tokio::test]
async fn a_place_of_another_length_is_refused_and_what_changed_in_memory_is_not_written() {
    let (rig, sample) = (Rig::new(), Sample::new(1, 0, LENGTHS));
    rig.packing.put(sample.put(&rig.memory)).await.unwrap();
    let mut get = sample.get_all(&rig.memory);
    get.places[1].span = rig.memory.span(LENGTHS[1] - 1);
    for tier in [&rig.packing, &rig.plain] {
        let error = tier.get(get.clone()).await.unwrap_err();
        assert_eq!(error.cause, Cause::Shape, "{error}");
        assert!(get.places.iter().all(|place| untouched(&place.span)));
    }
    let other = Sample::new(1, 1, LENGTHS);
    let put = other.put(&rig.memory);
    let byte = bytes_of(&put.spans[1])[3];
    put.spans[1].write(3, &[!byte]);
    let error = rig.packing.put(put).await.unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt);
    let there = rig.shelf.lookup(&[other.name()]).await;
    assert_eq!(there, Ok(vec![false]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_wait_for_room_and_all_end() {
    // However slow the machine is.
    let rig = Arc::new(Rig::of(deadline::Options {
        transfer: Duration::from_secs(600),
        ..deadline::Options::default()
    }));
    let mut operations = JoinSet::new();
    for number in 0..24 {
        let rig = rig.clone();
        operations.spawn(async move {
            // One of these takes most of the room that there is; every fifth is dropped while it waits or works.
            let (memory, sample) = (Memory::new(96 << 20), Sample::new(1, number, &[24 << 20]));
            let put = rig.packing.put(sample.put(&memory));
            if number % 5 == 0 {
                let _ = tokio::time::timeout(Duration::from_millis(30), put).await;
                return;
            }
            put.await.unwrap();
            let get = sample.get_all(&memory);
            rig.packing.get(get.clone()).await.unwrap();
            assert!(sample.lies_in(&get.places));
        });
    }
    operations.join_all().await;
}

#[tokio::test]
async fn what_there_is_no_room_for_is_not_packed_and_packed_by_others_not_read() {
    let rig = Rig::new();
    let huge = Sample::new(1, 0, &[PACKING_BYTES / 3 + (1 << 20)]);
    let memory = Memory::new(512 << 20);
    rig.packing.put(huge.put(&memory)).await.unwrap();
    assert_eq!(rig.at_rest(&huge).await, huge.object);
    // Who packs nothing has less room.
    let large = Sample::new(1, 1, &[PACKING_BYTES / 3 - (1 << 20)]);
    rig.packing.put(large.put(&memory)).await.unwrap();
    assert_eq!(rig.at_rest(&large).await.codec, Codec::Lossless);
    let get = large.get_all(&memory);
    let error = rig.plain.get(get.clone()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Shape);
    assert!(error.detail.contains("write.codec"), "{error}");
    assert!(rig.packing.get(get.clone()).await.is_ok());
    assert!(large.lies_in(&get.places));
}

#[tokio::test]
async fn the_layers_within_count_what_the_tier_has() {
    let shelf = Shelf::new(Kind::Disk, 0);
    let options = Options {
        packing: PackingOptions::new(Codec::Lossless),
        ..Options::default()
    };
    let stack = layered(Arc::new(shelf.clone()), &options);
    let (memory, sample) = (Memory::new(1 << 20), Sample::new(1, 0, LENGTHS));
    stack.tier.put(sample.put(&memory)).await.unwrap();
    assert!(shelf.spoil(&sample.name(), 0, 100));
    let error = stack.tier.get(sample.get_all(&memory)).await.unwrap_err();
    assert_eq!(error.cause, Cause::Corrupt);
    assert_eq!(
        stack.guarded.corrupt(),
        1,
        "by the digest of what is stored"
    );
    let [put, get] = stack.packed.amounts();
    assert!(put.raw_bytes > put.stored_bytes && put.stored_bytes > 0);
    assert_eq!(get.raw_bytes, 0);
}
