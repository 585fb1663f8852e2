//! Plans the objects of a pool: its finalizer, the password of its managed servers, and the objects of `desired`.

use super::deletion::{foreign_finalizers, has_finalizer};
use crate::api::KVCachePool;
use crate::desired::{job, redis};
use crate::names;
use crate::reconcile::children::Child;
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::{Active, Observed};
use crate::reconcile::step::Step;
use crate::status::is_complete;
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;
use kube::api::DynamicObject;
use std::borrow::Cow;
use std::time::Duration;

/// Interval between checks that the password exists, because it may be deleted.
const PASSWORD_INTERVAL: Duration = Duration::from_secs(300);

/// Interval between checks whether the servers of clusters are listed.
const UNLISTED_INTERVAL: Duration = Duration::from_secs(10);

/// Applies changed objects and deletes those that the pool no longer needs. Changes nothing while the spec is not accepted.
pub fn plan(observed: &Observed<'_>, active: &Active<'_>, memory: &mut Memory) -> Vec<Step> {
    if active.settings.is_err() {
        return Vec::new();
    }
    let mut steps = Vec::new();
    // The finalizer comes first, because pods may have stored objects already.
    steps.extend(finalizers(active));
    let is_old = |at| observed.clock.duration_since(at) >= PASSWORD_INTERVAL;
    if redis::managed(active.spec).is_some() && memory.password.is_none_or(is_old) {
        steps.push(Step::Password);
    }
    for (object, live) in &active.objects {
        if changes_mode(object, live.as_ref(), active) {
            let types = object.types.clone().unwrap_or_default();
            steps.push(Step::Delete(types, object.name_any()));
            continue;
        }
        let Memory { uid, applied, .. } = memory;
        let Some(object) = applicable(object, live.as_ref(), active) else {
            steps.push(Step::Requeue(UNLISTED_INTERVAL));
            continue;
        };
        let application = applied.application(&object, live.as_ref(), uid);
        let gone = matches!(live, Some(None));
        let edited = is_edited(active.spec) || loses_servers(&object, live.as_ref());
        steps.extend(application.map(|a| {
            match is_servers(&object) && !gone && !edited && a.changes_fields() {
                true => Step::ApplyInTurn(Box::new(a)),
                false => Step::Apply(Box::new(a)),
            }
        }));
    }
    for (types, name) in &active.children {
        let is =
            |(o, _): &(DynamicObject, _)| o.types.as_ref() == Some(types) && o.name_any() == *name;
        if !active.objects.iter().any(is) {
            steps.push(Step::Delete(types.clone(), name.clone()));
        }
    }
    steps
}

fn is_servers(object: &DynamicObject) -> bool {
    let types = object.types.as_ref();
    types.is_some_and(|types| types.kind == StatefulSet::KIND)
}

/// Whether these servers are standalone and are to be a cluster, or the reverse. An update in place would never end: the first server of a
/// cluster waits for the others, which the StatefulSet replaces after it. An object that somebody else has written may say anything.
fn changes_mode(object: &DynamicObject, live: Option<&Option<Child>>, active: &Active<'_>) -> bool {
    let (Some(Some(live)), Some(redis)) = (live, redis::managed(active.spec)) else {
        return false;
    };
    let is_ours = Some(&*live.owner_uid) == active.spec.metadata.uid.as_deref();
    is_servers(object)
        && is_ours
        && live.applied.is_some()
        && live.servers.is_some() != redis::is_cluster(redis)
}

/// The object as it may be applied now. The servers of a cluster stay until their manager has moved their slots away, which its readiness
/// says. `None` while it is unknown how many there are.
fn applicable<'a>(
    object: &'a DynamicObject,
    live: Option<&Option<Child>>,
    active: &Active<'_>,
) -> Option<Cow<'a, DynamicObject>> {
    let cluster = redis::managed(active.spec).filter(|redis| redis::is_cluster(redis));
    let Some(redis) = cluster.filter(|_| is_servers(object)) else {
        return Some(Cow::Borrowed(object));
    };
    live?;
    match servers(live) {
        Some(number) if number > redis::servers(redis) && !is_complete(&active.servers, redis) => {
            Some(Cow::Owned(redis::with_servers(object, number)))
        }
        _ => Some(Cow::Borrowed(object)),
    }
}

/// Number of servers that a cluster's StatefulSet has now.
fn servers(live: Option<&Option<Child>>) -> Option<i64> {
    live?.as_ref()?.servers
}

/// Whether a cluster gets fewer servers, as a user wants. The edit may be older than the last status.
fn loses_servers(object: &DynamicObject, live: Option<&Option<Child>>) -> bool {
    let wanted = object.data["spec"]["replicas"].as_i64();
    is_servers(object) && servers(live).is_some_and(|number| wanted < Some(number))
}

/// Whether the spec has changed since the last status, which is written after the objects are applied. A change of objects that is not due
/// to an edit comes from another version or other settings of the operator.
fn is_edited(pool: &KVCachePool) -> bool {
    let observed = pool.status.as_ref().and_then(|s| s.observed_generation);
    observed != pool.metadata.generation
}

/// Sets or removes the finalizer, as `deletionPolicy` requires.
fn finalizers(active: &Active<'_>) -> Option<Step> {
    let pool = active.spec;
    let purges = job::purges(pool);
    (purges != has_finalizer(pool)).then(|| {
        let mut finalizers = foreign_finalizers(pool);
        finalizers.extend(purges.then(|| names::PURGE.to_owned()));
        Step::Finalizers(finalizers)
    })
}
