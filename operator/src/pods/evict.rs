//! Pods that should have got a sidecar and did not, and which of them to evict next if the pool asks for it. Pure.

use super::pod::Pod;
use jiff::{SignedDuration, Timestamp};
use std::collections::HashMap;
use std::sync::Arc;

/// Longest wait for the pod that takes an evicted one's place.
const REPLACEMENT_MAX: SignedDuration = SignedDuration::from_mins(10);

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
    /// This one took the place of an evicted pod and was missed too: evicting it helps nobody.
    Futile(Arc<Pod>),
}

/// Evictions of one pool: one at a time, each followed until its replacement is ready.
#[derive(Debug, Default)]
pub struct Evictions {
    current: Option<Eviction>,
    /// When a pod of each owner (by uid) was evicted last.
    evicted: HashMap<Box<str>, Timestamp>,
}

#[derive(Debug)]
struct Eviction {
    pod: Box<str>,
    owner: Box<str>,
    at: Timestamp,
}

impl Evictions {
    /// Decides on the next step. Only pods with a controller are evicted: others would not come back.
    pub fn next(&mut self, pods: &[Arc<Pod>], pool_created: Timestamp, now: Timestamp) -> Missed {
        if self.current.as_ref().is_some_and(|e| e.goes_on(pods, now)) {
            return Missed::Wait;
        }
        self.current = None;
        let mut futile = None;
        for pod in missed(pods, pool_created) {
            let Some(owner) = &pod.owner else { continue };
            match self.evicted.get(&owner.uid) {
                Some(at) if pod.created >= *at => futile = Some(pod.clone()),
                _ => return Missed::Evict(pod.clone()),
            }
        }
        futile.map_or(Missed::Wait, Missed::Futile)
    }

    /// The API server accepted the eviction.
    pub fn done(&mut self, pod: &Pod, now: Timestamp) {
        let owner = pod
            .owner
            .as_ref()
            .map_or_else(Box::default, |o| o.uid.clone());
        self.evicted.insert(owner.clone(), now);
        self.current = Some(Eviction {
            pod: pod.uid.clone(),
            owner,
            at: now,
        });
    }
}

impl Eviction {
    /// The evicted pod is still there, or no younger pod of its owner is ready.
    fn goes_on(&self, pods: &[Arc<Pod>], now: Timestamp) -> bool {
        let there = pods.iter().any(|p| p.uid == self.pod);
        let replaced = pods.iter().any(|p| {
            p.created >= self.at && p.ready && p.owner.as_ref().is_some_and(|o| o.uid == self.owner)
        });
        (there || !replaced) && now.duration_since(self.at) < REPLACEMENT_MAX
    }
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

    fn arcs(pods: &[Pod]) -> Vec<Arc<Pod>> {
        pods.iter().cloned().map(Arc::new).collect()
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
        let mut evictions = Evictions::default();
        let pods = arcs(&[pod("a", 1), pod("b", 1)]);
        assert_eq!(
            evictions.next(&pods, at(0), at(5)),
            Missed::Evict(pods[0].clone())
        );
        evictions.done(&pods[0], at(5));
        assert_eq!(
            evictions.next(&pods, at(0), at(6)),
            Missed::Wait,
            "it is still there"
        );
        assert_eq!(
            evictions.next(&pods[1..], at(0), at(7)),
            Missed::Wait,
            "nothing took its place"
        );
        let mut replacement = pod("c", 8);
        replacement.injection = Some(Injection::default());
        replacement.ready = false;
        let pods = arcs(&[pod("b", 1), replacement.clone()]);
        assert_eq!(
            evictions.next(&pods, at(0), at(9)),
            Missed::Wait,
            "not ready"
        );
        replacement.ready = true;
        let pods = arcs(&[pod("b", 1), replacement]);
        assert_eq!(
            evictions.next(&pods, at(0), at(10)),
            Missed::Evict(pods[0].clone())
        );
    }

    #[test]
    fn a_replacement_that_is_missed_again_is_left_alone() {
        let mut evictions = Evictions::default();
        evictions.done(&pod("a", 1), at(5));
        let pods = arcs(&[pod("c", 8)]);
        assert_eq!(
            evictions.next(&pods, at(0), at(9)),
            Missed::Futile(pods[0].clone())
        );
    }

    #[test]
    fn a_pod_without_a_controller_is_never_evicted() {
        let pods = arcs(&[Pod {
            owner: None,
            ..pod("bare", 1)
        }]);
        assert_eq!(Evictions::default().next(&pods, at(0), at(5)), Missed::Wait);
    }

    #[test]
    fn a_replacement_that_never_comes_holds_the_others_up_for_ten_minutes() {
        let mut evictions = Evictions::default();
        let pods = arcs(&[pod("b", 1)]);
        evictions.done(&pod("a", 1), at(5));
        assert_eq!(evictions.next(&pods, at(0), at(604)), Missed::Wait);
        assert_eq!(
            evictions.next(&pods, at(0), at(605)),
            Missed::Evict(pods[0].clone())
        );
    }
}
