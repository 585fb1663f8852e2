//! The executor: carries the steps of a reconcile pass out, in their order, and records in the pool's memory what became of them.
//! What guards a write is read here, just before it: it must be newer than the snapshot.

mod apply;
mod evict;
mod executor;
mod pod_patch;
mod update;

pub use executor::Executor;

use super::error::{ApplyError, PassError};
use super::events::Event;
use super::memory::Memory;
use super::observe::Outcome;
use super::report;
use super::step::Step;
use crate::api::{KVCachePool, KVCachePoolStatus};
use crate::names;
use k8s_openapi::api::batch::v1::Job;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Resource, ResourceExt};
use serde_json::{Value, json};

impl Executor<'_> {
    /// Carries these steps out. An object that cannot be applied ends them; a status, or the finalizer of a deleted pool, that cannot
    /// be written fails the pass.
    pub async fn act(&self, steps: Vec<Step>, memory: &mut Memory) -> Result<Outcome, PassError> {
        let mut outcome = Outcome::default();
        for step in steps {
            match step {
                Step::Finalizers(finalizers) => {
                    // The objects are applied whatever becomes of it.
                    let held = self.hold(finalizers).await;
                    self.failed(held, &mut outcome).await;
                }
                Step::Password => {
                    let made = self.password(memory).await;
                    if self.failed(made, &mut outcome).await {
                        break;
                    }
                }
                Step::Apply(application) => {
                    let applied = self.apply(*application, memory).await;
                    if self.failed(applied, &mut outcome).await {
                        break;
                    }
                }
                Step::Delete(types, name) => {
                    if let Err(e) = self.delete(&types, &name, memory).await {
                        outcome.unapplied = Some(e);
                        break;
                    }
                }
                Step::Release(finalizers, event) => {
                    let gone = self.finalize(finalizers).await;
                    if gone.map_err(|e| PassError::Released(Box::new(e)))? {
                        self.publish(event.as_slice()).await;
                    }
                }
                Step::CreateJob(job) => outcome.job_refused = self.create_job(job).await.err(),
                Step::Status(status, events) => self.status(*status, &events, memory).await?,
                Step::Event(event) => self.publish(&[event]).await,
                Step::Count(counter, label) => self.context.metrics.add(counter, &[&label], 1),
                Step::Replace(pod) => self.replace(&pod, memory).await,
                Step::Evict(pod) => self.evict_missed(&pod, memory).await,
                Step::Update(step, settings) => {
                    if let Some(update) = &mut memory.update {
                        outcome.requeue(self.update(step, &settings, update).await);
                    }
                }
                Step::Requeue(within) => outcome.requeue(Some(within)),
            }
        }
        Ok(outcome)
    }

    /// Reports and records an object that could not be applied.
    async fn failed(&self, result: Result<(), ApplyError>, outcome: &mut Outcome) -> bool {
        let Err(e) = result else { return false };
        self.publish(&[report::not_applied(&self.observed.about, &e)])
            .await;
        outcome.unapplied = Some(e);
        true
    }

    async fn hold(&self, finalizers: Vec<String>) -> Result<(), ApplyError> {
        let held = self.finalize(finalizers).await;
        held.map(drop).map_err(|source| ApplyError::Api {
            kind: "KVCachePool".to_owned(),
            name: self.observed.name.name.to_string(),
            source: Box::new(source),
        })
    }

    /// Writes the pool's finalizers. False: somebody has written the pool meanwhile, or it is gone; the next pass sees that.
    async fn finalize(&self, finalizers: Vec<String>) -> Result<bool, kube::Error> {
        let patch = json!({"metadata": {
            "finalizers": finalizers,
            "resourceVersion": self.observed.stored.meta().resource_version,
        }});
        let (api, name) = (self.pools(), &self.observed.name.name);
        match api
            .patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
        {
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(false),
            written => written.map(|_| true),
        }
    }

    /// Writes the status and publishes these events.
    async fn status(
        &self,
        status: KVCachePoolStatus,
        events: &[Event],
        memory: &mut Memory,
    ) -> Result<(), PassError> {
        let kind = ApiResource::erase::<KVCachePool>(&());
        let name = &self.observed.name;
        let patch = json!({
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": name.name, "namespace": name.namespace},
            "status": status,
        });
        let params = PatchParams::apply(names::FIELD_MANAGER).force();
        let written = self
            .pools()
            .patch_status(&name.name, &params, &Patch::Apply(patch))
            .await;
        let stored = match written {
            // It was deleted meanwhile.
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            written => written.map_err(|e| PassError::Status(Box::new(e)))?,
        };
        self.context.metrics.add("status_writes_total", &[], 1);
        self.publish(events).await;
        memory.written = Some((status, stored.resource_version().unwrap_or_default()));
        memory.writes.add(self.observed.now);
        Ok(())
    }

    async fn create_job(&self, job: Value) -> Result<(), kube::Error> {
        let job: Job = serde_json::from_value(job).map_err(kube::Error::SerdeError)?;
        let namespace = &self.observed.name.namespace;
        let jobs: Api<Job> = Api::namespaced(self.context.client.clone(), namespace);
        match jobs.create(&PostParams::default(), &job).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            made => made.map(drop),
        }
    }

    fn pools(&self) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<KVCachePool>(&());
        let namespace = &self.observed.name.namespace;
        Api::namespaced_with(self.context.client.clone(), namespace, &kind)
    }
}
