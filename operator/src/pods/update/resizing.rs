//! The pace of resizes: which pods take their next step.

use super::step::Goal;
use super::{CHECK_INTERVAL, PAUSE, share};
use crate::pods::Pod;
use crate::pods::resize::{Memory, ResizeStep};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use std::sync::Arc;

/// After this time other pods do not wait for a resize: its node does not answer, or its sidecar cannot shrink.
const RESIZE_TIMEOUT: SignedDuration = SignedDuration::from_secs(60);

/// The resizes of one pool.
#[derive(Debug, Default)]
pub struct Resizing {
    /// Pods (by uid) whose memory is being changed, and since when.
    since: BTreeMap<Box<str>, Timestamp>,
    /// When sidecars that have not shrunk are queried again.
    check_at: Option<Timestamp>,
}

impl Resizing {
    /// The pods of `free` that take their next step. Pods that have begun continue, and others begin while there is room.
    pub fn next<'p>(
        &mut self,
        all: &[&Arc<Pod>],
        free: impl Iterator<Item = &'p Arc<Pod>>,
        goal: &Goal<'_>,
        now: Timestamp,
    ) -> Vec<Arc<Pod>> {
        let unfinished = |uid: &str| all.iter().any(|p| *p.uid == *uid && is_resized(p, goal));
        self.since.retain(|uid, _| unfinished(uid));
        let running = self
            .since
            .values()
            .filter(|since| now.duration_since(**since) < RESIZE_TIMEOUT);
        let mut room = share(all.len()).saturating_sub(running.count());
        let checks_shrunk = self.check_at.is_none_or(|at| at <= now);
        if checks_shrunk {
            self.check_at = None;
        }
        let is_due = |pod: &Pod| match next_step(pod, goal) {
            ResizeStep::Done | ResizeStep::AwaitKubelet => false,
            ResizeStep::Lower(_) => checks_shrunk,
            ResizeStep::Raise(_) | ResizeStep::SetSize | ResizeStep::Finish => true,
        };
        let mut chosen = Vec::new();
        for pod in free.filter(|p| p.address().is_some() && is_due(p)) {
            if !self.since.contains_key(&pod.uid) {
                if room == 0 {
                    continue;
                }
                room -= 1;
            }
            chosen.push(Arc::clone(pod));
        }
        chosen
    }

    /// Records that a step of a pod's resize is about to be taken.
    pub fn record_begin(&mut self, pod: &Pod, now: Timestamp) {
        self.since.entry(pod.uid.clone()).or_insert(now);
    }

    /// Records that a sidecar has not shrunk yet.
    pub fn record_not_shrunk(&mut self, pod: &Pod, now: Timestamp) {
        let since = self.since.get(&pod.uid).copied().unwrap_or(now);
        let wait = match now.duration_since(since) < RESIZE_TIMEOUT {
            true => CHECK_INTERVAL,
            false => PAUSE,
        };
        let at = now + wait;
        self.check_at = Some(self.check_at.map_or(at, |other| other.min(at)));
    }

    /// When to query sidecars again.
    pub fn check_at(&self) -> Option<Timestamp> {
        self.check_at
    }
}

fn next_step(pod: &Pod, goal: &Goal<'_>) -> ResizeStep {
    let step = |memory: &Memory| memory.next(goal.memory_bytes);
    pod.memory.as_deref().map_or(ResizeStep::Done, step)
}

/// Whether the pod's memory must change or is being changed.
pub fn is_resized(pod: &Pod, goal: &Goal<'_>) -> bool {
    next_step(pod, goal) != ResizeStep::Done
}
