//! Pods that the API server refuses before they exist (quota, limit range, Pod Security, another webhook). Only their controller sees the
//! error, and writes a `FailedCreate` event. Such events of labelled workloads are evidence for the breaker of their pool. Those of managed
//! servers are in the pool's status.

use super::index::{Index, PoolRef};
use super::pod::Owner;
use super::template::{Role, template_role};
use crate::metrics::Metrics;
use crate::scope::Scope;
use futures::{Stream, StreamExt};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Event, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::Config;
use kube::{Client, Resource};
use parking_lot::Mutex;
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;
use tracing::{debug, warn};

/// How long a refusal of an engine is kept.
const COUNTS: SignedDuration = SignedDuration::from_mins(5);
/// How long a refusal of a server is kept: longer than the longest pause between two attempts of a controller, 1,000 s.
const SERVER_COUNTS: SignedDuration = SignedDuration::from_mins(20);
/// Longest message that is kept, in characters.
const NOTE_CHARS_MAX: usize = 300;
/// Longest name, uid, kind or version of a workload, in bytes. Those of Kubernetes are shorter; an event claims anything.
const OWNER_BYTES_MAX: usize = 320;
/// Maximum workloads whose label is cached.
const OWNERS_MAX: usize = 4096;
/// How long the label of a workload is cached.
const OWNER_COUNTS: SignedDuration = SignedDuration::from_mins(10);

/// Maximum refused workloads that are kept per pool.
const REFUSED_MAX: usize = 256;

/// A workload whose pods are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub owner: Owner,
    /// The API server's message.
    pub message: Box<str>,
    /// Time of the last refusal.
    pub at: Timestamp,
}

impl Refused {
    fn counts(&self, role: Role, now: Timestamp) -> bool {
        let kept = match role {
            Role::Engine => COUNTS,
            Role::Server => SERVER_COUNTS,
        };
        now.duration_since(self.at) <= kept
    }
}

/// The last refusal of each workload, by pool and role.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<HashMap<Of, Vec<Refused>>>);

impl Refusals {
    /// Recent refusals of a pool.
    #[must_use]
    pub fn of(&self, pool: &PoolRef, role: Role, now: Timestamp) -> Vec<Refused> {
        let mut all = self.0.lock();
        let key = (pool.clone(), role);
        let Some(refused) = all.get_mut(&key) else {
            return Vec::new();
        };
        refused.retain(|r| r.counts(role, now));
        let refused = refused.clone();
        if refused.is_empty() {
            all.remove(&key);
        }
        refused
    }

    fn put(&self, pool: PoolRef, role: Role, refused: Refused) {
        let mut all = self.0.lock();
        let known = all.entry((pool, role)).or_default();
        // A replica that does not lead only collects.
        known.retain(|r| r.owner.uid != refused.owner.uid && r.counts(role, refused.at));
        if known.len() < REFUSED_MAX {
            known.push(refused);
        }
    }
}

/// Watches the events and yields pools with a new refusal. Never ends.
pub fn watch_refusals(
    client: Client,
    scope: Scope,
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
    scope
        .watch::<WireEvent>(&client, &config)
        .applied_objects()
        .filter_map(move |event| {
            let (owners, refusals) = (owners.clone(), refusals.clone());
            let event = event.inspect_err(|e| {
                metrics.add("watch_errors_total", &["Event"], 1);
                warn!(reason = %e, "watch of events failed; restarting it");
            });
            async move {
                owners
                    .record(&event.ok()?, &refusals, Timestamp::now())
                    .await
            }
        })
}

/// The needed part of an event.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = Event)]
#[serde(default, rename_all = "camelCase")]
struct WireEvent {
    metadata: ObjectMeta,
    involved_object: ObjectReference,
    message: String,
    last_timestamp: Option<Time>,
    event_time: Option<MicroTime>,
}

impl WireEvent {
    /// The refusal. `None` if the event claims something about another namespace, where its writer may have no rights.
    fn refused(&self, now: Timestamp) -> Option<Refused> {
        if self.involved_object.namespace != self.metadata.namespace {
            return None;
        }
        let at = self
            .last_timestamp
            .as_ref()
            .map(|t| t.0)
            .or_else(|| self.event_time.as_ref().map(|t| t.0))?;
        let o = &self.involved_object;
        let texts = [&o.api_version, &o.kind, &o.name, &o.uid];
        let too_long = |text: &String| text.len() > OWNER_BYTES_MAX;
        if texts.into_iter().flatten().any(too_long) {
            return None;
        }
        Some(Refused {
            owner: Owner {
                api_version: o.api_version.as_deref().unwrap_or_default().into(),
                kind: o.kind.as_deref().unwrap_or("workload").into(),
                name: o.name.as_deref()?.into(),
                uid: o.uid.as_deref()?.into(),
            },
            message: self
                .message
                .chars()
                .take(NOTE_CHARS_MAX)
                .collect::<String>()
                .into(),
            // A time in the future would never expire.
            at: at.min(now),
        })
    }
}

/// Maps workloads to the pools of their pods.
struct Owners {
    client: Client,
    index: Arc<Index>,
    known: Mutex<HashMap<Claim, (Timestamp, Option<Of>)>>,
}

/// What an event claims: a workload in a namespace.
type Claim = (String, Owner);

/// The pool of a workload, and what its pods are to it.
type Of = (PoolRef, Role);

impl Owners {
    /// Stores what an event says. Returns its pool.
    async fn record(
        &self,
        event: &WireEvent,
        refusals: &Refusals,
        now: Timestamp,
    ) -> Option<PoolRef> {
        let refused = event.refused(now)?;
        let namespace = event.metadata.namespace.as_deref()?;
        if !refused.counts(Role::Server, now) {
            return None;
        }
        let (pool, role) = self.pool(namespace, &refused.owner).await?;
        refused.counts(role, now).then(|| {
            refusals.put(pool.clone(), role, refused);
            pool
        })
    }

    async fn pool(&self, namespace: &str, owner: &Owner) -> Option<Of> {
        let key = (namespace.to_owned(), owner.clone());
        let now = Timestamp::now();
        if let Some((at, pool)) = self.known.lock().get(&key)
            && now.duration_since(*at) <= OWNER_COUNTS
        {
            return pool.clone();
        }
        // Of kinds that are not read, a pod of the workload decides.
        let of_pods = || {
            Some((
                self.index.pool_of_owner(namespace, &owner.uid)?,
                Role::Engine,
            ))
        };
        let pool = template_role(self.client.clone(), namespace, owner)
            .await
            .inspect_err(|e| debug!(reason = %e, kind = &*owner.kind, "workload cannot be read"))
            .unwrap_or_default()
            .map(|(name, role)| (PoolRef::new(namespace, &name), role))
            .or_else(of_pods);
        let mut known = self.known.lock();
        if known.len() >= OWNERS_MAX {
            known.clear();
        }
        known.insert(key, (now, pool.clone()));
        pool
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names;
    use crate::pods::template::tests::{one_workload, workload};
    use crate::pods::tests::{at, pod};
    use crate::pods::wire::WirePod;
    use kube::runtime::watcher;
    use serde_json::json;

    fn event(extra: &serde_json::Value) -> WireEvent {
        let mut event = json!({
            "metadata": {"name": "e", "namespace": "n"},
            "involvedObject": {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7f", "uid": "r", "namespace": "n"},
            "message": "Error creating: pods \"web-7f-\" is forbidden: exceeded quota: q",
        });
        event
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn an_event_names_the_owner_of_refused_pods_and_the_time() {
        let old = event(&json!({"lastTimestamp": at(5).to_string(), "count": 3}))
            .refused(at(9))
            .unwrap();
        assert_eq!((&*old.owner.name, old.at), ("web-7f", at(5)));
        assert!(old.message.contains("exceeded quota"));
        let new =
            event(&json!({"lastTimestamp": null, "eventTime": "2026-01-02T03:04:05.000006Z"}));
        assert!(new.refused(at(9)).is_some());
        assert_eq!(event(&json!({})).refused(at(9)), None, "without a time");
    }

    #[test]
    fn an_event_counts_only_for_its_namespace_and_not_beyond_now() {
        let time = json!({"lastTimestamp": at(500).to_string()});
        assert_eq!(event(&time).refused(at(9)).unwrap().at, at(9));
        let mut foreign = time;
        foreign["metadata"] = json!({"name": "e", "namespace": "of-the-writer"});
        assert_eq!(event(&foreign).refused(at(9)), None);
        let mut long = event(&json!({"lastTimestamp": at(5).to_string()}));
        long.involved_object.uid = Some("u".repeat(OWNER_BYTES_MAX + 1));
        assert_eq!(long.refused(at(9)), None);
    }

    #[tokio::test]
    async fn a_workload_belongs_to_the_pool_of_its_template_or_of_its_pods_in_the_same_namespace() {
        let (client, read) = one_workload();
        let index = Index::default();
        let of_pod = json!({
            "metadata": {
                "name": "a",
                "namespace": "n",
                "labels": {names::POOL: "of-pods"},
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Custom", "name": "web", "uid": "c", "controller": true}
                ],
            },
        });
        let of_pod: WirePod = serde_json::from_value(of_pod).unwrap();
        index.apply(watcher::Event::Apply(of_pod));
        let owners = Owners {
            client,
            index: Arc::new(index),
            known: Mutex::default(),
        };
        let owner = |kind: &str, uid: &str| Owner {
            api_version: "apps/v1".into(),
            kind: kind.into(),
            name: "web".into(),
            uid: uid.into(),
        };
        for (namespace, owner, pool) in [
            // What somebody claims about a workload in a namespace of theirs is not remembered for the workload itself.
            ("evil", owner("ReplicaSet", "other"), None),
            ("n", owner("ReplicaSet", "other"), None),
            ("n", owner("ReplicaSet", "u"), Some(PoolRef::new("n", "p"))),
            ("evil", owner("Custom", "c"), None),
            (
                "n",
                owner("Custom", "c"),
                Some(PoolRef::new("n", "of-pods")),
            ),
        ] {
            let expected = pool.map(|pool| (pool, Role::Engine));
            for _ in 0..2 {
                assert_eq!(owners.pool(namespace, &owner).await, expected, "{owner:?}");
            }
        }
        assert_eq!(read.lock().len(), 3, "each claim is looked up once");
    }

    #[tokio::test]
    async fn a_refused_server_or_manager_is_kept_for_the_pool_of_its_own_workload_only() {
        for name in [names::SERVERS, names::MANAGER] {
            let (client, _) = workload(json!({names::NAME: name, names::INSTANCE: "p"}));
            let owners = Owners {
                client,
                index: Arc::default(),
                known: Mutex::default(),
            };
            let refusals = Refusals::default();
            let now = at(2000);
            let pool = PoolRef::new("n", "p");
            for (uid, namespace, second, expected) in [
                ("other", "n", 2000, None),
                ("u", "m", 2000, None),
                ("u", "n", 799, None),
                ("u", "n", 800, Some(&pool)),
            ] {
                assert_eq!(refusals.of(&pool, Role::Server, now), []);
                let mut event = event(&json!({"lastTimestamp": at(second).to_string()}));
                event.involved_object.uid = Some(uid.to_owned());
                event.involved_object.namespace = Some(namespace.to_owned());
                let recorded = owners.record(&event, &refusals, now).await;
                assert_eq!(recorded.as_ref(), expected, "{uid} {namespace} {second}");
            }
            let kept = refusals.of(&pool, Role::Server, now);
            assert!(kept[0].message.contains("exceeded quota"));
            assert_eq!(refusals.of(&pool, Role::Engine, now), [], "for the breaker");
        }
    }

    #[test]
    fn the_last_refusal_of_each_workload_is_kept_for_minutes() {
        let pool = PoolRef::new("n", "p");
        let refused = |uid: &str, second| Refused {
            owner: Owner {
                uid: uid.into(),
                ..pod("a").owner.unwrap()
            },
            ..event(&json!({"lastTimestamp": at(second).to_string()}))
                .refused(at(999))
                .unwrap()
        };
        let refusals = Refusals::default();
        for (uid, second) in [("a", 0), ("b", 1), ("a", 2)] {
            refusals.put(pool.clone(), Role::Engine, refused(uid, second));
        }
        assert_eq!(
            refusals.of(&pool, Role::Engine, at(300)),
            [refused("b", 1), refused("a", 2)]
        );
        assert_eq!(refusals.of(&pool, Role::Engine, at(302)), [refused("a", 2)]);
        assert_eq!(refusals.of(&pool, Role::Engine, at(303)), []);
        for i in 0..2 * REFUSED_MAX {
            refusals.put(pool.clone(), Role::Engine, refused(&i.to_string(), 0));
        }
        assert_eq!(refusals.of(&pool, Role::Engine, at(0)).len(), REFUSED_MAX);
        refusals.put(pool.clone(), Role::Engine, refused("later", 301));
        assert_eq!(
            refusals.of(&pool, Role::Engine, at(301)),
            [refused("later", 301)]
        );
    }
}
