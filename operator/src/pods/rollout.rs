//! Follows one sidecar from the change of its image until it has run with the new image for a while.

use super::pod::{ImageChange, Pod, same_image};
use jiff::{SignedDuration, Timestamp};

/// How long a sidecar may be down before its old image is restored.
const START_TIMEOUT: SignedDuration = SignedDuration::from_secs(60);
/// How long it must run before others follow. A crashing image runs for a few seconds again and again.
const STEADY: SignedDuration = SignedDuration::from_secs(30);
/// How long the first sidecar may then take to report that it serves.
const ANSWER_TIMEOUT: SignedDuration = SignedDuration::from_secs(30);

/// A pod's sidecar before the change of its image, and observations since then.
#[derive(Debug, Clone)]
pub struct Rollout {
    /// Image before the change.
    pub image: Box<str>,
    /// Hash of the settings before the change; empty if unknown.
    pub hash: Box<str>,
    /// The new sidecar reported that it serves nothing.
    pub serves_nothing: bool,
    restarts: u32,
    /// Start time of the sidecar before the change. `None` if it did not run.
    running: Option<Timestamp>,
    /// Time of the change.
    at: Timestamp,
    /// Time when the sidecar was first seen running with the new image.
    up: Option<Timestamp>,
}

/// Failure of the new sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It did not start in time.
    NotStarted,
    /// It started, and ended again.
    Crashed,
    /// It runs, but does not answer, or reports that it serves nothing.
    DoesNotServe,
}

impl Rollout {
    /// The state before the change.
    pub fn of(pod: &Pod, now: Timestamp) -> Self {
        let sidecar = pod.sidecar.as_ref();
        Self {
            image: sidecar.map_or_else(Box::default, |s| s.image.clone()),
            hash: pod.hash().into(),
            serves_nothing: false,
            restarts: sidecar.map_or(0, |s| s.restarts),
            running: running_since(pod),
            at: now,
            up: None,
        }
    }

    /// A change by an earlier leader, known only from its stamp in the pod.
    pub fn adopted(pod: &Pod, change: &ImageChange, now: Timestamp) -> Self {
        Self {
            image: change.image.clone(),
            hash: change.hash.clone(),
            running: None,
            ..Self::of(pod, now)
        }
    }

    /// Whether the sidecar has run with the new image long enough.
    pub fn is_steady(&mut self, pod: &Pod, image: &str, now: Timestamp) -> bool {
        if !self.is_up(pod, image) {
            return false;
        }
        now.duration_since(*self.up.get_or_insert(now)) >= STEADY
    }

    /// Whether the sidecar runs with the image: by name, or, because runtimes have many names for one image, because it was started since
    /// the change.
    fn is_up(&self, pod: &Pod, image: &str) -> bool {
        let Some(sidecar) = pod.sidecar.as_ref().filter(|s| *s.image == *image) else {
            return false;
        };
        let started = running_since(pod);
        started.is_some() && (started != self.running || same_image(&sidecar.image_in_use, image))
    }

    /// Whether it restarted more often than the change itself requires, or started and ended.
    pub fn crashed(&self, pod: &Pod) -> bool {
        let restarts = pod.sidecar.as_ref().map_or(0, |s| s.restarts);
        restarts > self.restarts.saturating_add(1)
            || (self.up.is_some() && running_since(pod).is_none())
    }

    /// Why its old image must be restored, if so.
    pub fn failure(&self, pod: &Pod, proven: bool, now: Timestamp) -> Option<Failure> {
        let since = |at: Timestamp| now.duration_since(at);
        if self.crashed(pod) {
            return Some(Failure::Crashed);
        }
        match self.up {
            None if since(self.at) >= START_TIMEOUT => Some(Failure::NotStarted),
            Some(up) if !proven && since(up) >= STEADY + ANSWER_TIMEOUT => {
                Some(Failure::DoesNotServe)
            }
            _ => None,
        }
    }
}

impl Failure {
    /// What happened, for a sentence that begins with the sidecar of this pod.
    pub fn sentence(self, pod: &Pod, image: &str) -> String {
        let why = match pod.fault() {
            Some(fault) if fault.message.is_empty() => format!(" ({})", fault.reason),
            Some(fault) => format!(" ({}: {})", fault.reason, fault.message),
            None => String::new(),
        };
        match self {
            Self::NotStarted => format!("did not start within 60 s with image {image}{why}"),
            Self::Crashed => format!("did not keep running with image {image}{why}"),
            Self::DoesNotServe => {
                format!("does not report on port 9797 that it serves, with image {image}{why}")
            }
        }
    }
}

fn running_since(pod: &Pod) -> Option<Timestamp> {
    pod.sidecar.as_ref()?.state.since()
}
