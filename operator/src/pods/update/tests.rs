//! One rule after the other, then any pods and any images against a model of the kubelet.

use super::*;
use crate::pods::tests::{at, pod as bare, running, waiting};
use proptest::prelude::*;

const GOAL: Goal<'static> = Goal {
    image: "i:2",
    generation: 2,
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

/// The same after its image was patched and the old sidecar was stopped.
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
        Step::Config(pods) | Step::Image(pods) => pods.iter().map(|p| &*p.name).collect(),
        Step::Ask(pod) | Step::Back(pod, _) => vec![&pod.name],
        Step::Rest => Vec::new(),
    }
}

/// An update whose canary `a` was patched at second 0.
fn canary() -> Update {
    let mut update = Update::default();
    let pods = arcs([with("a", "i:1"), with("b", "i:1")]);
    let step = update.next(&pods, &GOAL, at(0));
    assert_eq!(step, Step::Image(vec![pods[0].clone()]));
    update.exchanged(&pods[0], at(0));
    update
}

#[test]
fn pods_that_are_as_the_pool_says_are_left_alone() {
    let mut update = Update::default();
    let pods = arcs([with("a", "i:2"), with("b", "i:2"), bare("none")]);
    assert_eq!(update.next(&pods, &GOAL, at(0)), Step::Rest);
    assert_eq!(update.look_again(at(0)), None);
}

#[test]
fn older_configs_come_before_images_and_are_given_time() {
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
    update.configured(at(0));
    let pods = arcs([with("a", "i:1")]);
    assert_eq!(update.next(&pods, &GOAL, at(1)), Step::Rest);
    assert_eq!(update.look_again(at(1)), Some(SignedDuration::from_secs(1)));
    assert_eq!(names(&update.next(&pods, &GOAL, at(2))), ["a"]);
}

#[test]
fn one_pod_proves_the_image_by_an_answer_before_the_others_get_it() {
    let mut update = canary();
    let others = || [with("b", "i:1"), with("c", "i:1")];
    for state in [with("a", "i:1"), stopped("a")] {
        let pods = arcs([state].into_iter().chain(others()));
        assert_eq!(update.next(&pods, &GOAL, at(5)), Step::Rest);
        assert_eq!(update.look_again(at(5)), Some(LOOK));
    }
    let mut pods = arcs([with("a", "i:2")].into_iter().chain(others()));
    for second in [6, 8] {
        assert_eq!(
            update.next(&pods, &GOAL, at(second)),
            Step::Ask(pods[0].clone())
        );
    }
    update.answered(&pods[0]);
    assert_eq!(names(&update.next(&pods, &GOAL, at(9))), ["b"]);
    update.exchanged(&pods[1], at(9));
    pods[1] = Arc::new(stopped("b"));
    assert_eq!(
        update.next(&pods, &GOAL, at(10)),
        Step::Rest,
        "one of three at a time"
    );
    pods[1] = Arc::new(with("b", "i:2"));
    assert_eq!(names(&update.next(&pods, &GOAL, at(11))), ["c"]);
}

#[test]
fn a_tenth_is_away_at_a_time_and_at_most_ten() {
    for (count, room) in [(5, 1), (40, 4), (400, 10)] {
        let mut update = canary();
        let others = (0..count).map(|n| with(&n.to_string(), "i:1"));
        let pods = arcs([with("a", "i:2")].into_iter().chain(others));
        update.answered(&pods[0]);
        assert_eq!(names(&update.next(&pods, &GOAL, at(1))).len(), room);
    }
}

#[test]
fn a_name_that_the_runtime_writes_otherwise_does_not_hide_that_it_runs() {
    let mut update = canary();
    let mut renamed = with("a", "i:2");
    let sidecar = renamed.sidecar.as_mut().unwrap();
    sidecar.image_in_use = "sha256:0a".into();
    let pods = arcs([renamed.clone()]);
    assert_eq!(
        update.next(&pods, &GOAL, at(3)),
        Step::Rest,
        "the old process still"
    );
    renamed.sidecar.as_mut().unwrap().state = SidecarState::Running { since: at(2) };
    assert_eq!(names(&update.next(&arcs([renamed]), &GOAL, at(3))), ["a"]);
}

#[test]
fn a_canary_that_is_not_up_in_a_minute_gets_its_image_back_and_no_other_is_tried() {
    let silent = with("a", "i:2");
    for (pod, why) in [
        (stopped("a"), "ImageNotPulled"),
        (silent, "does not answer"),
    ] {
        let mut update = canary();
        let mut pods = arcs([pod, with("b", "i:1")]);
        assert!(!matches!(update.next(&pods, &GOAL, at(59)), Step::Back(..)));
        let step = update.next(&pods, &GOAL, at(60));
        assert!(
            matches!(&step, Step::Back(p, was) if &*p.name == "a" && &*was.image == "i:1" && &*was.hash == "h"),
            "{step:?}"
        );
        let note = update.put_back(&pods[0]);
        assert!(
            note.contains("pod a") && note.contains("i:2") && note.contains(why),
            "{note}"
        );
        assert_eq!(update.setback(), Some(&Setback::RolledBack(note.clone())));
        pods[0] = Arc::new(with("a", "i:1"));
        assert_eq!(update.next(&pods, &GOAL, at(9000)), Step::Rest);
        let mut next_leader = Update::rolled_back(&GOAL, &note);
        assert_eq!(next_leader.next(&pods, &GOAL, at(9000)), Step::Rest);
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
        assert_eq!(update.setback(), None);
    }
}

#[test]
fn what_a_leader_left_half_done_is_put_back_too() {
    let mut update = Update::default();
    let pods = arcs([stopped("a"), with("b", "i:1")]);
    assert_eq!(
        update.next(&pods, &GOAL, at(0)),
        Step::Rest,
        "a is the canary"
    );
    let step = update.next(&pods, &GOAL, at(60));
    assert!(
        matches!(&step, Step::Back(_, was) if &*was.image == "i:1"),
        "{step:?}"
    );
}

#[test]
fn without_in_place_only_configs_and_pods_that_hang_are_changed() {
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
    update.exchanged(&pods[1], at(0));
    hanging.sidecar.as_mut().unwrap().image = "i:2".into();
    pods[1] = Arc::new(hanging);
    assert_eq!(
        update.next(&pods, &goal, at(90)),
        Step::Rest,
        "it has nothing to go back to"
    );
}

#[test]
fn a_refused_patch_is_told_and_tried_again_after_a_pause() {
    let mut update = Update::default();
    let pods = arcs([with("a", "i:1")]);
    let refused = Setback::NotAllowed("no".into());
    update.next(&pods, &GOAL, at(0));
    update.refused(refused.clone(), at(0));
    assert_eq!(update.setback(), Some(&refused));
    assert_eq!(update.next(&pods, &GOAL, at(14)), Step::Rest);
    assert_eq!(
        update.look_again(at(14)),
        Some(SignedDuration::from_secs(1))
    );
    assert_eq!(names(&update.next(&pods, &GOAL, at(15))), ["a"]);
    assert_eq!(update.setback(), None);
}

/// The kubelet: a patched sidecar is stopped, and started again where the image is good.
fn kubelet(pod: &mut Pod, good: bool, now: Timestamp) {
    let sidecar = pod.sidecar.as_mut().unwrap();
    if sidecar.image == sidecar.image_in_use && sidecar.runs() {
        return;
    }
    if good || &*sidecar.image != GOAL.image {
        sidecar.image_in_use = sidecar.image.clone();
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
    /// Whatever pods there are and however the image is: it ends; a pod that has the image and works is never touched; before an answer
    /// no second working sidecar is given up; and in the end all have a good image, or those that worked the one that they had.
    #[test]
    fn it_ends_and_never_risks_a_second_sidecar_on_an_unproven_image(
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
            // A new leader, some seconds after the last one stopped where it stood.
            if forgetful.get(turn) == Some(&true) && !matches!(update.setback(), Some(Setback::RolledBack(_))) {
                update = Update::default();
                proven = false;
                risked = 0;
            }
            now += 2;
            let step = update.next(&pods, &GOAL, at(now));
            idle = if step == Step::Rest { idle + 1 } else { 0 };
            if idle > 80 {
                break;
            }
            match step {
                Step::Rest => {}
                Step::Config(some) => {
                    for pod in some {
                        prop_assert_eq!(pod.config_generation, Some(1));
                        stored(&mut pods, &pod.uid, |p| p.config_generation = Some(2));
                    }
                    update.configured(at(now));
                }
                Step::Image(some) => {
                    for pod in some {
                        let sidecar = pod.sidecar.as_ref().unwrap();
                        prop_assert!(&*sidecar.image != GOAL.image);
                        risked += usize::from(!proven && sidecar.runs());
                        prop_assert!(risked <= 1, "a second canary");
                        update.exchanged(&pod, at(now));
                        stored(&mut pods, &pod.uid, |p| p.sidecar.as_mut().unwrap().image = GOAL.image.into());
                    }
                }
                Step::Ask(pod) => if answers {
                    proven = true;
                    update.answered(&pod);
                },
                Step::Back(pod, was) => {
                    stored(&mut pods, &pod.uid, |p| p.sidecar.as_mut().unwrap().image = was.image);
                    update.put_back(&pod);
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
