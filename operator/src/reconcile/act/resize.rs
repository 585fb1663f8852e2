//! Resizes running pods: takes the next step of each in the live pod, and records the result in the pool's `pods::Update`.

use super::executor::Executor;
use super::pod_patch;
use super::update::{NotPatched, not_patched, refusal};
use crate::inject::{Quantity, Settings};
use crate::pods::{Amounts, Lowered, Pod, ResizeStep, Update, UpdateBlocker, fetch};
use crate::reconcile::report;
use kube::api::{Patch, PatchParams};
use serde_json::Value;
use std::sync::Arc;

/// The result of a step of a pod's resize.
enum Resized {
    /// Nothing is left to do now, or the step was taken.
    Step,
    /// The config of the pod has the new size.
    Size,
    /// The sidecar has not shrunk yet.
    NotShrunk,
}

impl Executor<'_> {
    /// Takes the next step of each resize.
    pub(super) async fn resize_each(
        &self,
        pods: &[Arc<Pod>],
        settings: &Settings,
        update: &mut Update,
    ) {
        let now = self.observed.now;
        let mut sized = Vec::new();
        for pod in pods {
            update.record_resize(pod, now);
            match self.resize(pod, settings).await {
                Ok(Resized::Step) => update.record_accepted(pod),
                Ok(Resized::Size) => {
                    update.record_accepted(pod);
                    sized.push(Arc::clone(pod));
                }
                Ok(Resized::NotShrunk) => update.record_not_shrunk(pod, now),
                Err(failed) => {
                    self.record_failure(pod, failed, update).await;
                }
            }
        }
        let size = Quantity::bytes(settings.memory_bytes).to_string();
        let event = report::size_changed(&sized, &size, &self.observed.about);
        self.publish(event.as_slice()).await;
    }

    async fn resize(&self, pod: &Pod, settings: &Settings) -> Result<Resized, NotPatched> {
        let live = self.live(pod).await?;
        let memory = Pod::read(live.clone()).and_then(|pod| pod.memory);
        let memory = memory.ok_or(NotPatched::Outdated)?;
        let size = settings.memory_bytes;
        match memory.next(size) {
            ResizeStep::Done | ResizeStep::AwaitKubelet => Ok(Resized::Step),
            ResizeStep::Raise(to) => {
                capacity(pod).await?;
                let record = Some(memory.lowered_unless_used());
                if record != memory.lowered {
                    let patch = pod_patch::lowered(&live, record);
                    self.apply_patch(pod, patch).await?;
                }
                self.set_resources(pod, &live, to).await?;
                Ok(Resized::Step)
            }
            ResizeStep::SetSize => {
                capacity(pod).await?;
                let patch = pod_patch::size(&live, &memory, settings);
                self.apply_patch(pod, patch).await?;
                Ok(Resized::Size)
            }
            ResizeStep::Lower(_) if capacity(pod).await? > size => Ok(Resized::NotShrunk),
            ResizeStep::Lower(to) => {
                if let Some(refused) = self.set_resources(pod, &live, to).await? {
                    let refused = refused.into();
                    let patch = pod_patch::lowered(&live, Some(Lowered { to, refused }));
                    self.apply_patch(pod, patch).await?;
                }
                Ok(Resized::Step)
            }
            ResizeStep::Finish => {
                let patch = pod_patch::lowered(&live, None);
                self.apply_patch(pod, patch).await?;
                Ok(Resized::Step)
            }
        }
    }

    /// Sets the memory of the sidecar's container. Returns the reply of an API server that does not allow a smaller limit (Kubernetes 1.33);
    /// then the request alone is lowered, if the QoS class allows it.
    async fn set_resources(
        &self,
        pod: &Pod,
        live: &Value,
        to: Amounts,
    ) -> Result<Option<String>, NotPatched> {
        let patch = |to| pod_patch::resources(live, to).map_err(|why| not_resized(pod, why));
        let params = PatchParams::default();
        let api = self.pods_of(pod);
        let both = Patch::Json::<()>(patch(to)?);
        let before = Pod::read(live.clone()).and_then(|pod| pod.memory);
        let limit = before.map_or(0, |memory| memory.desired.limit);
        let refused = match api
            .patch_subresource("resize", &pod.name, &params, &both)
            .await
        {
            Ok(_) => return Ok(None),
            Err(kube::Error::Api(status)) if status.code == 422 && to.limit < limit => {
                status.message
            }
            Err(e) => return Err(resize_refused(pod, e)),
        };
        if let Ok(request) = patch(Amounts { limit, ..to }) {
            let request = Patch::Json::<()>(request);
            // It lowers what the pod reserves on its node. Without it the pod keeps its memory.
            let lowered = api.patch_subresource("resize", &pod.name, &params, &request);
            drop(lowered.await);
        }
        Ok(Some(refused))
    }
}

/// The size of the memory tier that the pod's sidecar has, if it can change it while it runs.
async fn capacity(pod: &Pod) -> Result<u64, NotPatched> {
    let ip = pod.address().ok_or(NotPatched::Outdated)?;
    let status = fetch(ip)
        .await
        .map_err(|e| not_resized(pod, &format!("its sidecar does not answer: {e}")))?;
    let memory = status.memory;
    match memory.target_bytes {
        0 if !memory.reason.is_empty() => Err(not_resized(
            pod,
            &format!("its sidecar has no memory tier: {}", memory.reason),
        )),
        0 => Err(not_resized(
            pod,
            &format!(
                "its sidecar of version {} does not change its memory while it runs; create the pod again",
                status.version
            ),
        )),
        _ => Ok(memory.capacity_bytes),
    }
}

fn not_resized(pod: &Pod, why: &str) -> NotPatched {
    NotPatched::Refused(UpdateBlocker::NotResized(format!(
        "the memory of pod {} cannot be changed while it runs: {why}",
        pod.name
    )))
}

/// Why the API server refused a resize.
fn resize_refused(pod: &Pod, error: kube::Error) -> NotPatched {
    let kube::Error::Api(status) = error else {
        return not_patched(pod, error);
    };
    let message = &status.message;
    match status.code {
        404 if !message.contains(&*pod.name) => not_resized(
            pod,
            "the API server has no subresource resize of pods; it needs Kubernetes 1.33",
        ),
        // The operator lacks the right. Quotas and the size of the node are replies of this code, too.
        403 if message.contains("pods/resize") => refusal(pod, &status),
        404 | 409 => NotPatched::Outdated,
        _ => not_resized(pod, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::running;
    use kube::core::Status;

    #[test]
    fn a_refused_resize_has_the_reply_and_a_missing_right_the_chart_value() {
        let answer = |code: u16, message: &str| {
            let status = Status {
                code,
                message: message.to_owned(),
                ..Status::default()
            };
            resize_refused(&running("web-0"), kube::Error::Api(Box::new(status)))
        };
        let quota = r#"pods "web-0" is forbidden: exceeded quota: limit"#;
        let right = r#"pods "web-0" is forbidden: User "u" cannot patch resource "pods/resize""#;
        let older = "the server could not find the requested resource";
        for (code, message, says) in [
            (403, quota, "exceeded quota"),
            (422, "QOS Class may not change", "QOS Class"),
            (404, older, "Kubernetes 1.33"),
        ] {
            let NotPatched::Refused(UpdateBlocker::NotResized(note)) = answer(code, message) else {
                panic!("{message}");
            };
            assert!(note.contains("web-0") && note.contains(says), "{note}");
        }
        let NotPatched::Refused(UpdateBlocker::NotAllowed(note)) = answer(403, right) else {
            panic!("not refused");
        };
        assert!(note.contains("allowPodPatch"), "{note}");
        let deleted = r#"pods "web-0" not found"#;
        assert!(matches!(answer(404, deleted), NotPatched::Outdated));
    }
}
