//! What the operator says of a pool: a pure function from what was seen (pool, pods, sidecars' answers, canary, breaker) to its
//! status, and the rule when a status is worth a write. Reasons of conditions stand in one table (`reason`).
//! Nothing here reads a cluster or a clock.

mod conditions;
mod counts;
mod paused;
mod reason;
mod tiers;
mod write;

pub use conditions::{
    ACCEPTED, INJECTION_READY, READY, SHARED_TIERS_READY, SIDECARS_READY, condition,
};
pub use paused::cause as cause_in_words;
pub use reason::Reason;
pub use write::{Write, Writes, due};

use crate::api::{Duration, KVCachePool, KVCachePoolStatus, Problem};
use crate::pods::{Breaker, Faults, HitRate, Pod, Setback, Summary, WINDOW_MINUTES};
use jiff::Timestamp;
use std::sync::Arc;

/// What the leader knows of the injection path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Canary {
    /// The first dry run is not back yet.
    #[default]
    Pending,
    /// A dry run came back with the sidecar in it.
    Works,
    /// It came back without.
    Unreachable,
    /// The API server refused it, which says nothing of the webhook.
    Refused(String),
}

/// All that was seen of one pool.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// The pool as it is stored.
    pub pool: &'a KVCachePool,
    /// What is wrong with its spec.
    pub problems: &'a [Problem],
    /// Pods with its label.
    pub pods: &'a [Arc<Pod>],
    /// Which of their sidecars fail.
    pub faults: &'a Faults,
    /// Hash of the settings that a new pod gets; empty while the spec is not accepted.
    pub hash: &'a str,
    /// What the sidecars said.
    pub usage: &'a Summary,
    /// The injection path.
    pub canary: &'a Canary,
    /// The pool's breaker.
    pub breaker: &'a Breaker,
    /// What keeps running pods from being updated.
    pub setback: Option<&'a Setback>,
    /// An object of the pool that could not be applied: by which name, and why.
    pub unapplied: Option<&'a (Reason, String)>,
}

/// The status of a pool. `previous` is what was written last; times of conditions that did not turn are kept from it, and until
/// a new leader has asked sidecars and canary itself, what the last one was told.
#[must_use]
pub fn status(seen: &Seen<'_>, previous: &KVCachePoolStatus, now: Timestamp) -> KVCachePoolStatus {
    let counts = counts::count(seen);
    let hit_rate_percent = hit_rate(seen, previous);
    let mut next = KVCachePoolStatus {
        observed_generation: seen.pool.metadata.generation,
        conditions: conditions::conditions(seen, &counts, &previous.conditions, now),
        injection_paused: paused::injection_paused(seen.breaker),
        skipped: counts.skipped,
        tiers: tiers::tiers(seen, &previous.tiers),
        hit_rate_percent,
        hit_rate_window: hit_rate_percent.map(|_| {
            Duration(format!(
                "{}m",
                seen.usage.window_minutes.max(WINDOW_MINUTES)
            ))
        }),
        observed_pods: Some(i64::from(seen.usage.observed)),
        versions: counts.versions,
        pods: counts.pods,
    };
    if !seen.usage.known
        && previous.observed_pods.is_some()
        && seen.pods.iter().any(|p| p.address().is_some())
    {
        next.pods.attached = previous.pods.attached.min(next.pods.injected);
        next.tiers = previous.tiers.clone();
        next.observed_pods = previous.observed_pods;
        next.versions = previous.versions.clone();
    }
    next
}

/// The status of an object that cannot be read.
#[must_use]
pub fn malformed(
    error: &str,
    generation: Option<i64>,
    previous: &KVCachePoolStatus,
    now: Timestamp,
) -> KVCachePoolStatus {
    KVCachePoolStatus {
        observed_generation: generation,
        conditions: conditions::malformed(error, generation, &previous.conditions, now),
        ..KVCachePoolStatus::default()
    }
}

/// No rate is known until sidecars were asked twice; the last one stands until then, unless nobody can be asked.
fn hit_rate(seen: &Seen<'_>, previous: &KVCachePoolStatus) -> Option<i64> {
    match seen.usage.hit_rate {
        HitRate::Percent(percent) => Some(i64::from(percent)),
        HitRate::Idle => None,
        HitRate::Unknown => previous.hit_rate_percent.filter(|_| {
            seen.usage.unreachable == 0 && seen.pods.iter().any(|p| p.address().is_some())
        }),
    }
}

#[cfg(test)]
mod tests;
