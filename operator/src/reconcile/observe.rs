//! The snapshot of a pool that one reconcile pass works with. It comes from the caches and, for a deleted pool, from its purge Job.

use super::caches::{Caches, Stored};
use super::children::Child;
use super::context::Context;
use super::error::ApplyError;
use super::purge::{Purge, purge};
use crate::api::{KVCachePool, Problem};
use crate::canary::CanaryResult;
use crate::desired::{desired, settings};
use crate::inject::Settings;
use crate::pods::{Pod, PoolRef, Refused, Role, Server, Summary};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{DynamicObject, TypeMeta};
use kube::{Resource, ResourceExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub struct Observed<'a> {
    pub now: Timestamp,
    /// The same time on the monotonic clock.
    pub clock: Instant,
    pub name: PoolRef,
    /// The pool, for events.
    pub about: ObjectReference,
    pub stored: &'a Stored,
    /// Pods with the pool's label.
    pub pods: Vec<Arc<Pod>>,
    pub pool: Pool<'a>,
    /// Minimum time between two status writes that only change counts.
    pub status_interval: SignedDuration,
    /// The outcome of the first steps of this pass. `None` before they were executed.
    pub outcome: Option<Outcome>,
}

/// The state of the pool itself.
pub enum Pool<'a> {
    Active(Box<Active<'a>>),
    /// The object cannot be deserialized, with this error.
    Malformed(&'a str),
    /// The pool is being deleted, and the operator's finalizer blocks the deletion.
    Deleted(Purge),
}

/// A pool that is valid JSON for its type and is not being deleted.
pub struct Active<'a> {
    pub spec: &'a KVCachePool,
    /// The settings of its spec, or all violations.
    pub settings: Result<Settings, Vec<Problem>>,
    /// The desired objects, each with its state in the watch's cache (`None` if its kind is not watched). Empty if the spec is not
    /// accepted.
    pub objects: Vec<(DynamicObject, Option<Option<Child>>)>,
    /// Existing objects that the pool owns.
    pub children: Vec<(TypeMeta, String)>,
    /// Pods of the pool's managed servers.
    pub servers: Vec<Arc<Server>>,
    /// Owners whose pods the API server refused recently.
    pub refused: Vec<Refused>,
    /// Workloads of the managed servers whose pods the API server refused recently.
    pub refused_servers: Vec<Refused>,
    pub usage: Summary,
    pub canary: CanaryResult,
    pub allow_pod_patch: bool,
}

/// The outcome of executed steps.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Time until the next pass at the latest. `None` if nothing requires one.
    pub requeue: Option<Duration>,
    /// Why an object was not applied.
    pub unapplied: Option<ApplyError>,
    /// Why the Job of a purge was not created.
    pub job_refused: Option<kube::Error>,
}

impl Outcome {
    /// Requires the next pass within this time.
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
    let canary = context.canary.borrow().clone();
    let objects = desired(spec, &context.defaults).unwrap_or_default();
    let with_live = |object: DynamicObject| {
        let kind = object.types.as_ref().map_or("", |types| &types.kind);
        let live = caches
            .children
            .find(kind, &name.namespace, &object.name_any());
        (object, live)
    };
    Active {
        spec,
        settings: settings(spec, &context.defaults),
        objects: objects.into_iter().map(with_live).collect(),
        children: caches
            .children
            .of(&name.namespace, spec.uid().as_deref().unwrap_or_default()),
        servers: caches.servers.of(name),
        refused: match canary {
            // Injection cannot be why pods are refused while no pod is injected.
            CanaryResult::WebhookUnreachable => Vec::new(),
            _ => caches.refusals.of(name, Role::Engine, now),
        },
        refused_servers: caches.refusals.of(name, Role::Server, now),
        usage: caches.usage.with(name, |usage| usage.summary(pods, now)),
        canary,
        allow_pod_patch: context.allow_pod_patch,
    }
}
