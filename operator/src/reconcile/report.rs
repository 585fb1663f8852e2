//! The events of a reconcile pass, in words: pure.

use super::error::ApplyError;
use super::events::Weight::{self, Normal, Warning, WarningOnce};
use super::events::{Event, of_owner, owner};
use super::step::Step;
use crate::api::KVCachePoolStatus;
use crate::pods::{Alone, Faults, Owner, Pod, Setback, Turn};
use crate::status::{READY, Reason, cause_in_words, condition};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use std::sync::Arc;

/// Why the operator does not update pods that it may not patch.
pub const NOT_ALLOWED: &str = "updateStrategy is InPlace and the operator may not patch pods: set the chart value allowPodPatch to true";

/// Pods older than this are not reported: a new leader does not repeat the events of the last one.
const NEWS: SignedDuration = SignedDuration::from_mins(10);

/// The same event on the controller of a pod and on its pool.
fn on_both(
    pod: &Pod,
    pool: &ObjectReference,
    weight: Weight,
    action: &'static str,
    reason: &str,
    note: &str,
) -> [Event; 2] {
    [&owner(pod), pool].map(|about| Event::new(about, weight, action, reason, note))
}

/// Conditions of a status that changed.
pub fn conditions(
    pool: &ObjectReference,
    before: &KVCachePoolStatus,
    next: &KVCachePoolStatus,
) -> Vec<Event> {
    let mut events = Vec::new();
    for turned in next.conditions.iter().filter(|c| c.type_ != READY) {
        let old = condition(&before.conditions, &turned.type_);
        let same = old.is_some_and(|o| o.status == turned.status && o.reason == turned.reason);
        // At first sight only what is wrong is worth a word.
        if same || (old.is_none() && turned.status != "False") {
            continue;
        }
        let weight = match &*turned.status {
            "False" => Warning,
            _ => Normal,
        };
        let gap = if turned.message.is_empty() { "" } else { ": " };
        let note = format!(
            "{} is {}{gap}{}",
            turned.type_, turned.status, turned.message
        );
        events.push(Event::new(pool, weight, "Observe", &turned.reason, note));
    }
    events
}

/// An object that could not be applied.
pub fn not_applied(pool: &ObjectReference, e: &ApplyError) -> Event {
    let reason = e.reason().name();
    Event::new(pool, WarningOnce, "Apply", reason, e.to_string())
}

/// An object that somebody had changed.
pub fn set_right(pool: &ObjectReference, object: &str) -> Event {
    let note = format!("{object} was changed by somebody and was set right");
    let reason = Reason::SetRight.name();
    Event::new(pool, WarningOnce, "Apply", reason, note)
}

/// A pause of injection that begins or ends: a counter, and events on the owner and on the pool.
pub fn turn(turn: &Turn, namespace: &str, pool: &ObjectReference) -> Vec<Step> {
    let mut steps = Vec::new();
    let (of, weight, reason, note) = match turn {
        Turn::Paused(of, cause) => {
            let reason = cause.reason.to_string();
            steps.push(Step::Count("injection_pauses_total", reason));
            let note = format!(
                "new pods of {} start without a sidecar: {}",
                name(of.as_ref()),
                cause_in_words(cause)
            );
            (of, Warning, Reason::PodsHeldBack, note)
        }
        Turn::Resumed(of) => {
            let note = format!("new pods of {} get a sidecar again", name(of.as_ref()));
            (of, Normal, Reason::InjectionResumed, note)
        }
        Turn::Cleared(of, cause) => {
            let note = format!(
                "pods of {} fail without a sidecar too, so they are injected again: {}",
                name(of.as_ref()),
                cause_in_words(cause)
            );
            (of, Normal, Reason::NotOurs, note)
        }
    };
    let of = of.as_ref().map(|o| of_owner(o, namespace));
    let event = |to| Step::Event(Event::new(to, weight, "Inject", reason.name(), &note));
    steps.extend(of.iter().chain([pool]).map(event));
    steps
}

fn name(owner: Option<&Owner>) -> String {
    owner.map_or_else(
        || "the pool".to_owned(),
        |o| format!("{} {}", o.kind, o.name),
    )
}

/// Young pods that have no sidecar, one that does not start or one that lacks something.
pub fn pods(
    pods: &[Arc<Pod>],
    missed: &[&Arc<Pod>],
    faults: &Faults,
    pool: &ObjectReference,
    now: Timestamp,
) -> Vec<Event> {
    let mut events = Vec::new();
    for pod in pods.iter().filter(|pod| is_news(pod, now)) {
        let said = refusal(pod)
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
                missed.iter().find(|m| m.uid == pod.uid)?;
                let note = format!(
                    "pod {} started without a cache: the injection webhook was not asked",
                    pod.name
                );
                Some((Reason::Missed.name(), note))
            });
        if let Some((reason, note)) = said {
            let both = on_both(pod, pool, WarningOnce, "Inject", reason, &note);
            events.extend(both);
        }
    }
    events
}

/// Young pods that were refused because their pool does not exist, on their controllers: no pool speaks for them.
pub fn pods_without_pool(pods: &[Arc<Pod>], now: Timestamp) -> Vec<Event> {
    let refused = pods.iter().filter(|pod| is_news(pod, now));
    let event = |pod: &Arc<Pod>| {
        let (reason, note) = refusal(pod)?;
        let owner = owner(pod);
        Some(Event::new(&owner, WarningOnce, "Inject", reason, note))
    };
    refused.filter_map(event).collect()
}

fn is_news(pod: &Pod, now: Timestamp) -> bool {
    pod.is_active() && now.duration_since(pod.created) < NEWS
}

/// Reason and note of a pod that has its sidecar, but not all that the pool wants of it.
fn shortfall(pod: &Pod) -> Option<(&str, String)> {
    let message = pod.injection.as_ref().map_or("", |i| &i.message);
    let note = format!("pod {} has its sidecar: {message}", pod.name);
    Some((pod.shortfall()?, note))
}

/// Reason and note of a pod that the webhook left as it is.
fn refusal(pod: &Pod) -> Option<(&str, String)> {
    let message = pod.injection.as_ref().map_or("", |i| &i.message);
    let note = format!("pod {} starts without a cache: {message}", pod.name);
    Some((pod.refusal()?, note))
}

/// A hung pod that was evicted or deleted.
pub fn replaced(pod: &Pod, how: &str, pool: &ObjectReference) -> [Event; 2] {
    let note = format!("pod {} hung and was {how}", pod.name);
    let reason = Reason::PodReplaced.name();
    on_both(pod, pool, Normal, "Replace", reason, &note)
}

/// A hung pod that was not replaced.
pub fn not_replaced(pod: &Pod, why: &str, pool: &ObjectReference) -> [Event; 2] {
    let note = format!("pod {} hangs and is not replaced: {why}", pod.name);
    let reason = Reason::PodNotReplaced.name();
    on_both(pod, pool, WarningOnce, "Replace", reason, &note)
}

/// A missed pod that was evicted.
pub fn evicted(pod: &Pod, pool: &ObjectReference) -> [Event; 2] {
    let note = format!(
        "pod {} had no sidecar because the webhook was not asked when it was made",
        pod.name
    );
    let reason = Reason::Evicted.name();
    on_both(pod, pool, Normal, "Evict", reason, &note)
}

/// A missed pod whose eviction the API server refused.
pub fn eviction_refused(pod: &Pod, e: &kube::Error, pool: &ObjectReference) -> Event {
    let note = format!(
        "pod {} has no sidecar and cannot be evicted now: {e}",
        pod.name
    );
    let reason = Reason::EvictionRefused.name();
    Event::new(pool, WarningOnce, "Evict", reason, note)
}

/// A missed pod that is not evicted.
pub fn left_alone(pod: &Pod, why: &Alone) -> Event {
    let name = &pod.name;
    let kind = pod.owner.as_ref().map_or("", |o| &*o.kind);
    let (reason, note) = match why {
        Alone::Futile => (
            Reason::EvictionFutile,
            format!(
                "pod {name} has no sidecar, nor has one that took the place of an evicted one; its like are left alone"
            ),
        ),
        Alone::NotReplaced => (
            Reason::EvictionFutile,
            format!(
                "pod {name} has no sidecar; no pod took the place of an evicted one within ten minutes, so its like are left alone"
            ),
        ),
        Alone::Kind => (
            Reason::NotEvicted,
            format!("pod {name} has no sidecar; a pod of a {kind} is not evicted"),
        ),
        Alone::Template(why) => (
            Reason::NotEvicted,
            format!("pod {name} has no sidecar and is not evicted: {why}"),
        ),
    };
    Event::new(&owner(pod), WarningOnce, "Evict", reason.name(), note)
}

/// Running pods that the operator may not patch.
pub fn update_not_allowed(pool: &ObjectReference) -> Event {
    let reason = Reason::PodPatchNotAllowed.name();
    Event::new(pool, WarningOnce, "Update", reason, NOT_ALLOWED)
}

/// A running pod that the API server did not let us patch.
pub fn not_patched(setback: &Setback, pool: &ObjectReference) -> Event {
    let (reason, note) = match setback {
        Setback::NotAllowed(note) => (Reason::PodPatchNotAllowed, note),
        Setback::Refused(note) | Setback::RolledBack(note) => (Reason::PodPatchFailed, note),
    };
    Event::new(pool, WarningOnce, "Update", reason.name(), note)
}

/// Running pods that got another image; `None`: there are none.
pub fn exchanged(pods: &[Arc<Pod>], image: &str, pool: &ObjectReference) -> Option<Event> {
    let first = pods.first()?;
    let others = match pods.len() {
        1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    let note = format!(
        "the sidecar of pod {}{others} is given image {image}",
        first.name
    );
    let reason = Reason::UpdatingInPlace.name();
    Some(Event::new(pool, Normal, "Update", reason, note))
}

/// A running pod that has its old image again.
pub fn rolled_back(pod: &Pod, note: &str, pool: &ObjectReference) -> [Event; 2] {
    let reason = Reason::UpdateRolledBack.name();
    on_both(pod, pool, Warning, "Update", reason, note)
}
