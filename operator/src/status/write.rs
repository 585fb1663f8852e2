//! When a status is worth a write: at once for a condition, at most once a minute for a count or a percent point, never for less.

use crate::api::{KVCachePoolStatus, Quantity, Tier};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// Least time between two writes that no condition asks for.
const WRITES: SignedDuration = SignedDuration::from_secs(60);

/// What to do with a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// Write it.
    Now,
    /// Look again after this time.
    In(SignedDuration),
    /// Nothing that matters has changed.
    No,
}

/// Compares a status with what was written last, and when.
#[must_use]
pub fn due(
    written: &KVCachePoolStatus,
    next: &KVCachePoolStatus,
    at: Option<Timestamp>,
    now: Timestamp,
) -> Write {
    if turned(written, next) {
        return Write::Now;
    }
    if !differs(written, next) {
        return Write::No;
    }
    let since = at.map_or(WRITES, |at| now.duration_since(at));
    if since >= WRITES {
        Write::Now
    } else {
        Write::In(WRITES - since)
    }
}

/// A condition turned, or has another reason, or speaks of another spec.
fn turned(a: &KVCachePoolStatus, b: &KVCachePoolStatus) -> bool {
    fn face(c: &Condition) -> (&str, &str, &str) {
        (&c.type_, &c.status, &c.reason)
    }
    a.observed_generation != b.observed_generation
        || !a
            .conditions
            .iter()
            .map(face)
            .eq(b.conditions.iter().map(face))
}

fn differs(a: &KVCachePoolStatus, b: &KVCachePoolStatus) -> bool {
    let coarse = |s: &KVCachePoolStatus| KVCachePoolStatus {
        tiers: Vec::new(),
        ..s.clone()
    };
    coarse(a) != coarse(b)
        || a.tiers.len() != b.tiers.len()
        || a.tiers
            .iter()
            .zip(&b.tiers)
            .any(|(a, b)| tier_differs(a, b))
}

fn tier_differs(a: &Tier, b: &Tier) -> bool {
    let face = |t: &Tier| {
        (
            t.name.clone(),
            t.state,
            t.reason.clone(),
            t.capacity.clone(),
        )
    };
    if face(a) != face(b) {
        return true;
    }
    match (bytes(&a.used), bytes(&b.used), bytes(&b.capacity)) {
        (Some(a), Some(b), Some(capacity)) => {
            u128::from(a.abs_diff(b)) * 100 >= u128::from(capacity.max(1))
        }
        _ => a.used != b.used,
    }
}

fn bytes(quantity: &Option<Quantity>) -> Option<u64> {
    quantity.as_ref().and_then(|q| q.bytes().ok()).map(|b| b.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::TierState;
    use crate::pods::tests::at;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    fn with(percent: i64, used: &str, message: &str, state: &str) -> KVCachePoolStatus {
        KVCachePoolStatus {
            hit_rate_percent: Some(percent),
            tiers: vec![Tier {
                name: "memory".into(),
                state: TierState::Ready,
                reason: String::new(),
                used: Some(Quantity(used.into())),
                capacity: Some(Quantity("100Gi".into())),
            }],
            conditions: vec![Condition {
                type_: "Ready".into(),
                status: state.into(),
                reason: "Ready".into(),
                message: message.into(),
                observed_generation: None,
                last_transition_time: Time(at(0)),
            }],
            ..KVCachePoolStatus::default()
        }
    }

    #[test]
    fn less_than_a_point_is_no_write_and_a_point_is() {
        let written = with(50, "10Gi", "", "True");
        let look = |next| due(&written, &next, None, at(999));
        assert_eq!(look(written.clone()), Write::No);
        assert_eq!(look(with(50, "11263Mi", "", "True")), Write::No);
        assert_eq!(look(with(50, "11Gi", "", "True")), Write::Now);
        assert_eq!(look(with(51, "10Gi", "", "True")), Write::Now);
    }

    #[test]
    fn numbers_and_messages_wait_for_their_minute_and_a_condition_does_not() {
        let written = with(50, "10Gi", "", "True");
        let look = |next, second| due(&written, &next, Some(at(0)), at(second));
        assert_eq!(
            look(with(51, "10Gi", "", "True"), 10),
            Write::In(SignedDuration::from_secs(50))
        );
        assert_eq!(look(with(51, "10Gi", "", "True"), 60), Write::Now);
        assert_eq!(
            look(with(50, "10Gi", "new", "True"), 10),
            Write::In(SignedDuration::from_secs(50))
        );
        assert_eq!(look(with(50, "10Gi", "", "False"), 10), Write::Now);
    }

    #[test]
    fn another_spec_is_observed_at_once() {
        let written = with(50, "10Gi", "", "True");
        let next = KVCachePoolStatus {
            observed_generation: Some(2),
            ..written.clone()
        };
        assert_eq!(due(&written, &next, Some(at(0)), at(1)), Write::Now);
    }
}
