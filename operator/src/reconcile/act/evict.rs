//! Evictions: of pods that hang, and of pods that the webhook missed.

use super::executor::Executor;
use crate::pods::{Alone, Pod, template_pool};
use crate::reconcile::memory::Memory;
use crate::reconcile::report;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod as FullPod;
use kube::Api;
use kube::api::{DeleteParams, EvictParams, Preconditions};

/// Default of a Job's `backoffLimit`.
const BACKOFF_LIMIT: i32 = 6;

impl Executor<'_> {
    /// Evicts a pod that hangs.
    pub(super) async fn replace(&self, pod: &Pod, memory: &mut Memory) {
        let Some(breaker) = &mut memory.breaker else {
            return;
        };
        breaker.replacing(pod, self.observed.now);
        let done = match self.why_not(pod).await {
            None => self.evict_or_delete(pod).await,
            Some(why) => Err(why),
        };
        let (metrics, pool) = (&self.context.metrics, &self.observed.about);
        let events = match done {
            Ok(how) => {
                metrics.add("replacements_total", &[how], 1);
                report::replaced(pod, how, pool)
            }
            Err(why) => {
                breaker.not_replaced(pod, self.observed.now);
                metrics.add("replacements_total", &["refused"], 1);
                report::not_replaced(pod, &why, pool)
            }
        };
        self.publish(&events).await;
    }

    /// Evicts a pod that the webhook missed, if a new one would be injected.
    pub(super) async fn evict_missed(&self, pod: &Pod, memory: &mut Memory) {
        let now = self.observed.now;
        if let Some(why) = self.label_came_later(pod).await {
            let why = Alone::Template(why);
            let event = report::left_alone(pod, &why);
            memory.evictions.leave(pod, why, now);
            return self.publish(&[event]).await;
        }
        memory.evictions.begin(pod, &self.observed.pods, now);
        let (metrics, pool) = (&self.context.metrics, &self.observed.about);
        match self.evict(pod).await {
            Ok(()) => {
                metrics.add("evictions_total", &["evicted"], 1);
                self.publish(&report::evicted(pod, pool)).await;
            }
            Err(e) => {
                memory.evictions.refused();
                metrics.add("evictions_total", &["refused"], 1);
                self.publish(&[report::eviction_refused(pod, &e, pool)])
                    .await;
            }
        }
    }

    /// A Job counts a pod that goes as a failure: its last one is left alone.
    async fn why_not(&self, pod: &Pod) -> Option<String> {
        let of = pod.owner.as_ref().filter(|o| *o.kind == *"Job")?;
        let jobs: Api<Job> = Api::namespaced(self.context.client.clone(), &pod.namespace);
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

    /// Why a new pod of the same controller would be no better: its template does not name this pool. `None`: it does.
    async fn label_came_later(&self, pod: &Pod) -> Option<String> {
        let owner = pod.owner.as_ref()?;
        let client = self.context.client.clone();
        let (kind, name) = (&owner.kind, &owner.name);
        match template_pool(client, &owner.api_version, kind, &pod.namespace, name).await {
            Ok(Some(pool)) if *pool == *self.observed.name.name => None,
            Ok(_) => Some(format!(
                "the template of {kind} {name} does not name the pool: a pod that takes its place would have no label"
            )),
            Err(e) => Some(format!("{kind} {name} cannot be read: {e}")),
        }
    }

    /// Evicts a pod; where a budget keeps one that serves nothing, it is deleted.
    async fn evict_or_delete(&self, pod: &Pod) -> Result<&'static str, String> {
        match self.evict(pod).await {
            Ok(()) => Ok("evicted"),
            Err(kube::Error::Api(status)) if status.code == 429 && !pod.ready => {
                let pods: Api<FullPod> =
                    Api::namespaced(self.context.client.clone(), &pod.namespace);
                let deleted = pods.delete(&pod.name, &this_one(pod)).await;
                deleted.map(|_| "deleted").map_err(|e| e.to_string())
            }
            Err(e) => Err(e.to_string()),
        }
    }

    /// Evicts this pod, not another of its name.
    async fn evict(&self, pod: &Pod) -> Result<(), kube::Error> {
        let api: Api<FullPod> = Api::namespaced(self.context.client.clone(), &pod.namespace);
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
