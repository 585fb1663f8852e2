//! What watches and requests to sidecars have shown in this leader session. `queue` and `sample` write it, `observe` reads it.

use super::children::Children;
use crate::api::KVCachePool;
use crate::pods::{Index, PoolRef, PoolUsage, Refusals};
use kube::core::DeserializeGuard;
use kube::runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// A stored pool, or why it cannot be read: one such pool must not stall the watch of all others.
pub type Stored = DeserializeGuard<KVCachePool>;

/// The caches of one leader session.
pub struct Caches {
    pub pools: Store<Stored>,
    pub pods: Arc<Index>,
    pub refusals: Arc<Refusals>,
    pub children: Arc<Children>,
    pub usage: Usage,
}

impl Caches {
    pub fn new(pools: Store<Stored>) -> Self {
        Self {
            pools,
            pods: Arc::default(),
            refusals: Arc::default(),
            children: Arc::default(),
            usage: Usage::default(),
        }
    }
}

/// The answers of sidecars, by pool.
#[derive(Debug, Default)]
pub struct Usage(Mutex<HashMap<PoolRef, PoolUsage>>);

impl Usage {
    /// Reads or changes the answers of a pool.
    pub fn with<T>(&self, pool: &PoolRef, access: impl FnOnce(&mut PoolUsage) -> T) -> T {
        access(self.0.lock().entry(pool.clone()).or_default())
    }

    pub fn forget(&self, pool: &PoolRef) {
        self.0.lock().remove(pool);
    }
}

/// The pool of a reference.
pub fn pool_ref(reference: &ObjectRef<Stored>) -> PoolRef {
    PoolRef::new(
        reference.namespace.as_deref().unwrap_or_default(),
        &reference.name,
    )
}
