//! Missed pods are evicted one at a time, where the pool asks for it (`onMissed: Evict`).

use super::events::{Weight, owner};
use super::pool::Look;
use super::term::State;
use crate::api::{Mode, OnMissed};
use crate::pods::{Missed, Pod, missed};
use crate::status::Reason;
use k8s_openapi::api::core::v1::{ObjectReference, Pod as FullPod};
use kube::Api;
use kube::api::{DeleteParams, EvictParams, Preconditions};
use std::sync::Arc;
use std::time::Duration;

/// The next look while a missed pod is being replaced.
const EVICTING: Duration = Duration::from_secs(15);

impl Look<'_> {
    /// The next step with missed pods, where the pool asks for it and a new pod would be injected.
    pub(super) async fn evict(
        &self,
        pods: &[Arc<Pod>],
        about: &ObjectReference,
        injects: bool,
        state: &mut State,
    ) -> Option<Duration> {
        let injection = &self.pool.spec.injection;
        if !injects || injection.mode == Mode::Disabled || injection.on_missed == OnMissed::Report {
            return None;
        }
        missed(pods, self.created()).next()?;
        match state.evictions.next(pods, self.created(), self.now) {
            Missed::Wait => {}
            Missed::Futile(pod) => {
                let note = format!(
                    "pod {} took the place of an evicted one and has no sidecar either; its like are left alone",
                    pod.name
                );
                self.term
                    .events
                    .warn_once(&owner(&pod), "Evict", Reason::EvictionFutile.name(), &note)
                    .await;
            }
            Missed::Evict(pod) => match self.ask_to_evict(&pod).await {
                Ok(()) => {
                    state.evictions.done(&pod, self.now);
                    self.term.metrics.add("evictions_total", &["evicted"], 1);
                    let note = format!(
                        "pod {} had no sidecar because the webhook was not asked when it was made",
                        pod.name
                    );
                    for to in [&owner(&pod), about] {
                        self.term
                            .events
                            .publish(to, Weight::Normal, "Evict", Reason::Evicted.name(), &note)
                            .await;
                    }
                }
                Err(e) => {
                    self.term.metrics.add("evictions_total", &["refused"], 1);
                    let note = format!(
                        "pod {} has no sidecar and cannot be evicted now: {e}",
                        pod.name
                    );
                    self.term
                        .events
                        .warn_once(about, "Evict", Reason::EvictionRefused.name(), &note)
                        .await;
                }
            },
        }
        Some(EVICTING)
    }

    async fn ask_to_evict(&self, pod: &Pod) -> Result<(), kube::Error> {
        let api: Api<FullPod> = Api::namespaced(self.term.client.clone(), &pod.namespace);
        let this_one = DeleteParams::default().preconditions(Preconditions {
            uid: Some(pod.uid.to_string()),
            ..Preconditions::default()
        });
        let params = EvictParams {
            delete_options: Some(this_one),
            ..EvictParams::default()
        };
        api.evict(&pod.name, &params).await.map(drop)
    }
}
