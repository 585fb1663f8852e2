//! Objects of a pool: applied, and deleted when the pool does not want them any more. An object of the same name with another owner
//! is never touched.

use crate::names;
use crate::reconcile::applied::{Application, Applied, Outcome};
use crate::reconcile::children::{controller, resource};
use crate::reconcile::error::ApplyError;
use kube::api::{
    DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, TypeMeta,
};
use kube::{Api, Client, ResourceExt};
use tracing::info;

/// Applies an object and records it. `None`: the cluster does not know its kind.
pub async fn apply(
    client: &Client,
    application: Application,
    owner_uid: &str,
    applied: &mut Applied,
) -> Result<Option<Outcome>, ApplyError> {
    let mut object = application.object.clone();
    let types = object.types.clone().unwrap_or_default();
    let name = object.name_any();
    let api = api(client, &object.namespace().unwrap_or_default(), &types);
    // Also where it was applied before: it may have been deleted since, and made anew by somebody else.
    match owner_of(&api, &name).await {
        Ok(Some(uid)) if uid != owner_uid => {
            applied.forget(&types.kind, &name);
            return Err(ApplyError::NameTaken {
                kind: types.kind,
                name,
            });
        }
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(None),
        found => found.map_err(|e| failed(&types, &name, e)).map(drop)?,
    }
    let params = PatchParams::apply(names::FIELD_MANAGER).force();
    let annotation = (names::APPLIED.to_owned(), application.hash.clone());
    object.annotations_mut().extend([annotation]);
    let stored = match api.patch(&name, &params, &Patch::Apply(&object)).await {
        Ok(stored) => stored,
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(None),
        Err(e) => return Err(failed(&types, &name, e)),
    };
    let version = stored.resource_version().unwrap_or_default();
    Ok(Some(applied.record(
        application,
        version,
        stored.metadata.generation,
    )))
}

/// Deletes an object of the pool that it does not want any more.
pub async fn delete(
    client: &Client,
    namespace: &str,
    types: &TypeMeta,
    name: &str,
    applied: &mut Applied,
) -> Result<(), ApplyError> {
    let api = api(client, namespace, types);
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => info!(
            kind = types.kind,
            namespace, name, "removed: the pool does not want it any more"
        ),
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(e) => return Err(failed(types, name, e)),
    }
    applied.forget(&types.kind, name);
    Ok(())
}

/// Creates an object unless there is one of its name.
pub async fn create(client: &Client, object: &DynamicObject) -> Result<(), ApplyError> {
    let types = object.types.clone().unwrap_or_default();
    let api = api(client, &object.namespace().unwrap_or_default(), &types);
    match api.create(&PostParams::default(), object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(e) => Err(failed(&types, &object.name_any(), e)),
    }
}

fn failed(types: &TypeMeta, name: &str, source: kube::Error) -> ApplyError {
    ApplyError::Api {
        kind: types.kind.clone(),
        name: name.to_owned(),
        source: Box::new(source),
    }
}

/// Uid of the object's controller; empty = it has none; `None` = there is no such object.
async fn owner_of(api: &Api<DynamicObject>, name: &str) -> Result<Option<String>, kube::Error> {
    // By list, because reading single objects of the kind is not among the operator's rights.
    let found = api
        .list_metadata(&ListParams::default().fields(&format!("metadata.name={name}")))
        .await?;
    Ok(found
        .items
        .first()
        .map(|o| controller(&o.metadata).unwrap_or_default()))
}

fn api(client: &Client, namespace: &str, types: &TypeMeta) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &resource(types))
}
