//! Executes the steps of a reconcile pass in order, and records the results in the pool's `Memory`. Preconditions of a write are read here,
//! immediately before it, because the snapshot may be outdated.

mod apply;
mod evict;
mod excluded;
mod executor;
mod pod_patch;
mod resize;
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
    /// Executes the steps. An object that cannot be applied does not keep others from being applied. Fails if a status, or the finalizer of a
    /// deleted pool, cannot be written.
    pub async fn act(&self, steps: Vec<Step>, memory: &mut Memory) -> Result<Outcome, PassError> {
        let mut outcome = Outcome::default();
        for step in steps {
            match step {
                Step::Finalizers(finalizers) => {
                    let written = self.set_finalizers(finalizers).await;
                    self.report_failure(written, &mut outcome).await;
                }
                Step::Password => {
                    let created = self.password(memory).await;
                    self.report_failure(created, &mut outcome).await;
                }
                Step::Apply(application) => {
                    let applied = self.apply(*application, memory).await;
                    self.report_failure(applied, &mut outcome).await;
                }
                Step::ApplyInTurn(application) => {
                    let applied = self.apply_in_turn(*application, memory).await;
                    let wait = applied.as_ref().ok().copied().flatten();
                    outcome.requeue(wait);
                    self.report_failure(applied.map(drop), &mut outcome).await;
                }
                Step::Delete(types, name) => {
                    let deleted = self.delete(&types, &name, memory).await;
                    outcome.unapplied = outcome.unapplied.or(deleted.err());
                }
                Step::Release(finalizers, event) => match self.write_finalizers(finalizers).await {
                    Ok(true) => self.publish(event.as_slice()).await,
                    Ok(false) => {}
                    Err(e) => {
                        let stuck = report::not_released(&self.observed.about, &e);
                        self.publish(&[stuck]).await;
                        return Err(PassError::Finalizer(Box::new(e)));
                    }
                },
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

    /// Publishes an object that could not be applied, and records the first one.
    async fn report_failure(&self, result: Result<(), ApplyError>, outcome: &mut Outcome) {
        let Err(e) = result else { return };
        self.publish(&[report::not_applied(&self.observed.about, &e)])
            .await;
        outcome.unapplied.get_or_insert(e);
    }

    async fn set_finalizers(&self, finalizers: Vec<String>) -> Result<(), ApplyError> {
        let written = self.write_finalizers(finalizers).await;
        written.map(drop).map_err(|source| ApplyError::Api {
            kind: "KVCachePool".to_owned(),
            name: self.observed.name.name.to_string(),
            source: Box::new(source),
        })
    }

    /// Writes the pool's finalizers. Returns false if the pool was changed or deleted since the snapshot; the next pass retries.
    async fn write_finalizers(&self, finalizers: Vec<String>) -> Result<bool, kube::Error> {
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
            // The pool was deleted since the snapshot.
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
            created => created.map(drop),
        }
    }

    fn pools(&self) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<KVCachePool>(&());
        let namespace = &self.observed.name.namespace;
        Api::namespaced_with(self.context.client.clone(), namespace, &kind)
    }
}
