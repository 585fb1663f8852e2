//! Pods, or managed servers, by pool, fed by the events of one watch. Every change returns the affected pools.

use super::pod::Pod;
use super::server::Server;
use super::wire::WirePod;
use kube::runtime::watcher::Event;
use parking_lot::RwLock;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use tokio::sync::watch;

/// Namespace and name of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolRef {
    pub namespace: Box<str>,
    pub name: Box<str>,
}

impl PoolRef {
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for PoolRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Namespace and name of a pod.
type PodRef = (Box<str>, Box<str>);

/// What is kept of a pod that belongs to a pool.
pub trait Member: PartialEq + Sized {
    /// `None` if the pod belongs to no pool.
    fn parse(wire: WirePod) -> Option<Self>;
    /// Namespace, name and pool.
    fn identity(&self) -> (&str, &str, &str);
}

impl Member for Pod {
    fn parse(wire: WirePod) -> Option<Self> {
        wire.into_pod()
    }

    fn identity(&self) -> (&str, &str, &str) {
        (&self.namespace, &self.name, &self.pool)
    }
}

impl Member for Server {
    fn parse(wire: WirePod) -> Option<Self> {
        wire.into_server()
    }

    fn identity(&self) -> (&str, &str, &str) {
        (&self.namespace, &self.name, &self.pool)
    }
}

/// An index of all pods of a watch.
#[derive(Debug)]
pub struct Index<T = Pod> {
    inner: RwLock<Inner<T>>,
    complete: watch::Sender<bool>,
}

impl<T> Default for Index<T> {
    fn default() -> Self {
        Self {
            inner: RwLock::new(Inner {
                pools: HashMap::new(),
                pool_of: HashMap::new(),
                listed: None,
            }),
            complete: watch::Sender::default(),
        }
    }
}

#[derive(Debug)]
struct Inner<T> {
    pools: HashMap<PoolRef, BTreeMap<Box<str>, Arc<T>>>,
    /// The pool of each pod. If a pod's label changes, the pod is removed from its old pool.
    pool_of: HashMap<PodRef, PoolRef>,
    /// Pods seen since a list started. At its end, all others are removed.
    listed: Option<HashSet<PodRef>>,
}

impl Index {
    /// The pool of any pod of this controller, which is in this namespace.
    #[must_use]
    pub fn pool_of_owner(&self, namespace: &str, uid: &str) -> Option<PoolRef> {
        let owned = |pod: &Arc<Pod>| pod.owner.as_ref().is_some_and(|o| *o.uid == *uid);
        let inner = self.inner.read();
        let (pool, _) = inner
            .pools
            .iter()
            .find(|(pool, pods)| *pool.namespace == *namespace && pods.values().any(owned))?;
        Some(pool.clone())
    }
}

impl<T: Member> Index<T> {
    /// The pods of a pool, by name.
    #[must_use]
    pub fn of(&self, pool: &PoolRef) -> Vec<Arc<T>> {
        let inner = self.inner.read();
        inner
            .pools
            .get(pool)
            .map(|pods| pods.values().cloned().collect())
            .unwrap_or_default()
    }

    /// Every pool that a pod names, whether it exists or not.
    #[must_use]
    pub fn pools(&self) -> Vec<PoolRef> {
        self.inner.read().pools.keys().cloned().collect()
    }

    /// Whether the first list is complete. Counts before that are too small.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        *self.complete.borrow()
    }

    /// Waits until the first list is complete.
    pub async fn completed(&self) {
        // This index holds the sender, so the wait cannot fail.
        let mut complete = self.complete.subscribe();
        let _there = complete.wait_for(|done| *done).await;
    }

    /// Applies a watch event. Returns the pools whose pods changed.
    pub fn apply(&self, event: Event<WirePod>) -> Vec<PoolRef> {
        let mut inner = self.inner.write();
        match event {
            Event::Init => {
                inner.listed = Some(HashSet::new());
                Vec::new()
            }
            Event::InitApply(wire) | Event::Apply(wire) => match T::parse(wire) {
                Some(pod) => inner.put(pod),
                None => Vec::new(),
            },
            Event::Delete(wire) => match T::parse(wire) {
                Some(pod) => {
                    let (namespace, name, _) = pod.identity();
                    inner.remove(&(namespace.into(), name.into()))
                }
                None => Vec::new(),
            },
            Event::InitDone => {
                let gone = inner.end_list();
                self.complete.send_replace(true);
                gone
            }
        }
    }
}

impl<T: Member> Inner<T> {
    fn put(&mut self, pod: T) -> Vec<PoolRef> {
        let (namespace, name, pool) = pod.identity();
        let key: PodRef = (namespace.into(), name.into());
        let pool = PoolRef::new(namespace, pool);
        if let Some(listed) = &mut self.listed {
            listed.insert(key.clone());
        }
        let mut changed = Vec::new();
        if self.pool_of.get(&key).is_some_and(|old| *old != pool) {
            changed.extend(self.remove(&key));
        }
        let pods = self.pools.entry(pool.clone()).or_default();
        if pods.get(&key.1).is_none_or(|known| **known != pod) {
            pods.insert(key.1.clone(), Arc::new(pod));
            self.pool_of.insert(key, pool.clone());
            changed.push(pool);
        }
        changed
    }

    fn remove(&mut self, key: &PodRef) -> Vec<PoolRef> {
        let Some(pool) = self.pool_of.remove(key) else {
            return Vec::new();
        };
        if let Some(pods) = self.pools.get_mut(&pool) {
            pods.remove(&key.1);
            if pods.is_empty() {
                self.pools.remove(&pool);
            }
        }
        vec![pool]
    }

    fn end_list(&mut self) -> Vec<PoolRef> {
        let listed = self.listed.take().unwrap_or_default();
        let gone: Vec<PodRef> = self
            .pool_of
            .keys()
            .filter(|key| !listed.contains(*key))
            .cloned()
            .collect();
        gone.iter().flat_map(|key| self.remove(key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names;
    use serde_json::json;

    fn wire(name: &str, pool: &str) -> WirePod {
        serde_json::from_value(json!({"metadata": {
            "name": name, "namespace": "n", "labels": {names::POOL: pool},
        }}))
        .unwrap()
    }

    fn names_of(index: &Index, pool: &str) -> Vec<String> {
        let pods = index.of(&PoolRef::new("n", pool));
        pods.iter().map(|p| p.name.to_string()).collect()
    }

    #[test]
    fn pods_are_found_by_pool_and_an_equal_pod_changes_nothing() {
        let index = Index::default();
        assert_eq!(
            index.apply(Event::Apply(wire("b", "x"))),
            [PoolRef::new("n", "x")]
        );
        assert_eq!(index.apply(Event::Apply(wire("a", "x"))).len(), 1);
        assert_eq!(index.apply(Event::Apply(wire("a", "x"))), []);
        assert_eq!(names_of(&index, "x"), ["a", "b"]);
        assert_eq!(names_of(&index, "y"), [""; 0]);
    }

    #[test]
    fn a_pod_whose_label_changes_leaves_its_old_pool() {
        let index = Index::default();
        index.apply(Event::Apply(wire("a", "x")));
        let changed = index.apply(Event::Apply(wire("a", "y")));
        assert_eq!(changed, [PoolRef::new("n", "x"), PoolRef::new("n", "y")]);
        assert_eq!(names_of(&index, "x"), [""; 0]);
        index.apply(Event::Delete(wire("a", "y")));
        assert!(index.pools().is_empty());
    }

    #[test]
    fn pods_missing_from_a_new_list_are_removed() {
        let index = Index::default();
        for event in [
            Event::Init,
            Event::InitApply(wire("a", "x")),
            Event::InitApply(wire("b", "y")),
        ] {
            index.apply(event);
        }
        assert!(!index.is_complete());
        index.apply(Event::InitDone);
        assert!(index.is_complete());
        for event in [Event::Init, Event::InitApply(wire("b", "y"))] {
            index.apply(event);
        }
        assert_eq!(index.apply(Event::InitDone), [PoolRef::new("n", "x")]);
        assert_eq!(names_of(&index, "y"), ["b"]);
    }
}
