//! Evicts pods that hang because of injection, and pods that the webhook missed.

use super::executor::Executor;
use crate::pods::{Pod, SkipReason, template_pool};
use crate::reconcile::memory::Memory;
use crate::reconcile::report;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod as FullPod;
use kube::Api;
use kube::api::{DeleteParams, EvictParams, Preconditions};

/// Kubernetes' default of a Job's `backoffLimit`.
const BACKOFF_LIMIT: i32 = 6;

impl Executor<'_> {
    /// Evicts a pod that hangs because of injection, or deletes it.
    pub(super) async fn replace(&self, pod: &Pod, memory: &mut Memory) {
        let Some(breaker) = &mut memory.breaker else {
            return;
        };
        breaker.record_replacing(pod, self.observed.now);
        let result = match self.job_objection(pod).await {
            None => self.evict_or_delete(pod).await,
            Some(why) => Err(why),
        };
        let (metrics, pool) = (&self.context.metrics, &self.observed.about);
        let events = match result {
            Ok(how) => {
                metrics.add("replacements_total", &[how], 1);
                report::replaced(pod, how, pool)
            }
            Err(why) => {
                breaker.record_not_replaced(pod, self.observed.now);
                metrics.add("replacements_total", &["refused"], 1);
                report::not_replaced(pod, &why, pool)
            }
        };
        self.publish(&events).await;
    }

    /// Evicts a pod that the webhook missed, unless its replacement would not be injected either.
    pub(super) async fn evict_missed(&self, pod: &Pod, memory: &mut Memory) {
        let now = self.observed.now;
        let mut objection = self.template_objection(pod).await;
        if objection.is_none() {
            objection = self.selector_objection(pod).await;
        }
        if let Some(why) = objection {
            let why = SkipReason::Objection(why);
            let event = report::eviction_skipped(pod, &why);
            memory.evictions.skip(pod, why, now);
            return self.publish(&[event]).await;
        }
        memory
            .evictions
            .record_eviction(pod, &self.observed.pods, now);
        let (metrics, pool) = (&self.context.metrics, &self.observed.about);
        match self.evict(pod).await {
            Ok(()) => {
                metrics.add("evictions_total", &["evicted"], 1);
                self.publish(&report::evicted(pod, pool)).await;
            }
            Err(e) => {
                memory.evictions.record_refused();
                metrics.add("evictions_total", &["refused"], 1);
                self.publish(&[report::eviction_refused(pod, &e, pool)])
                    .await;
            }
        }
    }

    /// Why the pod of a Job must not be replaced: a Job counts an evicted pod as a failure, and the last failure fails the Job.
    async fn job_objection(&self, pod: &Pod) -> Option<String> {
        let owner = pod.owner.as_ref().filter(|o| *o.kind == *"Job")?;
        let jobs: Api<Job> = Api::namespaced(self.context.client.clone(), &pod.namespace);
        match jobs.get_opt(&owner.name).await {
            Ok(job) => {
                let job = job.unwrap_or_default();
                let spec = job.spec.unwrap_or_default();
                let limit = spec.backoff_limit_per_index.or(spec.backoff_limit);
                let failed = job.status.and_then(|s| s.failed).unwrap_or(0);
                let last = failed >= limit.unwrap_or(BACKOFF_LIMIT);
                last.then(|| format!("Job {} would count it as its last failure", owner.name))
            }
            Err(e) => Some(format!("Job {} cannot be read: {e}", owner.name)),
        }
    }

    /// Why the pod's replacement would not be injected either: the template does not name this pool. `None` if it does.
    async fn template_objection(&self, pod: &Pod) -> Option<String> {
        let owner = pod.owner.as_ref()?;
        let client = self.context.client.clone();
        let (kind, name) = (&owner.kind, &owner.name);
        match template_pool(client, &pod.namespace, owner).await {
            Ok(Some(pool)) if *pool == *self.observed.name.name => None,
            Ok(_) => Some(format!(
                "the template of {kind} {name} does not have the pool's label, so a replacement would have none either"
            )),
            Err(e) => Some(format!("{kind} {name} cannot be read: {e}")),
        }
    }

    /// Evicts a pod. If a PodDisruptionBudget protects it and it is not ready, deletes it. Returns the label value for the metric.
    async fn evict_or_delete(&self, pod: &Pod) -> Result<&'static str, String> {
        match self.evict(pod).await {
            Ok(()) => Ok("evicted"),
            Err(kube::Error::Api(status)) if status.code == 429 && !pod.ready => {
                let pods: Api<FullPod> =
                    Api::namespaced(self.context.client.clone(), &pod.namespace);
                let deleted = pods.delete(&pod.name, &uid_precondition(pod)).await;
                deleted.map(|_| "deleted").map_err(|e| e.to_string())
            }
            Err(e) => Err(e.to_string()),
        }
    }

    async fn evict(&self, pod: &Pod) -> Result<(), kube::Error> {
        let api: Api<FullPod> = Api::namespaced(self.context.client.clone(), &pod.namespace);
        let params = EvictParams {
            delete_options: Some(uid_precondition(pod)),
            ..EvictParams::default()
        };
        api.evict(&pod.name, &params).await.map(drop)
    }
}

/// Limits the request to this pod, because a later pod may have the same name.
fn uid_precondition(pod: &Pod) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions {
        uid: Some(pod.uid.to_string()),
        ..Preconditions::default()
    })
}
