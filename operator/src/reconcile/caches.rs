//! The results of watches, and of requests to sidecars in one leader session. `queue` and `sample` write them, and `observe` reads them.

use super::children::Children;
use crate::api::KVCachePool;
use crate::pods::{Index, PoolRef, PoolUsage, Refusals, Server};
use kube::core::DeserializeGuard;
use kube::runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// A stored pool, or the error of its deserialization. One malformed pool must not block the watch of all others.
pub type Stored = DeserializeGuard<KVCachePool>;

pub struct Caches {
    pub pools: Store<Stored>,
    pub pods: Arc<Index>,
    pub servers: Arc<Index<Server>>,
    pub refusals: Arc<Refusals>,
    pub children: Arc<Children>,
    pub usage: Usage,
}

impl Caches {
    pub fn new(pools: Store<Stored>) -> Self {
        Self {
            pools,
            pods: Arc::default(),
            servers: Arc::default(),
            refusals: Arc::default(),
            children: Arc::default(),
            usage: Usage::default(),
        }
    }

    /// The same caches, without the responses of sidecars, which only the leader asks.
    pub fn of_session(&self) -> Self {
        Self {
            pools: self.pools.clone(),
            pods: self.pods.clone(),
            servers: self.servers.clone(),
            refusals: self.refusals.clone(),
            children: self.children.clone(),
            usage: Usage::default(),
        }
    }

    /// Whether all pods are listed. Counts before that would be too small.
    pub fn are_complete(&self) -> bool {
        self.pods.is_complete() && self.servers.is_complete()
    }

    /// Waits until all pools and pods are listed.
    pub async fn completed(&self) {
        self.pods.completed().await;
        self.servers.completed().await;
        // Fails only while the watch ends, with the process.
        let _ended = self.pools.wait_until_ready().await;
    }
}

/// The responses of sidecars, by pool.
#[derive(Debug, Default)]
pub struct Usage(Mutex<HashMap<PoolRef, PoolUsage>>);

impl Usage {
    /// Calls `access` with the responses of a pool, which it may read or change.
    pub fn with<T>(&self, pool: &PoolRef, access: impl FnOnce(&mut PoolUsage) -> T) -> T {
        access(self.0.lock().entry(pool.clone()).or_default())
    }

    pub fn forget(&self, pool: &PoolRef) {
        self.0.lock().remove(pool);
    }
}

pub fn pool_ref(reference: &ObjectRef<Stored>) -> PoolRef {
    PoolRef::new(
        reference.namespace.as_deref().unwrap_or_default(),
        &reference.name,
    )
}
