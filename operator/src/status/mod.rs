//! The status of a pool: a pure function of the observed state (pool, pods, sidecars' answers, canary, breaker), and the rule when to write
//! it. The table of reasons is in `reason`. This module reads neither a cluster nor a clock.

mod conditions;
mod counts;
mod paused;
mod reason;
mod servers;
mod tiers;
mod write;

pub use conditions::{
    ACCEPTED, INJECTION_READY, READY, SHARED_TIERS_READY, SIDECARS_READY, condition,
};
pub use paused::cause as cause_message;
pub use reason::Reason;
pub use servers::is_complete;
pub use write::{Write, Writes, due};

use crate::api::{Duration, KVCachePool, KVCachePoolStatus, Problem};
use crate::canary::CanaryResult;
use crate::pods::{
    Breaker, Faults, HitRate, Pod, Refused, Resizes, Server, Summary, UpdateBlocker, WINDOW_MINUTES,
};
use jiff::Timestamp;
use std::sync::Arc;

/// The observed state of one pool.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    pub pool: &'a KVCachePool,
    /// Violations of its spec.
    pub problems: &'a [Problem],
    /// Pods with its label.
    pub pods: &'a [Arc<Pod>],
    /// Pods of its managed servers.
    pub servers: &'a [Arc<Server>],
    /// Workloads of the managed servers whose pods the API server refused recently.
    pub refused_servers: &'a [Refused],
    /// Failing sidecars of these pods.
    pub faults: &'a Faults,
    /// Hash of the settings of new pods; empty while the spec is not accepted.
    pub hash: &'a str,
    /// The sum of the sidecars' answers.
    pub usage: &'a Summary,
    pub canary: &'a CanaryResult,
    pub breaker: &'a Breaker,
    /// Why running pods are not updated, if so.
    pub blocker: Option<&'a UpdateBlocker>,
    /// Changes of the memory of running pods.
    pub resizes: &'a Resizes,
    /// An object of the pool that could not be applied: reason and message.
    pub unapplied: Option<&'a (Reason, String)>,
}

/// The status of a pool. `previous` is the last written status. Conditions that do not change keep its times. Until a new leader has
/// queried sidecars and run its canary, their results are kept from it too.
#[must_use]
pub fn status(
    observed: &Observation<'_>,
    previous: &KVCachePoolStatus,
    now: Timestamp,
) -> KVCachePoolStatus {
    let counts = counts::count(observed);
    let hit_rate_percent = hit_rate(observed, previous);
    let mut next = KVCachePoolStatus {
        observed_generation: observed.pool.metadata.generation,
        conditions: conditions::conditions(observed, &counts, &previous.conditions, now),
        injection_paused: paused::injection_paused(observed.breaker),
        skipped: counts.skipped,
        managed_servers: servers::count(observed),
        tiers: tiers::tiers(observed, &previous.tiers),
        hit_rate_percent,
        hit_rate_window: hit_rate_percent.map(|_| Duration(format!("{WINDOW_MINUTES}m"))),
        observed_pods: Some(i64::from(observed.usage.observed)),
        versions: counts.versions,
        pods: counts.pods,
    };
    if !observed.usage.known
        && previous.observed_pods.is_some()
        && observed.pods.iter().any(|p| p.address().is_some())
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

/// The rate is unknown until sidecars were queried twice. The previous one is kept until then, unless no sidecar can be queried.
fn hit_rate(observed: &Observation<'_>, previous: &KVCachePoolStatus) -> Option<i64> {
    match observed.usage.hit_rate {
        HitRate::Percent(percent) => Some(i64::from(percent)),
        HitRate::Idle => None,
        HitRate::Unknown => previous.hit_rate_percent.filter(|_| {
            observed.usage.unreachable == 0 && observed.pods.iter().any(|p| p.address().is_some())
        }),
    }
}

#[cfg(test)]
mod tests;
