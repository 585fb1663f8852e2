//! Pods that should have got a sidecar and did not, and which of them to evict next if the pool asks for it. Pure.
//! An eviction that helps nobody is an outage that we made: in doubt a pod is left alone.

use super::pod::{Owner, Pod};
use jiff::{SignedDuration, Timestamp};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Longest wait for the pod that takes an evicted one's place.
const REPLACEMENT_MAX: SignedDuration = SignedDuration::from_mins(10);
/// How long a workload that is better left alone is left alone.
const LEFT: SignedDuration = SignedDuration::from_hours(6);
/// A pod that became not ready this long ago has other reasons than an eviction; vLLM loads its model in less.
const YOUNG: SignedDuration = SignedDuration::from_hours(1);

/// The pods that the webhook should have injected: labelled, created while the pool was there, and never seen by it. A refusal by
/// name is no miss.
pub fn missed(pods: &[Arc<Pod>], pool_created: Timestamp) -> impl Iterator<Item = &Arc<Pod>> {
    pods.iter().filter(move |p| {
        p.is_active() && p.sidecar.is_none() && p.injection.is_none() && p.created >= pool_created
    })
}

/// What to do about missed pods.
#[derive(Debug, PartialEq, Eq)]
pub enum Missed {
    /// Nothing, or nothing yet.
    Wait,
    /// Evict this one.
    Evict(Arc<Pod>),
}

/// Why the missed pods of a workload are left alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alone {
    /// The pod that took the place of an evicted one was missed too.
    Futile,
    /// No pod took the place of an evicted one.
    NotReplaced,
    /// Its controller does not simply make another pod, or counts the eviction as a failure.
    Kind,
    /// What its template says, or why that could not be read.
    Template(String),
}

/// Evictions of one pool: one at a time, each followed until its replacement is ready.
#[derive(Debug, Default)]
pub struct Evictions {
    current: Option<Eviction>,
    /// Owners (by uid) of which a pod was evicted, with the pods (by uid) that there were before. Clocks play no part in it.
    evicted: HashMap<Box<str>, HashSet<Box<str>>>,
    /// Owners that are left alone, until when, and why.
    left: HashMap<Box<str>, (Timestamp, Alone)>,
}

#[derive(Debug)]
struct Eviction {
    pod: Box<str>,
    owner: Owner,
    /// The owner's pods of then.
    known: HashSet<Box<str>>,
    at: Timestamp,
}

impl Evictions {
    /// Decides on the next step. Only pods with a controller are evicted: others would not come back.
    pub fn next(&mut self, pods: &[Arc<Pod>], pool_created: Timestamp, now: Timestamp) -> Missed {
        let missed: Vec<&Arc<Pod>> = missed(pods, pool_created).collect();
        self.learn(pods, &missed, now);
        if let Some(eviction) = &self.current {
            if eviction.goes_on(pods) && (now.duration_since(eviction.at) < REPLACEMENT_MAX) {
                return Missed::Wait;
            }
            if !eviction.replaced(pods) {
                let owner = eviction.owner.uid.clone();
                self.left.insert(owner, (now + LEFT, Alone::NotReplaced));
            }
            self.current = None;
        }
        let candidates: Vec<&Arc<Pod>> = missed
            .into_iter()
            .filter(|p| matches!(&p.owner, Some(o) if self.alone_of(o).is_none()))
            .collect();
        let owners: HashSet<&str> = candidates.iter().filter_map(|p| owner(p)).collect();
        let disturbed = pods.iter().any(|p| self.is_disturbed(p, &owners, now));
        match candidates.first() {
            Some(pod) if !disturbed => Missed::Evict(Arc::clone(pod)),
            _ => Missed::Wait,
        }
    }

    /// Missed pods that are left alone, one of each workload, and why.
    #[must_use]
    pub fn alone(&self, pods: &[Arc<Pod>], pool_created: Timestamp) -> Vec<(Arc<Pod>, Alone)> {
        let mut seen = HashSet::new();
        missed(pods, pool_created)
            .filter_map(|pod| Some((pod, pod.owner.as_ref()?)))
            .filter_map(|(pod, owner)| Some((pod, owner, self.alone_of(owner)?)))
            .filter(|(_, owner, _)| seen.insert(&owner.uid))
            .map(|(pod, _, why)| (pod.clone(), why))
            .collect()
    }

    /// A pod is about to be evicted. Said before the API server is asked: what it did is not always heard.
    pub fn begin(&mut self, pod: &Pod, pods: &[Arc<Pod>], now: Timestamp) {
        let Some(owner) = &pod.owner else { return };
        let known: HashSet<Box<str>> = of(pods, owner).map(|p| p.uid.clone()).collect();
        let before = self.evicted.entry(owner.uid.clone());
        before.or_insert_with(|| known.clone());
        self.current = Some(Eviction {
            pod: pod.uid.clone(),
            owner: owner.clone(),
            known,
            at: now,
        });
    }

    /// The API server did not evict it.
    pub fn refused(&mut self) {
        self.current = None;
    }

    /// This pod's workload is better left alone.
    pub fn leave(&mut self, pod: &Pod, why: Alone, now: Timestamp) {
        if let Some(owner) = &pod.owner {
            self.left.insert(owner.uid.clone(), (now + LEFT, why));
        }
    }

    /// Marks workloads whose new pods are missed too, and forgets those that are gone or whose time is over.
    fn learn(&mut self, pods: &[Arc<Pod>], missed: &[&Arc<Pod>], now: Timestamp) {
        let there: HashSet<&str> = pods.iter().filter_map(owner).collect();
        let current = self.current.as_ref().map(|e| e.owner.uid.clone());
        self.evicted
            .retain(|uid, _| there.contains(&**uid) || current.as_ref() == Some(uid));
        let over: Vec<Box<str>> = self
            .left
            .iter()
            .filter(|(uid, (until, _))| *until <= now || !there.contains(&***uid))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in over {
            self.left.remove(&uid);
            // What is there now is the new beginning.
            self.evicted.remove(&uid);
        }
        for pod in missed {
            let Some(uid) = owner(pod) else { continue };
            let younger = |known: &HashSet<Box<str>>| !known.contains(&pod.uid);
            if self.evicted.get(uid).is_some_and(younger) && !self.left.contains_key(uid) {
                self.left.insert(uid.into(), (now + LEFT, Alone::Futile));
            }
        }
    }

    fn alone_of(&self, owner: &Owner) -> Option<Alone> {
        if !makes_another(owner) {
            return Some(Alone::Kind);
        }
        self.left.get(&owner.uid).map(|(_, why)| why.clone())
    }

    /// A replacement is on its way, of an eviction of ours or of the leader before: no other pod goes meanwhile.
    fn is_disturbed(&self, pod: &Pod, candidates: &HashSet<&str>, now: Timestamp) -> bool {
        let Some(uid) = pod.owner.as_ref().map(|o| &*o.uid) else {
            return false;
        };
        if pod.deleting {
            return candidates.contains(uid) || self.evicted.contains_key(uid);
        }
        if !pod.is_active() || pod.ready {
            return false;
        }
        let younger = |known: &HashSet<Box<str>>| !known.contains(&pod.uid);
        self.evicted.get(uid).is_some_and(younger)
            || (candidates.contains(uid) && now.duration_since(pod.created) < YOUNG)
    }
}

impl Eviction {
    /// The evicted pod is still there, or no younger pod of its owner is ready.
    fn goes_on(&self, pods: &[Arc<Pod>]) -> bool {
        let there = pods.iter().any(|p| p.uid == self.pod);
        there || !self.younger(pods).any(|p| p.ready)
    }

    /// Something took its place, ready or not.
    fn replaced(&self, pods: &[Arc<Pod>]) -> bool {
        self.younger(pods).next().is_some()
    }

    fn younger<'p>(&'p self, pods: &'p [Arc<Pod>]) -> impl Iterator<Item = &'p Arc<Pod>> {
        of(pods, &self.owner).filter(|p| p.is_active() && !self.known.contains(&p.uid))
    }
}

fn owner(pod: &Arc<Pod>) -> Option<&str> {
    pod.owner.as_ref().map(|o| &*o.uid)
}

fn of<'p>(pods: &'p [Arc<Pod>], owner: &'p Owner) -> impl Iterator<Item = &'p Arc<Pod>> {
    pods.iter()
        .filter(|p| p.owner.as_ref().is_some_and(|o| o.uid == owner.uid))
}

/// Controllers that make a pod anew without a word. A Job counts the eviction as a failure; of others nothing is known.
fn makes_another(owner: &Owner) -> bool {
    matches!(
        (&*owner.api_version, &*owner.kind),
        ("apps/v1", "ReplicaSet" | "StatefulSet" | "DaemonSet")
    )
}

#[cfg(test)]
mod tests {
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

    /// What is decided for these pods, by name of the pod to evict.
    fn next(evictions: &mut Evictions, pods: &[Pod], second: i64) -> Option<String> {
        match evictions.next(&arcs(pods), at(0), at(second)) {
            Missed::Wait => None,
            Missed::Evict(pod) => Some(pod.name.to_string()),
        }
    }

    fn alone(evictions: &Evictions, pods: &[Pod]) -> Vec<Alone> {
        let alone = evictions.alone(&arcs(pods), at(0));
        alone.into_iter().map(|(_, why)| why).collect()
    }

    /// After `a` was evicted at second 5, where these pods were.
    fn begun(pods: &[Pod]) -> Evictions {
        let mut evictions = Evictions::default();
        assert_eq!(next(&mut evictions, pods, 5).as_deref(), Some("a"));
        evictions.begin(&pods[0], &arcs(pods), at(5));
        evictions
    }

    #[test]
    fn only_young_pods_that_the_webhook_never_saw_are_missed() {
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
    fn one_is_evicted_at_a_time_and_the_next_waits_for_the_replacement() {
        let (a, b) = (pod("a", 1), pod("b", 1));
        let mut evictions = begun(&[a.clone(), b.clone()]);
        let there = [a, b.clone()];
        assert_eq!(next(&mut evictions, &there, 6), None, "it is still there");
        assert_eq!(
            next(&mut evictions, &there[1..], 7),
            None,
            "nothing took its place"
        );
        let not_ready = [b.clone(), injected("c", 8, false)];
        assert_eq!(next(&mut evictions, &not_ready, 9), None);
        let ready = [b, injected("c", 8, true)];
        assert_eq!(next(&mut evictions, &ready, 10).as_deref(), Some("b"));
    }

    #[test]
    fn a_workload_whose_replacement_is_missed_too_is_left_alone_with_all_its_pods() {
        let mut evictions = begun(&[pod("a", 1), pod("b", 1)]);
        let pods = [pod("b", 1), pod("c", 5)];
        for second in [6, 700, 3 * 3600] {
            assert_eq!(next(&mut evictions, &pods, second), None);
            assert_eq!(alone(&evictions, &pods), [Alone::Futile]);
        }
        let other = [pods.to_vec(), vec![of("other", pod("z", 1))]].concat();
        assert_eq!(next(&mut evictions, &other, 701).as_deref(), Some("z"));
        let later = 6 * 3600 + 10;
        assert_eq!(next(&mut evictions, &pods, later).as_deref(), Some("b"));
    }

    #[test]
    fn a_single_replica_is_evicted_once_also_within_one_second() {
        let mut evictions = begun(&[pod("a", 1)]);
        let replacement = [pod("c", 5)];
        assert_eq!(next(&mut evictions, &replacement, 6), None);
        assert_eq!(next(&mut evictions, &replacement, 700), None);
        assert_eq!(alone(&evictions, &replacement), [Alone::Futile]);
    }

    #[test]
    fn a_replacement_that_loads_for_long_holds_all_others_up() {
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
    fn a_new_leader_waits_for_what_the_last_one_began() {
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
    fn a_workload_without_a_replacement_is_left_alone_and_others_go_on_after_ten_minutes() {
        let mut evictions = begun(&[pod("a", 1), pod("b", 1)]);
        let pods = [pod("b", 1), of("other", pod("z", 1))];
        assert_eq!(next(&mut evictions, &pods, 604), None);
        assert_eq!(next(&mut evictions, &pods, 605).as_deref(), Some("z"));
        assert_eq!(alone(&evictions, &pods), [Alone::NotReplaced]);
    }

    #[test]
    fn a_pod_that_nothing_makes_anew_is_never_evicted() {
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
        assert_eq!(alone(&evictions, &pods), [Alone::Kind]);
    }

    #[test]
    fn what_is_better_left_alone_does_not_keep_others() {
        let mut evictions = Evictions::default();
        let pods = [pod("a", 1), of("other", pod("z", 1))];
        let why = Alone::Template("it has no label".into());
        evictions.leave(&pods[0], why.clone(), at(5));
        assert_eq!(next(&mut evictions, &pods, 6).as_deref(), Some("z"));
        assert_eq!(alone(&evictions, &pods), [why]);
    }

    #[test]
    fn an_eviction_that_was_refused_is_tried_again() {
        let pods = [pod("a", 1)];
        let mut evictions = begun(&pods);
        evictions.refused();
        assert_eq!(next(&mut evictions, &pods, 6).as_deref(), Some("a"));
    }
}
