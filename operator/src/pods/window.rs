//! Hit rate of the last ten minutes, from counters that restart with each engine process. Integers only.

use jiff::Timestamp;
use std::collections::VecDeque;

/// Length of the window in minutes.
pub const MINUTES: i64 = 10;

/// Counters of one sidecar at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// Number of the engine process.
    pub boot: u64,
    /// Seconds since its start.
    pub uptime_s: u64,
    /// Requested tokens since its start.
    pub requested: u64,
    /// Tokens of these that came from the cache.
    pub hit: u64,
}

impl Counted {
    /// Requested and hit tokens since the previous sample of the same pod. Without a previous sample, a young engine counts in full, and an
    /// old one only from its second sample on.
    fn since(&self, before: Option<&Self>) -> Option<(u64, u64)> {
        match before {
            Some(b)
                if b.boot == self.boot && b.requested <= self.requested && b.hit <= self.hit =>
            {
                Some((self.requested - b.requested, self.hit - b.hit))
            }
            Some(_) => Some((self.requested, self.hit)),
            None if self.uptime_s <= (MINUTES * 60).unsigned_abs() => {
                Some((self.requested, self.hit))
            }
            None => None,
        }
    }
}

/// Share of the requested tokens that came from the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HitRate {
    /// No sidecar has two samples yet.
    #[default]
    Unknown,
    /// No tokens were requested within the window.
    Idle,
    /// In percent, rounded down.
    Percent(u8),
}

/// Tokens by minute.
#[derive(Debug, Default)]
pub struct Window {
    /// Minute, requested, hit; the oldest first.
    minutes: VecDeque<(i64, u64, u64)>,
    counted: bool,
}

impl Window {
    /// Adds the difference between two samples of a pod.
    pub fn add(&mut self, now: Timestamp, before: Option<&Counted>, after: &Counted) {
        let Some((requested, hit)) = after.since(before) else {
            return;
        };
        self.counted = true;
        let minute = now.as_second().div_euclid(60);
        match self.minutes.back_mut() {
            Some((last, r, h)) if *last == minute => {
                *r = r.saturating_add(requested);
                *h = h.saturating_add(hit);
            }
            _ => self.minutes.push_back((minute, requested, hit)),
        }
        let first = minute - MINUTES;
        while self.minutes.front().is_some_and(|(m, ..)| *m <= first) {
            self.minutes.pop_front();
        }
    }

    /// The hit rate of the window that ends now.
    #[must_use]
    pub fn rate(&self, now: Timestamp) -> HitRate {
        if !self.counted {
            return HitRate::Unknown;
        }
        let first = now.as_second().div_euclid(60) - MINUTES;
        let (mut requested, mut hit) = (0u128, 0u128);
        for (_, r, h) in self.minutes.iter().filter(|(m, ..)| *m > first) {
            requested += u128::from(*r);
            hit += u128::from(*h);
        }
        match (hit * 100).checked_div(requested) {
            None => HitRate::Idle,
            Some(percent) => HitRate::Percent(u8::try_from(percent.min(100)).unwrap_or(100)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(1_000_020 + minute * 60).unwrap()
    }

    fn counted(boot: u64, uptime_s: u64, requested: u64, hit: u64) -> Counted {
        Counted {
            boot,
            uptime_s,
            requested,
            hit,
        }
    }

    #[test]
    fn an_old_engine_counts_from_the_second_query_and_a_new_one_at_once() {
        let mut window = Window::default();
        let first = counted(1, 9000, 1000, 0);
        window.add(at(0), None, &first);
        assert_eq!(window.rate(at(0)), HitRate::Unknown);
        window.add(at(1), Some(&first), &counted(1, 9060, 1100, 87));
        assert_eq!(window.rate(at(1)), HitRate::Percent(87));
        let mut window = Window::default();
        window.add(at(0), None, &counted(1, 60, 100, 50));
        assert_eq!(window.rate(at(0)), HitRate::Percent(50));
    }

    #[test]
    fn a_restarted_engine_counts_from_zero() {
        let mut window = Window::default();
        let before = counted(1, 9000, 1000, 1000);
        window.add(at(0), Some(&before), &counted(2, 30, 400, 100));
        assert_eq!(window.rate(at(0)), HitRate::Percent(25));
        let mut window = Window::default();
        window.add(at(0), Some(&before), &counted(1, 30, 400, 100));
        assert_eq!(
            window.rate(at(0)),
            HitRate::Percent(25),
            "also where it kept its number"
        );
    }

    #[test]
    fn counts_older_than_the_window_are_dropped_and_no_requests_are_not_zero_percent() {
        let mut window = Window::default();
        window.add(at(0), None, &counted(1, 10, 100, 100));
        assert_eq!(window.rate(at(9)), HitRate::Percent(100));
        assert_eq!(window.rate(at(10)), HitRate::Idle);
        window.add(
            at(10),
            Some(&counted(1, 10, 100, 100)),
            &counted(1, 610, 200, 100),
        );
        assert_eq!(window.rate(at(10)), HitRate::Percent(0));
        assert_eq!(window.minutes.len(), 1);
    }

    proptest! {
        /// For any counters, the rate is a percentage and the memory is bounded.
        #[test]
        fn the_rate_is_a_percentage(looks in proptest::collection::vec(
            (0..3u64, 0..2000u64, any::<u64>(), any::<u64>(), 0..5i64), 1..100)) {
            let mut window = Window::default();
            let (mut minute, mut before) = (0, None);
            for (boot, uptime, requested, hit, wait) in looks {
                minute += wait;
                let after = counted(boot, uptime, requested, hit);
                window.add(at(minute), before.as_ref(), &after);
                before = Some(after);
                prop_assert!(window.minutes.len() <= 10);
                if let HitRate::Percent(p) = window.rate(at(minute)) {
                    prop_assert!(p <= 100);
                }
            }
        }
    }
}
