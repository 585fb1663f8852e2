//! Updates of running pods: reads the live pod, patches what differs, and records the result in the `pods::Update` of the pool.

use super::executor::Executor;
use super::pod_patch;
use crate::inject::Settings;
use crate::pods::{Pod, Setback, Step, Update, fetch};
use crate::reconcile::report;
use json_patch::Patch as JsonPatch;
use k8s_openapi::api::core::v1::Pod as FullPod;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::Status;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Pods that the API server refuses one after the other before the rest is not tried.
const REFUSED_MAX: usize = 3;

/// Why a pod was not patched.
enum NotPatched {
    /// It is another one now, or gone: the next pass sees it as it is.
    Moved,
    /// The API server does not take it.
    Refused(Setback),
}

impl Executor<'_> {
    /// Takes a step of an update. Returns when the next pass is due for it.
    pub(super) async fn update(
        &self,
        step: Step,
        settings: &Settings,
        update: &mut Update,
    ) -> Option<Duration> {
        let (now, pool) = (self.observed.now, &self.observed.about);
        match step {
            Step::Rest => {}
            Step::Config(pods) => {
                let config = |_: &Pod, live: &Value| pod_patch::config(live, settings);
                self.patch_each(&pods, update, false, config).await;
                update.configured(now);
            }
            Step::Image(pods) => {
                let image = |pod: &Pod, live: &Value| {
                    // What did not run needs no way back.
                    let at = pod.address().map(|_| now);
                    pod_patch::image(live, settings, at)
                };
                let done = self.patch_each(&pods, update, true, image).await;
                let exchanged = report::exchanged(&done, &settings.image, pool);
                self.publish(exchanged.as_slice()).await;
            }
            Step::Ask(pod) => {
                if let Some(ip) = pod.address()
                    && let Ok(status) = fetch(ip).await
                {
                    update.answered(&pod, status.state);
                }
            }
            Step::Back(pod, was) => {
                let back = |_: &Pod, live: &Value| pod_patch::back(live, &was.image, &was.hash);
                let one = std::slice::from_ref(&pod);
                if !self.patch_each(one, update, false, back).await.is_empty() {
                    let note = update.put_back(&pod, &was);
                    self.publish(&report::rolled_back(&pod, &note, pool)).await;
                }
            }
        }
        let again = update.look_again(now)?;
        Duration::try_from(again).ok()
    }

    /// Patches one pod after the other and returns those that are as wanted. A refused patch does not stop the others, but after
    /// `REFUSED_MAX` refusals and no success the rest is not tried.
    async fn patch_each(
        &self,
        pods: &[Arc<Pod>],
        update: &mut Update,
        exchange: bool,
        change: impl Fn(&Pod, &Value) -> Option<JsonPatch>,
    ) -> Vec<Arc<Pod>> {
        let now = self.observed.now;
        let mut done = Vec::new();
        let mut refused = 0;
        for pod in pods {
            if exchange {
                update.exchanging(pod, now);
            }
            let failed = match self.patch(pod, |live| change(pod, live)).await {
                Ok(()) => {
                    update.took(pod);
                    done.push(pod.clone());
                    continue;
                }
                Err(failed) => failed,
            };
            if exchange {
                update.not_exchanged(pod);
            }
            let NotPatched::Refused(setback) = failed else {
                continue;
            };
            self.publish(&[report::not_patched(&setback, &self.observed.about)])
                .await;
            update.refused(pod, setback, now);
            refused += 1;
            if refused >= REFUSED_MAX && done.is_empty() {
                update.pause(now);
                break;
            }
        }
        done
    }

    async fn patch(
        &self,
        pod: &Pod,
        change: impl Fn(&Value) -> Option<JsonPatch>,
    ) -> Result<(), NotPatched> {
        let kind = ApiResource::erase::<FullPod>(&());
        let client = self.context.client.clone();
        let api: Api<DynamicObject> = Api::namespaced_with(client, &pod.namespace, &kind);
        // By list, because reading single pods is not among the operator's rights.
        let name = ListParams::default().fields(&format!("metadata.name={}", pod.name));
        let live = api.list(&name).await.map_err(|e| failed(pod, e))?;
        let live = live.items.into_iter().next().ok_or(NotPatched::Moved)?;
        if live.metadata.uid.as_deref() != Some(&*pod.uid) {
            return Err(NotPatched::Moved);
        }
        let live = serde_json::to_value(live).map_err(|_| NotPatched::Moved)?;
        let Some(patch) = change(&live) else {
            return Ok(());
        };
        let patch = Patch::Json::<()>(patch);
        match api.patch(&pod.name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            Err(e) => Err(failed(pod, e)),
        }
    }
}

fn failed(pod: &Pod, error: kube::Error) -> NotPatched {
    match error {
        kube::Error::Api(status) => judged(pod, &status),
        e => NotPatched::Refused(Setback::Refused(format!(
            "pod {} cannot be patched: {e}",
            pod.name
        ))),
    }
}

fn judged(pod: &Pod, status: &Status) -> NotPatched {
    let said = &status.message;
    match status.code {
        404 | 409 => NotPatched::Moved,
        403 => NotPatched::Refused(Setback::NotAllowed(format!(
            "the operator may not patch pod {} (chart value allowPodPatch, or an admission policy): {said}",
            pod.name
        ))),
        _ => NotPatched::Refused(Setback::Refused(format!(
            "pod {} cannot be patched: {said}",
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
            message: "its words".to_owned(),
            ..Status::default()
        };
        judged(&running("a"), &status)
    }

    #[test]
    fn a_refusal_is_told_by_name_and_a_pod_that_went_is_not() {
        assert!(matches!(answer(404), NotPatched::Moved));
        assert!(matches!(answer(409), NotPatched::Moved));
        let NotPatched::Refused(Setback::NotAllowed(note)) = answer(403) else {
            panic!("not told");
        };
        assert!(note.contains("allowPodPatch") && note.contains("its words"));
        let NotPatched::Refused(Setback::Refused(note)) = answer(422) else {
            panic!("not told");
        };
        assert!(note.contains("pod a") && note.contains("its words"));
    }
}
