//! The webhook's pools: a cache that a watch updates, single reads for pools that are not in the cache, and the canary's built-in pool.

use super::breaker::Breaker;
use super::missing::Missing;
use crate::api::KVCachePool;
use crate::defaults::Defaults;
use crate::desired;
use crate::forms;
use crate::health::{POOLS, Readiness};
use crate::inject::{Reason, Settings};
use crate::metrics::Metrics;
use crate::names::{self, CANARY_POOL};
use crate::scope::Scope;
use futures::{Stream, StreamExt};
use kube::core::DeserializeGuard;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::{info, warn};

/// A stored pool, or the error of an unreadable one. One such pool must not stop the watch of all others.
pub type Stored = DeserializeGuard<KVCachePool>;

/// Timeout of reading a pool that is not in the cache.
const READ_TIME_MAX: Duration = Duration::from_millis(500);
/// Maximum concurrent reads. Anybody who reaches the port can request pools, and the API server must be protected.
pub(super) const READS_MAX: usize = 8;
/// Maximum characters of a name in a message.
const NAME_CHARS_SHOWN: usize = 80;
/// Memory of the canary's sidecar, which never runs.
const CANARY_MEMORY_BYTES: u64 = 1 << 30;

/// The pod for which a pool is looked up.
#[derive(Debug, Clone, Copy, Default)]
pub struct Requester<'a> {
    /// The request is a dry run: nothing is stored.
    pub dry_run: bool,
    /// The pod has its sidecar from an earlier call. The breaker does not apply again.
    pub injected: bool,
    /// Uid of its controller, empty without one, and before that of its LeaderWorkerSet, if it has one. A pause of any of them applies.
    pub owners: &'a [&'a str],
}

/// Result of looking up a pool.
#[derive(Debug)]
pub enum Found {
    /// The settings to inject.
    Pool(Box<Settings>),
    /// Its pods start without a sidecar, for this reason.
    Refused(Reason, String),
    /// The API server did not answer in time.
    Unread,
}

/// The pools and where to find them.
pub struct Pools {
    store: Store<Stored>,
    client: Client,
    pub(super) scope: Scope,
    defaults: Arc<Defaults>,
    metrics: Arc<Metrics>,
    breaker: Breaker,
    missing: Missing,
    pub(super) reads: Semaphore,
}

/// Returns the cache and the task that updates it. It becomes ready after the first list; a later failure of the watch keeps the cache.
pub fn watch(
    client: &Client,
    scope: &Scope,
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
) -> (Store<Stored>, impl Future<Output = ()> + use<>) {
    let events = scope.watch(client, &watcher::Config::default().any_semantic());
    keep(events, readiness, metrics)
}

fn keep(
    events: impl Stream<Item = watcher::Result<watcher::Event<Stored>>> + Send + 'static,
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
) -> (Store<Stored>, impl Future<Output = ()>) {
    let (store, writer) = reflector::store();
    let events = events.map(|event| event.map(|event| event.modify(slim)));
    let mut events = Box::pin(reflector::reflector(writer, events));
    let cache = store.clone();
    let work = async move {
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::InitDone) => {
                    if readiness.set(POOLS, Ok(())) {
                        info!(pools = cache.len(), "pool cache is ready");
                    }
                }
                Ok(_) => {}
                Err(e) => {
                    metrics.add("watch_errors_total", &["KVCachePool"], 1);
                    warn!(reason = %e, "watch of pools failed; restarting it");
                }
            }
            let invalid = cache.state_filter(|pool| pool.0.is_err()).len();
            metrics.set("pools", &[], cache.len() as f64);
            metrics.set("pools_invalid", &[], invalid as f64);
        }
    };
    (store, work)
}

/// Removes what the webhook never reads.
fn slim(stored: &mut Stored) {
    if let Ok(pool) = &mut stored.0 {
        pool.metadata.managed_fields = None;
        pool.annotations_mut()
            .retain(|name, _| name == names::PURGE_ACCOUNT);
    }
}

impl Pools {
    /// Uses a cache, and the API server for other pools.
    pub fn new(
        store: Store<Stored>,
        client: Client,
        scope: Scope,
        defaults: Arc<Defaults>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            store,
            client,
            scope,
            defaults,
            metrics,
            breaker: Breaker::default(),
            missing: Missing::default(),
            reads: Semaphore::new(READS_MAX),
        }
    }

    /// Finds the pool that a pod of this namespace requests.
    pub async fn find(&self, namespace: &str, name: &str, requester: Requester<'_>) -> Found {
        let defaults = &self.defaults;
        if name == CANARY_POOL && requester.dry_run && namespace == defaults.namespace {
            let settings = Settings::new(name, namespace, &defaults.image, CANARY_MEMORY_BYTES);
            return Found::Pool(Box::new(settings));
        }
        // Invalid names are not looked up, because they would become part of a URL.
        if !forms::is_label(name) || !forms::is_label(namespace) {
            return not_found(namespace, name);
        }
        if !self.scope.contains(namespace) {
            let message = format!(
                "the operator does not watch namespace {namespace}; add it to the chart value watchNamespaces, or remove the label"
            );
            return Found::Refused(Reason::NamespaceNotWatched, message);
        }
        let key = ObjectRef::new(name).within(namespace);
        if let Some(stored) = self.store.get(&key) {
            return self.judge(&stored, requester);
        }
        if self.missing.holds(namespace, name, Instant::now()) {
            return not_found(namespace, name);
        }
        let (result, found) = match timeout(READ_TIME_MAX, self.read(namespace, name)).await {
            Ok(Ok(Some(stored))) => ("found", self.judge(&stored, requester)),
            Ok(Ok(None)) => {
                self.missing.add(namespace, name, Instant::now());
                ("missing", not_found(namespace, name))
            }
            Ok(Err(e)) => {
                warn!(namespace, pool = name, reason = %e, "pool cannot be read");
                ("failed", Found::Unread)
            }
            Err(_) => {
                warn!(namespace, pool = name, "timeout reading a pool");
                ("failed", Found::Unread)
            }
        };
        self.metrics.add("webhook_pool_reads_total", &[result], 1);
        found
    }

    /// Records that a pod of this pool was injected and will be stored.
    pub fn injected(&self, namespace: &str, name: &str, owners: &[&str]) {
        let key = ObjectRef::new(name).within(namespace);
        if let Some(stored) = self.store.get(&key)
            && let Ok(pool) = &stored.0
        {
            for owner in owners {
                self.breaker.injected(pool, owner, Instant::now());
            }
        }
    }

    /// Reads a pool from the API server. A pool that was applied together with its pods may not be in the watch yet.
    async fn read(&self, namespace: &str, name: &str) -> kube::Result<Option<Stored>> {
        // The semaphore is never closed, so this only waits.
        let _place = self.reads.acquire().await;
        let api: Api<Stored> = Api::namespaced(self.client.clone(), namespace);
        api.get_opt(name).await
    }

    fn judge(&self, stored: &Stored, requester: Requester<'_>) -> Found {
        let pool = match &stored.0 {
            Ok(pool) => pool,
            Err(e) => {
                let message =
                    format!("this version of the operator cannot read the stored pool: {e}");
                return Found::Refused(Reason::PoolNotAccepted, message);
            }
        };
        if pool.metadata.deletion_timestamp.is_some() && !requester.injected {
            let name = pool.metadata.name.as_deref().unwrap_or_default();
            let message = format!("KVCachePool {name} is being deleted");
            return Found::Refused(Reason::PoolNotFound, message);
        }
        match desired::settings(pool, &self.defaults) {
            // An injected pod keeps its sidecar.
            Ok(settings) if requester.injected => Found::Pool(Box::new(settings)),
            Ok(settings) => {
                let now = Instant::now();
                let mut owners = requester.owners.iter();
                let refused = owners
                    .find_map(|owner| self.breaker.refuses(pool, owner, || settings.hash(), now));
                match refused {
                    Some(message) => Found::Refused(Reason::InjectionPaused, message),
                    None => Found::Pool(Box::new(settings)),
                }
            }
            Err(problems) => {
                let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
                Found::Refused(Reason::PoolNotAccepted, all.join("; "))
            }
        }
    }
}

fn not_found(namespace: &str, name: &str) -> Found {
    // An annotation may be long.
    let name: String = name.chars().take(NAME_CHARS_SHOWN).collect();
    let message = format!(
        "there is no KVCachePool {name} in namespace {namespace}; create it or correct the label, then create the pod again"
    );
    Found::Refused(Reason::PoolNotFound, message)
}
