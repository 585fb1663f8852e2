//! What the breaker decided, done: hung pods are replaced, and owner and pool are told.

use super::events::{Weight, of_owner, owner};
use super::pool::Look;
use super::term::State;
use crate::pods::{Owner, Pod, Turn};
use crate::status::{Reason, cause_in_words};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ObjectReference, Pod as FullPod};
use kube::Api;
use kube::api::{DeleteParams, EvictParams, Preconditions};
use std::sync::Arc;

/// Failures that a Job takes where it does not say it.
const BACKOFF_LIMIT: i32 = 6;

impl Look<'_> {
    /// Events on the owner and on the pool, and the metric.
    pub(super) async fn tell_turns(&self, turns: &[Turn], about: &ObjectReference) {
        let (events, metrics) = (&self.term.events, &self.term.metrics);
        for turn in turns {
            let (of, weight, reason, note) = match turn {
                Turn::Paused(of, cause) => {
                    metrics.add("injection_pauses_total", &[&cause.reason], 1);
                    let note = format!(
                        "new pods of {} start without a sidecar: {}",
                        name(of.as_ref()),
                        cause_in_words(cause)
                    );
                    (of, Weight::Warning, Reason::PodsHeldBack, note)
                }
                Turn::Resumed(of) => {
                    let note = format!("new pods of {} get a sidecar again", name(of.as_ref()));
                    (of, Weight::Normal, Reason::InjectionResumed, note)
                }
                Turn::Cleared(of, cause) => {
                    let note = format!(
                        "pods of {} fail without a sidecar too, so they are injected again: {}",
                        name(of.as_ref()),
                        cause_in_words(cause)
                    );
                    (of, Weight::Normal, Reason::NotOurs, note)
                }
            };
            let of = of.as_ref().map(|o| of_owner(o, &self.name.namespace));
            for to in of.iter().chain([about]) {
                events
                    .publish(to, weight, "Inject", reason.name(), &note)
                    .await;
            }
        }
    }

    /// Evicts these pods, which hang.
    pub(super) async fn replace(
        &self,
        pods: &[Arc<Pod>],
        about: &ObjectReference,
        state: &mut State,
    ) {
        let Some(breaker) = &mut state.breaker else {
            return;
        };
        for pod in pods {
            breaker.replacing(pod, self.now);
            let done = match self.why_not(pod).await {
                None => self.ask_to_go(pod).await,
                Some(why) => Err(why),
            };
            let (events, metrics) = (&self.term.events, &self.term.metrics);
            match done {
                Ok(how) => {
                    metrics.add("replacements_total", &[how], 1);
                    let note = format!("pod {} hung and was {how}", pod.name);
                    let reason = Reason::PodReplaced.name();
                    for to in [&owner(pod), about] {
                        events
                            .publish(to, Weight::Normal, "Replace", reason, &note)
                            .await;
                    }
                }
                Err(why) => {
                    breaker.not_replaced(pod, self.now);
                    metrics.add("replacements_total", &["refused"], 1);
                    let note = format!("pod {} hangs and is not replaced: {why}", pod.name);
                    let reason = Reason::PodNotReplaced.name();
                    for to in [&owner(pod), about] {
                        events.warn_once(to, "Replace", reason, &note).await;
                    }
                }
            }
        }
    }

    /// A Job counts a pod that goes as a failure: its last one is left alone.
    async fn why_not(&self, pod: &Pod) -> Option<String> {
        let of = pod.owner.as_ref().filter(|o| *o.kind == *"Job")?;
        let jobs: Api<Job> = Api::namespaced(self.term.client.clone(), &pod.namespace);
        match jobs.get_opt(&of.name).await {
            Ok(job) => {
                let job = job.unwrap_or_default();
                let spec = job.spec.unwrap_or_default();
                let most = spec.backoff_limit_per_index.or(spec.backoff_limit);
                let failed = job.status.and_then(|s| s.failed).unwrap_or(0);
                let last = failed >= most.unwrap_or(BACKOFF_LIMIT);
                last.then(|| format!("Job {} would count it as its last failure", of.name))
            }
            Err(e) => Some(format!("Job {} cannot be read: {e}", of.name)),
        }
    }

    /// Evicts a pod; where a budget keeps one that serves nothing, it is deleted.
    async fn ask_to_go(&self, pod: &Pod) -> Result<&'static str, String> {
        match self.ask_to_evict(pod).await {
            Ok(()) => Ok("evicted"),
            Err(kube::Error::Api(status)) if status.code == 429 && !pod.ready => {
                let pods: Api<FullPod> = Api::namespaced(self.term.client.clone(), &pod.namespace);
                let deleted = pods.delete(&pod.name, &this_one(pod)).await;
                deleted.map(|_| "deleted").map_err(|e| e.to_string())
            }
            Err(e) => Err(e.to_string()),
        }
    }

    /// Asks for the eviction of this pod, not of another of its name.
    pub(super) async fn ask_to_evict(&self, pod: &Pod) -> Result<(), kube::Error> {
        let api: Api<FullPod> = Api::namespaced(self.term.client.clone(), &pod.namespace);
        let params = EvictParams {
            delete_options: Some(this_one(pod)),
            ..EvictParams::default()
        };
        api.evict(&pod.name, &params).await.map(drop)
    }
}

fn this_one(pod: &Pod) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions {
        uid: Some(pod.uid.to_string()),
        ..Preconditions::default()
    })
}

fn name(owner: Option<&Owner>) -> String {
    owner.map_or_else(
        || "the pool".to_owned(),
        |o| format!("{} {}", o.kind, o.name),
    )
}
