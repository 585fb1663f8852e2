//! Missed pods are evicted one at a time, where the pool asks for it (`onMissed: Evict`).

use super::events::{Weight, owner};
use super::pool::Look;
use super::term::State;
use crate::api::{Mode, OnMissed};
use crate::pods::{Alone, Evictions, Missed, Pod, missed, template_pool};
use crate::status::{Canary, Reason};
use k8s_openapi::api::core::v1::ObjectReference;
use std::sync::Arc;
use std::time::Duration;

/// The next look while a missed pod is being replaced.
const EVICTING: Duration = Duration::from_secs(15);

impl Look<'_> {
    /// The next step with missed pods, where the pool asks for it and a new pod would be injected.
    pub(super) async fn evict(
        &self,
        pods: &[Arc<Pod>],
        about: &ObjectReference,
        canary: &Canary,
        injects: bool,
        state: &mut State,
    ) -> Option<Duration> {
        if *canary == Canary::Unreachable {
            // What was in vain meanwhile need not be afterwards.
            state.evictions = Evictions::default();
        }
        let injection = &self.pool.spec.injection;
        if !injects || injection.mode == Mode::Disabled || injection.on_missed == OnMissed::Report {
            return None;
        }
        missed(pods, self.created()).next()?;
        let mut next = state.evictions.next(pods, self.created(), self.now);
        if let Missed::Evict(pod) = &next
            && let Some(why) = self.label_came_later(pod).await
        {
            state.evictions.leave(pod, Alone::Template(why), self.now);
            next = Missed::Wait;
        }
        for (pod, why) in state.evictions.alone(pods, self.created()) {
            self.tell_left_alone(&pod, &why).await;
        }
        let Missed::Evict(pod) = next else {
            return Some(EVICTING);
        };
        state.evictions.begin(&pod, pods, self.now);
        let events = &self.term.events;
        match self.ask_to_evict(&pod).await {
            Ok(()) => {
                self.term.metrics.add("evictions_total", &["evicted"], 1);
                let note = format!(
                    "pod {} had no sidecar because the webhook was not asked when it was made",
                    pod.name
                );
                let reason = Reason::Evicted.name();
                for to in [&owner(&pod), about] {
                    events
                        .publish(to, Weight::Normal, "Evict", reason, &note)
                        .await;
                }
            }
            Err(e) => {
                state.evictions.refused();
                self.term.metrics.add("evictions_total", &["refused"], 1);
                let note = format!(
                    "pod {} has no sidecar and cannot be evicted now: {e}",
                    pod.name
                );
                let reason = Reason::EvictionRefused.name();
                events.warn_once(about, "Evict", reason, &note).await;
            }
        }
        Some(EVICTING)
    }

    /// Why a new pod of the same controller would be no better: its template does not name this pool. `None`: it does.
    async fn label_came_later(&self, pod: &Pod) -> Option<String> {
        let owner = pod.owner.as_ref()?;
        let client = self.term.client.clone();
        let (kind, name) = (&owner.kind, &owner.name);
        match template_pool(client, &owner.api_version, kind, &pod.namespace, name).await {
            Ok(Some(pool)) if *pool == *self.name.name => None,
            Ok(_) => Some(format!(
                "the template of {kind} {name} does not name the pool: a pod that takes its place would have no label"
            )),
            Err(e) => Some(format!("{kind} {name} cannot be read: {e}")),
        }
    }

    async fn tell_left_alone(&self, pod: &Pod, why: &Alone) {
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
        let events = &self.term.events;
        events
            .warn_once(&owner(pod), "Evict", reason.name(), &note)
            .await;
    }
}
