//! The breaker of a pool: pods whose sidecar cannot start do not start either, so when two of them hang, the webhook lets further
//! pods go without a sidecar. Pure: pods and time in, a door out. Webhooks on all replicas learn of it from the pool's status.

use super::pod::{Pod, Sidecar, SidecarState};
use jiff::{SignedDuration, Timestamp};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// How long a sidecar must hang before it counts.
const STUCK: SignedDuration = SignedDuration::from_secs(60);
/// How long it must run before it counts as started: a crashing one runs for seconds, again and again.
pub(super) const STEADY: SignedDuration = SignedDuration::from_secs(30);
/// Between two trials.
const TRIAL_EVERY: SignedDuration = SignedDuration::from_mins(10);
/// Hanging pods that shut the door.
const PODS: usize = 2;

/// Whether new pods are injected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Door {
    /// They are.
    Open,
    /// They are not.
    Shut(Shut),
    /// The next one is, to see whether sidecars start again.
    Ajar(Shut),
    /// That one is being watched; others are not injected.
    Trial(Shut, Box<str>),
}

/// Why the door is not open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shut {
    /// Since when the door is in this position.
    pub since: Timestamp,
    /// Settings that do not start; others open the door.
    pub hash: Box<str>,
    /// The kubelet's reason.
    pub reason: Box<str>,
    /// Its sentence.
    pub message: Box<str>,
    /// A pod that hangs.
    pub example: Box<str>,
}

/// The state machine.
#[derive(Debug)]
pub struct Breaker {
    door: Door,
    /// Since when which pod (by uid) hangs.
    stuck: HashMap<Box<str>, Timestamp>,
    /// Pods that hung when the door was opened: they have been judged, and shut it no more.
    judged: HashSet<Box<str>>,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            door: Door::Open,
            stuck: HashMap::new(),
            judged: HashSet::new(),
        }
    }
}

impl Breaker {
    /// The breaker of a leader before this one, which left its door shut in the pool's status.
    #[must_use]
    pub fn shut_since(since: Timestamp, hash: &str, ajar: bool) -> Self {
        let shut = Shut {
            since,
            hash: hash.into(),
            reason: "".into(),
            message: "".into(),
            example: "".into(),
        };
        Self {
            door: if ajar {
                Door::Ajar(shut)
            } else {
                Door::Shut(shut)
            },
            ..Self::default()
        }
    }

    /// Position of the door.
    #[must_use]
    pub fn door(&self) -> &Door {
        &self.door
    }

    /// Looks at the pool's pods; `hash` is that of the settings that a new pod would get. Returns how long to wait for the next
    /// look if nothing changes before.
    pub fn step(
        &mut self,
        pods: &[Arc<Pod>],
        hash: &str,
        now: Timestamp,
    ) -> Option<SignedDuration> {
        let pods: Vec<&Pod> = pods
            .iter()
            .map(|p| &**p)
            .filter(|p| p.is_active() && p.sidecar.is_some() && p.hash() == hash)
            .collect();
        self.mark(&pods, now);
        let before = std::mem::replace(&mut self.door, Door::Open);
        self.door = self.next(&before, &pods, hash, now);
        if before.hash() == Some(hash) && self.door == Door::Open {
            self.judged = self.stuck.keys().cloned().collect();
        }
        self.look_again(&pods, now)
    }

    fn mark(&mut self, pods: &[&Pod], now: Timestamp) {
        let mut stuck = HashMap::new();
        for pod in pods {
            let before = self.stuck.get(&pod.uid).copied();
            let since = match (pod.fault(), before) {
                (Some(_), before) => Some(before.unwrap_or(now)),
                (None, before) => before.filter(|_| may_fall_back(pod, now)),
            };
            if let Some(since) = since {
                stuck.insert(pod.uid.clone(), since);
            }
        }
        self.judged.retain(|uid| stuck.contains_key(uid));
        self.stuck = stuck;
    }

    fn next(&self, door: &Door, pods: &[&Pod], hash: &str, now: Timestamp) -> Door {
        match door {
            Door::Open => match self.verdict(pods, now) {
                Some(pod) => Door::Shut(cause(pod, hash, now)),
                None => Door::Open,
            },
            Door::Shut(shut) | Door::Ajar(shut) | Door::Trial(shut, _)
                if *shut.hash != *hash
                    || pods.iter().any(|p| started_after(p, shut.since, now)) =>
            {
                Door::Open
            }
            Door::Shut(shut) if now.duration_since(shut.since) >= TRIAL_EVERY => {
                Door::Ajar(shut.at(now))
            }
            Door::Shut(shut) => Door::Shut(shut.clone()),
            Door::Ajar(shut) => match pods.iter().find(|p| p.created >= shut.since) {
                Some(pod) => Door::Trial(shut.at(now), pod.uid.clone()),
                None => Door::Ajar(shut.clone()),
            },
            Door::Trial(shut, uid) => match pods.iter().find(|p| p.uid == *uid) {
                Some(pod) if self.hangs(pod, now) => Door::Shut(cause(pod, hash, now)),
                // A pod that is never scheduled must not keep the pool shut.
                Some(_) if now.duration_since(shut.since) < TRIAL_EVERY => door.clone(),
                _ => Door::Ajar(shut.at(now)),
            },
        }
    }

    /// One of the pods for which the open door shuts: several hang that were not judged yet, and none has started since the first of
    /// them began to.
    fn verdict<'p>(&self, pods: &[&'p Pod], now: Timestamp) -> Option<&'p Pod> {
        let mut hanging = pods
            .iter()
            .copied()
            .filter(|p| !self.judged.contains(&p.uid) && self.hangs(p, now));
        let first = hanging.clone().next();
        let began = hanging
            .clone()
            .filter_map(|p| self.stuck.get(&p.uid))
            .min()?;
        let starts = |p: &&Pod| {
            !self.stuck.contains_key(&p.uid) && running_since(p).is_some_and(|at| at > *began)
        };
        let enough = hanging.nth(PODS - 1).is_some();
        first.filter(|_| enough && !pods.iter().any(starts))
    }

    fn hangs(&self, pod: &Pod, now: Timestamp) -> bool {
        self.stuck
            .get(&pod.uid)
            .is_some_and(|since| pod.fault().is_some() && now.duration_since(*since) >= STUCK)
    }

    fn look_again(&self, pods: &[&Pod], now: Timestamp) -> Option<SignedDuration> {
        let ripe = self.stuck.values().map(|since| *since + STUCK);
        let door = match &self.door {
            Door::Shut(shut) | Door::Trial(shut, _) => Some(shut.since + TRIAL_EVERY),
            Door::Open | Door::Ajar(_) => None,
        };
        let shut = self.door != Door::Open;
        let steady = pods
            .iter()
            .filter_map(|p| running_since(p))
            .filter(|_| shut)
            .map(|since| since + STEADY);
        ripe.chain(door)
            .chain(steady)
            .filter(|at| *at > now)
            .min()
            .map(|at| at.duration_since(now))
    }
}

impl Door {
    fn hash(&self) -> Option<&str> {
        match self {
            Self::Open => None,
            Self::Shut(shut) | Self::Ajar(shut) | Self::Trial(shut, _) => Some(&shut.hash),
        }
    }
}

impl Shut {
    fn at(&self, now: Timestamp) -> Self {
        Self {
            since: now,
            ..self.clone()
        }
    }
}

fn cause(pod: &Pod, hash: &str, now: Timestamp) -> Shut {
    let (reason, message) = pod.fault().map_or(("", ""), |f| (f.reason, f.message));
    Shut {
        since: now,
        hash: hash.into(),
        reason: reason.into(),
        message: message.into(),
        example: pod.name.clone(),
    }
}

/// Since when its sidecar runs, if the pod's own containers can start beside it.
fn running_since(pod: &Pod) -> Option<Timestamp> {
    let sidecar = pod.sidecar.as_ref().filter(|s| s.lets_the_pod_start())?;
    match sidecar.state {
        SidecarState::Running { since } => Some(since),
        _ => None,
    }
}

/// Between two crashes: it runs, but not for long, or it ended and is about to be started.
pub(super) fn may_fall_back(pod: &Pod, now: Timestamp) -> bool {
    match &pod.sidecar {
        Some(Sidecar {
            state: SidecarState::Running { since },
            ..
        }) => now.duration_since(*since) < STEADY,
        Some(Sidecar {
            state: SidecarState::Terminated { .. },
            ..
        }) => true,
        _ => false,
    }
}

fn started_after(pod: &Pod, since: Timestamp, now: Timestamp) -> bool {
    running_since(pod).is_some_and(|at| at > since && now.duration_since(at) >= STEADY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::{at, injected, waiting as waits};
    use proptest::prelude::*;

    fn waiting(reason: &str) -> SidecarState {
        waits("", reason).sidecar.unwrap().state
    }

    fn running(since: i64) -> SidecarState {
        SidecarState::Running { since: at(since) }
    }

    fn pod(name: &str, hash: &str, created: i64, state: SidecarState) -> Arc<Pod> {
        let mut pod = injected(name, state);
        pod.created = at(created);
        if let Some(injection) = &mut pod.injection {
            injection.hash = hash.into();
        }
        if let Some(sidecar) = &mut pod.sidecar {
            sidecar.image_in_use = "i:1".into();
        }
        Arc::new(pod)
    }

    fn pull(name: &str) -> Arc<Pod> {
        pod(name, "h", 0, waiting("ImagePullBackOff"))
    }

    /// A breaker whose door was shut at second 60.
    fn shut() -> Breaker {
        let mut breaker = Breaker::default();
        let pods = [pull("a"), pull("b")];
        breaker.step(&pods, "h", at(0));
        breaker.step(&pods, "h", at(60));
        assert!(matches!(breaker.door(), Door::Shut(_)));
        breaker
    }

    #[test]
    fn two_pods_of_one_hash_that_hang_for_a_minute_shut_the_door() {
        let mut breaker = Breaker::default();
        let pods = [pull("a"), pull("b")];
        assert_eq!(breaker.step(&pods, "h", at(0)), Some(STUCK));
        breaker.step(&pods, "h", at(59));
        assert_eq!(*breaker.door(), Door::Open);
        breaker.step(&pods, "h", at(60));
        let Door::Shut(shut) = breaker.door() else {
            panic!("{:?}", breaker.door());
        };
        assert_eq!((&*shut.reason, &*shut.example), ("ImagePullBackOff", "a"));
        assert_eq!(&*shut.message, "no such image");
    }

    #[test]
    fn one_pod_or_two_hashes_or_pods_that_go_do_not() {
        let mut going = (*pull("b")).clone();
        going.deleting = true;
        let other = pod("b", "old", 0, waiting("ErrImagePull"));
        for pods in [
            vec![pull("a")],
            vec![pull("a"), other],
            vec![pull("a"), Arc::new(going)],
        ] {
            let mut breaker = Breaker::default();
            breaker.step(&pods, "h", at(0));
            breaker.step(&pods, "h", at(600));
            assert_eq!(*breaker.door(), Door::Open);
        }
    }

    #[test]
    fn an_image_that_was_patched_in_place_and_does_not_come_counts() {
        let ended = || SidecarState::Terminated {
            reason: "Completed".into(),
        };
        let mut breaker = Breaker::default();
        let pods = [pod("a", "h", 0, ended()), pod("b", "h", 0, ended())];
        breaker.step(&pods, "h", at(0));
        breaker.step(&pods, "h", at(60));
        assert!(matches!(breaker.door(), Door::Shut(s) if &*s.reason == "ImageNotPulled"));
    }

    #[test]
    fn a_crash_loop_is_not_forgotten_while_it_runs_for_seconds() {
        let mut breaker = Breaker::default();
        let crash = |s| [pod("a", "h", 0, s), pull("b")];
        breaker.step(&crash(waiting("CrashLoopBackOff")), "h", at(0));
        breaker.step(&crash(running(50)), "h", at(52));
        breaker.step(&crash(waiting("CrashLoopBackOff")), "h", at(61));
        assert!(matches!(breaker.door(), Door::Shut(_)));
        let mut breaker = Breaker::default();
        breaker.step(&crash(waiting("CrashLoopBackOff")), "h", at(0));
        breaker.step(&crash(running(10)), "h", at(45));
        breaker.step(&crash(waiting("CrashLoopBackOff")), "h", at(61));
        assert_eq!(*breaker.door(), Door::Open, "35 s of work is no crash loop");
    }

    #[test]
    fn after_ten_minutes_one_pod_is_tried_and_decides() {
        let mut breaker = shut();
        let old = [pull("a"), pull("b")];
        breaker.step(&old, "h", at(659));
        assert!(matches!(breaker.door(), Door::Shut(_)));
        breaker.step(&old, "h", at(660));
        assert!(matches!(breaker.door(), Door::Ajar(_)));
        let with = |state| [pull("a"), pull("b"), pod("c", "h", 700, state)];
        breaker.step(&with(SidecarState::Unseen), "h", at(701));
        assert!(matches!(breaker.door(), Door::Trial(_, uid) if &**uid == "c"));
        let wait = breaker.step(&with(running(710)), "h", at(720));
        assert!(matches!(breaker.door(), Door::Trial(..)));
        assert_eq!(wait, Some(SignedDuration::from_secs(20)));
        breaker.step(&with(running(710)), "h", at(740));
        assert_eq!(*breaker.door(), Door::Open);
    }

    #[test]
    fn a_trial_that_hangs_shuts_again_and_one_that_goes_leaves_the_door_ajar() {
        let trial = || {
            let mut breaker = shut();
            breaker.step(&[pull("a"), pull("b")], "h", at(660));
            breaker.step(&[pod("c", "h", 700, SidecarState::Unseen)], "h", at(700));
            breaker
        };
        let hung = [pod("c", "h", 700, waiting("ErrImagePull"))];
        let mut breaker = trial();
        breaker.step(&hung, "h", at(710));
        breaker.step(&hung, "h", at(770));
        assert!(matches!(breaker.door(), Door::Shut(s) if s.since == at(770)));
        let mut breaker = trial();
        breaker.step(&[], "h", at(710));
        assert!(matches!(breaker.door(), Door::Ajar(_)));
        let mut breaker = trial();
        breaker.step(&[pod("c", "h", 700, SidecarState::Unseen)], "h", at(1300));
        assert!(matches!(breaker.door(), Door::Ajar(_)), "never scheduled");
    }

    #[test]
    fn other_settings_and_a_sidecar_that_starts_open_the_door() {
        let mut breaker = shut();
        breaker.step(&[pull("a"), pull("b")], "new", at(61));
        assert_eq!(*breaker.door(), Door::Open);
        let mut breaker = shut();
        breaker.step(&[pod("a", "h", 0, running(100)), pull("b")], "h", at(130));
        assert_eq!(*breaker.door(), Door::Open);
    }

    #[test]
    fn a_door_that_a_trial_opened_is_not_shut_by_pods_that_hung_before() {
        let mut breaker = shut();
        let old = || vec![pull("a"), pull("b")];
        breaker.step(&old(), "h", at(660));
        let with = |more: &[Arc<Pod>]| [old(), more.to_vec()].concat();
        let c = pod("c", "h", 700, running(710));
        breaker.step(&with(std::slice::from_ref(&c)), "h", at(701));
        breaker.step(&with(std::slice::from_ref(&c)), "h", at(740));
        assert_eq!(*breaker.door(), Door::Open);
        for second in [741, 800, 3000] {
            breaker.step(&old(), "h", at(second));
            assert_eq!(*breaker.door(), Door::Open, "{second}");
        }
        let new = |n: &str| pod(n, "h", 3000, waiting("ErrImagePull"));
        let more = [new("d"), new("e")];
        breaker.step(&with(&more), "h", at(3001));
        breaker.step(&with(&more), "h", at(3061));
        assert!(matches!(breaker.door(), Door::Shut(s) if &*s.example == "d"));
    }

    #[test]
    fn two_pods_that_hang_while_another_starts_do_not_shut_it() {
        let mut breaker = Breaker::default();
        let pods = [pull("a"), pull("b"), pod("c", "h", 0, running(30))];
        breaker.step(&pods, "h", at(0));
        breaker.step(&pods, "h", at(60));
        assert_eq!(*breaker.door(), Door::Open);
        let earlier = [pull("a"), pull("b"), pod("c", "h", -90, running(-60))];
        breaker.step(&earlier, "h", at(61));
        assert!(matches!(breaker.door(), Door::Shut(_)), "it began before");
    }

    #[test]
    fn a_sidecar_whose_init_container_cannot_start_counts_as_hanging_and_not_as_started() {
        let hung = |name: &str, since| {
            let mut pod = (*pod(name, "h", 0, running(since))).clone();
            pod.sidecar.as_mut().unwrap().init = Some(Box::new(waiting("ErrImageNeverPull")));
            Arc::new(pod)
        };
        let mut breaker = Breaker::default();
        let pods = [hung("a", 1), hung("b", 1)];
        breaker.step(&pods, "h", at(5));
        breaker.step(&pods, "h", at(65));
        assert!(matches!(breaker.door(), Door::Shut(s) if &*s.reason == "ErrImageNeverPull"));
        breaker.step(&[hung("a", 70), hung("b", 70)], "h", at(120));
        assert!(matches!(breaker.door(), Door::Shut(_)));
    }

    #[test]
    fn what_the_last_leader_shut_stays_shut_for_the_rest_of_its_time() {
        let mut breaker = Breaker::shut_since(at(0), "h", false);
        breaker.step(&[], "h", at(300));
        assert!(matches!(breaker.door(), Door::Shut(_)));
        breaker.step(&[], "h", at(600));
        assert!(matches!(breaker.door(), Door::Ajar(_)));
        let mut breaker = Breaker::shut_since(at(0), "h", true);
        breaker.step(&[], "h", at(1));
        assert!(matches!(breaker.door(), Door::Ajar(_)));
    }

    proptest! {
        /// Whatever pods do: the door is never shut while fewer than two hung for a minute, and an open door never waits for a clock
        /// that has passed.
        #[test]
        fn fewer_than_two_hanging_pods_never_shut_it(steps in proptest::collection::vec((0..4u8, 1..120i64), 1..60)) {
            let mut breaker = Breaker::default();
            let mut now = 0;
            for (kind, wait) in steps {
                now += wait;
                let state = match kind {
                    0 => waiting("ErrImagePull"),
                    1 => running(now - wait / 2),
                    2 => SidecarState::Unseen,
                    _ => SidecarState::Terminated { reason: "Error".into() },
                };
                let again = breaker.step(&[pod("a", "h", 0, state)], "h", at(now));
                prop_assert_eq!(breaker.door(), &Door::Open);
                prop_assert!(again.is_none_or(|d| d > SignedDuration::ZERO));
            }
        }
    }
}
