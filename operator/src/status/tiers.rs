//! Tiers of the status: sums of the sidecars' reports, or why no sidecar could be queried.

use super::{Observation, Reason};
use crate::api::{KVCachePool, Size, Tier, TierState};
use crate::pods::TierUse;
use kvcachepool_protocol::config::ByteSize;
use kvcachepool_protocol::status::State;

/// All tiers, fastest first. Other names in a sidecar's report are ignored.
const TIERS: [&str; 5] = ["memory", "disk", "redis", "filesystem", "s3"];

pub fn tiers(observed: &Observation<'_>, previous: &[Tier]) -> Vec<Tier> {
    let reported = |name: &str| observed.usage.tiers.iter().find(|t| *t.name == *name);
    let before = |name: &str| previous.iter().find(|t| t.name == name);
    TIERS
        .into_iter()
        .filter(|name| is_configured(name, observed.pool) || reported(name).is_some())
        .map(|name| tier(name, observed, reported(name), before(name)))
        .collect()
}

/// Whether the pool has this tier.
pub fn is_configured(name: &str, pool: &KVCachePool) -> bool {
    let spec = &pool.spec;
    match name {
        "memory" => true,
        "disk" => spec.local.disk.is_some(),
        "redis" => spec.shared.redis.is_some(),
        "filesystem" => spec.shared.file_system.is_some(),
        "s3" => spec.shared.s3.is_some(),
        _ => false,
    }
}

fn tier(
    name: &str,
    observed: &Observation<'_>,
    reported: Option<&TierUse>,
    before: Option<&Tier>,
) -> Tier {
    let running = observed
        .pods
        .iter()
        .filter(|p| p.address().is_some())
        .count();
    let stale = observed.usage.unreachable > 0 && observed.usage.answering == 0;
    let (used, capacity) = match reported {
        Some(tier) => (size(tier.used), size(tier.capacity)),
        None if running > 0 => (
            before.and_then(|t| t.used.clone()),
            before.and_then(|t| t.capacity.clone()),
        ),
        None => (None, None),
    };
    let (state, reason) = match reported {
        _ if stale => (TierState::Stale, Reason::Unreachable.name()),
        None => (TierState::Unknown, Reason::NoSidecarYet.name()),
        Some(tier) => match tier.state {
            State::Off => (TierState::Unavailable, &*tier.reason),
            State::Degraded => (TierState::Degraded, &*tier.reason),
            State::Starting | State::Draining => (TierState::Unknown, Reason::TierStarting.name()),
            State::Ready => (TierState::Ready, ""),
        },
    };
    Tier {
        name: name.to_owned(),
        state,
        reason: reason.chars().take(63).collect(),
        used,
        capacity,
    }
}

/// Whole mebibytes. More digits would only cause more writes.
fn size(bytes: u64) -> Option<Size> {
    Some(Size::from(ByteSize(bytes >> 20 << 20)))
}
