//! The cache of the objects that pools own: one metadata watch by label for each kind that the cluster has.

use crate::metrics::Metrics;
use crate::names;
use crate::pods::PoolRef;
use crate::scope::{self, Events, Scope, is_denied};
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    ManagedFieldsEntry, ObjectMeta, OwnerReference,
};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, TypeMeta};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tracing::{debug, warn};

/// The kinds of objects that `desired` creates, and whether every cluster has them and lets the operator watch them.
const KINDS: [(&str, &str, bool); 7] = [
    ("v1", "ConfigMap", true),
    ("monitoring.coreos.com/v1", "PodMonitor", false),
    ("v1", "Service", false),
    ("apps/v1", "StatefulSet", false),
    ("apps/v1", "Deployment", false),
    ("policy/v1", "PodDisruptionBudget", false),
    ("networking.k8s.io/v1", "NetworkPolicy", false),
];

/// The last observed state of an object that a pool owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    pub resource_version: String,
    /// Rises with each change of the spec. Not all kinds have it.
    pub generation: Option<i64>,
    /// Uid of its controller; empty without one.
    pub owner_uid: String,
    /// Hash of the fields that the operator last applied. `None` if another manager has ever written a field.
    pub applied: Option<String>,
    /// Number of servers, of the StatefulSet of a cluster.
    pub servers: Option<i64>,
}

/// Kind, namespace, name.
type ChildRef = (String, String, String);

/// A kind, and the namespace of a watch; `None` for all.
type Listed = (String, Option<String>);

/// The children of all pools. A kind is unknown in a namespace until its first list is complete there.
#[derive(Debug, Default)]
pub struct Children(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    children: BTreeMap<ChildRef, Child>,
    /// Watches whose first list is complete.
    listed: HashSet<Listed>,
    /// The objects of lists in progress.
    listing: HashMap<Listed, BTreeMap<ChildRef, Child>>,
}

impl Children {
    /// Finds a child. `None` if its kind is unknown, and `Some(None)` if the child does not exist.
    pub fn find(&self, kind: &str, namespace: &str, name: &str) -> Option<Option<Child>> {
        let inner = self.0.lock();
        let watches = [None, Some(namespace.to_owned())].map(|within| (kind.to_owned(), within));
        if !watches.iter().any(|watch| inner.listed.contains(watch)) {
            return None;
        }
        let key = (kind.to_owned(), namespace.to_owned(), name.to_owned());
        Some(inner.children.get(&key).cloned())
    }

    /// Type and name of each child of a pool.
    pub fn of(&self, namespace: &str, owner_uid: &str) -> Vec<(TypeMeta, String)> {
        let inner = self.0.lock();
        let children = KINDS.iter().flat_map(|(api_version, kind, _)| {
            let first = ((*kind).to_owned(), namespace.to_owned(), String::new());
            inner
                .children
                .range(first..)
                .take_while(move |((k, n, _), _)| *k == **kind && *n == *namespace)
                .filter(|(_, child)| child.owner_uid == owner_uid)
                .map(|((_, _, name), _)| {
                    let types = TypeMeta {
                        api_version: (*api_version).to_owned(),
                        kind: (*kind).to_owned(),
                    };
                    (types, name.clone())
                })
        });
        children.collect()
    }

    /// Applies an event of the watch of this namespace, or of all. Returns the pool to reconcile.
    fn apply(
        &self,
        kind: &str,
        within: Option<&str>,
        event: Event<PartialObjectMeta<DynamicObject>>,
    ) -> Option<PoolRef> {
        let mut inner = self.0.lock();
        let watch = (kind.to_owned(), within.map(str::to_owned));
        match event {
            Event::Init => {
                inner.listing.insert(watch, BTreeMap::new());
                None
            }
            Event::InitApply(object) => {
                let (key, child) = child(kind, &object.metadata)?;
                inner.listing.entry(watch).or_default().insert(key, child);
                None
            }
            Event::InitDone => {
                let listing = inner.listing.remove(&watch).unwrap_or_default();
                let covers = |namespace: &str| within.is_none_or(|within| within == namespace);
                inner
                    .children
                    .retain(|(k, namespace, _), _| k != kind || !covers(namespace));
                inner.children.extend(listing);
                inner.listed.insert(watch);
                None
            }
            Event::Apply(object) => {
                let (key, child) = child(kind, &object.metadata)?;
                inner.children.insert(key, child);
                pool(&object.metadata)
            }
            Event::Delete(object) => {
                let (key, _) = child(kind, &object.metadata)?;
                inner.children.remove(&key);
                pool(&object.metadata)
            }
        }
    }
}

fn child(kind: &str, meta: &ObjectMeta) -> Option<(ChildRef, Child)> {
    let key = (kind.to_owned(), meta.namespace.clone()?, meta.name.clone()?);
    let child = Child {
        resource_version: meta.resource_version.clone().unwrap_or_default(),
        generation: meta.generation,
        owner_uid: controller(meta).unwrap_or_default(),
        applied: applied(meta).map(str::to_owned),
        servers: servers(meta),
    };
    Some((key, child))
}

fn servers(meta: &ObjectMeta) -> Option<i64> {
    meta.annotations
        .as_ref()?
        .get(names::REPLICAS)?
        .parse()
        .ok()
}

fn applied(meta: &ObjectMeta) -> Option<&str> {
    let managers = meta.managed_fields.as_ref()?;
    // Other managers write the status.
    let allowed = |m: &ManagedFieldsEntry| {
        m.manager.as_deref() == Some(names::FIELD_MANAGER)
            || m.subresource.as_deref() == Some("status")
    };
    let annotation = meta.annotations.as_ref()?.get(names::APPLIED);
    annotation
        .filter(|_| managers.iter().all(allowed))
        .map(|a| &**a)
}

/// Uid of an object's controller.
pub fn controller(meta: &ObjectMeta) -> Option<String> {
    let mut owners = meta.owner_references.iter().flatten();
    owners
        .find(|o: &&OwnerReference| o.controller == Some(true))
        .map(|o| o.uid.clone())
}

/// The API resource of a kind. Its plural must be regular.
pub fn resource(types: &TypeMeta) -> ApiResource {
    let (group, version) = types
        .api_version
        .split_once('/')
        .unwrap_or(("", &types.api_version));
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind))
}

fn pool(meta: &ObjectMeta) -> Option<PoolRef> {
    let name = meta.labels.as_ref()?.get(names::POOL)?;
    Some(PoolRef::new(meta.namespace.as_deref()?, name))
}

/// Interval between attempts to list a kind that the cluster does not have, or does not permit.
const DENIED_INTERVAL: Duration = Duration::from_secs(300);

/// The same events, with a pause after a denial.
fn patient<K: Send + 'static>(events: Events<K>) -> Events<K> {
    let next = |(mut events, denied): (Events<K>, bool)| async move {
        if denied {
            tokio::time::sleep(DENIED_INTERVAL).await;
        }
        let event = events.next().await?;
        let denied = event.as_ref().is_err_and(is_denied);
        Some((event, (events, denied)))
    };
    futures::stream::unfold((events, false), next).boxed()
}

/// Updates `children` and yields the pools whose children changed. Never ends.
pub fn watch(
    client: &Client,
    scope: &Scope,
    children: &Arc<Children>,
    metrics: &Arc<Metrics>,
) -> impl Stream<Item = PoolRef> + use<> {
    let kinds = KINDS.iter().flat_map(|kind| {
        let namespaces = scope.namespaces();
        namespaces.into_iter().map(move |within| (kind, within))
    });
    let watches = kinds.map(|(kind, within)| watch_kind(client, kind, within, children, metrics));
    futures::stream::select_all(watches)
}

/// Watches a kind in a namespace, or in all.
fn watch_kind(
    client: &Client,
    &(api_version, kind, required): &(&'static str, &'static str, bool),
    within: Option<String>,
    children: &Arc<Children>,
    metrics: &Arc<Metrics>,
) -> BoxStream<'static, PoolRef> {
    let types = TypeMeta {
        api_version: api_version.to_owned(),
        kind: kind.to_owned(),
    };
    let resource = resource(&types);
    let api: Api<PartialObjectMeta<DynamicObject>> = match &within {
        None => Api::all_with(client.clone(), &resource),
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
    };
    let managed = format!("app.kubernetes.io/managed-by={}", names::FIELD_MANAGER);
    let events = scope::watch(api, &Config::default().labels(&managed));
    let events = match required {
        true => events,
        false => patient(events),
    };
    let (children, metrics) = (children.clone(), metrics.clone());
    let pools = events.filter_map(move |event| {
        let pool = match event {
            Ok(event) => children.apply(kind, within.as_deref(), event),
            Err(e) if required => {
                metrics.add("watch_errors_total", &[kind], 1);
                warn!(reason = %e, kind, "watch of the pools' objects failed; restarting it");
                None
            }
            Err(e) => {
                debug!(reason = %e, kind, "kind cannot be watched: the cluster does not have it, or does not permit it");
                None
            }
        };
        std::future::ready(pool)
    });
    pools.boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn map(name: &str, version: &str) -> PartialObjectMeta<DynamicObject> {
        serde_json::from_value(json!({"metadata": {
            "name": name, "namespace": "n", "resourceVersion": version, "labels": {names::POOL: "p"},
            "ownerReferences": [{"apiVersion": "a", "kind": "KVCachePool", "name": "p", "uid": "u", "controller": true}],
        }}))
        .unwrap()
    }

    #[test]
    fn a_kind_is_unknown_until_its_first_list_is_complete() {
        let children = Children::default();
        children.apply("ConfigMap", None, Event::Init);
        children.apply("ConfigMap", None, Event::InitApply(map("a", "1")));
        assert_eq!(children.find("ConfigMap", "n", "a"), None);
        children.apply("ConfigMap", None, Event::InitDone);
        let a = children.find("ConfigMap", "n", "a").unwrap().unwrap();
        assert_eq!((&*a.resource_version, &*a.owner_uid), ("1", "u"));
        assert_eq!(children.find("ConfigMap", "n", "b"), Some(None));
        assert_eq!(children.find("PodMonitor", "n", "a"), None);
    }

    #[test]
    fn a_kind_that_is_denied_in_a_namespace_is_unknown_only_there() {
        let children = Children::default();
        let listed = |within: &str, objects: Vec<PartialObjectMeta<DynamicObject>>| {
            let objects = objects.into_iter().map(Event::InitApply);
            let events = std::iter::once(Event::Init).chain(objects);
            for event in events.chain([Event::InitDone]) {
                children.apply("ConfigMap", Some(within), event);
            }
        };
        listed("n", vec![map("a", "1")]);
        assert!(children.find("ConfigMap", "n", "a").unwrap().is_some());
        assert_eq!(children.find("ConfigMap", "m", "a"), None);
        listed("m", Vec::new());
        assert_eq!(children.find("ConfigMap", "m", "a"), Some(None));
        assert!(children.find("ConfigMap", "n", "a").unwrap().is_some());
    }

    #[test]
    fn the_annotation_is_trusted_only_if_no_other_manager_wrote() {
        let applied = |managers: &[&str]| {
            let mut map = map("a", "1");
            map.metadata.annotations = Some([(names::APPLIED.into(), "hash".into())].into());
            let entry = |manager: &&str| ManagedFieldsEntry {
                manager: Some((*manager).to_owned()),
                ..ManagedFieldsEntry::default()
            };
            map.metadata.managed_fields = Some(managers.iter().map(entry).collect());
            child("ConfigMap", &map.metadata).unwrap().1.applied
        };
        assert_eq!(applied(&[names::FIELD_MANAGER]), Some("hash".into()));
        assert_eq!(applied(&[names::FIELD_MANAGER, "kubectl-edit"]), None);
        let mut set = map("a", "1");
        set.metadata.annotations = Some([(names::APPLIED.into(), "hash".into())].into());
        set.metadata.managed_fields = Some(vec![ManagedFieldsEntry {
            manager: Some("kube-controller-manager".to_owned()),
            subresource: Some("status".to_owned()),
            ..ManagedFieldsEntry::default()
        }]);
        let child = child("StatefulSet", &set.metadata).unwrap().1;
        assert_eq!(child.applied.as_deref(), Some("hash"), "a status");
    }

    #[test]
    fn the_number_of_a_clusters_servers_is_in_an_annotation() {
        let mut set = map("a", "1");
        let servers = |set: &PartialObjectMeta<DynamicObject>| {
            child("StatefulSet", &set.metadata).unwrap().1.servers
        };
        assert_eq!(servers(&set), None);
        set.metadata.annotations = Some([(names::REPLICAS.into(), "6".into())].into());
        assert_eq!(servers(&set), Some(6));
    }

    #[test]
    fn children_are_found_by_owner_and_a_deleted_one_names_its_pool() {
        let children = Children::default();
        let pool = Some(PoolRef::new("n", "p"));
        assert_eq!(
            children.apply("ConfigMap", None, Event::Apply(map("a", "1"))),
            pool
        );
        assert_eq!(children.of("n", "u").len(), 1);
        assert_eq!(children.of("n", "other"), []);
        assert_eq!(children.of("m", "u"), []);
        assert_eq!(
            children.apply("ConfigMap", None, Event::Delete(map("a", "2"))),
            pool
        );
        assert_eq!(children.of("n", "u"), []);
    }

    #[test]
    fn objects_missing_from_a_new_list_are_removed() {
        let children = Children::default();
        children.apply("ConfigMap", None, Event::Apply(map("a", "1")));
        for event in [
            Event::Init,
            Event::InitApply(map("b", "1")),
            Event::InitDone,
        ] {
            children.apply("ConfigMap", None, event);
        }
        let names: Vec<String> = children
            .of("n", "u")
            .into_iter()
            .map(|(_, name)| name)
            .collect();
        assert_eq!(names, ["b"]);
    }
}
