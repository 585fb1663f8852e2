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
mod tests;
