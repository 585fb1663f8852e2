//! Pods that the cluster refuses before they exist (quota, limit range, validation): nobody sees them but their controller, which
//! writes an event `FailedCreate`. Those of workloads that carry our label are told to their pool.

use super::index::{Index, PoolRef};
use super::pod::Pod;
use super::template::template_pool;
use crate::metrics::Metrics;
use futures::{Stream, StreamExt};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use tracing::{debug, warn};

/// Controllers try again with waits of up to 17 minutes; a refusal counts until it should have come again.
const COUNTS: SignedDuration = SignedDuration::from_mins(20);
/// Longest note that is kept, in characters.
const NOTE_CHARS_MAX: usize = 300;
/// Workloads whose label is remembered.
const OWNERS_MAX: usize = 4096;
/// How long the label of a workload is remembered.
const OWNER_COUNTS: SignedDuration = SignedDuration::from_mins(10);

/// A workload whose pods are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// `ReplicaSet web-7f`.
    pub owner: Box<str>,
    /// Its uid.
    pub owner_uid: Box<str>,
    /// What the API server said.
    pub message: Box<str>,
    /// When, last.
    pub at: Timestamp,
}

/// The last refusal of each pool, and the workload that it came to.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<HashMap<PoolRef, (Refused, ObjectReference)>>);

impl Refusals {
    /// The refusal that holds for a pool, unless its time is over or the workload has made a pod since.
    #[must_use]
    pub fn of(&self, pool: &PoolRef, pods: &[Arc<Pod>], now: Timestamp) -> Option<Refused> {
        let mut refusals = self.0.lock();
        let (refused, _) = refusals.get(pool)?;
        let made = pods.iter().any(|p| {
            p.created > refused.at && p.owner.as_ref().is_some_and(|o| o.uid == refused.owner_uid)
        });
        if made || now.duration_since(refused.at) > COUNTS {
            refusals.remove(pool);
            return None;
        }
        Some(refused.clone())
    }

    /// The refusal, if its workload still lacks pods: one that was scaled down, or replaced by another, wants none any more.
    pub async fn confirmed(
        &self,
        client: &Client,
        pool: &PoolRef,
        refused: Refused,
    ) -> Option<Refused> {
        let workload = self.0.lock().get(pool).map(|(_, w)| w.clone())?;
        let Some((api, name)) = api_of(client, &workload) else {
            return Some(refused);
        };
        let lacks = match api.get_opt(name).await {
            Ok(Some(found)) => {
                found.metadata.uid.as_deref() == Some(&*refused.owner_uid)
                    && lacks_pods(workload.kind.as_deref().unwrap_or_default(), &found.data)
            }
            Ok(None) => false,
            // Kinds that may not be read tell nothing.
            Err(_) => true,
        };
        if !lacks {
            self.0.lock().remove(pool);
        }
        lacks.then_some(refused)
    }

    fn put(&self, pool: PoolRef, refused: Refused, workload: ObjectReference) {
        self.0.lock().insert(pool, (refused, workload));
    }
}

/// Follows the events and yields the pools that have a new refusal. Never ends.
pub fn watch_refusals(
    client: Client,
    index: Arc<Index>,
    refusals: Arc<Refusals>,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = PoolRef> {
    let owners = Arc::new(Owners {
        client: client.clone(),
        index,
        known: Mutex::default(),
    });
    let config = Config::default()
        .fields("reason=FailedCreate,type=Warning")
        .page_size(100);
    watcher(Api::<WireEvent>::all(client), config)
        .default_backoff()
        .applied_objects()
        .filter_map(move |event| {
            let (owners, refusals) = (owners.clone(), refusals.clone());
            let event = event.inspect_err(|e| {
                metrics.add("watch_errors_total", &["Event"], 1);
                warn!(error = %e, "watch of events broke; it begins anew");
            });
            async move {
                let event = event.ok()?;
                let refused = event
                    .refused()
                    .filter(|r| Timestamp::now().duration_since(r.at) <= COUNTS)?;
                let pool = owners.pool(&event.involved_object).await?;
                refusals.put(pool.clone(), refused, event.involved_object);
                Some(pool)
            }
        })
}

/// An event as far as it matters.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireEvent {
    metadata: ObjectMeta,
    involved_object: ObjectReference,
    message: String,
    last_timestamp: Option<Time>,
    event_time: Option<MicroTime>,
}

impl WireEvent {
    fn refused(&self) -> Option<Refused> {
        let at = self
            .last_timestamp
            .as_ref()
            .map(|t| t.0)
            .or_else(|| self.event_time.as_ref().map(|t| t.0))?;
        let o = &self.involved_object;
        let kind = o.kind.as_deref().unwrap_or("workload");
        Some(Refused {
            owner: format!("{kind} {}", o.name.as_deref()?).into(),
            owner_uid: o.uid.as_deref()?.into(),
            message: self
                .message
                .chars()
                .take(NOTE_CHARS_MAX)
                .collect::<String>()
                .into(),
            at,
        })
    }
}

impl Resource for WireEvent {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Event".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "events".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Which pool a workload's pods ask for.
struct Owners {
    client: Client,
    index: Arc<Index>,
    known: Mutex<HashMap<String, (Timestamp, Option<PoolRef>)>>,
}

impl Owners {
    async fn pool(&self, owner: &ObjectReference) -> Option<PoolRef> {
        let namespace = owner.namespace.as_deref()?;
        let uid = owner.uid.clone()?;
        let now = Timestamp::now();
        if let Some((at, pool)) = self.known.lock().get(&uid)
            && now.duration_since(*at) <= OWNER_COUNTS
        {
            return pool.clone();
        }
        let label = self.label(owner).await;
        let pool = label
            .map(|name| PoolRef::new(namespace, &name))
            .or_else(|| self.index.pool_of_owner(&uid));
        let mut known = self.known.lock();
        if known.len() >= OWNERS_MAX {
            known.clear();
        }
        known.insert(uid, (now, pool.clone()));
        pool
    }

    /// What its template says. Kinds that may not be read tell nothing: then a pod of it has to.
    async fn label(&self, owner: &ObjectReference) -> Option<String> {
        let (api_version, kind) = (owner.api_version.as_deref()?, owner.kind.as_deref()?);
        let (namespace, name) = (owner.namespace.as_deref()?, owner.name.as_deref()?);
        template_pool(self.client.clone(), api_version, kind, namespace, name)
            .await
            .inspect_err(|e| debug!(error = %e, kind, "workload not read"))
            .ok()?
    }
}

/// Where a workload is read, and by which name.
fn api_of<'a>(
    client: &Client,
    workload: &'a ObjectReference,
) -> Option<(Api<DynamicObject>, &'a str)> {
    let api_version = workload.api_version.as_deref()?;
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let kind = GroupVersionKind::gvk(group, version, workload.kind.as_deref()?);
    let namespace = workload.namespace.as_deref()?;
    let resource = ApiResource::from_gvk(&kind);
    let api = Api::namespaced_with(client.clone(), namespace, &resource);
    Some((api, workload.name.as_deref()?))
}

/// Whether a workload has fewer pods than it wants, as its controller counts them.
fn lacks_pods(kind: &str, workload: &Value) -> bool {
    let number = |path: &str| workload.pointer(path).and_then(Value::as_i64);
    let count = |path: &str| number(path).unwrap_or(0);
    match kind {
        "DaemonSet" => {
            count("/status/currentNumberScheduled") < count("/status/desiredNumberScheduled")
        }
        "Job" => {
            let parallel = number("/spec/parallelism").unwrap_or(1);
            let left = number("/spec/completions").map(|all| all - count("/status/succeeded"));
            let ended = ["/status/completionTime", "/spec/suspend"]
                .iter()
                .any(|path| workload.pointer(path).is_some_and(|v| *v != false));
            !ended && count("/status/active") < parallel.min(left.unwrap_or(parallel))
        }
        _ => count("/status/replicas") < number("/spec/replicas").unwrap_or(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::{at, pod};
    use serde_json::json;

    fn event(extra: &serde_json::Value) -> WireEvent {
        let mut event = json!({
            "metadata": {"name": "e"},
            "involvedObject": {"kind": "ReplicaSet", "name": "web-7f", "uid": "r", "namespace": "n"},
            "message": "Error creating: pods \"web-7f-\" is forbidden: exceeded quota: q",
        });
        event
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn an_event_says_whose_pods_are_refused_and_when() {
        let old = event(&json!({"lastTimestamp": at(5).to_string(), "count": 3}))
            .refused()
            .unwrap();
        assert_eq!((&*old.owner, old.at), ("ReplicaSet web-7f", at(5)));
        assert!(old.message.contains("exceeded quota"));
        let new =
            event(&json!({"lastTimestamp": null, "eventTime": "2026-01-02T03:04:05.000006Z"}));
        assert!(new.refused().is_some());
        assert_eq!(event(&json!({})).refused(), None, "without a time");
    }

    #[test]
    fn a_refusal_holds_until_a_pod_was_made_or_its_time_is_over() {
        let pool = PoolRef::new("n", "p");
        let refused = event(&json!({"lastTimestamp": at(0).to_string()}))
            .refused()
            .unwrap();
        let refusals = Refusals::default();
        refusals.put(pool.clone(), refused.clone(), ObjectReference::default());
        assert_eq!(refusals.of(&pool, &[], at(1200)), Some(refused.clone()));
        assert_eq!(refusals.of(&pool, &[], at(1201)), None);
        refusals.put(pool.clone(), refused, ObjectReference::default());
        let mut young = pod("web-7f-1");
        young.created = at(7);
        let mut other = young.clone();
        other.owner = None;
        assert!(
            refusals.of(&pool, &[Arc::new(other)], at(8)).is_some(),
            "of another workload"
        );
        assert_eq!(refusals.of(&pool, &[Arc::new(young)], at(8)), None);
    }

    #[test]
    fn a_workload_lacks_pods_while_its_controller_counts_fewer_than_it_wants() {
        for (kind, workload, lacks) in [
            (
                "ReplicaSet",
                json!({"spec": {"replicas": 2}, "status": {"replicas": 1}}),
                true,
            ),
            (
                "ReplicaSet",
                json!({"spec": {"replicas": 2}, "status": {"replicas": 2}}),
                false,
            ),
            (
                "ReplicaSet",
                json!({"spec": {"replicas": 0}, "status": {"replicas": 0}}),
                false,
            ),
            ("StatefulSet", json!({"spec": {}, "status": {}}), true),
            (
                "DaemonSet",
                json!({"status": {"desiredNumberScheduled": 3, "currentNumberScheduled": 2}}),
                true,
            ),
            (
                "DaemonSet",
                json!({"status": {"desiredNumberScheduled": 3, "currentNumberScheduled": 3}}),
                false,
            ),
            (
                "Job",
                json!({"spec": {"parallelism": 1, "completions": 1}, "status": {}}),
                true,
            ),
            (
                "Job",
                json!({"spec": {"parallelism": 1, "completions": 1}, "status": {"active": 1}}),
                false,
            ),
            (
                "Job",
                json!({"spec": {"parallelism": 2, "completions": 3}, "status": {"active": 1, "succeeded": 2}}),
                false,
            ),
            (
                "Job",
                json!({"spec": {"parallelism": 2, "suspend": true}, "status": {}}),
                false,
            ),
            (
                "Job",
                json!({"spec": {"parallelism": 2, "suspend": false}, "status": {}}),
                true,
            ),
        ] {
            assert_eq!(lacks_pods(kind, &workload), lacks, "{kind} {workload}");
        }
    }
}
