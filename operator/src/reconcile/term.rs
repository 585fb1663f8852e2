//! One term of a leader: what it shares, and the loop.

use super::apply::Applied;
use super::backoff::Backoff;
use super::children::Children;
use super::events::Events;
use super::pool::{Failed, reconcile};
use super::tell::tell_of_no_pool;
use super::{queue, sample};
use crate::api::{KVCachePool, KVCachePoolStatus};
use crate::canary::Seen;
use crate::defaults::Defaults;
use crate::metrics::Metrics;
use crate::pods::{Breaker, Evictions, Faults, Index, PoolRef, PoolUsage, Refusals, Update};
use crate::status::Writes;
use futures::{FutureExt, StreamExt};
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::core::DeserializeGuard;
use kube::runtime::controller::{Action, Config, Error, applier};
use kube::runtime::reflector::{ObjectRef, Store, store};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

/// A stored pool, or why it cannot be read: one such pool must not stall the watch of all others.
pub type Stored = DeserializeGuard<KVCachePool>;

/// Pools that are reconciled at the same time.
const AT_ONCE: u16 = 16;

/// What the leader's work needs.
#[derive(Clone)]
pub struct Context {
    /// The cluster.
    pub client: Client,
    /// Of the running operator.
    pub defaults: Arc<Defaults>,
    /// Where work is counted.
    pub metrics: Arc<Metrics>,
    /// What the last dry run saw.
    pub canary: watch::Receiver<Seen>,
    /// Name of this replica, for events.
    pub name: String,
    /// Pods may be patched, so that sidecars can be updated in place.
    pub allow_pod_patch: bool,
    /// Sidecars are asked, and counts in the status of a pool are written, at most once in this time.
    pub status_interval: SignedDuration,
}

/// What the parts of a term share.
pub struct Term {
    pub client: Client,
    pub defaults: Arc<Defaults>,
    pub metrics: Arc<Metrics>,
    pub canary: watch::Receiver<Seen>,
    pub allow_pod_patch: bool,
    pub status_interval: SignedDuration,
    pub pools: Store<Stored>,
    pub pods: Arc<Index>,
    pub refusals: Arc<Refusals>,
    pub children: Arc<Children>,
    pub usage: Usage,
    pub events: Events,
    backoff: Backoff,
    states: Mutex<HashMap<PoolRef, Arc<tokio::sync::Mutex<State>>>>,
}

/// What is remembered of a pool from one look to the next.
#[derive(Debug, Default)]
pub struct State {
    /// Uid of the pool: one of the same name later is another.
    pub uid: String,
    /// Objects as they were left.
    pub applied: Applied,
    /// When it was made sure that its servers have a password.
    pub password: Option<Instant>,
    /// Since when the Job that purges it cannot be made.
    pub purge_refused: Option<Timestamp>,
    /// The breaker; `None` before the first look.
    pub breaker: Option<Breaker>,
    /// Updates of running pods; `None` before the first look.
    pub update: Option<Update>,
    /// Evictions of missed pods.
    pub evictions: Evictions,
    /// Faults of its sidecars.
    pub faults: Faults,
    /// The status as it was written last, and the version of the pool then.
    pub written: Option<(KVCachePoolStatus, String)>,
    /// When it was written.
    pub writes: Writes,
}

/// What sidecars said, by pool.
#[derive(Debug, Default)]
pub struct Usage(Mutex<HashMap<PoolRef, PoolUsage>>);

impl Usage {
    /// Looks at or changes the numbers of a pool.
    pub fn with<T>(&self, pool: &PoolRef, look: impl FnOnce(&mut PoolUsage) -> T) -> T {
        look(self.0.lock().entry(pool.clone()).or_default())
    }

    fn forget(&self, pool: &PoolRef) {
        self.0.lock().remove(pool);
    }
}

impl Term {
    /// What is remembered of a pool; nothing, if it is another one than last time.
    pub fn state(&self, pool: &PoolRef) -> Arc<tokio::sync::Mutex<State>> {
        self.states.lock().entry(pool.clone()).or_default().clone()
    }

    fn forget(&self, pool: &PoolRef) {
        self.states.lock().remove(pool);
        self.usage.forget(pool);
        self.backoff.clear(pool);
    }
}

/// Reconciles all pools for as long as it is polled. Dropping it stops all of its work where it stands.
pub async fn run(context: Context) {
    let (pools, writer) = store();
    let term = Arc::new(Term {
        events: Events::new(context.client.clone(), context.name),
        client: context.client,
        defaults: context.defaults,
        metrics: context.metrics,
        canary: context.canary,
        allow_pod_patch: context.allow_pod_patch,
        status_interval: context.status_interval,
        pools: pools.clone(),
        pods: Arc::default(),
        refusals: Arc::default(),
        children: Arc::default(),
        usage: Usage::default(),
        backoff: Backoff::default(),
        states: Mutex::default(),
    });
    let (asked, heard) = mpsc::unbounded_channel();
    let work = applier(
        |pool, term| reconcile(pool, term).boxed(),
        |pool, failed, term| Action::requeue(again(&pool, failed, &term)),
        term.clone(),
        pools,
        queue::queue(&term, writer, heard),
        // No debounce: it begins anew with every change, and a pool that changes without end would never be looked at.
        Config::default().concurrency(AT_ONCE),
    );
    let here = &term;
    let work = work.for_each_concurrent(usize::from(AT_ONCE), move |done| async move {
        match done {
            Ok((pool, _)) => here.backoff.clear(&queue::pool_ref(&pool)),
            Err(Error::ObjectNotFound(gone)) => {
                let namespace = gone.namespace.as_deref().unwrap_or_default();
                let gone = PoolRef::new(namespace, &gone.name);
                here.forget(&gone);
                tell_of_no_pool(&gone, here).await;
            }
            // Said where the pause was chosen.
            Err(Error::ReconcilerFailed(..)) => {}
            Err(e) => error!(error = %e, "the reconciler's queue broke"),
        }
    });
    info!("reconciling");
    let sampling = sample::run(term.clone(), move |pool| {
        // Nobody hears it only while the term ends.
        let _ended = asked.send(pool);
    });
    tokio::select! {
        () = work => {}
        () = sampling => {}
    }
}

fn again(pool: &Arc<Stored>, failed: &Failed, term: &Term) -> Duration {
    let pool = queue::pool_ref(&ObjectRef::from_obj(&**pool));
    let pause = term.backoff.failed(&pool).min(failed.within());
    warn!(%pool, error = %failed, ?pause, "not reconciled; trying again");
    pause
}
