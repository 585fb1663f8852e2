//! Hung pods that the operator replaces, so that their owners create pods that injection leaves alone.

use super::super::evidence::Kind;
use super::super::pod::Pod;
use super::owners::{by_owner, owner_uid};
use super::pause::{Pause, Position, controls, whole_seconds};
use super::{Breaker, BreakerInput, PAUSE_SEEN};
use jiff::{SignedDuration, Timestamp};
use std::sync::Arc;

/// How long to wait until the replacement of a pod starts.
const REPLACEMENT_MAX: SignedDuration = SignedDuration::from_secs(60);
/// Its containers have started or failed by then.
const REPLACEMENT: SignedDuration = SignedDuration::from_secs(5);
/// Maximum pods replaced per check, each of a different owner.
const REPLACED_MAX: usize = 4;

#[derive(Debug)]
pub(super) struct Replacing {
    pod: Box<str>,
    pub(super) at: Timestamp,
}

impl Breaker {
    /// Hung pods to replace now, so that their owners create new ones: one at a time per owner, and only one in all until a pod without a
    /// sidecar has proven the cause. Pods whose vLLM runs, and pods that no controller would create again, are left alone.
    #[must_use]
    pub fn replaceable(&self, input: &BreakerInput<'_>) -> Vec<Arc<Pod>> {
        let mut found = Vec::new();
        for (uid, pods) in by_owner(input.pods)
            .iter()
            .filter(|(uid, _)| !uid.is_empty())
        {
            if found.len() == REPLACED_MAX {
                break;
            }
            if self.is_being_replaced(uid, pods, input.now)
                || !self.may_replace(uid, pods, input.now)
            {
                continue;
            }
            // These pods hang with older settings, and their replacements get the current ones. A failing vLLM is excluded, because the
            // user may be responsible.
            let stale = |p: &Pod| {
                let kind = self.hung.get(&p.uid).map(|(kind, _)| *kind);
                !self.is_current(p) && kind != Some(Kind::Engine)
            };
            let paused =
                self.pauses.get(*uid).is_some_and(Pause::holds) || self.pool_pause.is_some();
            let hung = pods.iter().find(|p| {
                p.is_active()
                    && (paused || stale(p))
                    && !p.engine_runs()
                    && self.backoff.allows(&p.uid, input.now)
                    && self.hangs(p, input.now).is_some()
            });
            found.extend(hung.map(|p| Arc::clone(p)));
        }
        found
    }

    /// Whether pods of this owner may be replaced: webhooks have seen its pause, and the cause is proven or no comparison exists yet.
    fn may_replace(&self, uid: &str, pods: &[&Arc<Pod>], now: Timestamp) -> bool {
        let Some(pause) = self.pauses.get(uid) else {
            return true;
        };
        let pause_seen = now.duration_since(pause.since) >= PAUSE_SEEN;
        match pause.position {
            Position::Paused { proven: true } => pause_seen,
            Position::Paused { proven: false } => {
                pause_seen && controls(pause, pods).next().is_none()
            }
            Position::Probing | Position::Watching(_) | Position::Cleared => false,
        }
    }

    fn is_being_replaced(&self, uid: &str, pods: &[&Arc<Pod>], now: Timestamp) -> bool {
        let Some(replacing) = self.replacing.get(uid) else {
            return false;
        };
        let start = whole_seconds(replacing.at);
        let exists = pods.iter().any(|p| p.uid == replacing.pod);
        let started = pods.iter().any(|p| {
            let old = now.duration_since(p.created) >= REPLACEMENT;
            p.created >= start && p.uid != replacing.pod && (p.has_started() || old)
        });
        (exists || !started) && now.duration_since(replacing.at) < REPLACEMENT_MAX
    }

    /// Records that a pod is about to be replaced. Called before the API request, because its response may be lost.
    pub fn record_replacing(&mut self, pod: &Pod, now: Timestamp) {
        let (uid, pod) = (owner_uid(pod).into(), pod.uid.clone());
        self.replacing.insert(uid, Replacing { pod, at: now });
    }

    /// Records that the pod was not replaced. Retries come at growing intervals.
    pub fn record_not_replaced(&mut self, pod: &Pod, now: Timestamp) {
        self.replacing.remove(owner_uid(pod));
        self.backoff.record_refusal(&pod.uid, now);
    }
}
