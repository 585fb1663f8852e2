//! The queue of pools that need a reconcile pass, after a change of the pool, its pods, its servers, its objects, refused pods, the responses of its
//! sidecars, or the canary's result.

use super::caches::{Caches, Stored};
use super::children;
use super::context::Context;
use crate::names;
use crate::pods::{PoolRef, watch_pods, watch_refusals, watch_servers};
use futures::{Stream, StreamExt};
use kube::ResourceExt;
use kube::runtime::reflector::{ObjectRef, store::Writer};
use kube::runtime::scheduler::{ScheduleRequest, scheduler};
use kube::runtime::watcher::Config;
use kube::runtime::{WatchStreamExt, reflector};
use std::collections::HashSet;
use std::convert::Infallible;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{info, warn};

/// Changes of one pool within this time cause one pass.
const COALESCE_TIME: Duration = Duration::from_millis(200);

/// Updates the caches from all watches, and yields the changed pools. The stream never ends and never fails, because failed watches restart.
pub fn watch(
    context: &Context,
    caches: &Caches,
    writer: Writer<Stored>,
) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let (client, scope, metrics) = (&context.client, &context.scope, &context.metrics);
    let pods = watch_pods(
        client.clone(),
        scope.clone(),
        caches.pods.clone(),
        metrics.clone(),
    );
    let servers = watch_servers(
        client.clone(),
        scope.clone(),
        caches.servers.clone(),
        metrics.clone(),
    );
    let refusals = watch_refusals(
        client.clone(),
        scope.clone(),
        caches.pods.clone(),
        caches.refusals.clone(),
        metrics.clone(),
    );
    let related = futures::stream::select_all([
        pods.boxed(),
        servers.boxed(),
        children::watch(client, scope, &caches.children, metrics).boxed(),
        refusals.boxed(),
    ])
    .map(reference);
    futures::stream::select(pools(context, writer), related)
}

fn reference(pool: PoolRef) -> ObjectRef<Stored> {
    ObjectRef::new(&pool.name).within(&pool.namespace)
}

/// The queue of a leader session, from all sources of changes. `changed` yields pools that a watch saw change, `sampled` those whose sidecars
/// were queried.
pub fn queue(
    context: &Context,
    caches: &Arc<Caches>,
    changed: mpsc::UnboundedReceiver<ObjectRef<Stored>>,
    sampled: mpsc::UnboundedReceiver<PoolRef>,
) -> impl Stream<Item = Result<ObjectRef<Stored>, Infallible>> + use<> {
    let all = futures::stream::select_all([
        received(changed).boxed(),
        received(sampled).map(reference).boxed(),
        canary(context, caches).boxed(),
        listed(caches).boxed(),
    ]);
    coalesced(all, COALESCE_TIME).map(Ok)
}

/// Yields the items of `changes` after `delay`, each once, however often it occurs within that time. Later changes do not restart the time,
/// so a pool whose pods change continuously is still reconciled.
fn coalesced<T: Clone + Eq + Hash>(
    changes: impl Stream<Item = T>,
    delay: Duration,
) -> impl Stream<Item = T> {
    scheduler(changes.map(move |message| ScheduleRequest {
        message,
        run_at: Instant::now() + delay,
    }))
}

fn received<T>(receiver: mpsc::UnboundedReceiver<T>) -> impl Stream<Item = T> {
    futures::stream::unfold(receiver, |mut receiver| async move {
        let item = receiver.recv().await?;
        Some((item, receiver))
    })
}

/// Yields every pool, and those that only pods name, once all pools and pods are listed. Counts before that would be wrong.
fn listed(caches: &Arc<Caches>) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let caches = caches.clone();
    futures::stream::once(async move {
        caches.completed().await;
        let pools: HashSet<_> = all(&caches)
            .into_iter()
            .chain(caches.pods.pools().into_iter().map(reference))
            .collect();
        info!(
            pools = pools.len(),
            "all pods are listed; reconciling every pool"
        );
        futures::stream::iter(pools)
    })
    .flatten()
    .chain(futures::stream::pending())
}

fn all(caches: &Caches) -> Vec<ObjectRef<Stored>> {
    let pools = caches.pools.state();
    pools.iter().map(|p| ObjectRef::from_obj(&**p)).collect()
}

/// Watches pools into the store.
fn pools(
    context: &Context,
    writer: Writer<Stored>,
) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let events = context
        .scope
        .watch::<Stored>(&context.client, &Config::default())
        .map(|event| event.map(|event| event.modify(slim)));
    let metrics = context.metrics.clone();
    reflector(writer, events)
        .applied_objects()
        .filter_map(move |pool| {
            let pool = pool.inspect_err(|e| {
                metrics.add("watch_errors_total", &["KVCachePool"], 1);
                warn!(reason = %e, "watch of pools failed; restarting it");
            });
            std::future::ready(pool.ok().map(|pool| ObjectRef::from_obj(&pool)))
        })
}

fn slim(pool: &mut Stored) {
    pool.managed_fields_mut().clear();
    pool.annotations_mut()
        .retain(|name, _| name == names::PURGE_ACCOUNT);
}

/// Yields every pool when the canary's result changes.
fn canary(
    context: &Context,
    caches: &Arc<Caches>,
) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let caches = caches.clone();
    futures::stream::unfold(context.canary.clone(), move |mut canary| {
        let caches = caches.clone();
        async move {
            // The sender exists as long as the process.
            if canary.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            Some((futures::stream::iter(all(&caches)), canary))
        }
    })
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream::{iter, pending, unfold};
    use tokio::time::{sleep, timeout};

    const DELAY: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn concurrent_changes_are_yielded_once() {
        let changes = iter(["a", "b", "a", "a"]).chain(pending());
        let mut coalesced = Box::pin(coalesced(changes, DELAY));
        let mut yielded = [coalesced.next().await, coalesced.next().await];
        yielded.sort();
        assert_eq!(yielded, [Some("a"), Some("b")]);
        assert!(timeout(10 * DELAY, coalesced.next()).await.is_err());
    }

    #[tokio::test]
    async fn a_pool_that_changes_continuously_is_yielded_repeatedly() {
        let changes = unfold((), async |()| {
            sleep(DELAY / 50).await;
            Some(("a", ()))
        });
        let mut coalesced = Box::pin(coalesced(changes, DELAY));
        for _ in 0..3 {
            let started = Instant::now();
            assert_eq!(timeout(LONG, coalesced.next()).await, Ok(Some("a")));
            assert!(started.elapsed() >= DELAY);
        }
    }
}
