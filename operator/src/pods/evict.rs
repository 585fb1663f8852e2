//! Pods without a sidecar that should have one, and which of them to evict next if the pool requests it. Pure. An eviction without effect
//! is an outage, so in doubt a pod is left alone.

use super::pod::{Owner, Pod};
use jiff::{SignedDuration, Timestamp};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Longest wait for the replacement of an evicted pod.
const REPLACEMENT_MAX: SignedDuration = SignedDuration::from_mins(10);
/// How long a workload is left alone.
const SKIP_TIME: SignedDuration = SignedDuration::from_hours(6);
/// A pod that became not ready longer ago than this has other reasons than an eviction. vLLM loads its model in less time.
const YOUNG: SignedDuration = SignedDuration::from_hours(1);

/// Missed pods: labelled, created while the pool existed, and never seen by the webhook. A pod with a named refusal is not missed.
pub fn missed(pods: &[Arc<Pod>], pool_created: Timestamp) -> impl Iterator<Item = &Arc<Pod>> {
    pods.iter().filter(move |p| {
        p.is_active() && p.sidecar.is_none() && p.injection.is_none() && p.created >= pool_created
    })
}

/// The next step for missed pods.
#[derive(Debug, PartialEq, Eq)]
pub enum EvictionStep {
    /// Nothing to do now.
    Wait,
    Evict(Arc<Pod>),
}

/// Why the missed pods of a workload are left alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SkipReason {
    /// The replacement of an evicted pod was missed too.
    Futile,
    /// An evicted pod was not replaced.
    NotReplaced,
    /// Its controller does not simply create another pod, or counts the eviction as a failure.
    Kind,
    /// A replacement would have no sidecar either, because of its template or its namespace, or they cannot be read.
    Objection(String),
}

/// Evictions of one pool: one at a time, each followed until its replacement is ready.
#[derive(Debug, Default)]
pub struct Evictions {
    current: Option<Eviction>,
    /// By uid of an owner with an evicted pod: uids of its pods before the eviction. This does not depend on clocks.
    evicted: HashMap<Box<str>, HashSet<Box<str>>>,
    /// Owners that are left alone, until when and why.
    skipped: HashMap<Box<str>, (Timestamp, SkipReason)>,
}

#[derive(Debug)]
struct Eviction {
    pod: Box<str>,
    owner: Owner,
    /// The owner's pods at the time of the eviction.
    known: HashSet<Box<str>>,
    at: Timestamp,
}

impl Evictions {
    /// The next step. Only pods with a controller are evicted, because others would not be created again.
    pub fn next(
        &mut self,
        pods: &[Arc<Pod>],
        pool_created: Timestamp,
        now: Timestamp,
    ) -> EvictionStep {
        let missed: Vec<&Arc<Pod>> = missed(pods, pool_created).collect();
        self.update_skipped(pods, &missed, now);
        if let Some(eviction) = &self.current {
            if eviction.is_pending(pods) && (now.duration_since(eviction.at) < REPLACEMENT_MAX) {
                return EvictionStep::Wait;
            }
            if !eviction.replaced(pods) {
                let owner = eviction.owner.uid.clone();
                self.skipped
                    .insert(owner, (now + SKIP_TIME, SkipReason::NotReplaced));
            }
            self.current = None;
        }
        let candidates: Vec<&Arc<Pod>> = missed
            .into_iter()
            .filter(|p| matches!(&p.owner, Some(o) if self.skip_reason(o).is_none()))
            .collect();
        let owners: HashSet<&str> = candidates.iter().filter_map(|p| owner(p)).collect();
        let disturbed = pods.iter().any(|p| self.is_disturbed(p, &owners, now));
        match candidates.first() {
            Some(pod) if !disturbed => EvictionStep::Evict(Arc::clone(pod)),
            _ => EvictionStep::Wait,
        }
    }

    /// Missed pods that are left alone, one per workload, with the reason.
    #[must_use]
    pub fn skipped(
        &self,
        pods: &[Arc<Pod>],
        pool_created: Timestamp,
    ) -> Vec<(Arc<Pod>, SkipReason)> {
        let mut seen = HashSet::new();
        missed(pods, pool_created)
            .filter_map(|pod| Some((pod, pod.owner.as_ref()?)))
            .filter_map(|(pod, owner)| Some((pod, owner, self.skip_reason(owner)?)))
            .filter(|(_, owner, _)| seen.insert(&owner.uid))
            .map(|(pod, _, why)| (pod.clone(), why))
            .collect()
    }

    /// Records that a pod is about to be evicted. Called before the API request, because its response may be lost.
    pub fn record_eviction(&mut self, pod: &Pod, pods: &[Arc<Pod>], now: Timestamp) {
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

    /// Records that the API server refused the eviction.
    pub fn record_refused(&mut self) {
        self.current = None;
    }

    /// Leaves this pod's workload alone.
    pub fn skip(&mut self, pod: &Pod, why: SkipReason, now: Timestamp) {
        if let Some(owner) = &pod.owner {
            self.skipped
                .insert(owner.uid.clone(), (now + SKIP_TIME, why));
        }
    }

    /// Finds workloads whose new pods are missed too, and drops workloads that are gone or whose time is over.
    fn update_skipped(&mut self, pods: &[Arc<Pod>], missed: &[&Arc<Pod>], now: Timestamp) {
        let existing: HashSet<&str> = pods.iter().filter_map(owner).collect();
        let current = self.current.as_ref().map(|e| e.owner.uid.clone());
        self.evicted
            .retain(|uid, _| existing.contains(&**uid) || current.as_ref() == Some(uid));
        let over: Vec<Box<str>> = self
            .skipped
            .iter()
            .filter(|(uid, (until, _))| *until <= now || !existing.contains(&***uid))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in over {
            self.skipped.remove(&uid);
            // The comparison restarts from the current pods.
            self.evicted.remove(&uid);
        }
        for pod in missed {
            let Some(uid) = owner(pod) else { continue };
            let younger = |known: &HashSet<Box<str>>| !known.contains(&pod.uid);
            if self.evicted.get(uid).is_some_and(younger) && !self.skipped.contains_key(uid) {
                self.skipped
                    .insert(uid.into(), (now + SKIP_TIME, SkipReason::Futile));
            }
        }
    }

    fn skip_reason(&self, owner: &Owner) -> Option<SkipReason> {
        if !recreates_pods(owner) {
            return Some(SkipReason::Kind);
        }
        self.skipped.get(&owner.uid).map(|(_, why)| why.clone())
    }

    /// Whether a replacement is pending, after an eviction by this leader or the previous one. No other pod is evicted meanwhile.
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
    /// Whether the evicted pod still exists, or no younger pod of its owner is ready.
    fn is_pending(&self, pods: &[Arc<Pod>]) -> bool {
        let exists = pods.iter().any(|p| p.uid == self.pod);
        exists || !self.younger(pods).any(|p| p.ready)
    }

    /// Whether the evicted pod has a replacement, ready or not.
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

/// Controllers that simply create a pod again. A Job counts the eviction as a failure; other kinds are unknown.
fn recreates_pods(owner: &Owner) -> bool {
    matches!(
        (&*owner.api_version, &*owner.kind),
        ("apps/v1", "ReplicaSet" | "StatefulSet" | "DaemonSet")
    )
}

#[cfg(test)]
mod tests;
