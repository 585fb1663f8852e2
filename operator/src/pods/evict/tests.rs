//! The rules of evictions, one by one.

use super::*;
use crate::pods::pod::{Injection, Phase};
use crate::pods::tests::{at, pod as any, refused};

fn pod(name: &str, created: i64) -> Pod {
    Pod {
        created: at(created),
        ..any(name)
    }
}

fn injected(name: &str, created: i64, ready: bool) -> Pod {
    Pod {
        injection: Some(Injection::default()),
        ready,
        ..pod(name, created)
    }
}

fn starting(name: &str, created: i64) -> Pod {
    Pod {
        ready: false,
        ..pod(name, created)
    }
}

fn of(owner: &str, pod: Pod) -> Pod {
    let mut of = pod;
    of.owner.as_mut().unwrap().uid = owner.into();
    of
}

fn arcs(pods: &[Pod]) -> Vec<Arc<Pod>> {
    pods.iter().cloned().map(Arc::new).collect()
}

/// The next step for these pods, as the name of the pod to evict.
fn next(evictions: &mut Evictions, pods: &[Pod], second: i64) -> Option<String> {
    match evictions.next(&arcs(pods), at(0), at(second)) {
        EvictionStep::Wait => None,
        EvictionStep::Evict(pod) => Some(pod.name.to_string()),
    }
}

fn skipped(evictions: &Evictions, pods: &[Pod]) -> Vec<SkipReason> {
    let skipped = evictions.skipped(&arcs(pods), at(0));
    skipped.into_iter().map(|(_, why)| why).collect()
}

/// Evictions after `a` was evicted at second 5, with these pods.
fn begun(pods: &[Pod]) -> Evictions {
    let mut evictions = Evictions::default();
    assert_eq!(next(&mut evictions, pods, 5).as_deref(), Some("a"));
    evictions.record_eviction(&pods[0], &arcs(pods), at(5));
    evictions
}

#[test]
fn only_pods_younger_than_the_pool_without_an_annotation_are_missed() {
    let refused = refused("refused", "ContainerAmbiguous");
    let ended = Pod {
        phase: Phase::Succeeded,
        ..pod("ended", 5)
    };
    let pods = arcs(&[pod("old", -1), pod("young", 0), refused, ended]);
    let names: Vec<&str> = missed(&pods, at(0)).map(|p| &*p.name).collect();
    assert_eq!(names, ["young"]);
}

#[test]
fn one_pod_is_evicted_at_a_time_until_its_replacement_is_ready() {
    let (a, b) = (pod("a", 1), pod("b", 1));
    let mut evictions = begun(&[a.clone(), b.clone()]);
    let existing = [a, b.clone()];
    assert_eq!(next(&mut evictions, &existing, 6), None, "it still exists");
    assert_eq!(
        next(&mut evictions, &existing[1..], 7),
        None,
        "nothing took its place"
    );
    let not_ready = [b.clone(), injected("c", 8, false)];
    assert_eq!(next(&mut evictions, &not_ready, 9), None);
    let ready = [b, injected("c", 8, true)];
    assert_eq!(next(&mut evictions, &ready, 10).as_deref(), Some("b"));
}

#[test]
fn no_more_pods_of_a_workload_are_evicted_if_a_replacement_is_missed_too() {
    let mut evictions = begun(&[pod("a", 1), pod("b", 1)]);
    let pods = [pod("b", 1), pod("c", 5)];
    for second in [6, 700, 3 * 3600] {
        assert_eq!(next(&mut evictions, &pods, second), None);
        assert_eq!(skipped(&evictions, &pods), [SkipReason::Futile]);
    }
    let other = [pods.to_vec(), vec![of("other", pod("z", 1))]].concat();
    assert_eq!(next(&mut evictions, &other, 701).as_deref(), Some("z"));
    let later = 6 * 3600 + 10;
    assert_eq!(next(&mut evictions, &pods, later).as_deref(), Some("b"));
}

#[test]
fn a_single_replica_is_evicted_once_within_one_second() {
    let mut evictions = begun(&[pod("a", 1)]);
    let replacement = [pod("c", 5)];
    assert_eq!(next(&mut evictions, &replacement, 6), None);
    assert_eq!(next(&mut evictions, &replacement, 700), None);
    assert_eq!(skipped(&evictions, &replacement), [SkipReason::Futile]);
}

#[test]
fn no_other_pod_is_evicted_while_a_replacement_loads() {
    let mut evictions = begun(&[pod("a", 1), pod("b", 1)]);
    let loading = [
        pod("b", 1),
        injected("c", 8, false),
        of("other", pod("z", 1)),
    ];
    for second in [9, 605, 7000] {
        assert_eq!(next(&mut evictions, &loading, second), None, "{second}");
    }
    let ready = [pod("b", 1), injected("c", 8, true)];
    assert_eq!(next(&mut evictions, &ready, 7001).as_deref(), Some("b"));
}

#[test]
fn a_new_leader_waits_for_evictions_of_the_previous_one() {
    let on_its_way = [
        vec![pod("b", 1), injected("c", 8, false)],
        vec![pod("b", 1), starting("c", 8)],
        vec![
            pod("b", 1),
            Pod {
                deleting: true,
                ..pod("a", 1)
            },
        ],
    ];
    for pods in on_its_way {
        assert_eq!(next(&mut Evictions::default(), &pods, 20), None, "{pods:?}");
    }
    let broken_for_long = [pod("b", 1), starting("c", 8)];
    let evicted = next(&mut Evictions::default(), &broken_for_long, 8 + 3600);
    assert_eq!(evicted.as_deref(), Some("b"));
    let not_its_own = [pod("b", 1), of("other", starting("z", 8))];
    let later = next(&mut Evictions::default(), &not_its_own[..1], 20);
    assert_eq!(later.as_deref(), Some("b"));
}

#[test]
fn evictions_continue_with_other_workloads_ten_minutes_after_a_missing_replacement() {
    let mut evictions = begun(&[pod("a", 1), pod("b", 1)]);
    let pods = [pod("b", 1), of("other", pod("z", 1))];
    assert_eq!(next(&mut evictions, &pods, 604), None);
    assert_eq!(next(&mut evictions, &pods, 605).as_deref(), Some("z"));
    assert_eq!(skipped(&evictions, &pods), [SkipReason::NotReplaced]);
}

#[test]
fn a_pod_that_nothing_recreates_is_never_evicted() {
    let mut of_a_job = pod("job", 1);
    let owner = of_a_job.owner.as_mut().unwrap();
    (owner.api_version, owner.kind) = ("batch/v1".into(), "Job".into());
    let bare = Pod {
        owner: None,
        ..pod("bare", 1)
    };
    let pods = [of_a_job, bare];
    let mut evictions = Evictions::default();
    assert_eq!(next(&mut evictions, &pods, 5), None);
    assert_eq!(skipped(&evictions, &pods), [SkipReason::Kind]);
}

#[test]
fn skipped_workloads_do_not_block_others() {
    let mut evictions = Evictions::default();
    let pods = [pod("a", 1), of("other", pod("z", 1))];
    let why = SkipReason::Objection("it has no label".into());
    evictions.skip(&pods[0], why.clone(), at(5));
    assert_eq!(next(&mut evictions, &pods, 6).as_deref(), Some("z"));
    assert_eq!(skipped(&evictions, &pods), [why]);
}

#[test]
fn a_refused_eviction_is_retried() {
    let pods = [pod("a", 1)];
    let mut evictions = begun(&pods);
    evictions.record_refused();
    assert_eq!(next(&mut evictions, &pods, 6).as_deref(), Some("a"));
}
