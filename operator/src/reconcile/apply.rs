//! Objects of a pool: applied when they are not as they were left, removed when they are not wanted any more. An object of the same
//! name that is not the pool's is never touched.

use super::children::{Child, Children};
use crate::names;
use crate::status::Reason;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    TypeMeta,
};
use kube::{Api, Client, ResourceExt};
use std::collections::HashMap;
use thiserror::Error;
use tracing::info;

/// Kind and name of an object within the pool's namespace.
pub type Key = (String, String);

/// How an object was left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    hash: String,
    resource_version: String,
}

/// How the objects of one pool were left.
pub type Applied = HashMap<Key, Left>;

/// Why an object is not as it shall be.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// No password can be made.
    #[error("the operating system gives no random bytes for a password")]
    NoRandom,
    /// Somebody else's object has the name.
    #[error("{kind} {name} exists and does not belong to this pool; rename it or the pool")]
    NameTaken {
        /// Kind.
        kind: String,
        /// Name.
        name: String,
    },
    /// The API server did not take it.
    #[error("{kind} {name} cannot be applied: {source}")]
    Api {
        /// Kind.
        kind: String,
        /// Name.
        name: String,
        /// Its words.
        #[source]
        source: Box<kube::Error>,
    },
}

impl ApplyError {
    /// As conditions and events name it.
    pub fn reason(&self) -> Reason {
        match self {
            Self::NameTaken { .. } => Reason::NameTaken,
            Self::Api { .. } | Self::NoRandom => Reason::ApplyFailed,
        }
    }
}

/// What became of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was as it was left.
    Same,
    /// It was applied.
    Applied,
    /// Somebody had changed it, and it was set right.
    SetRight,
    /// The cluster does not know its kind.
    NoSuchKind,
}

/// Applies one object if it needs it.
pub async fn apply(
    client: &Client,
    object: &DynamicObject,
    owner_uid: &str,
    children: &Children,
    applied: &mut Applied,
) -> Result<Outcome, ApplyError> {
    let types = object.types.clone().unwrap_or_default();
    let name = object.name_any();
    let key = (types.kind.clone(), name.clone());
    let failed = |source| ApplyError::Api {
        kind: types.kind.clone(),
        name: name.clone(),
        source: Box::new(source),
    };
    let hash = hash(object);
    let live = children.seen(&types.kind, &object.namespace().unwrap_or_default(), &name);
    let left = match applied.get(&key).cloned() {
        None => untouched(live.as_ref().and_then(Option::as_ref), owner_uid, &hash)
            .inspect(|left| drop(applied.insert(key.clone(), left.clone()))),
        left => left,
    };
    let is_left = |live: &Option<Child>, left: &Left| {
        let live = live.as_ref().map(|child| &child.resource_version);
        live == Some(&left.resource_version)
    };
    if let Some(left) = &left
        && left.hash == hash
        && live.as_ref().is_none_or(|live| is_left(live, left))
    {
        return Ok(Outcome::Same);
    }
    let api = api(client, object, &types);
    // Also where it was applied before: it may have been deleted since, and made anew by somebody else.
    match owner_of(&api, &name).await {
        Ok(Some(uid)) if uid != owner_uid => {
            applied.remove(&key);
            return Err(ApplyError::NameTaken {
                kind: types.kind,
                name,
            });
        }
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Outcome::NoSuchKind),
        found => found.map_err(failed).map(drop)?,
    }
    let params = PatchParams::apply(names::FIELD_MANAGER).force();
    let mut object = object.clone();
    let annotation = (names::APPLIED.to_owned(), hash.clone());
    object.annotations_mut().extend([annotation]);
    let stored = match api.patch(&name, &params, &Patch::Apply(&object)).await {
        Ok(stored) => stored,
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Outcome::NoSuchKind),
        Err(e) => return Err(failed(e)),
    };
    let resource_version = stored.resource_version().unwrap_or_default();
    let now = Left {
        hash,
        resource_version,
    };
    let generation = stored.metadata.generation;
    let outcome = outcome(left.as_ref(), live.flatten().as_ref(), &now, generation);
    applied.insert(key, now);
    Ok(outcome)
}

/// How an earlier leader left an object, as far as the object itself proves it: then a new leader has nothing to write.
fn untouched(live: Option<&Child>, owner_uid: &str, hash: &str) -> Option<Left> {
    let live = live.filter(|child| child.owner_uid == owner_uid)?;
    live.applied.as_ref().filter(|applied| *applied == hash)?;
    Some(Left {
        hash: hash.to_owned(),
        resource_version: live.resource_version.clone(),
    })
}

/// What an application did. The watch may be behind: where the object is as it was left, nobody had changed it. `generation`: of the
/// object now.
fn outcome(
    left: Option<&Left>,
    live: Option<&Child>,
    now: &Left,
    generation: Option<i64>,
) -> Outcome {
    // The version also changes with what others say in an object's status, the generation does not.
    let changed = |live: &Child| match (live.generation, generation) {
        (Some(before), Some(after)) => before != after,
        _ => live.resource_version != now.resource_version,
    };
    match left {
        Some(left) if left == now => Outcome::Same,
        Some(left) if left.hash == now.hash && live.is_some_and(changed) => Outcome::SetRight,
        _ => Outcome::Applied,
    }
}

/// Deletes what carries the pool's label and owner and is not wanted.
pub async fn prune(
    client: &Client,
    namespace: &str,
    owner_uid: &str,
    wanted: &[DynamicObject],
    children: &Children,
    applied: &mut Applied,
) -> Result<(), ApplyError> {
    for (types, name) in children.of(namespace, owner_uid) {
        let is = |o: &&DynamicObject| o.types.as_ref() == Some(&types) && o.name_any() == name;
        if wanted.iter().find(is).is_some() {
            continue;
        }
        let mut object = DynamicObject::new(&name, &resource(&types));
        object.metadata.namespace = Some(namespace.to_owned());
        match api(client, &object, &types)
            .delete(&name, &DeleteParams::default())
            .await
        {
            Ok(_) => info!(
                kind = types.kind,
                namespace, name, "removed: the pool does not want it any more"
            ),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(source) => {
                return Err(ApplyError::Api {
                    kind: types.kind,
                    name,
                    source: Box::new(source),
                });
            }
        }
        applied.remove(&(types.kind, name));
    }
    Ok(())
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

/// Uid of an object's controller.
pub fn controller(meta: &ObjectMeta) -> Option<String> {
    let mut owners = meta.owner_references.iter().flatten();
    owners
        .find(|o: &&OwnerReference| o.controller == Some(true))
        .map(|o| o.uid.clone())
}

/// The API of a kind whose plural is regular, which all of ours are.
pub fn resource(types: &TypeMeta) -> ApiResource {
    let (group, version) = types
        .api_version
        .split_once('/')
        .unwrap_or(("", &types.api_version));
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind))
}

fn api(client: &Client, object: &DynamicObject, types: &TypeMeta) -> Api<DynamicObject> {
    let namespace = object.namespace().unwrap_or_default();
    Api::namespaced_with(client.clone(), &namespace, &resource(types))
}

/// Of all that is applied; the same in every build.
fn hash(object: &DynamicObject) -> String {
    let text = serde_json::to_string(object).unwrap_or_default();
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(hash: u64, version: &str) -> Left {
        Left {
            hash: hash.to_string(),
            resource_version: version.to_owned(),
        }
    }

    #[test]
    fn a_new_leader_believes_an_object_that_says_what_was_applied_and_is_the_pools() {
        let child = Child {
            resource_version: "5".into(),
            generation: None,
            owner_uid: "u".into(),
            applied: Some("1".into()),
        };
        assert_eq!(untouched(Some(&child), "u", "1"), Some(left(1, "5")));
        assert_eq!(untouched(Some(&child), "u", "2"), None);
        assert_eq!(untouched(Some(&child), "another", "1"), None);
        let edited = Child {
            applied: None,
            ..child
        };
        assert_eq!(untouched(Some(&edited), "u", "1"), None);
        assert_eq!(untouched(None, "u", "1"), None);
    }

    #[test]
    fn only_a_change_of_somebody_else_is_set_right() {
        let first = left(1, "5");
        let seen = |version: &str, generation| Child {
            resource_version: version.into(),
            generation,
            owner_uid: "u".into(),
            applied: None,
        };
        let look = |live: Option<&str>, now: &Left| {
            let live = live.map(|version| seen(version, None));
            outcome(Some(&first), live.as_ref(), now, None)
        };
        assert_eq!(look(Some("7"), &left(1, "8")), Outcome::SetRight);
        assert_eq!(
            look(Some("4"), &left(1, "5")),
            Outcome::Same,
            "the watch is behind"
        );
        assert_eq!(
            look(Some("7"), &left(1, "7")),
            Outcome::Applied,
            "not our fields"
        );
        assert_eq!(
            look(None, &left(1, "8")),
            Outcome::Applied,
            "it was deleted"
        );
        assert_eq!(
            look(Some("5"), &left(2, "8")),
            Outcome::Applied,
            "ours to change"
        );
        let unknown = outcome(None, Some(&seen("5", None)), &left(1, "5"), None);
        assert_eq!(unknown, Outcome::Applied);
        let status = seen("7", Some(1));
        let look = |after| outcome(Some(&first), Some(&status), &left(1, "8"), Some(after));
        assert_eq!(look(1), Outcome::Applied, "only its status is another");
        assert_eq!(look(2), Outcome::SetRight);
    }
}
