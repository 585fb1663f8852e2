//! One leader session: its caches, its queue, and the reconcile pass of a pool. Wires only.

use super::act::Executor;
use super::backoff::{Backoff, spread};
use super::caches::{Caches, Stored, pool_ref};
use super::context::Context;
use super::error::{PASS_TIME_MAX, PassError};
use super::events::Events;
use super::memory::Memory;
use super::observe::{Observed, Outcome, observe};
use super::plan::{held, plan};
use super::report;
use super::{queue, sample};
use crate::pods::PoolRef;
use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use kube::Resource;
use kube::runtime::controller::{Action, Config, Error, applier};
use kube::runtime::reflector::{ObjectRef, store};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::{error, info, warn};

/// Pools that are reconciled at the same time.
const AT_ONCE: u16 = 16;
/// The next pass if nothing happens.
const RESYNC: Duration = Duration::from_secs(600);
/// The least time to the next pass.
const SOON: Duration = Duration::from_secs(1);

/// One leader session.
struct LeaderSession {
    context: Context,
    caches: Arc<Caches>,
    events: Events,
    backoff: Backoff,
    memories: Mutex<HashMap<PoolRef, Arc<tokio::sync::Mutex<Memory>>>>,
}

impl LeaderSession {
    fn forget(&self, pool: &PoolRef) {
        self.memories.lock().remove(pool);
        self.caches.usage.forget(pool);
        self.backoff.clear(pool);
    }

    /// Reconciles one pool and counts it.
    async fn reconcile(&self, stored: &Stored) -> Result<Action, PassError> {
        let began = Instant::now();
        let result = timeout(PASS_TIME_MAX, self.pass(stored)).await;
        let result = result.unwrap_or(Err(PassError::TimedOut));
        let name = if result.is_ok() { "done" } else { "failed" };
        let metrics = &self.context.metrics;
        metrics.add("reconciles_total", &[name], 1);
        metrics.observe("reconcile_seconds", &[], began.elapsed());
        result.map(Action::requeue)
    }

    /// One reconcile pass. Returns when the next one is due.
    async fn pass(&self, stored: &Stored) -> Result<Duration, PassError> {
        // Counts of a list that is under way would be wrong. When it is complete, every pool is due.
        if !self.caches.pods.is_complete() {
            return Ok(RESYNC);
        }
        if stored.meta().deletion_timestamp.is_some() && !held(stored) {
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
        let mut observed = observe(stored, &name, &self.context, &self.caches).await;
        observed.outcome = Some(self.act(&observed, &mut memory).await?);
        let last = self.act(&observed, &mut memory).await?;
        let within = last.requeue.unwrap_or_else(|| spread(RESYNC)).max(SOON);
        match observed.outcome.and_then(|first| first.unapplied) {
            None => Ok(within),
            Some(source) => Err(PassError::Object { source, within }),
        }
    }

    async fn act(
        &self,
        observed: &Observed<'_>,
        memory: &mut Memory,
    ) -> Result<Outcome, PassError> {
        let executor = Executor {
            context: &self.context,
            events: &self.events,
            observed,
        };
        executor.act(plan(observed, memory), memory).await
    }

    /// A pool that does not exist, or not any more.
    async fn gone(&self, pool: &PoolRef) {
        self.forget(pool);
        let pods = self.caches.pods.of(pool);
        for event in report::pods_without_pool(&pods, Timestamp::now()) {
            self.events.publish(&event).await;
        }
    }

    /// The pause after a failed pass.
    fn failed(&self, pool: &Stored, failed: &PassError) -> Duration {
        let pool = pool_ref(&ObjectRef::from_obj(pool));
        let pause = self.backoff.failed(&pool).min(failed.within());
        warn!(%pool, error = %failed, ?pause, "not reconciled; trying again");
        pause
    }
}

/// Reconciles all pools for as long as it is polled. Dropping it stops all of its work at once.
pub async fn run(context: Context) {
    let (pools, writer) = store();
    let session = Arc::new(LeaderSession {
        events: Events::new(context.client.clone(), context.name.clone()),
        caches: Arc::new(Caches::new(pools.clone())),
        context,
        backoff: Backoff::default(),
        memories: Mutex::default(),
    });
    let LeaderSession {
        context, caches, ..
    } = &*session;
    let (tx, rx) = mpsc::unbounded_channel();
    let work = applier(
        |pool, session: Arc<LeaderSession>| async move { session.reconcile(&pool).await }.boxed(),
        |pool, failed, session| Action::requeue(session.failed(&pool, failed)),
        session.clone(),
        pools,
        queue::queue(context, caches, writer, rx),
        // No debounce: every change restarts it, and a pool that changes without end would never be reconciled.
        Config::default().concurrency(AT_ONCE),
    );
    let here = &session;
    let work = work.for_each_concurrent(usize::from(AT_ONCE), move |done| async move {
        match done {
            Ok((pool, _)) => here.backoff.clear(&pool_ref(&pool)),
            Err(Error::ObjectNotFound(gone)) => {
                let namespace = gone.namespace.as_deref().unwrap_or_default();
                here.gone(&PoolRef::new(namespace, &gone.name)).await;
            }
            // Logged where the pause was chosen.
            Err(Error::ReconcilerFailed(..)) => {}
            Err(e) => error!(error = %e, "the reconciler's queue broke"),
        }
    });
    info!("reconciling");
    let sampling = sample::run(context, caches, move |pool| {
        // The receiver is gone only while the session ends.
        let _ended = tx.send(pool);
    });
    tokio::select! {
        () = work => {}
        () = sampling => {}
    }
}
