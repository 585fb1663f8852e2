//! Events of pods that have no sidecar, or one that does not start: once each, on what made them and on the pool.

use super::events::owner;
use super::pool::Look;
use crate::api::Mode;
use crate::pods::{Pod, missed};
use crate::status::Reason;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::ObjectReference;
use std::sync::Arc;

/// Pods older than this are not spoken of: a new leader does not repeat what the last one said.
const NEWS: SignedDuration = SignedDuration::from_mins(10);

impl Look<'_> {
    /// Events of young pods that have no sidecar or one that does not start, on their controllers and on the pool.
    pub(super) async fn tell(&self, pods: &[Arc<Pod>], about: &ObjectReference) {
        let young = |p: &&Arc<Pod>| p.is_active() && self.now.duration_since(p.created) < NEWS;
        let missed: Vec<&Arc<Pod>> = match self.pool.spec.injection.mode {
            Mode::Enabled => missed(pods, self.created()).collect(),
            Mode::Disabled => Vec::new(),
        };
        for pod in pods.iter().filter(young) {
            let said = if let Some(reason) = pod.refusal() {
                let message = pod.injection.as_ref().map_or("", |i| &i.message);
                Some((
                    reason,
                    format!("pod {} starts without a cache: {message}", pod.name),
                ))
            } else if let Some(fault) = pod.fault() {
                Some((
                    fault.reason,
                    format!(
                        "the sidecar of pod {} does not start: {}",
                        pod.name, fault.message
                    ),
                ))
            } else if missed.iter().any(|m| m.uid == pod.uid) {
                let note = format!(
                    "pod {} started without a cache: the injection webhook was not asked",
                    pod.name
                );
                Some((Reason::Missed.name(), note))
            } else {
                None
            };
            if let Some((reason, note)) = said {
                for to in [&owner(pod), about] {
                    self.term
                        .events
                        .warn_once(to, "Inject", reason, &note)
                        .await;
                }
            }
        }
    }
}
