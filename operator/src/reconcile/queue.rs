//! The queue of pools that need a reconcile pass: after a change of the pool, its pods, its objects, refused pods, the answers of its
//! sidecars, or the canary.

use super::caches::{Caches, Stored};
use super::children;
use super::context::Context;
use super::gather::gathered;
use crate::names;
use crate::pods::{PoolRef, watch_pods, watch_refusals};
use futures::{Stream, StreamExt};
use kube::runtime::reflector::{ObjectRef, store::Writer};
use kube::runtime::watcher::{Config, watcher};
use kube::runtime::{WatchStreamExt, reflector};
use kube::{Api, ResourceExt};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tracing::warn;

/// Changes of one pool within this time are one pass.
const MOMENT: Duration = Duration::from_millis(200);

/// All triggers, merged. `sampled`: pools whose sidecars have answered. Never ends and never fails: broken watches begin anew.
pub fn queue(
    context: &Context,
    caches: &Arc<Caches>,
    writer: Writer<Stored>,
    sampled: mpsc::UnboundedReceiver<PoolRef>,
) -> impl Stream<Item = Result<ObjectRef<Stored>, Infallible>> + use<> {
    let (client, metrics) = (&context.client, &context.metrics);
    let pods = watch_pods(client.clone(), caches.pods.clone(), metrics.clone());
    let refusals = watch_refusals(
        client.clone(),
        caches.pods.clone(),
        caches.refusals.clone(),
        metrics.clone(),
    );
    let sampled = futures::stream::unfold(sampled, |mut sampled| async move {
        let pool = sampled.recv().await?;
        Some((pool, sampled))
    });
    let related = futures::stream::select_all([
        pods.boxed(),
        children::watch(client, &caches.children, metrics).boxed(),
        refusals.boxed(),
        sampled.boxed(),
    ])
    .map(|pool| ObjectRef::new(&pool.name).within(&pool.namespace));
    let all = futures::stream::select_all([
        pools(context, writer).boxed(),
        related.boxed(),
        canary(context, caches).boxed(),
        listed(caches).boxed(),
    ]);
    gathered(all, MOMENT).map(Ok)
}

/// Every pool, once all pods are listed: before that none can be judged.
fn listed(caches: &Arc<Caches>) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let caches = caches.clone();
    futures::stream::once(async move {
        caches.pods.completed().await;
        futures::stream::iter(all(&caches))
    })
    .flatten()
    .chain(futures::stream::pending())
}

fn all(caches: &Caches) -> Vec<ObjectRef<Stored>> {
    let pools = caches.pools.state();
    pools.iter().map(|p| ObjectRef::from_obj(&**p)).collect()
}

/// Pools themselves, into the store of this leader session.
fn pools(
    context: &Context,
    writer: Writer<Stored>,
) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let api: Api<Stored> = Api::all(context.client.clone());
    let events = watcher(api, Config::default())
        .default_backoff()
        .map(|event| event.map(|event| event.modify(slim)));
    let metrics = context.metrics.clone();
    reflector(writer, events)
        .applied_objects()
        .filter_map(move |pool| {
            let pool = pool.inspect_err(|e| {
                metrics.add("watch_errors_total", &["KVCachePool"], 1);
                warn!(error = %e, "watch of pools broke; it begins anew");
            });
            std::future::ready(pool.ok().map(|pool| ObjectRef::from_obj(&pool)))
        })
}

fn slim(pool: &mut Stored) {
    pool.managed_fields_mut().clear();
    pool.annotations_mut()
        .retain(|name, _| name == names::PURGE_ACCOUNT);
}

/// Every pool, when the canary sees something new.
fn canary(
    context: &Context,
    caches: &Arc<Caches>,
) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let caches = caches.clone();
    futures::stream::unfold(context.canary.clone(), move |mut canary| {
        let caches = caches.clone();
        async move {
            // The sender ends only with the process.
            if canary.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            Some((futures::stream::iter(all(&caches)), canary))
        }
    })
    .flatten()
}
