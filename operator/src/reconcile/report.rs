//! Builds the events of a reconcile pass. Pure.

use super::error::ApplyError;
use super::events::Severity::{self, Normal, Warning, WarningHourly};
use super::events::{Event, owner, owner_reference};
use super::step::Step;
use crate::api::KVCachePoolStatus;
use crate::names;
use crate::pods::{BreakerChange, Faults, Owner, Pod, SkipReason, UpdateBlocker};
use crate::status::{READY, Reason, cause_message, condition};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use std::collections::HashSet;
use std::sync::Arc;

/// Note of the event, and message of the condition, if the operator may not patch pods.
pub const NOT_ALLOWED: &str = "updateStrategy is InPlace, but the operator may not patch pods; set the chart value allowPodPatch to true";

/// Pods older than this are not reported, so that a new leader does not repeat the events of the previous one.
const RECENT: SignedDuration = SignedDuration::from_mins(10);

/// The same event on the controller of a pod and on its pool.
fn on_both(
    pod: &Pod,
    pool: &ObjectReference,
    severity: Severity,
    action: &'static str,
    reason: &str,
    note: &str,
) -> [Event; 2] {
    [&owner(pod), pool].map(|about| Event::new(about, severity, action, reason, note))
}

/// Events about changed conditions.
pub fn conditions(
    pool: &ObjectReference,
    before: &KVCachePoolStatus,
    next: &KVCachePoolStatus,
) -> Vec<Event> {
    let mut events = Vec::new();
    for changed in next.conditions.iter().filter(|c| c.type_ != READY) {
        let old = condition(&before.conditions, &changed.type_);
        let same = old.is_some_and(|o| o.status == changed.status && o.reason == changed.reason);
        // A new condition is reported only if it is False.
        if same || (old.is_none() && changed.status != "False") {
            continue;
        }
        let severity = match &*changed.status {
            "False" => Warning,
            _ => Normal,
        };
        let gap = if changed.message.is_empty() { "" } else { ": " };
        let note = format!(
            "{} is {}{gap}{}",
            changed.type_, changed.status, changed.message
        );
        events.push(Event::new(pool, severity, "Observe", &changed.reason, note));
    }
    events
}

pub fn not_applied(pool: &ObjectReference, e: &ApplyError) -> Event {
    let reason = e.reason().name();
    Event::new(pool, WarningHourly, "Apply", reason, e.to_string())
}

/// Event about a deleted pool whose finalizer cannot be removed.
pub fn not_released(pool: &ObjectReference, e: &kube::Error) -> Event {
    let note = format!(
        "the finalizer {} of the deleted pool cannot be removed: {e}. If the chart value allowPurge was withdrawn, grant it again, or remove the finalizer with kubectl",
        names::PURGE
    );
    Event::new(
        pool,
        WarningHourly,
        "Purge",
        Reason::ApplyFailed.name(),
        note,
    )
}

/// Event about an object that another writer had changed.
pub fn reverted(pool: &ObjectReference, object: &str) -> Event {
    let note = format!("{object} was changed by another client; the change was reverted");
    let reason = Reason::ChangeReverted.name();
    Event::new(pool, WarningHourly, "Apply", reason, note)
}

/// Steps after a pause of injection has started or ended: a counter, and events on the owner and on the pool.
pub fn breaker_change(
    change: &BreakerChange,
    namespace: &str,
    pool: &ObjectReference,
) -> Vec<Step> {
    let mut steps = Vec::new();
    let (owner, severity, reason, note) = match change {
        BreakerChange::Paused(owner, cause) => {
            let reason = cause.reason.to_string();
            steps.push(Step::Count("injection_pauses_total", reason));
            let note = format!(
                "new pods of {} start without a sidecar: {}",
                name(owner.as_ref()),
                cause_message(cause)
            );
            (owner, Warning, Reason::PodsHeldBack, note)
        }
        BreakerChange::Resumed(owner) => {
            let note = format!("new pods of {} get a sidecar again", name(owner.as_ref()));
            (owner, Normal, Reason::InjectionResumed, note)
        }
        BreakerChange::Cleared(owner, cause) => {
            let note = format!(
                "pods of {} fail without a sidecar too, so injection continues: {}",
                name(owner.as_ref()),
                cause_message(cause)
            );
            (owner, Normal, Reason::NotCausedByInjection, note)
        }
    };
    let reference = owner.as_ref().map(|o| owner_reference(o, namespace));
    let event = |about| Step::Event(Event::new(about, severity, "Inject", reason.name(), &note));
    steps.extend(reference.iter().chain([pool]).map(event));
    steps
}

fn name(owner: Option<&Owner>) -> String {
    owner.map_or_else(
        || "the pool".to_owned(),
        |o| format!("{} {}", o.kind, o.name),
    )
}

/// Events about recent pods without a sidecar, with a sidecar that does not start, or with a shortfall.
pub fn pods(
    pods: &[Arc<Pod>],
    missed: &[&Arc<Pod>],
    faults: &Faults,
    pool: &ObjectReference,
    now: Timestamp,
) -> Vec<Event> {
    let missed: HashSet<&str> = missed.iter().map(|pod| &*pod.uid).collect();
    let mut events = Vec::new();
    for pod in pods.iter().filter(|pod| is_recent(pod, now)) {
        let found = refusal(pod)
            .or_else(|| {
                let fault = faults.of(pod)?;
                let note = format!(
                    "the sidecar of pod {} does not start: {}",
                    pod.name, fault.message
                );
                Some((fault.reason, note))
            })
            .or_else(|| shortfall(pod))
            .or_else(|| {
                missed.get(&*pod.uid)?;
                let note = format!(
                    "pod {} started without a cache, because the injection webhook was not called; create the pod again",
                    pod.name
                );
                Some((Reason::Missed.name(), note))
            });
        if let Some((reason, note)) = found {
            let both = on_both(pod, pool, WarningHourly, "Inject", reason, &note);
            events.extend(both);
        }
    }
    events
}

/// Events about recent pods whose pool does not exist. They are attached to the pods' controllers.
pub fn pods_without_pool(pods: &[Arc<Pod>], now: Timestamp) -> Vec<Event> {
    let refused = pods.iter().filter(|pod| is_recent(pod, now));
    let event = |pod: &Arc<Pod>| {
        let (reason, note) = refusal(pod)?;
        let owner = owner(pod);
        Some(Event::new(&owner, WarningHourly, "Inject", reason, note))
    };
    refused.filter_map(event).collect()
}

fn is_recent(pod: &Pod, now: Timestamp) -> bool {
    pod.is_active() && now.duration_since(pod.created) < RECENT
}

/// Reason and note about an injected pod with a shortfall.
fn shortfall(pod: &Pod) -> Option<(&str, String)> {
    let message = pod.injection.as_ref().map_or("", |i| &i.message);
    let note = format!("pod {} has a sidecar, but {message}", pod.name);
    Some((pod.shortfall()?, note))
}

/// Reason and note about a pod that the webhook did not inject.
fn refusal(pod: &Pod) -> Option<(&str, String)> {
    let message = pod.injection.as_ref().map_or("", |i| &i.message);
    let note = format!("pod {} starts without a cache: {message}", pod.name);
    Some((pod.refusal()?, note))
}

/// Events about a hung pod that was evicted or deleted.
pub fn replaced(pod: &Pod, how: &str, pool: &ObjectReference) -> [Event; 2] {
    let note = format!(
        "pod {} hung because of injection and was {how}; its owner creates one without a sidecar",
        pod.name
    );
    let reason = Reason::PodReplaced.name();
    on_both(pod, pool, Normal, "Replace", reason, &note)
}

/// Events about a hung pod that was not replaced.
pub fn not_replaced(pod: &Pod, why: &str, pool: &ObjectReference) -> [Event; 2] {
    let note = format!(
        "pod {} hangs because of injection and was not replaced, so delete it yourself: {why}",
        pod.name
    );
    let reason = Reason::PodNotReplaced.name();
    on_both(pod, pool, WarningHourly, "Replace", reason, &note)
}

/// Events about an evicted missed pod.
pub fn evicted(pod: &Pod, pool: &ObjectReference) -> [Event; 2] {
    let note = format!(
        "pod {} was evicted: it had no sidecar, because the webhook was not called when the pod was created",
        pod.name
    );
    let reason = Reason::Evicted.name();
    on_both(pod, pool, Normal, "Evict", reason, &note)
}

/// Event about a missed pod whose eviction the API server refused.
pub fn eviction_refused(pod: &Pod, e: &kube::Error, pool: &ObjectReference) -> Event {
    let note = format!(
        "pod {} has no sidecar and cannot be evicted now: {e}",
        pod.name
    );
    let reason = Reason::EvictionRefused.name();
    Event::new(pool, WarningHourly, "Evict", reason, note)
}

/// Event about a missed pod that is not evicted.
pub fn eviction_skipped(pod: &Pod, why: &SkipReason) -> Event {
    let name = &pod.name;
    let kind = pod.owner.as_ref().map_or("", |o| &*o.kind);
    let (reason, note) = match why {
        SkipReason::Futile => (
            Reason::EvictionFutile,
            format!(
                "pod {name} has no sidecar and is not evicted: the replacement of an evicted pod of the same controller has none either; check whether the webhook's namespaceSelector excludes the namespace"
            ),
        ),
        SkipReason::NotReplaced => (
            Reason::EvictionFutile,
            format!(
                "pod {name} has no sidecar and is not evicted: an evicted pod of the same controller was not replaced within ten minutes"
            ),
        ),
        SkipReason::Kind => (
            Reason::NotEvicted,
            format!(
                "pod {name} has no sidecar and is not evicted: its controller is a {kind}, and only pods of a ReplicaSet, StatefulSet or DaemonSet are evicted"
            ),
        ),
        SkipReason::Objection(why) => (
            Reason::NotEvicted,
            format!("pod {name} has no sidecar and is not evicted: {why}"),
        ),
    };
    Event::new(&owner(pod), WarningHourly, "Evict", reason.name(), note)
}

pub fn update_not_allowed(pool: &ObjectReference) -> Event {
    let reason = Reason::PodPatchNotAllowed.name();
    Event::new(pool, WarningHourly, "Update", reason, NOT_ALLOWED)
}

/// Event about a running pod whose patch the API server refused.
pub fn not_patched(blocker: &UpdateBlocker, pool: &ObjectReference) -> Event {
    let (reason, note) = match blocker {
        UpdateBlocker::NotAllowed(note) => (Reason::PodPatchNotAllowed, note),
        UpdateBlocker::NotResized(note) => (Reason::MemoryNotResized, note),
        UpdateBlocker::Refused(note) | UpdateBlocker::RolledBack(note) => {
            (Reason::PodPatchFailed, note)
        }
    };
    Event::new(pool, WarningHourly, "Update", reason.name(), note)
}

/// Event about running pods whose image was changed. `None` without pods.
pub fn image_changed(pods: &[Arc<Pod>], image: &str, pool: &ObjectReference) -> Option<Event> {
    let note = format!(
        "the image of the sidecar of pod {} was changed to {image}",
        example(pods)?
    );
    let reason = Reason::UpdatingInPlace.name();
    Some(Event::new(pool, Normal, "Update", reason, note))
}

/// Name of the first pod, and how many others there are.
fn example(pods: &[Arc<Pod>]) -> Option<String> {
    let first = pods.first()?;
    Some(match pods.len() {
        1 => first.name.to_string(),
        n => format!("{} and {} more", first.name, n - 1),
    })
}

/// Event about running pods whose memory tier has another size in the config. `None` without pods.
pub fn size_changed(pods: &[Arc<Pod>], size: &str, pool: &ObjectReference) -> Option<Event> {
    let note = format!(
        "the memory tier of pod {} is being changed to {size}",
        example(pods)?
    );
    let reason = Reason::MemoryResizing.name();
    Some(Event::new(pool, Normal, "Update", reason, note))
}

/// Events about a running pod that was rolled back.
pub fn rolled_back(pod: &Pod, note: &str, pool: &ObjectReference) -> [Event; 2] {
    let reason = Reason::UpdateRolledBack.name();
    on_both(pod, pool, Warning, "Update", reason, note)
}
