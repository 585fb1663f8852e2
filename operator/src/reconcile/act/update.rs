//! Updates running pods: reads the live pod, patches it, and records the result in the pool's `pods::Update`.

use super::executor::Executor;
use super::pod_patch;
use crate::inject::Settings;
use crate::pods::{Pod, Step, Update, UpdateBlocker, fetch};
use crate::reconcile::report;
use json_patch::Patch as JsonPatch;
use k8s_openapi::api::core::v1::Pod as FullPod;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::Status;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// After this many refused patches without a success, the remaining pods are not tried.
const REFUSED_MAX: usize = 3;

/// Why a pod was not patched.
pub(super) enum NotPatched {
    /// The pod was changed, replaced or deleted since the snapshot. The next pass retries.
    Outdated,
    /// The API server refused the patch.
    Refused(UpdateBlocker),
}

impl Executor<'_> {
    /// Executes a step of an update. Returns the time until the next pass that the update requires.
    pub(super) async fn update(
        &self,
        step: Step,
        settings: &Settings,
        update: &mut Update,
    ) -> Option<Duration> {
        let (now, pool) = (self.observed.now, &self.observed.about);
        match step {
            Step::Wait => {}
            Step::Config(pods) => {
                let config = |_: &Pod, live: &Value| pod_patch::config(live, settings);
                self.patch_each(&pods, update, false, config).await;
                update.record_configs(now);
            }
            Step::Resize(pods) => self.resize_each(&pods, settings, update).await,
            Step::Image(pods) => {
                let image = |pod: &Pod, live: &Value| {
                    // A sidecar that did not run needs no rollback.
                    let at = pod.address().map(|_| now);
                    pod_patch::image(live, settings, at)
                };
                let patched = self.patch_each(&pods, update, true, image).await;
                let event = report::image_changed(&patched, &settings.image, pool);
                self.publish(event.as_slice()).await;
            }
            Step::Query(pod) => {
                if let Some(ip) = pod.address()
                    && let Ok(status) = fetch(ip).await
                {
                    update.record_answer(&pod, status.state);
                }
            }
            Step::RollBack(pod, previous) => {
                let rollback = |_: &Pod, live: &Value| {
                    pod_patch::rollback(live, &previous.image, &previous.hash)
                };
                let one = std::slice::from_ref(&pod);
                if !self
                    .patch_each(one, update, false, rollback)
                    .await
                    .is_empty()
                {
                    let note = update.record_rollback(&pod, &previous);
                    self.publish(&report::rolled_back(&pod, &note, pool)).await;
                }
            }
        }
        let next = update.next_check(now)?;
        Duration::try_from(next).ok()
    }

    /// Patches the pods one after another and returns those that were patched or needed no patch. Stops after `REFUSED_MAX` refusals
    /// without a success.
    async fn patch_each(
        &self,
        pods: &[Arc<Pod>],
        update: &mut Update,
        changes_image: bool,
        change: impl Fn(&Pod, &Value) -> Option<JsonPatch>,
    ) -> Vec<Arc<Pod>> {
        let now = self.observed.now;
        let mut done = Vec::new();
        let mut refused = 0;
        for pod in pods {
            if changes_image {
                update.record_image_change(pod, now);
            }
            let failed = match self.patch(pod, |live| change(pod, live)).await {
                Ok(()) => {
                    update.record_accepted(pod);
                    done.push(pod.clone());
                    continue;
                }
                Err(failed) => failed,
            };
            if changes_image {
                update.record_not_changed(pod);
            }
            refused += usize::from(self.record_failure(pod, failed, update).await);
            if refused >= REFUSED_MAX && done.is_empty() {
                update.pause(now);
                break;
            }
        }
        done
    }

    /// Publishes and records that a pod was not patched. Returns whether the patch was refused.
    pub(super) async fn record_failure(
        &self,
        pod: &Pod,
        failed: NotPatched,
        update: &mut Update,
    ) -> bool {
        let NotPatched::Refused(blocker) = failed else {
            return false;
        };
        self.publish(&[report::not_patched(&blocker, &self.observed.about)])
            .await;
        update.record_refused(pod, blocker, self.observed.now);
        true
    }

    pub(super) fn pods_of(&self, pod: &Pod) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<FullPod>(&());
        Api::namespaced_with(self.context.client.clone(), &pod.namespace, &kind)
    }

    async fn patch(
        &self,
        pod: &Pod,
        change: impl Fn(&Value) -> Option<JsonPatch>,
    ) -> Result<(), NotPatched> {
        let live = self.live(pod).await?;
        self.apply_patch(pod, change(&live)).await
    }

    /// The pod as stored.
    pub(super) async fn live(&self, pod: &Pod) -> Result<Value, NotPatched> {
        let api = self.pods_of(pod);
        // By list, because the operator has no right to get single pods.
        let name = ListParams::default().fields(&format!("metadata.name={}", pod.name));
        let live = api.list(&name).await.map_err(|e| not_patched(pod, e))?;
        let live = live.items.into_iter().next().ok_or(NotPatched::Outdated)?;
        if live.metadata.uid.as_deref() != Some(&*pod.uid) {
            return Err(NotPatched::Outdated);
        }
        serde_json::to_value(live).map_err(|_| NotPatched::Outdated)
    }

    pub(super) async fn apply_patch(
        &self,
        pod: &Pod,
        patch: Option<JsonPatch>,
    ) -> Result<(), NotPatched> {
        let Some(patch) = patch else {
            return Ok(());
        };
        let patch = Patch::Json::<()>(patch);
        let api = self.pods_of(pod);
        match api.patch(&pod.name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            Err(e) => Err(not_patched(pod, e)),
        }
    }
}

pub(super) fn not_patched(pod: &Pod, error: kube::Error) -> NotPatched {
    match error {
        kube::Error::Api(status) => refusal(pod, &status),
        e => NotPatched::Refused(UpdateBlocker::Refused(format!(
            "pod {} cannot be patched: {e}",
            pod.name
        ))),
    }
}

pub(super) fn refusal(pod: &Pod, status: &Status) -> NotPatched {
    let message = &status.message;
    match status.code {
        404 | 409 => NotPatched::Outdated,
        403 => NotPatched::Refused(UpdateBlocker::NotAllowed(format!(
            "the operator may not patch pod {} (chart value allowPodPatch, or an admission policy): {message}",
            pod.name
        ))),
        _ => NotPatched::Refused(UpdateBlocker::Refused(format!(
            "pod {} cannot be patched: {message}",
            pod.name
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::running;

    fn answer(code: u16) -> NotPatched {
        let status = Status {
            code,
            message: "the reply".to_owned(),
            ..Status::default()
        };
        refusal(&running("a"), &status)
    }

    #[test]
    fn a_refusal_names_the_pod_and_an_outdated_pod_is_no_refusal() {
        assert!(matches!(answer(404), NotPatched::Outdated));
        assert!(matches!(answer(409), NotPatched::Outdated));
        let NotPatched::Refused(UpdateBlocker::NotAllowed(note)) = answer(403) else {
            panic!("not refused");
        };
        assert!(note.contains("allowPodPatch") && note.contains("the reply"));
        let NotPatched::Refused(UpdateBlocker::Refused(note)) = answer(422) else {
            panic!("not refused");
        };
        assert!(note.contains("pod a") && note.contains("the reply"));
    }
}
