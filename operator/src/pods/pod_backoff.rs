//! Backoff for pods whose changes the API server refuses, separately for each pod.

use jiff::{SignedDuration, Timestamp};
use std::collections::HashMap;

const DELAY_MIN: SignedDuration = SignedDuration::from_secs(15);
const DELAY_MAX: SignedDuration = SignedDuration::from_mins(10);

/// Refused pods by uid: end of the wait, and number of refusals.
#[derive(Debug, Default)]
pub struct PodBackoff(HashMap<Box<str>, (Timestamp, u32)>);

impl PodBackoff {
    /// A change of this pod was refused.
    pub fn record_refusal(&mut self, uid: &str, now: Timestamp) {
        let (until, times) = self.0.entry(uid.into()).or_insert((now, 0));
        let wait = (DELAY_MIN * (1 << (*times).min(8))).min(DELAY_MAX);
        *until = now + wait;
        *times = times.saturating_add(1);
    }

    /// A change of this pod was accepted.
    pub fn record_success(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| keep(uid));
    }

    /// Whether a change of this pod may be tried.
    pub fn allows(&self, uid: &str, now: Timestamp) -> bool {
        self.0.get(uid).is_none_or(|(until, _)| *until <= now)
    }

    /// Whether no pod is refused.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The earliest time of the next try.
    pub fn next_at(&self) -> Option<Timestamp> {
        self.0.values().map(|(until, _)| *until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::at;

    #[test]
    fn delays_grow_to_ten_minutes_per_pod() {
        let mut backoff = PodBackoff::default();
        let mut now = 0;
        for wait in [15, 30, 60, 120, 240, 480, 600, 600] {
            backoff.record_refusal("a", at(now));
            assert!(!backoff.allows("a", at(now + wait - 1)) && backoff.allows("b", at(now)));
            now += wait;
            assert!(backoff.allows("a", at(now)));
        }
        backoff.record_success("a");
        assert!(backoff.is_empty());
    }
}
