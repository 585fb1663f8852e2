//! What makes a pool due: itself, its pods, its objects, refused pods, numbers of its sidecars, and the canary.

use super::children;
use super::gather::gathered;
use super::term::{Stored, Term};
use crate::api::KVCachePool;
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

/// Changes of one pool within this time are one look.
const MOMENT: Duration = Duration::from_millis(200);

/// All triggers, merged. Never ends and never fails: broken watches begin anew.
pub fn queue(
    term: &Arc<Term>,
    writer: Writer<Stored>,
    asked: mpsc::UnboundedReceiver<PoolRef>,
) -> impl Stream<Item = Result<ObjectRef<Stored>, Infallible>> + use<> {
    let client = &term.client;
    let metrics = &term.metrics;
    let pods = watch_pods(client.clone(), term.pods.clone(), metrics.clone());
    let refusals = watch_refusals(
        client.clone(),
        term.pods.clone(),
        term.refusals.clone(),
        metrics.clone(),
    );
    let asked = futures::stream::unfold(asked, |mut asked| async move {
        let pool = asked.recv().await?;
        Some((pool, asked))
    });
    let related = futures::stream::select_all([
        pods.boxed(),
        children::watch(client, &term.children, metrics).boxed(),
        refusals.boxed(),
        asked.boxed(),
    ])
    .map(|pool| ObjectRef::new(&pool.name).within(&pool.namespace));
    let all = futures::stream::select_all([
        pools(term, writer).boxed(),
        related.boxed(),
        canary(term).boxed(),
        listed(term).boxed(),
    ]);
    gathered(all, MOMENT).map(Ok)
}

/// Every pool, once all pods are listed: before that none can be judged.
fn listed(term: &Arc<Term>) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let term = term.clone();
    futures::stream::once(async move {
        term.pods.completed().await;
        futures::stream::iter(all(&term))
    })
    .flatten()
    .chain(futures::stream::pending())
}

fn all(term: &Term) -> Vec<ObjectRef<Stored>> {
    let pools = term.pools.state();
    pools.iter().map(|p| ObjectRef::from_obj(&**p)).collect()
}

/// Pools themselves, into the store of this term.
fn pools(
    term: &Arc<Term>,
    writer: Writer<Stored>,
) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let api: Api<Stored> = Api::all(term.client.clone());
    let events = watcher(api, Config::default())
        .default_backoff()
        .map(|event| event.map(|event| event.modify(slim)));
    let metrics = term.metrics.clone();
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
fn canary(term: &Arc<Term>) -> impl Stream<Item = ObjectRef<Stored>> + use<> {
    let term = term.clone();
    futures::stream::unfold(term.canary.clone(), move |mut canary| {
        let term = term.clone();
        async move {
            // A canary that ended is one that says nothing new.
            if canary.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            Some((futures::stream::iter(all(&term)), canary))
        }
    })
    .flatten()
}

/// The pool that a reference names.
pub fn pool_ref(reference: &ObjectRef<Stored>) -> PoolRef {
    PoolRef::new(
        reference.namespace.as_deref().unwrap_or_default(),
        &reference.name,
    )
}

/// The reference of a pool for events.
pub fn object_ref(pool: &KVCachePool) -> k8s_openapi::api::core::v1::ObjectReference {
    kube::Resource::object_ref(pool, &())
}
