//! The watches of a replica, and its leader sessions, which connect the caches, the queue and the reconcile passes of pools.

use super::act::Executor;
use super::backoff::{Backoff, jitter};
use super::caches::{Caches, Stored, pool_ref};
use super::context::Context;
use super::error::{PASS_TIMEOUT, PassError};
use super::events::Events;
use super::gauges;
use super::memory::Memory;
use super::observe::{Observed, Outcome, observe};
use super::plan::{has_finalizer, plan};
use super::report;
use super::upgrades::Upgrades;
use super::{queue, sample};
use crate::leader::Leadership;
use crate::pods::PoolRef;
use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use kube::runtime::controller::{Action, Config, Error, applier};
use kube::runtime::reflector::{ObjectRef, store};
use kube::{Api, Resource};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::{error, info, warn};

/// Maximum number of pools that are reconciled concurrently.
const CONCURRENCY: u16 = 16;
/// Time until the next pass without changes.
const RESYNC: Duration = Duration::from_secs(600);
/// Minimum time until the next pass.
const REQUEUE_MIN: Duration = Duration::from_secs(1);

struct LeaderSession {
    context: Context,
    caches: Arc<Caches>,
    events: Events,
    backoff: Backoff,
    upgrades: Upgrades,
    memories: Mutex<HashMap<PoolRef, Arc<tokio::sync::Mutex<Memory>>>>,
}

impl LeaderSession {
    fn forget(&self, pool: &PoolRef) {
        self.memories.lock().remove(pool);
        self.caches.usage.forget(pool);
        self.backoff.clear(pool);
        self.context.metrics.remove_group(&pool.to_string());
    }

    /// Runs one reconcile pass with a timeout, and counts it.
    async fn reconcile(&self, stored: &Stored) -> Result<Action, PassError> {
        let started = Instant::now();
        let result = timeout(PASS_TIMEOUT, self.pass(stored)).await;
        let result = result.unwrap_or(Err(PassError::TimedOut));
        let label = if result.is_ok() { "done" } else { "failed" };
        let metrics = &self.context.metrics;
        metrics.add("reconciles_total", &[label], 1);
        metrics.observe("reconcile_seconds", &[], started.elapsed());
        result.map(Action::requeue)
    }

    /// Runs one reconcile pass. Returns the time until the next one.
    async fn pass(&self, stored: &Stored) -> Result<Duration, PassError> {
        // Counts would be wrong while pods are being listed. Every pool is queued when the list is complete.
        if !self.caches.are_complete() {
            return Ok(RESYNC);
        }
        if stored.meta().deletion_timestamp.is_some() && !has_finalizer(stored) {
            return Ok(RESYNC);
        }
        let name = pool_ref(&ObjectRef::from_obj(stored));
        let memory = self
            .memories
            .lock()
            .entry(name.clone())
            .or_default()
            .clone();
        let mut memory = memory.lock().await;
        memory.reset_unless(stored.meta().uid.as_deref().unwrap_or_default());
        let read;
        let stored = if memory.breaker.is_some() {
            stored
        } else {
            // The first pass restores what the last leader wrote into the status. A watch may be behind that.
            match self.read(&name).await? {
                Some(pool) => read = pool,
                None => return Ok(RESYNC),
            }
            &read
        };
        let generation = stored.meta().generation.unwrap_or_default();
        if generation < memory.generation {
            // The watch is behind what was read. It queues the pool once it has caught up.
            return Ok(RESYNC);
        }
        memory.generation = generation;
        let mut observed = observe(stored, &name, &self.context, &self.caches).await;
        observed.outcome = Some(self.plan_and_act(&observed, &mut memory).await?);
        let mut last = self.plan_and_act(&observed, &mut memory).await?;
        last.requeue(observed.outcome.as_ref().and_then(|first| first.requeue));
        let within = last
            .requeue
            .unwrap_or_else(|| jitter(RESYNC))
            .max(REQUEUE_MIN);
        match observed.outcome.and_then(|first| first.unapplied) {
            None => Ok(within),
            Some(source) => Err(PassError::Object { source, within }),
        }
    }

    async fn read(&self, pool: &PoolRef) -> Result<Option<Stored>, PassError> {
        let pools = Api::<Stored>::namespaced(self.context.client.clone(), &pool.namespace);
        let read = pools.get_opt(&pool.name).await;
        read.map_err(|e| PassError::Pool(Box::new(e)))
    }

    async fn plan_and_act(
        &self,
        observed: &Observed<'_>,
        memory: &mut Memory,
    ) -> Result<Outcome, PassError> {
        let executor = Executor {
            context: &self.context,
            events: &self.events,
            observed,
            upgrades: &self.upgrades,
        };
        let steps = plan(observed, memory);
        if let Some(status) = memory.planned.take() {
            gauges::export(&self.context.metrics, &observed.name, &status);
        }
        executor.act(steps, memory).await
    }

    /// Forgets a pool that does not exist, and reports its pods.
    async fn pool_missing(&self, pool: &PoolRef) {
        self.forget(pool);
        let pods = self.caches.pods.of(pool);
        for event in report::pods_without_pool(&pods, Timestamp::now()) {
            self.events.publish(&event).await;
        }
    }

    /// Logs a failed pass. Returns the delay of the retry.
    fn pass_failed(&self, pool: &Stored, error: &PassError) -> Duration {
        let pool = pool_ref(&ObjectRef::from_obj(pool));
        let delay = self.backoff.record_failure(&pool).min(error.within());
        warn!(%pool, reason = %error, ?delay, "reconcile pass failed; retrying");
        delay
    }
}

/// Only the leader exports gauges of pools.
impl Drop for LeaderSession {
    fn drop(&mut self) {
        self.context.metrics.clear_groups();
    }
}

/// Where the watches report changed pools: the queue of the leader session, if there is one.
type Changes = Arc<Mutex<Option<mpsc::UnboundedSender<ObjectRef<Stored>>>>>;

/// Keeps the caches while it is polled, and reconciles all pools in each leader session. A replica that does not lead has everything listed
/// when it takes over: lists of a large cluster take longer than the checks of all its pools.
pub async fn run(context: Context, leadership: Leadership) {
    let (pools, writer) = store();
    let caches = Caches::new(pools);
    let changes = Changes::default();
    let watching = queue::watch(&context, &caches, writer).for_each(|pool| {
        if let Some(queue) = &*changes.lock() {
            // Sending fails only while the session ends.
            let _closed = queue.send(pool);
        }
        std::future::ready(())
    });
    let leading = leadership.during(|| lead(context.clone(), caches.of_session(), changes.clone()));
    tokio::select! {
        () = watching => {}
        () = leading => {}
    }
}

/// One leader session. Dropping the future stops all work immediately.
async fn lead(context: Context, caches: Caches, changes: Changes) {
    let (queue, changed) = mpsc::unbounded_channel();
    *changes.lock() = Some(queue);
    let pools = caches.pools.clone();
    let session = Arc::new(LeaderSession {
        events: Events::new(context.client.clone(), context.name.clone()),
        caches: Arc::new(caches),
        context,
        backoff: Backoff::default(),
        upgrades: Upgrades::default(),
        memories: Mutex::default(),
    });
    let LeaderSession {
        context, caches, ..
    } = &*session;
    let (tx, rx) = mpsc::unbounded_channel();
    let work = applier(
        |pool, session: Arc<LeaderSession>| async move { session.reconcile(&pool).await }.boxed(),
        |pool, error, session| Action::requeue(session.pass_failed(&pool, error)),
        session.clone(),
        pools,
        queue::queue(context, caches, changed, rx),
        // No debounce: every change would restart it, and a pool that changes continuously would never be reconciled.
        Config::default().concurrency(CONCURRENCY),
    );
    let this = &session;
    let work = work.for_each_concurrent(usize::from(CONCURRENCY), move |done| async move {
        match done {
            Ok((pool, _)) => this.backoff.clear(&pool_ref(&pool)),
            Err(Error::ObjectNotFound(missing)) => {
                let namespace = missing.namespace.as_deref().unwrap_or_default();
                this.pool_missing(&PoolRef::new(namespace, &missing.name))
                    .await;
            }
            // `pass_failed` has logged it.
            Err(Error::ReconcilerFailed(..)) => {}
            Err(e) => error!(reason = %e, "the reconcile queue failed"),
        }
    });
    info!("leader session started");
    let sampling = sample::run(context, caches, move |pool| {
        // Sending fails only while the session ends.
        let _closed = tx.send(pool);
    });
    tokio::select! {
        () = work => {}
        () = sampling => {}
    }
}
