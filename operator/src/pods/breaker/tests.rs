//! Every transition of a pause, and invariants.

use super::*;
use crate::inject::Reason;
use crate::pods::pod::{Exit, Own, Phase, SidecarState, Waits, WaitsFor};
use crate::pods::tests::{at, engine, injected, refused as refused_pod, waiting as waits};
use proptest::prelude::*;

mod kinds;

fn waiting(reason: &str) -> SidecarState {
    waits("", reason).sidecar.unwrap().state
}

fn running(since: i64) -> SidecarState {
    SidecarState::Running { since: at(since) }
}

fn owner(uid: &str) -> Owner {
    Owner {
        uid: uid.into(),
        name: uid.into(),
        ..injected("a", SidecarState::Unseen).owner.unwrap()
    }
}

/// A pod of owner `r` with settings `h`, created at this second.
fn pod(name: &str, created: i64, sidecar: SidecarState) -> Pod {
    let mut pod = injected(name, sidecar);
    pod.created = at(created);
    pod.phase = Phase::Pending;
    pod.ready = false;
    pod.own = [engine(SidecarState::Unseen)].into();
    pod
}

fn pull(name: &str, created: i64) -> Pod {
    pod(name, created, waiting("ImagePullBackOff"))
}

/// Such a pod whose sidecar and vLLM run since `since`.
fn works(name: &str, created: i64, since: i64) -> Pod {
    let mut pod = pod(name, created, running(since));
    pod.phase = Phase::Running;
    pod.ready = true;
    pod.own[0].state = running(since + 1);
    pod
}

/// A running pod that the breaker let through.
fn let_through(name: &str, created: i64) -> Pod {
    let mut pod = refused_pod(name, Reason::InjectionPaused.name());
    pod.created = at(created);
    pod.own = [engine(running(created + 1))].into();
    pod
}

fn owned_by(uid: &str, mut pod: Pod) -> Pod {
    pod.owner = (!uid.is_empty()).then(|| owner(uid));
    pod
}

/// A breaker and its input.
struct Rig {
    breaker: Breaker,
    pods: Vec<Arc<Pod>>,
    refused: Vec<Refused>,
    injects: bool,
    hash: &'static str,
}

impl Rig {
    fn new() -> Self {
        Self {
            breaker: Breaker::restored("h", None, []),
            pods: Vec::new(),
            refused: Vec::new(),
            injects: true,
            hash: "h",
        }
    }

    fn pods(&mut self, pods: impl IntoIterator<Item = Pod>) -> &mut Self {
        self.pods = pods.into_iter().map(Arc::new).collect();
        self
    }

    fn refused(&mut self, uid: &str, second: i64) -> &mut Self {
        self.refused = vec![Refused {
            owner: owner(uid),
            message: "exceeded quota: q".into(),
            at: at(second),
        }];
        self
    }

    fn step(&mut self, second: i64) -> Option<SignedDuration> {
        let input = BreakerInput {
            pods: &self.pods,
            refused: &self.refused,
            injects: self.injects,
            hash: self.hash,
            updating: &|_| false,
            now: at(second),
        };
        self.breaker.step(&input)
    }

    /// Runs a step and replaces pods. Returns the names of the replaced pods.
    fn replaced(&mut self, second: i64) -> Vec<String> {
        self.step(second);
        let input = BreakerInput {
            pods: &self.pods,
            refused: &[],
            injects: self.injects,
            hash: self.hash,
            updating: &|_| false,
            now: at(second),
        };
        let found = self.breaker.replaceable(&input);
        for pod in &found {
            self.breaker.record_replacing(pod, at(second));
        }
        found.iter().map(|p| p.name.to_string()).collect()
    }

    fn position(&self, uid: &str) -> Option<Position> {
        self.breaker.pauses.get(uid).map(|p| p.position.clone())
    }

    #[track_caller]
    fn expect(&self, uid: &str, position: Option<Position>) {
        assert_eq!(self.position(uid), position);
    }
}

const PAUSED: Position = Position::Paused { proven: false };
const PROVEN: Position = Position::Paused { proven: true };

/// A pause since second 30, proven by pod `b`, which runs without a sidecar. Pod `a` was replaced.
fn proven() -> Rig {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0)]).step(0);
    rig.step(30);
    rig.pods([let_through("b", 32)]).step(40);
    rig.expect("r", Some(PROVEN));
    rig.breaker.take_changes();
    rig
}

#[test]
fn one_pod_pauses_injection_for_its_owner_only() {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0), owned_by("s", works("b", 0, 1))]);
    assert_eq!(rig.step(0), Some(SignedDuration::from_secs(30)));
    rig.step(29);
    assert!(rig.breaker.is_closed());
    rig.step(30);
    rig.expect("r", Some(PAUSED));
    rig.expect("s", None);
    assert!(rig.breaker.pool_pause().is_none());
    let [BreakerChange::Paused(Some(of), cause)] = &rig.breaker.take_changes()[..] else {
        panic!("one change");
    };
    assert_eq!((&*of.uid, &*cause.example), ("r", "a"));
    assert_eq!(
        (&*cause.reason, &*cause.message),
        ("ImagePullBackOff", "no such image")
    );
}

#[test]
fn a_pod_without_an_owner_pauses_such_pods_and_is_not_replaced() {
    let mut rig = Rig::new();
    rig.pods([owned_by("", pull("a", 0))]).step(0);
    for second in [40, 50] {
        assert_eq!(rig.replaced(second), [""; 0]);
        rig.expect("", Some(PAUSED));
    }
}

#[test]
fn a_hung_pod_is_replaced_once_webhooks_know_and_its_replacement_proves_the_cause() {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0), pull("b", 0), pull("c", 0)]);
    rig.step(0);
    assert_eq!(rig.replaced(30), [""; 0], "webhooks do not know yet");
    assert_eq!(rig.replaced(32), ["a"]);
    assert_eq!(rig.replaced(33), [""; 0], "one at a time");
    let mut new = let_through("d", 33);
    new.own[0].state = SidecarState::Unseen;
    rig.pods([pull("b", 0), pull("c", 0), new]);
    for second in [34, 40, 47] {
        assert_eq!(
            rig.replaced(second),
            [""; 0],
            "only one until the cause is proven"
        );
    }
    rig.pods([pull("b", 0), pull("c", 0), let_through("d", 33)]);
    assert_eq!(rig.replaced(36), ["b"], "b follows, because d runs");
    rig.expect("r", Some(PROVEN));
    rig.pods([pull("c", 0), let_through("d", 33), let_through("e", 37)]);
    assert_eq!(rig.replaced(38), ["c"]);
}

#[test]
fn injection_continues_if_a_pod_without_a_sidecar_fails_too() {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0), pull("c", 0)]).step(0);
    assert_eq!(rig.replaced(32), [""; 0]);
    assert_eq!(rig.replaced(34), ["a"]);
    let mut fails = let_through("b", 35);
    fails.own[0].state = waiting("ErrImagePull");
    rig.pods([pull("c", 0), fails]);
    rig.step(50);
    rig.expect("r", Some(PAUSED));
    rig.breaker.take_changes();
    rig.step(65);
    rig.expect("r", Some(Position::Cleared));
    assert!(rig.breaker.is_closed(), "pods are injected again");
    assert!(matches!(
        &rig.breaker.take_changes()[..],
        [BreakerChange::Cleared(..)]
    ));
    for second in [66, 200, 364] {
        assert_eq!(rig.replaced(second), [""; 0]);
        rig.expect("r", Some(Position::Cleared));
    }
    rig.step(365);
    rig.expect("r", Some(PAUSED));
    assert_eq!(rig.replaced(367), ["c"], "the comparison repeats");
}

#[test]
fn a_pod_whose_vllm_runs_is_never_replaced() {
    let mut runs = works("a", 0, 1);
    runs.sidecar.as_mut().unwrap().state = waiting("CrashLoopBackOff");
    let mut rig = Rig::new();
    rig.pods([runs]).step(5);
    for second in [60, 70, 300] {
        assert_eq!(rig.replaced(second), [""; 0], "its vLLM runs");
        rig.expect("r", Some(PAUSED));
    }
}

#[test]
fn a_failed_replacement_is_retried_later_and_does_not_block_other_owners() {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0), owned_by("s", pull("b", 0))])
        .step(0);
    rig.step(30);
    assert_eq!(rig.replaced(32), ["a", "b"]);
    let a = rig.pods[0].clone();
    rig.breaker.record_not_replaced(&a, at(32));
    assert_eq!(rig.replaced(40), [""; 0]);
    assert_eq!(rig.replaced(47), ["a"]);
}

#[test]
fn a_successful_probe_after_ten_minutes_resumes_injection() {
    let mut rig = proven();
    rig.step(629);
    rig.expect("r", Some(PROVEN));
    rig.step(630);
    rig.expect("r", Some(Position::Probing));
    let probe = |sidecar| pod("c", 700, sidecar);
    rig.pods([let_through("b", 32), probe(SidecarState::Unseen)]);
    rig.step(701);
    rig.expect("r", Some(Position::Watching("c".into())));
    rig.pods([let_through("b", 32), works("c", 700, 710)]);
    assert_eq!(rig.step(720), Some(SignedDuration::from_secs(5)));
    rig.step(740);
    assert!(rig.breaker.is_closed());
    assert!(matches!(
        &rig.breaker.take_changes()[..],
        [BreakerChange::Resumed(Some(_))]
    ));
}

#[test]
fn a_probe_may_start_within_the_second_of_its_creation() {
    let mut rig = proven();
    rig.step(630);
    rig.pods([let_through("b", 32), works("c", 700, 700)])
        .step(701);
    rig.expect("r", Some(Position::Watching("c".into())));
    rig.step(730);
    rig.expect("r", None);
}

#[test]
fn each_failed_probe_doubles_the_wait_and_is_replaced() {
    let mut rig = proven();
    let mut now = 30;
    for wait in [600, 1200, 2400, 4800, 9600, 19200, 21600, 21600] {
        rig.pods([let_through("b", 32)]).step(now + wait - 1);
        rig.expect("r", Some(PROVEN));
        rig.step(now + wait);
        rig.expect("r", Some(Position::Probing));
        now += wait + 10;
        rig.pods([let_through("b", 32), pull("c", now)]);
        rig.step(now);
        assert_eq!(rig.replaced(now + 20), [""; 0]);
        now += 30;
        rig.step(now);
        rig.expect("r", Some(PROVEN));
        assert_eq!(rig.replaced(now + 2), ["c"]);
    }
}

#[test]
fn a_deleted_or_unscheduled_probe_allows_another() {
    let probing = || {
        let mut rig = proven();
        rig.step(630);
        rig.pods([pod("c", 700, SidecarState::Unseen)]).step(700);
        rig.expect("r", Some(Position::Watching("c".into())));
        rig
    };
    let mut rig = probing();
    rig.pods([let_through("b", 32)]).step(710);
    rig.expect("r", Some(Position::Probing));
    let mut rig = probing();
    rig.step(1300);
    rig.expect("r", Some(Position::Probing));
}

#[test]
fn a_hung_pod_that_starts_after_all_resumes_injection() {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0), pull("b", 0)]).step(0);
    rig.step(30);
    rig.pods([works("a", 0, 100), pull("b", 0)]);
    rig.step(129);
    rig.expect("r", Some(PAUSED));
    rig.step(130);
    rig.expect("r", None);
    for second in [131, 300, 3000] {
        rig.step(second);
        rig.expect("r", None);
    }
    rig.pods([works("a", 0, 100), pull("b", 0), pull("c", 3000)]);
    rig.step(3001);
    rig.step(3031);
    rig.expect("r", Some(PAUSED));
    assert_eq!(
        &*rig.breaker.pauses["r"].cause.example, "c",
        "b was already compared"
    );
}

#[test]
fn new_settings_reset_the_breaker_and_hung_pods_are_replaced() {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0)]).step(0);
    rig.step(30);
    rig.hash = "new";
    assert_eq!(rig.replaced(40), [""; 0]);
    assert!(rig.breaker.is_closed());
    assert_eq!(rig.replaced(70), ["a"]);
    assert!(rig.breaker.is_closed());
}

#[test]
fn all_groups_of_a_leader_worker_set_are_one_owner() {
    let grouped = |uid: &str, pod: Pod| Pod {
        group: Some(Box::new(Owner::leader_worker_set("web"))),
        ..owned_by(uid, pod)
    };
    let mut rig = Rig::new();
    let hung = [
        grouped("leaders", pull("web-0", 0)),
        grouped("workers of web-0", pull("web-0-1", 0)),
    ];
    rig.pods(hung).step(0);
    rig.step(30);
    rig.expect("leaderworkerset/web", Some(PAUSED));
    rig.expect("leaders", None);
    let [pause] = rig.breaker.owners()[..] else {
        panic!("one pause");
    };
    assert_eq!(pause.owner, Some(Owner::leader_worker_set("web")));
}

#[test]
fn the_same_fault_of_the_added_containers_in_two_owners_pauses_the_pool() {
    let mut rig = Rig::new();
    let hung = [
        pull("a", 0),
        owned_by("s", pull("b", 0)),
        owned_by("t", works("t", 0, 1)),
    ];
    rig.pods(hung).step(0);
    rig.step(30);
    assert!(rig.breaker.pool_pause().is_none(), "neither is proven");
    rig.pods([
        let_through("a2", 32),
        owned_by("s", let_through("b2", 32)),
        owned_by("t", works("t", 0, 1)),
    ]);
    rig.step(35);
    let pause = rig.breaker.pool_pause().unwrap();
    assert_eq!((&pause.owner, &pause.position), (&None, &PROVEN));
    rig.step(635);
    assert_eq!(
        rig.breaker.pool_pause().unwrap().position,
        Position::Probing
    );
    rig.pods([owned_by("new", works("n", 700, 701))]);
    rig.step(702);
    rig.step(740);
    assert!(rig.breaker.is_closed(), "one probe resumes the pool");
}

#[test]
fn the_pool_is_paused_if_a_status_cannot_list_all_owners() {
    let mut rig = Rig::new();
    let owners: Vec<Refused> = (0..=OWNERS_MAX)
        .map(|i| Refused {
            owner: owner(&i.to_string()),
            message: "exceeded quota".into(),
            at: at(1),
        })
        .collect();
    rig.refused = owners[..OWNERS_MAX].to_vec();
    rig.step(2);
    assert!(rig.breaker.pool_pause().is_none());
    assert_eq!(rig.breaker.owners().len(), OWNERS_MAX);
    rig.refused = owners;
    rig.step(3);
    assert!(rig.breaker.pool_pause().is_some());
}

#[test]
fn a_sidecar_that_is_being_updated_is_no_evidence() {
    let pods = [Arc::new(pull("a", 0))];
    let mut breaker = Breaker::restored("h", None, []);
    for second in [0, 60, 600] {
        breaker.step(&BreakerInput {
            pods: &pods,
            refused: &[],
            injects: true,
            hash: "h",
            updating: &|_| true,
            now: at(second),
        });
        assert!(breaker.is_closed());
    }
}

#[test]
fn while_injection_is_disabled_all_hung_pods_are_replaced_and_then_the_pause_ends() {
    let mut rig = Rig::new();
    rig.pods([pull("a", 0), pull("b", 0)]).step(0);
    rig.step(30);
    rig.expect("r", Some(PAUSED));
    rig.injects = false;
    assert_eq!(rig.replaced(33), ["a"]);
    let mut new = refused_pod("c", Reason::PoolDisabled.name());
    new.created = at(34);
    new.own = [engine(running(35))].into();
    rig.pods([pull("b", 0), new.clone()]);
    assert_eq!(rig.replaced(36), ["b"], "nothing is compared");
    // One that nobody may replace keeps the pause, and there is no probe.
    rig.step(3000);
    rig.expect("r", Some(PROVEN));
    rig.pods([new]).step(3001);
    rig.expect("r", None);
    assert!(rig.breaker.is_closed());
}

#[test]
fn the_pause_of_a_deleted_owner_is_dropped() {
    let mut rig = proven();
    rig.pods([]).step(100);
    rig.step(640);
    rig.expect("r", Some(Position::Probing));
    rig.step(641);
    rig.expect("r", None);
}

#[test]
fn a_pause_of_the_previous_leader_continues() {
    let stored = |probing| StoredPause {
        owner: Some(owner("r")),
        reason: "EngineFails".into(),
        message: "m".into(),
        since: at(0),
        probing,
        failures: 1,
    };
    let mut rig = Rig::new();
    rig.breaker = Breaker::restored("h", None, [stored(false)]);
    rig.pods([let_through("a", 0)]).step(1199);
    rig.expect("r", Some(PROVEN));
    assert_eq!(rig.breaker.pauses["r"].cause.kind, Kind::Engine);
    rig.step(1200);
    rig.expect("r", Some(Position::Probing));
    rig.breaker = Breaker::restored(
        "h",
        Some(StoredPause {
            owner: None,
            ..stored(true)
        }),
        [],
    );
    rig.step(1);
    assert_eq!(
        rig.breaker.pool_pause().unwrap().position,
        Position::Probing
    );
}

proptest! {
    /// For any pods: an owner without hanging pods is never paused, one pod per owner is replaced at a time, a pod whose vLLM runs never
    /// is, and the next check is never due in the past.
    #[test]
    fn only_owners_with_hung_pods_are_paused(
        steps in proptest::collection::vec((0..8u8, 0..8u8, 1..120i64), 1..60)
    ) {
        let mut rig = Rig::new();
        let mut now = 0;
        for (i, (one, two, wait)) in steps.into_iter().enumerate() {
            now += wait;
            let made = |kind, name: &str| match kind {
                0 => pull(name, now),
                1 => works(name, now - wait, now - wait / 2),
                2 => let_through(name, now - wait),
                3 => pod(name, now - wait, SidecarState::Unseen),
                4 => pod(name, now - wait, waiting("CrashLoopBackOff")),
                5 => pod(name, now - wait, SidecarState::Terminated { reason: "Error".into() }),
                6 => {
                    let mut runs = works(name, now - wait, now - wait / 2);
                    runs.sidecar.as_mut().unwrap().state = waiting("CrashLoopBackOff");
                    runs
                }
                _ => pull(&format!("{name}{i}"), now - wait),
            };
            rig.pods([made(one, "a"), made(two, "b"), owned_by("s", works("s", 0, 1))]);
            let replaced = rig.replaced(now);
            prop_assert!(replaced.len() <= 1);
            prop_assert!(!replaced.contains(&"s".to_owned()));
            for pod in rig.pods.iter().filter(|p| replaced.contains(&p.name.to_string())) {
                prop_assert!(!pod.engine_runs() && pod.sidecar.is_some());
            }
            prop_assert!(rig.position("s").is_none());
            prop_assert!(rig.step(now).is_none_or(|d| d > SignedDuration::ZERO));
        }
    }
}
