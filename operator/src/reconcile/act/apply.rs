//! Applies and deletes objects of a pool. An object with another owner is never changed.

use super::executor::Executor;
use crate::desired::redis;
use crate::names;
use crate::reconcile::applied::{Application, Outcome};
use crate::reconcile::children::{controller, resource};
use crate::reconcile::context::Context;
use crate::reconcile::error::ApplyError;
use crate::reconcile::memory::Memory;
use crate::reconcile::report;
use crate::reconcile::upgrades::Turn;
use jiff::Timestamp;
use kube::api::{
    DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, TypeMeta,
};
use kube::{Api, ResourceExt};
use std::time::{Duration, Instant};
use tracing::info;

impl Executor<'_> {
    /// Applies an object. Does nothing if the cluster does not have its kind.
    pub(super) async fn apply(
        &self,
        application: Application,
        memory: &mut Memory,
    ) -> Result<(), ApplyError> {
        let mut object = application.object.clone();
        let types = object.types.clone().unwrap_or_default();
        let name = object.name_any();
        let api = self.api(&types);
        // Checked even if it was applied before, because it may have been deleted and created by another owner.
        match owner_of(&api, &name).await {
            Ok(Some(uid)) if uid != memory.uid => {
                memory.applied.forget(&types.kind, &name);
                let kind = types.kind;
                return Err(ApplyError::NameTaken { kind, name });
            }
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            found => found.map_err(|e| api_error(&types, &name, e)).map(drop)?,
        }
        let params = PatchParams::apply(names::FIELD_MANAGER).force();
        let annotation = (names::APPLIED.to_owned(), application.hash.clone());
        object.annotations_mut().extend([annotation]);
        let stored = match api.patch(&name, &params, &Patch::Apply(&object)).await {
            Ok(stored) => stored,
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(e) => return Err(api_error(&types, &name, e)),
        };
        let version = stored.resource_version().unwrap_or_default();
        let generation = stored.metadata.generation;
        let outcome = memory.applied.record(application, version, generation);
        if outcome == Outcome::Reverted {
            self.publish(&[report::reverted(&self.observed.about, &name)])
                .await;
        }
        Ok(())
    }

    /// Applies an object that replaces managed servers, if no other pool's are being replaced. Otherwise returns when to try again.
    pub(super) async fn apply_in_turn(
        &self,
        application: Application,
        memory: &mut Memory,
    ) -> Result<Option<Duration>, ApplyError> {
        let Context { client, scope, .. } = self.context;
        let turn = self.upgrades.turn(&self.observed.name, client, scope).await;
        let turn = turn.map_err(|e| {
            let types = application.object.types.clone().unwrap_or_default();
            api_error(&types, &application.object.name_any(), e)
        })?;
        // Held until the change is stored, so that the next pool finds it.
        let _turn = match turn {
            Turn::Now(turn) => turn,
            Turn::Later(wait) => return Ok(Some(wait)),
        };
        self.apply(application, memory).await?;
        Ok(None)
    }

    pub(super) async fn delete(
        &self,
        types: &TypeMeta,
        name: &str,
        memory: &mut Memory,
    ) -> Result<(), ApplyError> {
        let namespace = &*self.observed.name.namespace;
        let api = self.api(types);
        match api.delete(name, &DeleteParams::default()).await {
            Ok(_) => info!(
                kind = types.kind,
                namespace,
                name,
                reason = "the pool no longer needs it",
                "object deleted"
            ),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(e) => return Err(api_error(types, name, e)),
        }
        memory.applied.forget(&types.kind, name);
        Ok(())
    }

    /// Creates the Secret of the pool's managed servers. An existing one is kept; the operator cannot read it and does not need to.
    pub(super) async fn password(&self, memory: &mut Memory) -> Result<(), ApplyError> {
        let Ok(pool) = &self.observed.stored.0 else {
            return Ok(());
        };
        let mut random = redis::Random::default();
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let random_bytes = random.as_flattened_mut();
        if provider.secure_random.fill(random_bytes).is_err() {
            return Err(ApplyError::NoRandom);
        }
        let now = u64::try_from(Timestamp::now().as_second()).unwrap_or(0);
        let secret = redis::password(pool, &random, now)?;
        let types = secret.types.clone().unwrap_or_default();
        let api = self.api(&types);
        match api.create(&PostParams::default(), &secret).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(e) => return Err(api_error(&types, &secret.name_any(), e)),
        }
        memory.password = Some(Instant::now());
        Ok(())
    }

    fn api(&self, types: &TypeMeta) -> Api<DynamicObject> {
        let client = self.context.client.clone();
        Api::namespaced_with(client, &self.observed.name.namespace, &resource(types))
    }
}

fn api_error(types: &TypeMeta, name: &str, source: kube::Error) -> ApplyError {
    ApplyError::Api {
        kind: types.kind.clone(),
        name: name.to_owned(),
        source: Box::new(source),
    }
}

/// Uid of the object's controller, empty without one. `None` if the object does not exist.
async fn owner_of(api: &Api<DynamicObject>, name: &str) -> Result<Option<String>, kube::Error> {
    // By list, because the operator has no right to get single objects of the kind.
    let found = api
        .list_metadata(&ListParams::default().fields(&format!("metadata.name={name}")))
        .await?;
    Ok(found
        .items
        .first()
        .map(|o| controller(&o.metadata).unwrap_or_default()))
}
