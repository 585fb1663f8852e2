//! Every reason of every condition, counts, and invariants.

use super::*;
use crate::api::{self, Mode, TierState};
use crate::pods::tests::{at, injected, pod, refused, running, waiting};
use crate::pods::{
    Faults, FetchError, Owner, Position, SidecarState, StoredPause, TierUse, Trouble,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kvcachepool_protocol::status::State;
use proptest::prelude::*;
use serde_json::json;

mod shared;

/// A scene in which everything is fine. Each test changes it.
struct Scene {
    pool: KVCachePool,
    problems: Vec<Problem>,
    pods: Vec<Arc<Pod>>,
    servers: Vec<Arc<Server>>,
    refused_servers: Vec<Refused>,
    usage: Summary,
    canary: CanaryResult,
    breaker: Breaker,
    blocker: Option<UpdateBlocker>,
    resizes: Resizes,
    unapplied: Option<(Reason, String)>,
}

fn scene(pods: impl IntoIterator<Item = Pod>) -> Scene {
    let pool = json!({
        "apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePool",
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 3, "creationTimestamp": at(0).to_string()},
        "spec": {"local": {"memory": {"perPod": "1Gi"}}},
    });
    Scene {
        pool: serde_json::from_value(pool).unwrap(),
        problems: Vec::new(),
        pods: pods.into_iter().map(Arc::new).collect(),
        servers: Vec::new(),
        refused_servers: Vec::new(),
        usage: Summary {
            known: true,
            ..Summary::default()
        },
        canary: CanaryResult::Injected,
        breaker: Breaker::default(),
        blocker: None,
        resizes: Resizes::default(),
        unapplied: None,
    }
}

impl Scene {
    fn after(&self, previous: &KVCachePoolStatus, now: Timestamp) -> KVCachePoolStatus {
        let mut faults = Faults::default();
        faults.update(&self.pods, |_| false, now);
        let observed = Observation {
            pool: &self.pool,
            problems: &self.problems,
            pods: &self.pods,
            servers: &self.servers,
            refused_servers: &self.refused_servers,
            faults: &faults,
            hash: "h",
            usage: &self.usage,
            canary: &self.canary,
            breaker: &self.breaker,
            blocker: self.blocker.as_ref(),
            resizes: &self.resizes,
            unapplied: self.unapplied.as_ref(),
        };
        status(&observed, previous, now)
    }

    fn status(&self) -> KVCachePoolStatus {
        self.after(&KVCachePoolStatus::default(), at(10))
    }
}

fn face(status: &KVCachePoolStatus, type_: &str) -> (String, String) {
    let c = condition(&status.conditions, type_).unwrap();
    (c.status.clone(), c.reason.clone())
}

/// Expects a condition, and that `Ready` follows it if it is not True.
fn expect(status: &KVCachePoolStatus, type_: &str, state: &str, reason: &str) {
    assert_eq!(
        face(status, type_),
        (state.into(), reason.into()),
        "{status:#?}"
    );
    if state != "True" {
        assert_eq!(face(status, READY), (state.into(), reason.into()));
    }
}

fn kept(owner: Option<&str>, probing: bool) -> StoredPause {
    StoredPause {
        owner: owner.map(|name| Owner {
            name: name.into(),
            uid: name.into(),
            ..pod("a").owner.unwrap()
        }),
        reason: "ErrImagePull".into(),
        message: "no such image".into(),
        since: at(0),
        probing,
        failures: 1,
    }
}

/// Injection is paused for the whole pool.
fn whole(probing: bool) -> Breaker {
    Breaker::restored("h", Some(kept(None, probing)), [])
}

#[test]
fn a_healthy_pool_is_ready() {
    let status = scene([running("a")]).status();
    expect(&status, ACCEPTED, "True", "Accepted");
    expect(&status, SHARED_TIERS_READY, "True", "NoneConfigured");
    expect(&status, INJECTION_READY, "True", "WebhookAnswers");
    expect(&status, SIDECARS_READY, "True", "AllRunning");
    expect(&status, READY, "True", "Ready");
    assert!(
        status
            .conditions
            .iter()
            .all(|c| c.observed_generation == Some(3))
    );
    assert_eq!(status.observed_generation, Some(3));
}

#[test]
fn every_problem_of_a_spec_is_reported() {
    let problems = api::Reason::ALL.iter().copied();
    for reason in problems.filter(|r| *r != api::Reason::Accepted) {
        let mut scene = scene([]);
        scene.problems = vec![Problem {
            reason,
            field: "spec.x".into(),
            message: "write y".into(),
        }];
        let status = scene.status();
        expect(&status, ACCEPTED, "False", reason.name());
        assert_eq!(
            condition(&status.conditions, ACCEPTED).unwrap().message,
            "spec.x: write y"
        );
        assert_eq!(
            face(&status, INJECTION_READY),
            ("False".into(), "NotAccepted".into())
        );
        assert_eq!(
            face(&status, SHARED_TIERS_READY),
            ("Unknown".into(), "NotAccepted".into())
        );
    }
}

#[test]
fn every_reason_of_injection() {
    let closed = Breaker::default;
    let one = |probing| Breaker::restored("h", None, [kept(Some("web"), probing)]);
    let table = [
        (CanaryResult::Injected, closed(), "True", "WebhookAnswers"),
        (CanaryResult::NotYet, closed(), "Unknown", "CanaryPending"),
        (
            CanaryResult::Unknown("quota".into()),
            closed(),
            "Unknown",
            "CanaryRefused",
        ),
        (
            CanaryResult::WebhookUnreachable,
            whole(false),
            "False",
            "WebhookUnreachable",
        ),
        (
            CanaryResult::Partly,
            closed(),
            "False",
            "WebhookUnreachable",
        ),
        (
            CanaryResult::Injected,
            whole(false),
            "False",
            "PodsHeldBack",
        ),
        (CanaryResult::NotYet, one(false), "False", "PodsHeldBack"),
        (CanaryResult::Injected, whole(true), "False", "TryingOnePod"),
        (CanaryResult::Injected, one(true), "False", "TryingOnePod"),
    ];
    for (canary, breaker, state, reason) in table {
        let mut scene = scene([]);
        (scene.canary, scene.breaker) = (canary, breaker);
        let status = scene.status();
        expect(&status, INJECTION_READY, state, reason);
        let paused = status.injection_paused;
        assert_eq!(
            paused.is_some(),
            !scene.breaker.is_closed(),
            "whatever the condition says"
        );
        let Some(paused) = paused else { continue };
        assert_eq!((paused.hash.as_str(), paused.since.0), ("h", at(0)));
        let whole = scene.breaker.pool_pause();
        let probing = |p: &Position| *p == Position::Probing;
        assert_eq!(paused.trial, whole.is_some_and(|p| probing(&p.position)));
        let owners: Vec<_> = paused
            .owners
            .iter()
            .map(|o| (o.uid.as_str(), o.trial))
            .collect();
        match whole {
            Some(_) => assert_eq!(owners, []),
            None => assert_eq!(owners, [("web", reason == "TryingOnePod")]),
        }
    }
    let mut scene = scene([]);
    scene.pool.spec.injection.mode = Mode::Disabled;
    let status = scene.status();
    let disabled = ("False".to_owned(), "InjectionDisabled".to_owned());
    assert_eq!(face(&status, INJECTION_READY), disabled);
    expect(&status, READY, "True", "Ready");
}

#[test]
fn a_pause_names_the_owner_and_the_cause() {
    let paused = |breaker: Breaker| {
        let mut scene = scene([]);
        scene.breaker = breaker;
        let status = scene.status();
        let condition = condition(&status.conditions, INJECTION_READY).unwrap();
        condition.message.clone()
    };
    assert_eq!(
        paused(whole(false)),
        "all new pods of the pool start without a sidecar: ErrImagePull: no such image; a later pod gets a sidecar as a probe"
    );
    let owners = ["web", "batch"].map(|name| kept(Some(name), true));
    let paused = paused(Breaker::restored("h", None, owners));
    assert_eq!(
        paused,
        "new pods of ReplicaSet batch and of 1 other owner start without a sidecar: ErrImagePull: no such image; the next pod gets a sidecar as a probe"
    );
}

#[test]
fn a_restored_pause_repeats_neither_the_reason_nor_the_sentence() {
    let restored = |pause: StoredPause| {
        let mut scene = scene([]);
        scene.breaker = if pause.owner.is_some() {
            Breaker::restored("h", None, [pause])
        } else {
            Breaker::restored("h", Some(pause), [])
        };
        scene.status().injection_paused.unwrap()
    };
    let cause = "ErrImagePull (pod a): no such image";
    let owner = restored(StoredPause {
        message: cause.into(),
        ..kept(Some("web"), false)
    });
    assert_eq!(owner.owners[0].message, cause);
    let sentence = "all new pods of the pool start without a sidecar: ErrImagePull: no such image; a later pod gets a sidecar as a probe";
    let pool = restored(StoredPause {
        reason: "".into(),
        message: sentence.into(),
        ..kept(None, true)
    });
    assert_eq!(pool.message, sentence.replace("a later", "the next"));
}

#[test]
fn a_status_stays_small_however_many_owners_are_paused() {
    let owners = (0..100).map(|i| StoredPause {
        message: "x".repeat(5000).into(),
        reason: "r".repeat(500).into(),
        ..kept(Some(&i.to_string()), false)
    });
    let mut scene = scene([]);
    scene.breaker = Breaker::restored("h", None, owners);
    let paused = scene.status().injection_paused.unwrap();
    assert_eq!(paused.owners.len(), crate::pods::OWNERS_MAX);
    assert!(serde_json::to_vec(&paused).unwrap().len() < 16 << 10);
}

#[test]
fn every_reason_of_sidecars() {
    expect(&scene([]).status(), SIDECARS_READY, "True", "NoPods");
    expect(
        &scene([running("a")]).status(),
        SIDECARS_READY,
        "True",
        "AllRunning",
    );
    let starting = scene([injected("a", SidecarState::Unseen)]).status();
    expect(&starting, SIDECARS_READY, "Unknown", "SidecarsStarting");
    let failing = scene([running("a"), waiting("b", "ErrImagePull")]).status();
    expect(&failing, SIDECARS_READY, "False", "SidecarsFailing");
    let message = &condition(&failing.conditions, SIDECARS_READY)
        .unwrap()
        .message;
    assert_eq!(
        message,
        "1 of 2 sidecars fail, for example in pod b: ErrImagePull: no such image"
    );

    for (off, state, reason, what) in [
        (1, "False", "SidecarsOff", "serve nothing"),
        (0, "True", "SomeDegraded", "report this"),
    ] {
        let mut scene = scene([running("a")]);
        scene.usage.observed = 1;
        scene.usage.troubles = vec![Trouble {
            reason: "ArenaTooLarge".into(),
            message: "raise the limit".into(),
            pods: 1,
            off,
            example: "a".into(),
        }];
        let status = scene.status();
        expect(&status, SIDECARS_READY, state, reason);
        let message = &condition(&status.conditions, SIDECARS_READY)
            .unwrap()
            .message;
        assert_eq!(
            *message,
            format!(
                "1 of 1 queried sidecars {what}, for example in pod a: ArenaTooLarge: raise the limit"
            )
        );
    }
}

#[test]
fn unreachable_sidecars_are_reported_and_are_no_error() {
    let mut scene = scene([running("a")]);
    scene.usage.unreachable = 1;
    scene.usage.unreachable_example = Some(("a".into(), FetchError::Unreachable));
    let mut previous = self::scene([running("a")]).status();
    previous.hit_rate_percent = Some(87);
    previous.tiers[0].used = Some(api::Size("5Mi".to_string()));
    let status = scene.after(&previous, at(20));
    expect(&status, SIDECARS_READY, "True", "AllRunning");
    let message = &condition(&status.conditions, SIDECARS_READY)
        .unwrap()
        .message;
    assert_eq!(
        message,
        "1 of 1 queried sidecars did not answer, for example in pod a: no connection to its port 9797"
    );
    let tier = &status.tiers[0];
    assert_eq!(
        (tier.state, tier.reason.as_str()),
        (TierState::Stale, "Unreachable")
    );
    assert_eq!(
        tier.used, previous.tiers[0].used,
        "the previous size is kept"
    );
    assert_eq!(status.hit_rate_percent, None, "an old rate is not kept");
}

#[test]
fn an_object_that_cannot_be_applied_is_reported_by_ready() {
    let mut scene = scene([running("a")]);
    scene.unapplied = Some((Reason::NameTaken, "ConfigMap x exists".into()));
    let status = scene.status();
    assert_eq!(face(&status, READY), ("False".into(), "NameTaken".into()));
    expect(&status, SIDECARS_READY, "True", "AllRunning");
    scene.canary = CanaryResult::NotYet;
    let ready = face(&scene.status(), READY);
    assert_eq!(ready, ("False".into(), "NameTaken".into()));
    scene.canary = CanaryResult::WebhookUnreachable;
    let ready = face(&scene.status(), READY);
    assert_eq!(ready, ("False".into(), "WebhookUnreachable".into()));
}

#[test]
fn a_tier_is_stale_only_if_no_sidecar_answers() {
    let mut scene = scene([running("a"), running("b")]);
    (scene.usage.unreachable, scene.usage.answering) = (20, 980);
    scene.usage.unreachable_example = Some(("a".into(), FetchError::TimedOut));
    let status = scene.status();
    assert_ne!(status.tiers[0].state, TierState::Stale);
    let message = &condition(&status.conditions, SIDECARS_READY)
        .unwrap()
        .message;
    assert!(
        message.starts_with("20 of 1000 queried sidecars did not answer"),
        "{message}"
    );
}

#[test]
fn tiers_have_the_state_that_sidecars_report() {
    let status = scene([]).status();
    assert_eq!(
        (status.tiers[0].state, status.tiers[0].reason.as_str()),
        (TierState::Unknown, "NoSidecarYet")
    );
    let table = [
        (State::Ready, TierState::Ready, ""),
        (State::Starting, TierState::Unknown, "TierStarting"),
        (State::Degraded, TierState::Degraded, "HugePagesUnavailable"),
        (State::Off, TierState::Unavailable, "HugePagesUnavailable"),
    ];
    for (reported, state, reason) in table {
        let mut scene = scene([running("a")]);
        scene.usage.tiers = vec![TierUse {
            name: "memory".into(),
            state: reported,
            reason: "HugePagesUnavailable".into(),
            used: (3 << 20) + 17,
            capacity: 1 << 30,
            ..TierUse::default()
        }];
        let tier = &scene.status().tiers[0];
        assert_eq!((tier.state, tier.reason.as_str()), (state, reason));
        assert_eq!(tier.used.as_ref().unwrap().0, "3Mi");
        assert_eq!(tier.capacity.as_ref().unwrap().0, "1Gi");
    }
}

#[test]
fn pods_are_counted_once_each() {
    let mut old = pod("before-the-pool");
    old.created = at(-5);
    let mut going = running("going");
    going.deleting = true;
    let mut outdated = running("outdated");
    outdated.injection.as_mut().unwrap().hash = "old".into();
    let scene = scene([
        running("a"),
        outdated,
        refused("r1", "ContainerAmbiguous"),
        refused("r2", "ContainerAmbiguous"),
        refused("r3", "PoolNotFound"),
        pod("missed"),
        old,
        going,
    ]);
    let status = scene.status();
    let expected = api::Pods {
        matched: 7,
        injected: 2,
        attached: 0,
        skipped: 3,
        missed: 1,
        outdated: 1,
    };
    assert_eq!(status.pods, expected);
    let skipped = |reason: &str, count, example: &str| api::Skipped {
        reason: reason.into(),
        count,
        example_pod: example.into(),
    };
    assert_eq!(
        status.skipped,
        [
            skipped("ContainerAmbiguous", 2, "r1"),
            skipped("PoolNotFound", 1, "r3")
        ]
    );
}

#[test]
fn nothing_is_missed_while_injection_is_disabled() {
    let mut scene = scene([pod("a")]);
    scene.pool.spec.injection.mode = Mode::Disabled;
    assert_eq!(scene.status().pods.missed, 0);
}

#[test]
fn lists_are_bounded_for_any_pods() {
    let pods = (0..40).map(|i| refused(&format!("p{i}"), &format!("{i}{}", "x".repeat(500))));
    let mut scene = scene(pods);
    scene.usage.versions = (0..40).map(|i| (format!("{i}").into(), 1)).collect();
    let status = scene.status();
    assert_eq!((status.skipped.len(), status.versions.len()), (10, 10));
    assert_eq!(status.pods.skipped, 40, "the count is of all");
    assert!(status.skipped.iter().all(|s| s.reason.len() <= 63));
}

#[test]
fn a_new_leader_keeps_the_hit_rate_until_it_has_measured_one() {
    let mut scene = scene([running("a")]);
    let mut previous = scene.status();
    previous.hit_rate_percent = Some(87);
    assert_eq!(scene.after(&previous, at(20)).hit_rate_percent, Some(87));
    scene.usage.hit_rate = HitRate::Percent(40);
    let status = scene.after(&previous, at(20));
    assert_eq!(status.hit_rate_percent, Some(40));
    assert_eq!(status.hit_rate_window.unwrap().0, "10m");
    scene.usage.hit_rate = HitRate::Idle;
    assert_eq!(scene.after(&previous, at(20)).hit_rate_percent, None);
    scene.usage.hit_rate = HitRate::Unknown;
    scene.pods.clear();
    assert_eq!(
        scene.after(&previous, at(20)).hit_rate_percent,
        None,
        "no pod has it"
    );
}

#[test]
fn a_new_leader_writes_nothing_before_it_has_queried_sidecars() {
    let mut scene = scene([running("a")]);
    scene.usage = Summary {
        known: true,
        observed: 1,
        attached: 1,
        hit_rate: HitRate::Percent(87),
        versions: [("0.1.0".into(), 1)].into(),
        tiers: vec![TierUse {
            name: "memory".into(),
            state: State::Degraded,
            reason: "HugePagesUnavailable".into(),
            used: 1 << 30,
            capacity: 1 << 31,
            ..TierUse::default()
        }],
        troubles: vec![Trouble {
            reason: "HugePagesUnavailable".into(),
            message: "m".into(),
            pods: 1,
            off: 0,
            example: "a".into(),
        }],
        ..Summary::default()
    };
    let last = scene.status();
    scene.usage = Summary::default();
    scene.canary = CanaryResult::NotYet;
    let first = scene.after(&last, at(500));
    assert_eq!(first, last);
    scene.pods = vec![Arc::new(waiting("a", "CrashLoopBackOff"))];
    let crashed = scene.after(&last, at(500));
    expect(&crashed, SIDECARS_READY, "False", "SidecarsFailing");
    assert_eq!(
        crashed.pods.attached, 0,
        "no vLLM is attached to a stopped sidecar"
    );
}

#[test]
fn a_condition_keeps_its_transition_time_until_its_status_changes() {
    let scene_a = scene([running("a")]);
    let first = scene_a.status();
    let mut scene_b = scene([waiting("a", "ErrImagePull")]);
    let second = scene_b.after(&first, at(100));
    scene_b.pods = vec![Arc::new(waiting("a", "ImagePullBackOff"))];
    let third = scene_b.after(&second, at(200));
    let time =
        |s: &KVCachePoolStatus, t| condition(&s.conditions, t).unwrap().last_transition_time.0;
    assert_eq!(time(&second, SIDECARS_READY), at(100));
    assert_eq!(
        time(&third, SIDECARS_READY),
        at(100),
        "another message is no turn"
    );
    assert_eq!(time(&third, ACCEPTED), at(10));
}

#[test]
fn a_malformed_object_is_reported() {
    let status = malformed(
        "missing field `local`",
        Some(4),
        &KVCachePoolStatus::default(),
        at(0),
    );
    expect(&status, ACCEPTED, "False", "Malformed");
    assert_eq!(status.conditions.len(), 2);
    assert!(
        status.conditions[1]
            .message
            .contains("missing field `local`")
    );
}

#[test]
fn a_long_message_is_cut() {
    let status = malformed(
        &"ä".repeat(2000),
        None,
        &KVCachePoolStatus::default(),
        at(0),
    );
    assert!(status.conditions.iter().all(|c| c.message.len() <= 900));
}

fn any_pod() -> impl Strategy<Value = Pod> {
    let kinds = prop_oneof![Just(0u8), Just(1), Just(2), Just(3), Just(4),];
    (kinds, 0..100u32, any::<bool>(), -10..10i64).prop_map(|(kind, name, deleting, created)| {
        let name = format!("pod-{name}");
        let mut pod = match kind {
            0 => pod(&name),
            1 => running(&name),
            2 => waiting(&name, "ErrImagePull"),
            3 => refused(&name, "ContainerAmbiguous"),
            _ => injected(&name, SidecarState::Unseen),
        };
        pod.deleting = deleting;
        pod.created = at(created);
        pod
    })
}

proptest! {
    /// A status computed from itself is the same and needs no write; parts never exceed the whole; Ready is the conjunction of the others.
    #[test]
    fn a_status_is_stable_and_adds_up(pods in proptest::collection::vec(any_pod(), 0..40), disabled in any::<bool>(), works in any::<bool>()) {
        let mut scene = scene(pods);
        if disabled {
            scene.pool.spec.injection.mode = Mode::Disabled;
        }
        if !works {
            scene.canary = CanaryResult::WebhookUnreachable;
        }
        let first = scene.status();
        let second = scene.after(&first, at(5000));
        prop_assert_eq!(&first, &second);
        prop_assert_eq!(due(&first, &second, &Writes::default(), jiff::SignedDuration::from_mins(1), at(5000)), Write::No);
        let c = &first.pods;
        prop_assert!(c.injected + c.skipped + c.missed <= c.matched);
        prop_assert!(c.outdated <= c.injected && c.attached <= c.injected);
        prop_assert_eq!(first.conditions.len(), 5);
        let counted = |c: &&Condition| c.type_ != READY && c.reason != "InjectionDisabled";
        let all = first.conditions.iter().filter(counted).all(|c| c.status == "True");
        prop_assert_eq!(face(&first, READY).0 == "True", all);
    }
}

#[test]
fn update_blockers_are_reported_and_do_not_end_readiness() {
    let because = || "because".to_owned();
    for (blocker, reason) in [
        (UpdateBlocker::NotAllowed(because()), "PodPatchNotAllowed"),
        (UpdateBlocker::Refused(because()), "PodPatchFailed"),
        (UpdateBlocker::NotResized(because()), "MemoryNotResized"),
        (UpdateBlocker::RolledBack(because()), "UpdateRolledBack"),
    ] {
        for pods in [vec![], vec![running("a")]] {
            let mut scene = scene(pods);
            scene.blocker = Some(blocker.clone());
            let status = scene.status();
            expect(&status, SIDECARS_READY, "True", reason);
            expect(&status, READY, "True", "Ready");
            let condition = condition(&status.conditions, SIDECARS_READY).unwrap();
            assert_eq!(condition.message, "because");
        }
    }
    let mut scene = scene([waiting("a", "ErrImagePull")]);
    scene.blocker = Some(UpdateBlocker::RolledBack(because()));
    expect(&scene.status(), SIDECARS_READY, "False", "SidecarsFailing");
}

#[test]
fn resizes_are_reported_with_their_reason_and_do_not_end_readiness() {
    let mut scene = scene([running("a"), running("b")]);
    let told = |scene: &Scene, reason: &str| {
        let status = scene.status();
        expect(&status, SIDECARS_READY, "True", reason);
        expect(&status, READY, "True", "Ready");
        let condition = condition(&status.conditions, SIDECARS_READY).unwrap();
        condition.message.clone()
    };
    scene.usage.resize_waits = Some(("b".into(), "pins hold 3 chunks".into()));
    let message = told(&scene, "MemoryResizing");
    assert_eq!(message, "the sidecar of pod b reports: pins hold 3 chunks");
    scene.resizes.running = 2;
    scene.resizes.example = "a".into();
    let message = told(&scene, "MemoryResizing");
    assert!(message.contains("of 2 of 2 pods"), "{message}");
    assert!(message.contains("pod a; the sidecar of pod b"), "{message}");
    scene.resizes.refused = Some("pod a: Infeasible".to_owned());
    assert_eq!(told(&scene, "MemoryNotResized"), "pod a: Infeasible");
}
