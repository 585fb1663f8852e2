//! Events of pods that have no sidecar, one that does not start or one that lacks something: once each, on what made them and on the pool.

use super::events::owner;
use super::pool::Look;
use super::term::Term;
use crate::api::Mode;
use crate::pods::{Faults, Pod, PoolRef, missed};
use crate::status::Reason;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use std::sync::Arc;

/// Pods older than this are not spoken of: a new leader does not repeat what the last one said.
const NEWS: SignedDuration = SignedDuration::from_mins(10);

impl Look<'_> {
    /// Events of young pods that have no sidecar, one that does not start or one that lacks something, on their controllers and on
    /// the pool.
    pub(super) async fn tell(&self, pods: &[Arc<Pod>], faults: &Faults, about: &ObjectReference) {
        let missed: Vec<&Arc<Pod>> = match self.pool.spec.injection.mode {
            Mode::Enabled => missed(pods, self.created()).collect(),
            Mode::Disabled => Vec::new(),
        };
        for pod in pods.iter().filter(|pod| is_news(pod, self.now)) {
            let said = if let Some(refused) = refusal(pod) {
                Some(refused)
            } else if let Some(fault) = faults.of(pod) {
                Some((
                    fault.reason,
                    format!(
                        "the sidecar of pod {} does not start: {}",
                        pod.name, fault.message
                    ),
                ))
            } else if let Some(lacking) = shortfall(pod) {
                Some(lacking)
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

/// Events of young pods that were refused and whose pool is not there, on their controllers: no pool speaks for them.
pub async fn tell_of_no_pool(name: &PoolRef, term: &Term) {
    let now = Timestamp::now();
    for pod in term.pods.of(name).iter().filter(|pod| is_news(pod, now)) {
        if let Some((reason, note)) = refusal(pod) {
            term.events
                .warn_once(&owner(pod), "Inject", reason, &note)
                .await;
        }
    }
}

fn is_news(pod: &Pod, now: Timestamp) -> bool {
    pod.is_active() && now.duration_since(pod.created) < NEWS
}

/// Reason and note of a pod that has its sidecar, but not all that the pool wants of it.
fn shortfall(pod: &Pod) -> Option<(&str, String)> {
    let message = pod.injection.as_ref().map_or("", |i| &i.message);
    let note = format!("pod {} has its sidecar: {message}", pod.name);
    Some((pod.shortfall()?, note))
}

/// Reason and note of a pod that the webhook left as it is.
fn refusal(pod: &Pod) -> Option<(&str, String)> {
    let message = pod.injection.as_ref().map_or("", |i| &i.message);
    let note = format!("pod {} starts without a cache: {message}", pod.name);
    Some((pod.refusal()?, note))
}
