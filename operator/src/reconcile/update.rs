//! Updates running pods as `pods::Update` decides: reads the live pod, patches what differs, tells back what became of it.

use super::events::{Events, Weight, owner};
use super::live;
use super::term::Term;
use crate::inject::Settings;
use crate::pods::{Goal, Pod, Setback, Step, Update, fetch};
use crate::status::Reason;
use jiff::Timestamp;
use json_patch::Patch as JsonPatch;
use k8s_openapi::api::core::v1::{ObjectReference, Pod as FullPod};
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::Status;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Said where the operator has no right to patch pods.
pub const NOT_ALLOWED: &str = "updateStrategy is InPlace and the operator may not patch pods: set the chart value allowPodPatch to true";

/// Pods that the API server refuses one after the other before the rest is not tried.
const REFUSED_MAX: usize = 3;

/// One look at the running pods of a pool.
pub struct Updating<'a> {
    pub term: &'a Term,
    pub settings: &'a Settings,
    pub goal: Goal<'a>,
    /// The pool, for events.
    pub about: &'a ObjectReference,
    pub now: Timestamp,
}

/// Why a pod was not patched.
enum Failed {
    /// It is another one now, or gone: the next look sees it as it is.
    Moved,
    /// The API server does not take it.
    Refused(Setback),
}

impl Updating<'_> {
    /// Takes the next step, if there is one. Returns when to look again.
    pub async fn run(&self, pods: &[Arc<Pod>], update: &mut Update) -> Option<Duration> {
        match update.next(pods, &self.goal, self.now) {
            Step::Rest => {}
            Step::Config(pods) => {
                let config = |_: &Pod, live: &Value| live::config(live, self.settings);
                self.each(&pods, update, false, config).await;
                update.configured(self.now);
            }
            Step::Image(pods) => {
                let image = |pod: &Pod, live: &Value| {
                    // What did not run needs no way back.
                    let at = pod.address().map(|_| self.now);
                    live::image(live, self.settings, at)
                };
                let done = self.each(&pods, update, true, image).await;
                self.tell_exchanged(&done).await;
            }
            Step::Ask(pod) => {
                if let Some(ip) = pod.address()
                    && let Ok(status) = fetch(ip).await
                {
                    update.answered(&pod, status.state);
                }
            }
            Step::Back(pod, was) => {
                let back = |_: &Pod, live: &Value| live::back(live, &was.image, &was.hash);
                let one = std::slice::from_ref(&pod);
                if !self.each(one, update, false, back).await.is_empty() {
                    let note = update.put_back(&pod, &was);
                    for to in [&owner(&pod), self.about] {
                        self.events()
                            .publish(
                                to,
                                Weight::Warning,
                                "Update",
                                Reason::UpdateRolledBack.name(),
                                &note,
                            )
                            .await;
                    }
                }
            }
        }
        update
            .look_again(self.now)
            .and_then(|d| Duration::try_from(d).ok())
    }

    /// Patches one pod after the other and returns those that have what they shall have. One that the API server refuses keeps no
    /// other; where it refuses all of several, the rest is not tried.
    async fn each(
        &self,
        pods: &[Arc<Pod>],
        update: &mut Update,
        exchange: bool,
        change: impl Fn(&Pod, &Value) -> Option<JsonPatch>,
    ) -> Vec<Arc<Pod>> {
        let mut done = Vec::new();
        let mut refused = 0;
        for pod in pods {
            if exchange {
                update.exchanging(pod, self.now);
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
            let Failed::Refused(setback) = failed else {
                continue;
            };
            let (reason, note) = match &setback {
                Setback::NotAllowed(note) => (Reason::PodPatchNotAllowed, note),
                Setback::Refused(note) | Setback::RolledBack(note) => {
                    (Reason::PodPatchFailed, note)
                }
            };
            self.events()
                .warn_once(self.about, "Update", reason.name(), note)
                .await;
            update.refused(pod, setback, self.now);
            refused += 1;
            if refused >= REFUSED_MAX && done.is_empty() {
                update.pause(self.now);
                break;
            }
        }
        done
    }

    async fn patch(
        &self,
        pod: &Pod,
        change: impl Fn(&Value) -> Option<JsonPatch>,
    ) -> Result<(), Failed> {
        let kind = ApiResource::erase::<FullPod>(&());
        let client = self.term.client.clone();
        let api: Api<DynamicObject> = Api::namespaced_with(client, &pod.namespace, &kind);
        // By list, because reading single pods is not among the operator's rights.
        let name = ListParams::default().fields(&format!("metadata.name={}", pod.name));
        let live = api.list(&name).await.map_err(|e| failed(pod, e))?;
        let live = live.items.into_iter().next().ok_or(Failed::Moved)?;
        if live.metadata.uid.as_deref() != Some(&*pod.uid) {
            return Err(Failed::Moved);
        }
        let live = serde_json::to_value(live).map_err(|_| Failed::Moved)?;
        let Some(patch) = change(&live) else {
            return Ok(());
        };
        let patch = Patch::Json::<()>(patch);
        match api.patch(&pod.name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            Err(e) => Err(failed(pod, e)),
        }
    }

    async fn tell_exchanged(&self, pods: &[Arc<Pod>]) {
        let Some(first) = pods.first() else { return };
        let others = match pods.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let note = format!(
            "the sidecar of pod {}{others} is given image {}",
            first.name, self.settings.image
        );
        self.events()
            .publish(
                self.about,
                Weight::Normal,
                "Update",
                Reason::UpdatingInPlace.name(),
                &note,
            )
            .await;
    }

    fn events(&self) -> &Events {
        &self.term.events
    }
}

fn failed(pod: &Pod, error: kube::Error) -> Failed {
    match error {
        kube::Error::Api(status) => judged(pod, &status),
        e => Failed::Refused(Setback::Refused(format!(
            "pod {} cannot be patched: {e}",
            pod.name
        ))),
    }
}

fn judged(pod: &Pod, status: &Status) -> Failed {
    let said = &status.message;
    match status.code {
        404 | 409 => Failed::Moved,
        403 => Failed::Refused(Setback::NotAllowed(format!(
            "the operator may not patch pod {} (chart value allowPodPatch, or an admission policy): {said}",
            pod.name
        ))),
        _ => Failed::Refused(Setback::Refused(format!(
            "pod {} cannot be patched: {said}",
            pod.name
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::running;

    fn answer(code: u16) -> Failed {
        let status = Status {
            code,
            message: "its words".to_owned(),
            ..Status::default()
        };
        judged(&running("a"), &status)
    }

    #[test]
    fn a_refusal_is_told_by_name_and_a_pod_that_went_is_not() {
        assert!(matches!(answer(404), Failed::Moved));
        assert!(matches!(answer(409), Failed::Moved));
        let Failed::Refused(Setback::NotAllowed(note)) = answer(403) else {
            panic!("not told");
        };
        assert!(note.contains("allowPodPatch") && note.contains("its words"));
        let Failed::Refused(Setback::Refused(note)) = answer(422) else {
            panic!("not told");
        };
        assert!(note.contains("pod a") && note.contains("its words"));
    }
}
