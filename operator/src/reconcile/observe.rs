//! The snapshot of a pool: everything that one reconcile pass reads, from caches and, for a deleted pool, from its purge.

use super::caches::{Caches, Stored};
use super::children::Child;
use super::context::Context;
use super::error::ApplyError;
use super::purge::{Purge, purge};
use crate::api::{KVCachePool, Problem};
use crate::canary::Seen;
use crate::desired::{desired, settings};
use crate::inject::Settings;
use crate::pods::{Pod, PoolRef, Refused, Summary};
use crate::status::Canary;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{DynamicObject, TypeMeta};
use kube::{Resource, ResourceExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Snapshot of a pool.
pub struct Observed<'a> {
    pub now: Timestamp,
    /// The same moment on the clock that never goes back.
    pub clock: Instant,
    pub name: PoolRef,
    /// The pool, for events.
    pub about: ObjectReference,
    pub stored: &'a Stored,
    /// Pods with the pool's label.
    pub pods: Vec<Arc<Pod>>,
    pub pool: Pool<'a>,
    /// The least time between two writes of counts.
    pub status_interval: SignedDuration,
    /// The outcome of this pass so far; `None`: nothing has been done yet.
    pub outcome: Option<Outcome>,
}

/// What else there is of a pool.
pub enum Pool<'a> {
    Active(Box<Active<'a>>),
    /// Its object cannot be read, for this reason.
    Malformed(&'a str),
    /// It is being deleted, and our finalizer holds it.
    Deleted(Purge),
}

/// A pool that can be read and is not being deleted.
pub struct Active<'a> {
    pub spec: &'a KVCachePool,
    /// What its spec asks for, or all that is wrong with it.
    pub settings: Result<Settings, Vec<Problem>>,
    /// Its objects, and each as the watch shows it (`None` = nobody watches its kind); none of a spec that is not accepted.
    pub objects: Vec<(DynamicObject, Option<Option<Child>>)>,
    /// Objects that it owns.
    pub children: Vec<(TypeMeta, String)>,
    /// Owners whose pods the API server refused lately.
    pub refused: Vec<Refused>,
    pub usage: Summary,
    pub canary: Canary,
    pub allow_pod_patch: bool,
}

/// The outcome of steps.
#[derive(Debug, Default)]
pub struct Outcome {
    /// When the next pass is due at the latest; `None`: nothing waits for it.
    pub requeue: Option<Duration>,
    /// Why an object was not applied.
    pub unapplied: Option<ApplyError>,
    /// Why the Job of a purge was not created.
    pub job_refused: Option<kube::Error>,
}

impl Outcome {
    /// The next pass is due within this time.
    pub fn requeue(&mut self, within: Option<Duration>) {
        self.requeue = self.requeue.into_iter().chain(within).min();
    }
}

/// Takes the snapshot of a pool.
pub async fn observe<'a>(
    stored: &'a Stored,
    name: &PoolRef,
    context: &Context,
    caches: &Caches,
) -> Observed<'a> {
    let now = Timestamp::now();
    let pods = caches.pods.of(name);
    let pool = match &stored.0 {
        _ if stored.meta().deletion_timestamp.is_some() => {
            Pool::Deleted(purge(stored, context, caches, now).await)
        }
        Ok(spec) => Pool::Active(Box::new(active(spec, name, &pods, context, caches, now))),
        Err(invalid) => Pool::Malformed(&invalid.error),
    };
    Observed {
        now,
        clock: Instant::now(),
        name: name.clone(),
        about: stored.object_ref(&()),
        stored,
        pods,
        pool,
        status_interval: context.status_interval,
        outcome: None,
    }
}

fn active<'a>(
    spec: &'a KVCachePool,
    name: &PoolRef,
    pods: &[Arc<Pod>],
    context: &Context,
    caches: &Caches,
    now: Timestamp,
) -> Active<'a> {
    let canary = canary(&context.canary.borrow());
    let objects = desired(spec, &context.defaults).unwrap_or_default();
    let seen = |object: DynamicObject| {
        let kind = object.types.as_ref().map_or("", |types| &types.kind);
        let live = caches
            .children
            .seen(kind, &name.namespace, &object.name_any());
        (object, live)
    };
    Active {
        spec,
        settings: settings(spec, &context.defaults),
        objects: objects.into_iter().map(seen).collect(),
        children: caches
            .children
            .of(&name.namespace, spec.uid().as_deref().unwrap_or_default()),
        refused: match canary {
            // Pods that are not injected are not refused for it.
            Canary::Unreachable => Vec::new(),
            _ => caches.refusals.of(name, now),
        },
        usage: caches.usage.with(name, |usage| usage.summary(pods, now)),
        canary,
        allow_pod_patch: context.allow_pod_patch,
    }
}

fn canary(seen: &Seen) -> Canary {
    match seen {
        Seen::NotYet => Canary::Pending,
        Seen::Injected => Canary::Works,
        Seen::WebhookUnreachable => Canary::Unreachable,
        Seen::Unknown(why) => Canary::Refused(why.clone()),
    }
}
