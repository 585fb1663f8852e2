//! The pools that the webhook knows: a cache that a watch keeps, one read of the API server for what it does not hold, and the canary's
//! built-in pool.

use super::breaker::Breaker;
use crate::api::KVCachePool;
use crate::defaults::Defaults;
use crate::desired;
use crate::health::{POOLS, Readiness};
use crate::inject::{Reason, Settings};
use crate::metrics::Metrics;
use crate::names::CANARY_POOL;
use futures::{Stream, StreamExt};
use kube::core::DeserializeGuard;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tracing::{info, warn};

/// A stored pool, or why it cannot be read: one such pool must not stall the watch of all others.
pub type Stored = DeserializeGuard<KVCachePool>;

/// Longest read of a pool that the cache does not hold.
const READ_TIME_MAX: Duration = Duration::from_millis(500);
/// Memory of the canary's sidecar, which never runs.
const CANARY_MEMORY_BYTES: u64 = 1 << 30;

/// What there is of a pool.
#[derive(Debug)]
pub enum Found {
    /// What to inject.
    Pool(Box<Settings>),
    /// Its pods start without a sidecar, and why.
    Refused(Reason, String),
    /// The API server did not say in time.
    Unread,
}

/// Where pools are looked up.
pub struct Pools {
    store: Store<Stored>,
    client: Client,
    defaults: Arc<Defaults>,
    metrics: Arc<Metrics>,
    breaker: Breaker,
}

/// The cache, and the work that keeps it. Ready is said once the first list is in; later breaks leave the cache as it is.
pub fn watch(
    client: Client,
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
) -> (Store<Stored>, impl Future<Output = ()>) {
    let pools: Api<Stored> = Api::all(client);
    let events = watcher(pools, watcher::Config::default().any_semantic());
    keep(events, readiness, metrics)
}

fn keep(
    events: impl Stream<Item = watcher::Result<watcher::Event<Stored>>> + Send + 'static,
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
) -> (Store<Stored>, impl Future<Output = ()>) {
    let (store, writer) = reflector::store();
    let events = events.map(|event| event.map(|event| event.modify(slim)));
    let mut events = Box::pin(reflector::reflector(writer, events.default_backoff()));
    let cache = store.clone();
    let work = async move {
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::InitDone) => {
                    if readiness.set(POOLS, Ok(())) {
                        info!(pools = cache.len(), "pools are in the cache");
                    }
                }
                Ok(_) => {}
                Err(e) => {
                    metrics.add("watch_errors_total", &["KVCachePool"], 1);
                    warn!(error = %e, "the watch of pools broke; starting it again");
                }
            }
            let invalid = cache.state_filter(|pool| pool.0.is_err()).len();
            metrics.set("pools", &[], cache.len() as f64);
            metrics.set("pools_invalid", &[], invalid as f64);
        }
    };
    (store, work)
}

/// Leaves out what the webhook never reads.
fn slim(stored: &mut Stored) {
    if let Ok(pool) = &mut stored.0 {
        pool.metadata.managed_fields = None;
        pool.metadata.annotations = None;
    }
}

impl Pools {
    /// Over a cache and the API server behind it.
    pub fn new(
        store: Store<Stored>,
        client: Client,
        defaults: Arc<Defaults>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            store,
            client,
            defaults,
            metrics,
            breaker: Breaker::default(),
        }
    }

    /// The pool that a pod of this namespace asks for.
    pub async fn find(&self, namespace: &str, name: &str, dry_run: bool) -> Found {
        if name == CANARY_POOL && dry_run && namespace == self.defaults.namespace {
            let image = &self.defaults.image;
            let settings = Settings::new(name, namespace, image, CANARY_MEMORY_BYTES);
            return Found::Pool(Box::new(settings));
        }
        let key = ObjectRef::new(name).within(namespace);
        if let Some(stored) = self.store.get(&key) {
            return self.judge(&stored);
        }
        // Applied together with its pods, a pool is there before the watch has told.
        let api: Api<Stored> = Api::namespaced(self.client.clone(), namespace);
        let read = timeout(READ_TIME_MAX, api.get_opt(name)).await;
        let (result, found) = match read {
            Ok(Ok(Some(stored))) => ("found", self.judge(&stored)),
            Ok(Ok(None)) => {
                let message = format!(
                    "there is no KVCachePool {name} in namespace {namespace}; create it, or correct the label, and make the pod again"
                );
                ("missing", Found::Refused(Reason::PoolNotFound, message))
            }
            Ok(Err(e)) => {
                warn!(namespace, pool = name, error = %e, "a pool could not be read");
                ("failed", Found::Unread)
            }
            Err(_) => {
                warn!(namespace, pool = name, "a pool could not be read in time");
                ("failed", Found::Unread)
            }
        };
        self.metrics.add("webhook_pool_reads_total", &[result], 1);
        found
    }

    /// A pod that asks for this pool was injected, and will be stored.
    pub fn injected(&self, namespace: &str, name: &str) {
        let key = ObjectRef::new(name).within(namespace);
        if let Some(stored) = self.store.get(&key)
            && let Ok(pool) = &stored.0
        {
            self.breaker.injected(pool, Instant::now());
        }
    }

    fn judge(&self, stored: &Stored) -> Found {
        let pool = match &stored.0 {
            Ok(pool) => pool,
            Err(e) => {
                let message = format!("the stored pool cannot be read: {e}");
                return Found::Refused(Reason::PoolNotAccepted, message);
            }
        };
        match desired::settings(pool, &self.defaults) {
            Ok(settings) => match self
                .breaker
                .refuses(pool, || settings.hash(), Instant::now())
            {
                Some(message) => Found::Refused(Reason::InjectionPaused, message),
                None => Found::Pool(Box::new(settings)),
            },
            Err(problems) => {
                let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
                Found::Refused(Reason::PoolNotAccepted, all.join("; "))
            }
        }
    }
}
