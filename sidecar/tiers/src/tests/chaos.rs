//! What goes wrong on purpose does so as it says.

use crate::testing::chaos::{Chaos, Faults};
use crate::testing::shelf::Shelf;
use crate::testing::suite::{Memory, Sample, untouched};
use crate::{Cause, Kind, Removal, Span, Stored, Tier};
use std::sync::Arc;
use std::time::Duration;

async fn rig(faults: Faults) -> (Chaos, Memory, Sample) {
    let (memory, sample) = (Memory::new(8 << 20), Sample::new(1, 0, &[5_000, 300]));
    let shelf = Shelf::new(Kind::S3, 0);
    shelf.put(sample.put(&memory)).await.unwrap();
    (Chaos::new(Arc::new(shelf), faults), memory, sample)
}

#[tokio::test]
async fn a_seed_says_what_goes_wrong() {
    let outcomes = async |seed| {
        let half = Faults {
            before: 500,
            causes: Cause::ALL.to_vec(),
            ..Faults::none(seed)
        };
        let (chaos, _, sample) = rig(half).await;
        let mut outcomes = Vec::new();
        for _ in 0..50 {
            outcomes.push(chaos.head(&sample.name()).await.err());
        }
        outcomes
    };
    assert_eq!(outcomes(1).await, outcomes(1).await);
    assert_ne!(outcomes(1).await, outcomes(2).await);
}

#[tokio::test]
async fn wrong_and_missing_bytes_are_called_right() {
    let wrong = Faults {
        wrong: 1_000,
        ..Faults::none(1)
    };
    let truncated = Faults {
        truncated: 1_000,
        ..Faults::none(1)
    };
    for faults in [wrong, truncated] {
        let (chaos, memory, sample) = rig(faults).await;
        let get = sample.get_all(&memory);
        assert!(chaos.get(get.clone()).await.is_ok());
        assert!(!sample.lies_in(&get.places));
    }
}

#[tokio::test]
async fn a_put_may_keep_a_wrong_bit_and_leaves_the_arena_as_it_is() {
    let wrong = Faults {
        wrong: 1_000,
        ..Faults::none(1)
    };
    let (chaos, memory, _) = rig(wrong).await;
    let sample = Sample::new(1, 1, &[5_000, 300]);
    let put = sample.put(&memory);
    assert_eq!(chaos.put(put.clone()).await, Ok(Stored::New));
    let digests: Vec<_> = put.spans.iter().filter_map(Span::digest).collect();
    let expected: Vec<_> = sample
        .object
        .sections
        .iter()
        .map(|s| s.stored_digest)
        .collect();
    assert_eq!(digests, expected);
    chaos.heal();
    let get = sample.get_all(&memory);
    assert!(chaos.get(get.clone()).await.is_ok());
    assert!(!sample.lies_in(&get.places));
}

#[tokio::test(start_paused = true)]
async fn late_bytes_come_when_the_answer_was_given() {
    let late = Faults {
        late: 1_000,
        ..Faults::none(1)
    };
    let (chaos, memory, sample) = rig(late).await;
    let get = sample.get_all(&memory);
    let error = chaos.get(get.clone()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Timeout);
    assert!(get.places.iter().all(|place| untouched(&place.span)));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(sample.lies_in(&get.places));
}

#[tokio::test]
async fn an_error_after_the_fact_leaves_the_fact() {
    let after = Faults {
        after: 1_000,
        ..Faults::none(1)
    };
    let (chaos, memory, sample) = rig(after).await;
    assert!(
        chaos
            .remove(Removal::Named(&[sample.name()]))
            .await
            .is_err()
    );
    assert!(chaos.put(sample.put(&memory)).await.is_err());
    chaos.heal();
    assert_eq!(chaos.remove(Removal::Named(&[sample.name()])).await, Ok(1));
}
