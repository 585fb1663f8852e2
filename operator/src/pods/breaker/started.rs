//! When a pod's sidecar and its vLLM count as started.

use super::super::pod::{Pod, Sidecar, SidecarState};
use jiff::{SignedDuration, Timestamp};

/// How long a sidecar must run before it counts as started. A crashing one runs for a few seconds again and again.
pub(in crate::pods) const STEADY: SignedDuration = SignedDuration::from_secs(30);

pub(super) fn is_up(pod: &Pod, now: Timestamp) -> bool {
    pod.engine().is_some_and(|engine| pod.is_up(engine, now))
}

/// Start of its sidecar, if the pod's own containers can start beside it.
pub(super) fn running_since(pod: &Pod) -> Option<Timestamp> {
    let sidecar = pod.sidecar.as_ref().filter(|s| s.lets_the_pod_start())?;
    sidecar.state.since()
}

/// Whether the sidecar may be between two crashes: it has run for a short time only, or ended and is about to restart.
pub(in crate::pods) fn may_fall_back(pod: &Pod, now: Timestamp) -> bool {
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
