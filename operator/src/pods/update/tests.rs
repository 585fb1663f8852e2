//! The rules one by one, then random pods and images against a model of the kubelet.

use super::*;
use crate::pods::tests::{at, pod as bare, running, sized as of_size, waiting};
use crate::pods::{ImageChange, Lowered, Owner};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;

const GOAL: Goal<'static> = Goal {
    image: "i:2",
    generation: 2,
    memory_bytes: 64 << 20,
    in_place: true,
};

/// A pod whose sidecar runs with `image`, with the pool's config.
fn with(name: &str, image: &str) -> Pod {
    let mut pod = running(name);
    pod.config_generation = Some(2);
    let sidecar = pod.sidecar.as_mut().unwrap();
    sidecar.image = image.into();
    sidecar.image_in_use = image.into();
    pod
}

/// Such a pod after its image was patched and the old sidecar was stopped.
fn stopped(name: &str) -> Pod {
    let mut pod = with(name, "i:1");
    let sidecar = pod.sidecar.as_mut().unwrap();
    sidecar.image = "i:2".into();
    sidecar.state = SidecarState::Terminated {
        reason: "Completed".into(),
    };
    pod
}

fn arcs(pods: impl IntoIterator<Item = Pod>) -> Vec<Arc<Pod>> {
    pods.into_iter().map(Arc::new).collect()
}

fn names(step: &Step) -> Vec<&str> {
    match step {
        Step::Config(pods) | Step::Resize(pods) | Step::Image(pods) => {
            pods.iter().map(|p| &*p.name).collect()
        }
        Step::Query(pod) | Step::RollBack(pod, _) => vec![&pod.name],
        Step::Wait => Vec::new(),
    }
}

/// An update whose canary `a` was patched at second 0.
fn canary() -> Update {
    let mut update = Update::default();
    let pods = arcs([with("a", "i:1"), with("b", "i:1")]);
    let step = update.next(&pods, &GOAL, at(0));
    assert_eq!(step, Step::Image(vec![pods[0].clone()]));
    update.record_image_change(&pods[0], at(0));
    update
}

/// Such a pod after the update, restarted once.
fn updated(name: &str, second: i64) -> Pod {
    let mut pod = with(name, "i:2");
    let sidecar = pod.sidecar.as_mut().unwrap();
    sidecar.state = SidecarState::Running { since: at(second) };
    sidecar.restarts = 1;
    pod
}

fn crashed(name: &str) -> Pod {
    let mut pod = updated(name, 2);
    let sidecar = pod.sidecar.as_mut().unwrap();
    sidecar.restarts = 2;
    sidecar.state = SidecarState::Waiting {
        reason: "CrashLoopBackOff".into(),
        message: "back-off".into(),
    };
    pod
}

/// A proven update: `a` runs with the image, and `b` and `c` wait for theirs.
fn proven() -> (Update, Vec<Arc<Pod>>) {
    let mut update = canary();
    let pods = arcs([updated("a", 2), with("b", "i:1"), with("c", "i:1")]);
    assert_eq!(update.next(&pods, &GOAL, at(3)), Step::Wait);
    assert_eq!(names(&update.next(&pods, &GOAL, at(33))), ["a"]);
    update.record_answer(&pods[0], State::Ready);
    (update, pods)
}

#[test]
fn current_pods_are_not_updated() {
    let mut update = Update::default();
    let pods = arcs([with("a", "i:2"), with("b", "i:2"), bare("none")]);
    assert_eq!(update.next(&pods, &GOAL, at(0)), Step::Wait);
    assert_eq!(update.next_check(at(0)), None);
}

#[test]
fn configs_are_updated_before_images() {
    let old = |n: usize| Pod {
        config_generation: Some(1),
        ..with(&n.to_string(), "i:1")
    };
    let unread = Pod {
        config_generation: None,
        ..with("unread", "i:1")
    };
    let mut update = Update::default();
    let pods = arcs((0..30).map(old).chain([unread]));
    let step = update.next(&pods, &GOAL, at(0));
    assert!(matches!(&step, Step::Config(pods) if pods.len() == CONFIGS_MAX));
    update.record_configs(at(0));
    let pods = arcs([with("a", "i:1")]);
    assert_eq!(update.next(&pods, &GOAL, at(1)), Step::Wait);
    assert_eq!(update.next_check(at(1)), Some(SignedDuration::from_secs(1)));
    assert_eq!(names(&update.next(&pods, &GOAL, at(2))), ["a"]);
}

#[test]
fn one_pod_proves_the_image_before_others_get_it() {
    let mut update = canary();
    let others = || [with("b", "i:1"), with("c", "i:1")];
    for state in [with("a", "i:1"), stopped("a")] {
        let pods = arcs([state].into_iter().chain(others()));
        assert_eq!(update.next(&pods, &GOAL, at(5)), Step::Wait);
        assert_eq!(update.next_check(at(5)), Some(CHECK_INTERVAL));
        assert!(update.is_updating(&pods[0]) && !update.is_updating(&pods[1]));
    }
    let mut pods = arcs([updated("a", 5)].into_iter().chain(others()));
    for second in [6, 20, 35] {
        let step = update.next(&pods, &GOAL, at(second));
        assert_eq!(step, Step::Wait, "it may still crash");
    }
    for (second, says) in [(36, State::Starting), (38, State::Off), (40, State::Ready)] {
        let step = update.next(&pods, &GOAL, at(second));
        assert_eq!(step, Step::Query(pods[0].clone()));
        update.record_answer(&pods[0], says);
    }
    assert_eq!(names(&update.next(&pods, &GOAL, at(41))), ["b"]);
    update.record_image_change(&pods[1], at(41));
    for (second, state) in [
        (42, stopped("b")),
        (43, updated("b", 43)),
        (72, updated("b", 43)),
    ] {
        pods[1] = Arc::new(state);
        let step = update.next(&pods, &GOAL, at(second));
        assert_eq!(step, Step::Wait, "one of three at a time");
    }
    assert_eq!(names(&update.next(&pods, &GOAL, at(73))), ["c"]);
}

#[test]
fn an_updated_sidecar_that_crashes_is_rolled_back_and_ends_the_update() {
    let mut canary = canary();
    let mut restarted = updated("a", 9);
    restarted.sidecar.as_mut().unwrap().restarts = 2;
    let between = arcs([restarted, with("b", "i:1")]);
    let step = canary.next(&between, &GOAL, at(10));
    assert!(
        matches!(&step, Step::RollBack(p, previous) if &*p.name == "a" && &*previous.image == "i:1")
    );
    let (mut update, mut pods) = proven();
    pods[0] = Arc::new(crashed("a"));
    let step = update.next(&pods, &GOAL, at(40));
    let Step::RollBack(pod, previous) = &step else {
        panic!("{step:?}");
    };
    let note = update.record_rollback(pod, previous);
    assert!(
        note.contains("did not keep running with image i:2 (CrashLoopBackOff"),
        "{note}"
    );
    pods[0] = Arc::new(with("a", "i:1"));
    assert_eq!(update.next(&pods, &GOAL, at(9000)), Step::Wait);
}

#[test]
fn no_sidecar_is_updated_while_a_new_pod_crashes_with_the_image() {
    let (mut update, mut pods) = proven();
    pods.push(Arc::new(crashed("new")));
    assert_eq!(update.next(&pods, &GOAL, at(40)), Step::Wait);
    pods.pop();
    assert_eq!(names(&update.next(&pods, &GOAL, at(41))), ["b"]);
}

#[test]
fn a_sidecar_that_ends_long_after_the_update_keeps_its_image() {
    let (mut update, _) = proven();
    let pods = arcs([crashed("a"), with("b", "i:2"), with("c", "i:2")]);
    assert_eq!(update.next(&pods, &GOAL, at(9000)), Step::Wait);
}

#[test]
fn at_most_a_tenth_and_ten_sidecars_are_updated_at_a_time() {
    for (count, room) in [(5, 1), (40, 4), (400, 10)] {
        let (mut update, pods) = proven();
        let others = (0..count).map(|n| with(&n.to_string(), "i:1"));
        let pods = arcs(others.chain([(*pods[0]).clone()]));
        assert_eq!(names(&update.next(&pods, &GOAL, at(40))).len(), room);
    }
}

#[test]
fn a_sidecar_runs_even_if_the_runtime_reports_another_image_name() {
    let mut update = canary();
    let mut renamed = with("a", "i:2");
    let sidecar = renamed.sidecar.as_mut().unwrap();
    sidecar.image_in_use = "sha256:0a".into();
    let pods = arcs([renamed.clone()]);
    assert_eq!(
        update.next(&pods, &GOAL, at(3)),
        Step::Wait,
        "the old process still"
    );
    renamed.sidecar.as_mut().unwrap().state = SidecarState::Running { since: at(2) };
    let pods = arcs([renamed]);
    update.next(&pods, &GOAL, at(3));
    assert_eq!(names(&update.next(&pods, &GOAL, at(33))), ["a"]);
}

#[test]
fn a_canary_that_does_not_start_within_a_minute_is_rolled_back_and_ends_the_update() {
    let silent = updated("a", 0);
    for (pod, why) in [
        (stopped("a"), "ImageNotPulled"),
        (silent, "does not report"),
    ] {
        let mut update = canary();
        let mut pods = arcs([pod, with("b", "i:1")]);
        update.next(&pods, &GOAL, at(0));
        assert!(!matches!(
            update.next(&pods, &GOAL, at(59)),
            Step::RollBack(..)
        ));
        let step = update.next(&pods, &GOAL, at(60));
        let Step::RollBack(pod, previous) = &step else {
            panic!("{step:?}");
        };
        assert_eq!(
            (&*pod.name, &*previous.image, &*previous.hash),
            ("a", "i:1", "h")
        );
        let note = update.record_rollback(pod, previous);
        assert!(
            note.contains("pod a") && note.contains("i:2") && note.contains(why),
            "{note}"
        );
        assert_eq!(
            update.blocker(),
            Some(&UpdateBlocker::RolledBack(note.clone()))
        );
        pods[0] = Arc::new(with("a", "i:1"));
        assert_eq!(update.next(&pods, &GOAL, at(9000)), Step::Wait);
        let mut next_leader = Update::rolled_back(&GOAL, &note);
        assert_eq!(next_leader.next(&pods, &GOAL, at(9000)), Step::Wait);
        let edited = Goal {
            generation: 3,
            ..GOAL
        };
        let pods = arcs([Pod {
            config_generation: Some(3),
            ..with("a", "i:1")
        }]);
        assert_eq!(names(&next_leader.next(&pods, &edited, at(9001))), ["a"]);
        let other = Goal {
            image: "i:3",
            ..GOAL
        };
        assert_eq!(names(&update.next(&pods, &other, at(9001))), ["a"]);
        assert_eq!(update.blocker(), None);
    }
}

#[test]
fn an_image_set_by_another_client_is_never_rolled_back() {
    let stamped = |mut pod: Pod, second| {
        pod.image_change = Some(Box::new(ImageChange {
            image: "i:1".into(),
            hash: "h".into(),
            at: Time(at(second)),
        }));
        pod
    };
    let long_ago = stamped(stopped("a"), -3600);
    let mut killed = stamped(with("a", "i:2"), -5);
    let sidecar = killed.sidecar.as_mut().unwrap();
    sidecar.image_in_use = "sha256:0a".into();
    sidecar.state = SidecarState::Terminated {
        reason: "OOMKilled".into(),
    };
    for pod in [stopped("a"), long_ago, killed] {
        let mut update = Update::default();
        let pods = arcs([pod]);
        for second in [0, 60, 120] {
            assert_eq!(update.next(&pods, &GOAL, at(second)), Step::Wait);
        }
    }
}

#[test]
fn an_unfinished_update_of_an_earlier_leader_is_rolled_back() {
    let mut update = Update::default();
    let mut half = stopped("a");
    half.image_change = Some(Box::new(ImageChange {
        image: "i:1".into(),
        hash: "h".into(),
        at: Time(at(-5)),
    }));
    let pods = arcs([half, with("b", "i:1")]);
    assert_eq!(
        update.next(&pods, &GOAL, at(0)),
        Step::Wait,
        "a is the canary"
    );
    let step = update.next(&pods, &GOAL, at(60));
    assert!(
        matches!(&step, Step::RollBack(_, previous) if &*previous.image == "i:1"),
        "{step:?}"
    );
}

#[test]
fn no_image_changes_in_place_where_that_would_recreate_a_group() {
    let grouped = |name| Pod {
        group: Some(Box::new(Owner::leader_worker_set("web"))),
        ..with(name, "i:1")
    };
    let mut update = Update::default();
    assert_eq!(
        update.next(&arcs([grouped("a"), grouped("b")]), &GOAL, at(0)),
        Step::Wait
    );
    let pods = arcs([grouped("a"), with("b", "i:1")]);
    assert_eq!(names(&update.next(&pods, &GOAL, at(0))), ["b"]);
}

#[test]
fn without_in_place_updates_only_configs_and_hanging_pods_change() {
    let goal = Goal {
        in_place: false,
        ..GOAL
    };
    let mut hanging = waiting("hangs", "ErrImagePull");
    hanging.sidecar.as_mut().unwrap().image = "i:0".into();
    let mut crashed = with("crashed", "i:1");
    crashed.sidecar.as_mut().unwrap().state = SidecarState::Terminated {
        reason: "OOMKilled".into(),
    };
    let mut update = Update::default();
    let mut pods = arcs([with("works", "i:1"), hanging.clone(), crashed]);
    assert_eq!(names(&update.next(&pods, &goal, at(0))), ["hangs"]);
    update.record_image_change(&pods[1], at(0));
    hanging.sidecar.as_mut().unwrap().image = "i:2".into();
    pods[1] = Arc::new(hanging);
    assert_eq!(
        update.next(&pods, &goal, at(90)),
        Step::Wait,
        "it has nothing to go back to"
    );
}

#[test]
fn a_refused_pod_is_reported_and_does_not_block_others() {
    let mut update = Update::default();
    let old = |name: &str| Pod {
        config_generation: Some(1),
        ..with(name, "i:2")
    };
    let mut pods = arcs([old("a"), old("b")]);
    let refused = UpdateBlocker::Refused("no".into());
    update.next(&pods, &GOAL, at(0));
    update.record_refused(&pods[0], refused.clone(), at(0));
    assert_eq!(update.blocker(), Some(&refused));
    assert_eq!(names(&update.next(&pods, &GOAL, at(1))), ["b"]);
    pods[1] = Arc::new(with("b", "i:2"));
    assert_eq!(update.next(&pods, &GOAL, at(14)), Step::Wait);
    assert_eq!(
        update.next_check(at(14)),
        Some(SignedDuration::from_secs(1))
    );
    assert_eq!(names(&update.next(&pods, &GOAL, at(15))), ["a"]);
    update.record_refused(&pods[0], refused.clone(), at(15));
    assert_eq!(update.next(&pods, &GOAL, at(44)), Step::Wait);
    assert_eq!(update.blocker(), Some(&refused));
    assert_eq!(names(&update.next(&pods, &GOAL, at(45))), ["a"]);
    update.record_accepted(&pods[0]);
    update.next(&pods, &GOAL, at(46));
    assert_eq!(update.blocker(), None);
}

#[test]
fn another_pod_becomes_the_canary_if_the_first_cannot_be_patched() {
    let mut update = Update::default();
    let pods = arcs([with("a", "i:1"), with("b", "i:1")]);
    assert_eq!(names(&update.next(&pods, &GOAL, at(0))), ["a"]);
    update.record_image_change(&pods[0], at(0));
    update.record_not_changed(&pods[0]);
    update.record_refused(&pods[0], UpdateBlocker::NotAllowed("no".into()), at(0));
    assert_eq!(names(&update.next(&pods, &GOAL, at(1))), ["b"]);
}

#[test]
fn refused_patches_of_all_pods_pause_the_update() {
    let mut update = Update::default();
    let pods = arcs([with("a", "i:1"), with("b", "i:1")]);
    update.next(&pods, &GOAL, at(0));
    update.pause(at(0));
    assert_eq!(update.next(&pods, &GOAL, at(14)), Step::Wait);
    assert_eq!(names(&update.next(&pods, &GOAL, at(15))), ["a"]);
}

#[test]
fn hanging_pods_are_updated_before_configs() {
    let mut hanging = waiting("hangs", "ErrImagePull");
    hanging.sidecar.as_mut().unwrap().image = "i:0".into();
    let old = Pod {
        config_generation: Some(1),
        ..with("old", "i:2")
    };
    let pods = arcs([old, hanging]);
    let step = Update::default().next(&pods, &GOAL, at(0));
    assert_eq!(names(&step), ["hangs"]);
}

/// A pod whose memory tier has this size, in MiB, and the pool's image.
fn sized(name: &str, size: u64) -> Pod {
    Pod {
        memory: Some(Box::new(of_size(size << 20))),
        ..with(name, "i:2")
    }
}

/// A pod whose container waits for the kubelet.
fn resizing(name: &str) -> Pod {
    let mut pod = sized(name, 32);
    let needed = sized("grown", 64).memory.unwrap().desired;
    pod.memory.as_mut().unwrap().desired = needed;
    pod
}

#[test]
fn a_tenth_of_the_pods_are_resized_at_a_time_and_a_silent_node_blocks_for_a_minute() {
    let mut update = Update::default();
    let mut pods = arcs((0..30).map(|n| sized(&n.to_string(), 32)));
    assert_eq!(names(&update.next(&pods, &GOAL, at(0))), ["0", "1", "2"]);
    for pod in &pods[..3] {
        update.record_resize(pod, at(0));
    }
    pods[0] = Arc::new(resizing("0"));
    pods[1] = Arc::new(resizing("1"));
    let step = update.next(&pods, &GOAL, at(1));
    assert_eq!(names(&step), ["2"], "it has begun");
    pods[2] = Arc::new(sized("2", 64));
    assert_eq!(names(&update.next(&pods, &GOAL, at(2))), ["3"]);
    assert_eq!(
        names(&update.next(&pods, &GOAL, at(60))),
        ["3", "4", "5"],
        "0 and 1 are slow"
    );
}

#[test]
fn a_sidecar_that_has_not_shrunk_is_queried_again() {
    let mut shrinking = sized("a", 64);
    let memory = shrinking.memory.as_mut().unwrap();
    memory.lowered = Some(Lowered {
        to: sized("b", 32).memory.unwrap().desired,
        refused: "".into(),
    });
    let pods = arcs([shrinking]);
    let mut update = Update::default();
    for (now, next) in [(0, 2), (2, 4), (60, 75)] {
        assert_eq!(names(&update.next(&pods, &GOAL, at(now))), ["a"]);
        update.record_resize(&pods[0], at(now));
        update.record_not_shrunk(&pods[0], at(now));
        assert_eq!(update.next(&pods, &GOAL, at(now + 1)), Step::Wait);
        let wait = SignedDuration::from_secs(next - now - 1);
        assert_eq!(update.next_check(at(now + 1)), Some(wait));
    }
}

#[test]
fn a_refused_resize_is_reported_and_retried_after_an_edit() {
    let mut update = Update::default();
    let pods = arcs([sized("a", 32)]);
    update.next(&pods, &GOAL, at(0));
    update.record_resize(&pods[0], at(0));
    let refused = UpdateBlocker::NotResized("quota".into());
    update.record_refused(&pods[0], refused.clone(), at(0));
    assert_eq!(update.next(&pods, &GOAL, at(1)), Step::Wait);
    assert_eq!(update.blocker(), Some(&refused));
    let edited = Goal {
        generation: 3,
        memory_bytes: 16 << 20,
        ..GOAL
    };
    let mut newer = sized("a", 32);
    newer.config_generation = Some(3);
    let pods = arcs([newer]);
    assert_eq!(names(&update.next(&pods, &edited, at(2))), ["a"]);
    assert_eq!(update.blocker(), None);
}

#[test]
fn a_sidecar_that_gets_another_image_is_not_resized_meanwhile() {
    let mut update = canary();
    let mut pod = stopped("a");
    pod.memory = sized("a", 32).memory;
    assert_eq!(update.next(&arcs([pod]), &GOAL, at(1)), Step::Wait);
    let own_size = with("b", "i:2");
    assert_eq!(
        Update::default().next(&arcs([own_size]), &GOAL, at(0)),
        Step::Wait
    );
}

/// The kubelet: stops a patched sidecar, and restarts it if the image is good.
fn kubelet(pod: &mut Pod, good: bool, now: Timestamp) {
    let sidecar = pod.sidecar.as_mut().unwrap();
    if sidecar.image == sidecar.image_in_use && sidecar.runs() {
        return;
    }
    if good || &*sidecar.image != GOAL.image {
        sidecar.image_in_use = sidecar.image.clone();
        sidecar.restarts += 1;
        sidecar.state = SidecarState::Running { since: now };
    } else if !matches!(sidecar.state, SidecarState::Waiting { .. }) {
        sidecar.state = SidecarState::Terminated {
            reason: "Completed".into(),
        };
    }
}

fn stored(pods: &mut [Arc<Pod>], uid: &str, change: impl FnOnce(&mut Pod)) {
    let pod = pods.iter_mut().find(|p| &*p.uid == uid).unwrap();
    change(Arc::make_mut(pod));
}

proptest! {
    /// For any pods and images: the update ends; a pod that has the image and works is never changed; before an answer at most one working
    /// sidecar is put at risk; and in the end all pods have a good image, or working ones have kept theirs.
    #[test]
    fn an_update_ends_and_never_risks_a_second_sidecar_on_an_unproven_image(
        kinds in proptest::collection::vec(0..4u8, 1..25),
        good in any::<bool>(),
        answers in any::<bool>(),
        forgetful in proptest::collection::vec(any::<bool>(), 20),
    ) {
        let mut pods = arcs(kinds.iter().enumerate().map(|(n, kind)| {
            let name = n.to_string();
            match kind {
                0 => with(&name, "i:2"),
                1 => with(&name, "i:1"),
                2 => Pod { config_generation: Some(1), ..with(&name, "i:1") },
                _ => {
                    let mut pod = waiting(&name, "ErrImagePull");
                    pod.config_generation = Some(2);
                    pod.sidecar.as_mut().unwrap().image = "i:0".into();
                    pod
                }
            }
        }));
        let mut update = Update::default();
        let mut now = 10;
        let mut risked = 0;
        let mut proven = false;
        let mut idle = 0;
        for turn in 0..2000 {
            prop_assert!(turn < 1999, "it does not end");
            // A new leader takes over some seconds after the last one stopped.
            if forgetful.get(turn) == Some(&true) && !matches!(update.blocker(), Some(UpdateBlocker::RolledBack(_))) {
                update = Update::default();
                proven = false;
                risked = 0;
            }
            now += 2;
            let step = update.next(&pods, &GOAL, at(now));
            idle = if step == Step::Wait { idle + 1 } else { 0 };
            if idle > 80 {
                break;
            }
            match step {
                Step::Wait => {}
                Step::Resize(_) => prop_assert!(false, "no pod has memory to change"),
                Step::Config(some) => {
                    for pod in some {
                        prop_assert_eq!(pod.config_generation, Some(1));
                        stored(&mut pods, &pod.uid, |p| p.config_generation = Some(2));
                    }
                    update.record_configs(at(now));
                }
                Step::Image(some) => {
                    for pod in some {
                        let sidecar = pod.sidecar.as_ref().unwrap();
                        prop_assert!(&*sidecar.image != GOAL.image);
                        risked += usize::from(!proven && sidecar.runs());
                        prop_assert!(risked <= 1, "a second canary");
                        update.record_image_change(&pod, at(now));
                        stored(&mut pods, &pod.uid, |p| {
                            if p.address().is_some() {
                                p.image_change = Some(Box::new(ImageChange {
                                    image: p.sidecar.as_ref().unwrap().image.clone(),
                                    hash: "h".into(),
                                    at: Time(at(now)),
                                }));
                            }
                            p.sidecar.as_mut().unwrap().image = GOAL.image.into();
                        });
                    }
                }
                Step::Query(pod) => if answers {
                    proven = true;
                    update.record_answer(&pod, State::Ready);
                },
                Step::RollBack(pod, previous) => {
                    stored(&mut pods, &pod.uid, |p| p.sidecar.as_mut().unwrap().image = previous.image.clone());
                    update.record_rollback(&pod, &previous);
                }
            }
            for pod in &mut pods {
                kubelet(Arc::make_mut(pod), good, at(now));
            }
        }
        for (pod, kind) in pods.iter().zip(&kinds) {
            let sidecar = pod.sidecar.as_ref().unwrap();
            prop_assert!(sidecar.runs() || *kind == 3, "{:?}", sidecar);
            if good && answers {
                prop_assert_eq!(&*sidecar.image, GOAL.image);
            }
        }
    }
}
