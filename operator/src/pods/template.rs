//! Finds the pool that the pods of a workload will belong to, from its template.

use super::pod::Owner;
use crate::forms;
use crate::names;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use serde_json::Value;
use std::time::Duration;
use thiserror::Error;
use tokio::time::timeout;

/// The kinds that the operator may read.
const KINDS: [(&str, &str, &str); 4] = [
    ("apps", "v1", "ReplicaSet"),
    ("apps", "v1", "StatefulSet"),
    ("apps", "v1", "DaemonSet"),
    ("batch", "v1", "Job"),
];
const READ_TIME_MAX: Duration = Duration::from_secs(5);

/// Why a template is unknown.
#[derive(Debug, Error)]
pub enum TemplateError {
    #[error("this kind of workload is not read")]
    OtherKind,
    #[error("invalid name")]
    Name,
    #[error("no answer within {READ_TIME_MAX:?}")]
    TimedOut,
    /// Another object of the same name, or none.
    #[error("it does not exist anymore")]
    Gone,
    #[error(transparent)]
    Api(#[from] kube::Error),
}

/// What the pods of a workload do for their pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// They run vLLM and request the pool.
    Engine,
    /// They are its managed servers, or the manager of their cluster.
    Server,
}

/// The label (or annotation) in the workload's template. `None` if it has neither.
pub async fn template_pool(
    client: Client,
    namespace: &str,
    owner: &Owner,
) -> Result<Option<String>, TemplateError> {
    let found = template_role(client, namespace, owner).await?;
    Ok(found.and_then(|(pool, role)| (role == Role::Engine).then_some(pool)))
}

/// The pool of the workload's template, and the role of its pods. `owner` may have been written by anybody, so only known kinds and valid
/// names become part of a URL.
pub async fn template_role(
    client: Client,
    namespace: &str,
    owner: &Owner,
) -> Result<Option<(String, Role)>, TemplateError> {
    let kind = readable(owner)?;
    if !forms::is_label(namespace) || !forms::is_subdomain(&owner.name) {
        return Err(TemplateError::Name);
    }
    let kind = ApiResource::from_gvk(&kind);
    let api: Api<DynamicObject> = Api::namespaced_with(client, namespace, &kind);
    let workload = timeout(READ_TIME_MAX, api.get_opt(&owner.name)).await;
    let workload = workload.map_err(|_| TemplateError::TimedOut)??;
    let same = |found: &DynamicObject| found.metadata.uid.as_deref() == Some(&*owner.uid);
    let workload = workload.filter(same).ok_or(TemplateError::Gone)?;
    let meta = workload.data.pointer("/spec/template/metadata");
    Ok(meta.and_then(role))
}

fn role(template: &Value) -> Option<(String, Role)> {
    let text = |place: &str, key: &str| template.get(place)?.get(key)?.as_str();
    let requested = ["labels", "annotations"].into_iter().find_map(|place| {
        let pool = text(place, names::POOL)?;
        forms::is_label(pool).then_some((pool, Role::Engine))
    });
    let serves = || {
        let serves = [names::SERVERS, names::MANAGER].contains(&text("labels", names::NAME)?);
        let pool = text("labels", names::INSTANCE).filter(|_| serves)?;
        forms::is_label(pool).then_some((pool, Role::Server))
    };
    let (pool, role) = requested.or_else(serves)?;
    Some((pool.to_owned(), role))
}

fn readable(owner: &Owner) -> Result<GroupVersionKind, TemplateError> {
    let found = KINDS.iter().find(|(group, version, kind)| {
        *kind == &*owner.kind && owner.api_version.split_once('/') == Some((group, version))
    });
    let (group, version, kind) = found.ok_or(TemplateError::OtherKind)?;
    Ok(GroupVersionKind::gvk(group, version, kind))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use axum::Router;
    use axum::http::Uri;
    use parking_lot::Mutex;
    use serde_json::json;
    use std::sync::Arc;

    /// A client of an API server whose only workload, with uid `u`, requests the pool `p`; and the paths that were read.
    pub fn one_workload() -> (Client, Arc<Mutex<Vec<String>>>) {
        workload(json!({names::POOL: "p"}))
    }

    /// As above, with these labels of the template.
    pub fn workload(labels: Value) -> (Client, Arc<Mutex<Vec<String>>>) {
        let read: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = read.clone();
        let workload = json!({
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {"name": "web", "uid": "u"},
            "spec": {"template": {"metadata": {"labels": labels}}},
        });
        let router = Router::new().fallback(async move |uri: Uri| {
            seen.lock().push(uri.to_string());
            axum::Json(workload)
        });
        (Client::new(router, "default"), read)
    }

    fn owner(api_version: &str, kind: &str, name: &str, uid: &str) -> Owner {
        Owner {
            api_version: api_version.into(),
            kind: kind.into(),
            name: name.into(),
            uid: uid.into(),
        }
    }

    #[tokio::test]
    async fn the_template_of_a_workload_names_its_pool() {
        let (client, read) = one_workload();
        let set = owner("apps/v1", "ReplicaSet", "web", "u");
        let pool = template_pool(client.clone(), "n", &set).await.unwrap();
        assert_eq!(pool.as_deref(), Some("p"));
        assert_eq!(*read.lock(), ["/apis/apps/v1/namespaces/n/replicasets/web"]);
        let later = owner("apps/v1", "ReplicaSet", "web", "of its successor");
        let gone = template_pool(client, "n", &later).await.unwrap_err();
        assert!(matches!(gone, TemplateError::Gone));
    }

    #[tokio::test]
    async fn nothing_else_becomes_part_of_a_url() {
        let (client, read) = one_workload();
        for (namespace, version, kind, name) in [
            ("n", "v1", "Pod", "?watch=true"),
            ("n", "v1", "Secret", "web"),
            (
                "n",
                "apps/v1",
                "ReplicaSet",
                "?watch=true&timeoutSeconds=1000000",
            ),
            ("n", "apps/v1", "ReplicaSet", "../../../secrets"),
            ("n", "kube-system/configmaps?x=", "ReplicaSet", "web"),
            ("n/secrets?x=", "apps/v1", "ReplicaSet", "web"),
            ("n", "apps/v1", "ReplicaSet", ""),
        ] {
            let owner = owner(version, kind, name, "u");
            let result = template_pool(client.clone(), namespace, &owner).await;
            assert!(result.is_err(), "{owner:?}");
        }
        assert_eq!(*read.lock(), [""; 0]);
    }
}
