//! When to write a status: immediately for a changed condition (but not repeatedly), at most once per interval (a minute by default) for
//! counts and percents, and otherwise never.

use crate::api::{KVCachePoolStatus, PausedOwner, Size, Tier};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use std::collections::VecDeque;

/// Conditions that change this often within `CHANGES_WITHIN` are written after it has passed, with their latest state.
const CHANGES_MAX: usize = 3;
/// See `CHANGES_MAX`.
const CHANGES_WITHIN: SignedDuration = SignedDuration::from_secs(30);

/// Whether to write a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    Now,
    /// Check again after this time.
    In(SignedDuration),
    /// Nothing relevant has changed.
    No,
}

/// Times of a pool's recent status writes.
#[derive(Debug, Clone, Default)]
pub struct Writes(VecDeque<Timestamp>);

impl Writes {
    pub fn add(&mut self, at: Timestamp) {
        self.0.push_back(at);
        if self.0.len() > CHANGES_MAX {
            self.0.pop_front();
        }
    }

    fn last(&self) -> Option<Timestamp> {
        self.0.back().copied()
    }

    /// End of the time in which there have been too many writes.
    fn full(&self) -> Option<Timestamp> {
        let first = self.0.front().filter(|_| self.0.len() >= CHANGES_MAX)?;
        Some(*first + CHANGES_WITHIN)
    }
}

/// Compares a status with the last written one. `every` is the minimum time between two writes that no condition requires.
#[must_use]
pub fn due(
    written: &KVCachePoolStatus,
    next: &KVCachePoolStatus,
    writes: &Writes,
    every: SignedDuration,
    now: Timestamp,
) -> Write {
    if urgent(written, next) {
        return Write::Now;
    }
    if condition_changed(written, next) {
        return match writes.full().filter(|until| *until > now) {
            Some(until) => Write::In(until.duration_since(now)),
            None => Write::Now,
        };
    }
    if !differs(written, next) {
        return Write::No;
    }
    let since = writes.last().map_or(every, |at| now.duration_since(at));
    if since >= every {
        Write::Now
    } else {
        Write::In(every - since)
    }
}

/// Whether the status describes another spec, or webhooks wait for it.
fn urgent(a: &KVCachePoolStatus, b: &KVCachePoolStatus) -> bool {
    let paused = |s: &KVCachePoolStatus| {
        let paused = s.injection_paused.as_ref();
        let owner = |o: &PausedOwner| (o.uid.clone(), o.trial);
        paused.map(|p| {
            let owners: Vec<_> = p.owners.iter().map(owner).collect();
            (p.hash.clone(), p.trial, owners)
        })
    };
    a.observed_generation != b.observed_generation || paused(a) != paused(b)
}

/// Whether a condition has another state or reason.
fn condition_changed(a: &KVCachePoolStatus, b: &KVCachePoolStatus) -> bool {
    fn compared(c: &Condition) -> (&str, &str, &str) {
        (&c.type_, &c.status, &c.reason)
    }
    !a.conditions
        .iter()
        .map(compared)
        .eq(b.conditions.iter().map(compared))
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
    let compared = |t: &Tier| {
        (
            t.name.clone(),
            t.state,
            t.reason.clone(),
            t.capacity.clone(),
        )
    };
    if compared(a) != compared(b) {
        return true;
    }
    match (bytes(&a.used), bytes(&b.used), bytes(&b.capacity)) {
        (Some(a), Some(b), Some(capacity)) => {
            u128::from(a.abs_diff(b)) * 100 >= u128::from(capacity.max(1))
        }
        _ => a.used != b.used,
    }
}

fn bytes(quantity: &Option<Size>) -> Option<u64> {
    quantity.as_ref().and_then(|q| q.bytes().ok()).map(|b| b.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{InjectionPaused, TierState};
    use crate::pods::tests::at;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    const MINUTE: SignedDuration = SignedDuration::from_secs(60);

    fn with(percent: i64, used: &str, message: &str, state: &str) -> KVCachePoolStatus {
        KVCachePoolStatus {
            hit_rate_percent: Some(percent),
            tiers: vec![Tier {
                name: "memory".into(),
                state: TierState::Ready,
                reason: String::new(),
                used: Some(Size(used.into())),
                capacity: Some(Size("100Gi".into())),
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
    fn only_changes_of_at_least_a_percent_point_are_written() {
        let written = with(50, "10Gi", "", "True");
        let decision = |next| due(&written, &next, &Writes::default(), MINUTE, at(999));
        assert_eq!(decision(written.clone()), Write::No);
        assert_eq!(decision(with(50, "11263Mi", "", "True")), Write::No);
        assert_eq!(decision(with(50, "11Gi", "", "True")), Write::Now);
        assert_eq!(decision(with(51, "10Gi", "", "True")), Write::Now);
    }

    #[test]
    fn counts_and_messages_are_written_once_a_minute_and_conditions_at_once() {
        let written = with(50, "10Gi", "", "True");
        let decision = |next, second| due(&written, &next, &writes(&[0]), MINUTE, at(second));
        assert_eq!(
            decision(with(51, "10Gi", "", "True"), 10),
            Write::In(SignedDuration::from_secs(50))
        );
        assert_eq!(decision(with(51, "10Gi", "", "True"), 60), Write::Now);
        assert_eq!(
            decision(with(50, "10Gi", "new", "True"), 10),
            Write::In(SignedDuration::from_secs(50))
        );
        assert_eq!(decision(with(50, "10Gi", "", "False"), 10), Write::Now);
    }

    #[test]
    fn another_spec_is_observed_at_once() {
        let written = with(50, "10Gi", "", "True");
        let next = KVCachePoolStatus {
            observed_generation: Some(2),
            ..written.clone()
        };
        assert_eq!(
            due(&written, &next, &writes(&[0, 0, 0]), MINUTE, at(1)),
            Write::Now
        );
        let paused = KVCachePoolStatus {
            injection_paused: Some(InjectionPaused {
                hash: "h".into(),
                since: Time(at(1)),
                trial: false,
                failed_probes: 0,
                message: String::new(),
                owners: Vec::new(),
            }),
            ..written.clone()
        };
        assert_eq!(
            due(&written, &paused, &writes(&[0, 0, 0]), MINUTE, at(1)),
            Write::Now
        );
    }

    #[test]
    fn flapping_conditions_are_written_at_intervals() {
        let written = with(50, "10Gi", "", "True");
        let condition_changed = with(50, "10Gi", "", "False");
        let decision = |seconds: &[i64], now| {
            due(
                &written,
                &condition_changed,
                &writes(seconds),
                MINUTE,
                at(now),
            )
        };
        assert_eq!(decision(&[0, 1], 2), Write::Now);
        assert_eq!(
            decision(&[0, 1, 2], 3),
            Write::In(SignedDuration::from_secs(27))
        );
        assert_eq!(decision(&[0, 1, 2], 30), Write::Now);
        assert_eq!(
            decision(&[0, 1, 2, 30], 30),
            Write::In(SignedDuration::from_secs(1))
        );
    }

    fn writes(seconds: &[i64]) -> Writes {
        let mut writes = Writes::default();
        for second in seconds {
            writes.add(at(*second));
        }
        writes
    }
}
