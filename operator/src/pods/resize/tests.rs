//! Each step, and whole resizes against a model of the API server, the kubelet and the sidecar.

use super::*;
use crate::pods::tests::{running, sized as memory};
use kvcachepool_protocol::config::{ByteSize, Config};
use proptest::prelude::*;

const MI: u64 = 1 << 20;

fn footprint() -> Footprint {
    Config::default().footprint()
}

fn bytes(size: u64) -> Amounts {
    let bytes = footprint().container_bytes(size);
    Amounts {
        request: bytes,
        limit: bytes,
    }
}

fn lowered(size: u64) -> Option<Lowered> {
    Some(Lowered {
        to: bytes(size),
        refused: "".into(),
    })
}

#[test]
fn the_footprint_of_a_config_is_that_of_its_container() {
    let mut config = Config::default();
    config.memory.size = ByteSize(64 * MI);
    assert_eq!(
        config.container_memory_bytes(),
        footprint().container_bytes(64 * MI)
    );
}

#[test]
fn a_growing_container_has_its_memory_before_the_config_asks_for_it() {
    let mut pod = memory(64 * MI);
    assert_eq!(pod.next(64 * MI), ResizeStep::Done);
    assert_eq!(pod.next(128 * MI), ResizeStep::Raise(bytes(128 * MI)));
    pod.lowered = Some(pod.lowered_unless_used());
    pod.desired = bytes(128 * MI);
    assert_eq!(pod.next(128 * MI), ResizeStep::AwaitKubelet);
    pod.actual = Some(bytes(128 * MI));
    assert_eq!(pod.next(128 * MI), ResizeStep::SetSize);
    pod.lowered = pod.lowered_for(128 * MI);
    assert_eq!(pod.lowered, None);
    pod.size = 128 * MI;
    assert_eq!(pod.next(128 * MI), ResizeStep::Done);
}

#[test]
fn a_shrinking_sidecar_gives_back_its_memory_before_its_container_loses_it() {
    let mut pod = memory(128 * MI);
    assert_eq!(pod.next(64 * MI), ResizeStep::SetSize);
    pod.lowered = pod.lowered_for(64 * MI);
    assert_eq!(pod.lowered, lowered(64 * MI));
    pod.size = 64 * MI;
    assert_eq!(pod.next(64 * MI), ResizeStep::Lower(bytes(64 * MI)));
    pod.desired = bytes(64 * MI);
    assert_eq!(pod.next(64 * MI), ResizeStep::AwaitKubelet);
    pod.actual = Some(bytes(64 * MI));
    assert_eq!(pod.next(64 * MI), ResizeStep::Finish);
    pod.lowered = None;
    assert_eq!(pod.next(64 * MI), ResizeStep::Done);
}

#[test]
fn a_raised_container_is_lowered_again_if_the_pool_returns_to_its_size() {
    let mut pod = memory(64 * MI);
    pod.lowered = Some(pod.lowered_unless_used());
    pod.desired = bytes(1 << 40);
    pod.refused = Some("Infeasible: not enough capacity".into());
    assert_eq!(pod.next(1 << 40), ResizeStep::AwaitKubelet);
    assert_eq!(pod.next(128 * MI), ResizeStep::Raise(bytes(128 * MI)));
    assert_eq!(pod.next(64 * MI), ResizeStep::Lower(bytes(64 * MI)));
    pod.desired = bytes(64 * MI);
    assert_eq!(pod.next(64 * MI), ResizeStep::Finish);
    pod.lowered = None;
    assert_eq!(pod.next(64 * MI), ResizeStep::Done);
}

#[test]
fn a_limit_that_stays_is_not_tried_again_and_counts_for_the_next_growth() {
    let mut pod = memory(128 * MI);
    pod.size = 64 * MI;
    pod.lowered = lowered(64 * MI);
    if let Some(lowered) = &mut pod.lowered {
        lowered.refused = "limits cannot be decreased".into();
    }
    pod.desired.request = bytes(64 * MI).request;
    pod.actual = Some(pod.desired);
    assert_eq!(pod.next(64 * MI), ResizeStep::Done);
    let raised = Amounts {
        request: bytes(96 * MI).request,
        limit: bytes(128 * MI).limit,
    };
    assert_eq!(pod.next(96 * MI), ResizeStep::Raise(raised));
    assert_eq!(pod.lowered_for(96 * MI), lowered(96 * MI));
}

#[test]
fn a_container_that_is_about_to_be_lowered_is_raised_before_the_config_asks_for_more() {
    let mut pod = memory(128 * MI);
    pod.size = 64 * MI;
    pod.lowered = lowered(64 * MI);
    pod.desired = bytes(64 * MI);
    assert_eq!(pod.next(128 * MI), ResizeStep::Raise(bytes(128 * MI)));
}

#[test]
fn memory_that_a_removed_tier_still_uses_is_not_taken_away() {
    let mut pod = memory(128 * MI);
    let with_tier = |size| Amounts {
        request: bytes(size).request + 32 * MI,
        limit: bytes(size).limit + 32 * MI,
    };
    (pod.desired, pod.actual) = (with_tier(128 * MI), Some(with_tier(128 * MI)));
    assert_eq!(
        pod.lowered_for(64 * MI).map(|l| l.to),
        Some(with_tier(64 * MI))
    );
}

#[test]
fn a_kubelet_that_reports_no_resources_never_confirms_a_growth() {
    let mut pod = memory(128 * MI);
    pod.actual = None;
    assert_eq!(pod.next(256 * MI), ResizeStep::Raise(bytes(256 * MI)));
    pod.desired = bytes(256 * MI);
    assert_eq!(pod.next(256 * MI), ResizeStep::AwaitKubelet);
    assert_eq!(pod.next(64 * MI), ResizeStep::SetSize);
}

#[test]
fn running_and_refused_resizes_are_reported_with_an_example() {
    let with = |name: &str, memory: Memory| {
        let mut pod = running(name);
        pod.memory = Some(Box::new(memory));
        Arc::new(pod)
    };
    let mut deferred = memory(64 * MI);
    deferred.desired = bytes(128 * MI);
    deferred.refused = Some("Deferred: not enough memory".into());
    let mut stays = memory(128 * MI);
    stays.lowered = lowered(64 * MI);
    if let Some(lowered) = &mut stays.lowered {
        lowered.refused = "limits cannot be decreased".into();
    }
    let pods = [
        with("a", memory(64 * MI)),
        with("b", memory(128 * MI)),
        with("c", deferred),
        Arc::new(running("own-size")),
    ];
    let resizes = Resizes::of(&pods, 128 * MI);
    assert_eq!((resizes.running, &*resizes.example), (1, "a"));
    let why = resizes.refused.unwrap();
    assert!(
        why.contains("pod c") && why.contains("Deferred: not"),
        "{why}"
    );
    let why = Resizes::of(&[with("d", stays)], 128 * MI).refused.unwrap();
    assert!(
        why.contains("pod d") && why.contains("cannot be decreased"),
        "{why}"
    );
    assert_eq!(
        Resizes::of(&pods[1..2], 128 * MI),
        Resizes::default(),
        "unchanged"
    );
}

proptest! {
    /// Whatever sizes follow each other, and whenever the kubelet and the sidecar act: a container never has less than its sidecar may use,
    /// and the pod ends with exactly the memory of the last size.
    #[test]
    fn a_container_never_has_less_than_its_sidecar_uses(
        sizes in proptest::collection::vec(1..40u64, 1..6),
        turns in proptest::collection::vec((any::<bool>(), any::<bool>()), 40),
    ) {
        let mut pod = memory(64 * MI);
        let mut capacity = 64 * MI;
        let mut target = 64 * MI;
        let settle = [(true, true); 20];
        for (turn, (kubelet, sidecar)) in turns.into_iter().chain(settle).enumerate() {
            if turn < 40 && turn % 8 == 0 && let Some(size) = sizes.get(turn / 8) {
                target = size * 64 * MI;
            }
            match pod.next(target) {
                ResizeStep::Done | ResizeStep::AwaitKubelet => {}
                ResizeStep::Raise(to) => {
                    pod.lowered = Some(pod.lowered_unless_used());
                    pod.desired = to;
                }
                ResizeStep::SetSize => {
                    pod.lowered = pod.lowered_for(target);
                    pod.size = target;
                }
                ResizeStep::Lower(to) => if capacity <= target {
                    pod.desired = to;
                },
                ResizeStep::Finish => pod.lowered = None,
            }
            if kubelet {
                pod.actual = Some(pod.desired);
            }
            if sidecar && (pod.size < capacity || pod.actual.unwrap().covers(bytes(pod.size).limit)) {
                capacity = pod.size;
            }
            prop_assert!(pod.actual.unwrap().covers(bytes(capacity).limit), "turn {turn}: {pod:?} {capacity}");
        }
        prop_assert_eq!(pod.next(target), ResizeStep::Done);
        prop_assert_eq!((pod.size, capacity), (target, target));
        prop_assert_eq!((pod.desired, pod.actual), (bytes(target), Some(bytes(target))));
    }
}
