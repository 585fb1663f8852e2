//! A rate limit in bytes per second, shared fairly between users. Time is an argument.
//! The engine has two: one for reads from tiers, one for writes to tiers and background digest checks.

use super::lower::TIERS_MAX;

/// Limit on users of a budget.
const USERS_MAX: usize = TIERS_MAX + 1;
/// User number of background digest checks; tiers use their index.
pub(crate) const CHECKS: usize = TIERS_MAX;
/// The burst after a pause, as time in ms. The shell's timer interval is a few times shorter.
const BURST_MS: u64 = 250;
/// A waiter that does not poll for this long is dropped. Milliseconds.
const WAITS_MS: u64 = 500;

/// One user of a budget.
#[derive(Debug, Clone, Copy, Default)]
struct User {
    /// Bytes taken, with or without competition.
    taken: u64,
    /// Start of the wait and time of the last poll; none = not waiting.
    waits: Option<[u64; 2]>,
}

/// Counters since start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PaceStats {
    /// Bytes taken, limited or not.
    pub bytes: u64,
    /// Total waiting time of all users. Milliseconds.
    pub waited_ms: u64,
}

/// A budget in bytes per second.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    /// 0 = no limit.
    bytes_per_s: u64,
    /// Bytes available now. Negative after a piece that was larger than the level, because pieces are not split.
    level: i64,
    at_ms: u64,
    users: [User; USERS_MAX],
    /// `taken` of the last served user before it was served. A user that was not waiting starts at no less.
    served: u64,
    pub stats: PaceStats,
}

impl Pace {
    pub fn new(bytes_per_s: u64) -> Self {
        let mut pace = Self {
            bytes_per_s,
            ..Self::default()
        };
        pace.level = pace.burst();
        pace
    }

    pub fn configure(&mut self, bytes_per_s: u64) {
        if self.bytes_per_s != bytes_per_s {
            self.bytes_per_s = bytes_per_s;
            self.level = self.level.clamp(0, self.burst());
        }
    }

    /// Bytes per second; 0 = no limit.
    pub fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s
    }

    fn burst(&self) -> i64 {
        let bytes = self.bytes_per_s.saturating_mul(BURST_MS) / 1_000;
        i64::try_from(bytes.max(1)).unwrap_or(i64::MAX)
    }

    fn fill(&mut self, now_ms: u64) {
        let passed_ms = now_ms.saturating_sub(self.at_ms);
        let earned = u128::from(self.bytes_per_s) * u128::from(passed_ms) / 1_000;
        if earned > 0 || passed_ms > BURST_MS {
            // fractions of a byte are left to the next call
            self.at_ms = now_ms;
            let earned = i64::try_from(earned).unwrap_or(i64::MAX);
            self.level = self.level.saturating_add(earned).min(self.burst());
        }
    }

    /// Takes the bytes if it is this user's turn. Otherwise the user waits, and must poll again.
    pub fn take(&mut self, now_ms: u64, user: usize, bytes: u64) -> bool {
        if self.bytes_per_s > 0 {
            self.fill(now_ms);
            self.asks(now_ms, user);
            if self.level <= 0 || !self.turn(now_ms, user) {
                self.wait(now_ms, user);
                return false;
            }
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            self.level = self.level.saturating_sub(bytes);
        }
        self.stats.bytes = self.stats.bytes.saturating_add(bytes);
        if let Some(user) = self.users.get_mut(user) {
            self.served = user.taken;
            user.taken = user.taken.saturating_add(bytes);
            if let Some([since_ms, _]) = user.waits.take() {
                self.stats.waited_ms += now_ms.saturating_sub(since_ms);
            }
        }
        true
    }

    /// Returns bytes that were taken and not needed.
    pub fn give_back(&mut self, user: usize, bytes: u64) {
        if self.bytes_per_s > 0 {
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            self.level = self.level.saturating_add(bytes).min(self.burst());
        }
        self.stats.bytes = self.stats.bytes.saturating_sub(bytes);
        if let Some(user) = self.users.get_mut(user) {
            user.taken = user.taken.saturating_sub(bytes);
        }
    }

    pub fn leave(&mut self, user: usize) {
        if let Some(user) = self.users.get_mut(user) {
            user.waits = None;
        }
    }

    /// Prepares a request. A user that was not waiting has no credit from earlier: its `taken` is raised to that of the last served user.
    fn asks(&mut self, now_ms: u64, user: usize) {
        let served = self.served;
        if let Some(user) = self.users.get_mut(user).filter(|u| !u.waits_at(now_ms)) {
            user.waits = None;
            user.taken = user.taken.max(served);
        }
    }

    /// True if no waiting user has taken less.
    fn turn(&self, now_ms: u64, user: usize) -> bool {
        let mine = self.users.get(user).map_or(0, |u| u.taken);
        let mut others = (0..).zip(&self.users).filter(|(other, _)| *other != user);
        others.all(|(_, other)| !other.waits_at(now_ms) || mine <= other.taken)
    }

    fn wait(&mut self, now_ms: u64, user: usize) {
        if let Some(user) = self.users.get_mut(user) {
            let since_ms = user.waits.map_or(now_ms, |[since_ms, _]| since_ms);
            user.waits = Some([since_ms, now_ms]);
        }
    }
}

impl User {
    fn waits_at(&self, now_ms: u64) -> bool {
        self.waits
            .is_some_and(|[_, asked_ms]| now_ms <= asked_ms + WAITS_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn without_a_bound_everything_goes_and_is_counted() {
        let mut pace = Pace::new(0);
        assert!((0..100).all(|user| pace.take(0, user, u64::MAX / 1_000)));
        assert_eq!(pace.stats.waited_ms, 0);
    }

    #[test]
    fn a_pause_earns_a_quarter_of_a_second_and_no_more() {
        let mut pace = Pace::new(1_000);
        let taken = |pace: &mut Pace, now| (0..10_000).take_while(|_| pace.take(now, 0, 1)).count();
        assert_eq!(taken(&mut pace, 1_000_000), 250);
        assert_eq!(taken(&mut pace, 1_000_000), 0);
        assert_eq!(taken(&mut pace, 1_000_001), 1);
        assert_eq!(taken(&mut pace, 1_000_101), 100);
        assert_eq!(taken(&mut pace, 9_000_000), 250);
    }

    #[test]
    fn a_piece_larger_than_the_budget_goes_and_is_paid_for_later() {
        let mut pace = Pace::new(1_000);
        assert!(pace.take(0, 0, 10_000));
        assert!(!pace.take(9_000, 0, 1));
        assert!(!pace.take(9_400, 0, 1));
        assert!(pace.take(9_751, 0, 1));
        assert_eq!(pace.stats.waited_ms, 751);
    }

    #[test]
    fn who_waits_gets_as_much_as_who_always_asks() {
        let mut pace = Pace::new(1_000_000);
        let mut taken = [0u64; 3];
        for now in 0..10_000 {
            for (user, bytes) in [(0, 64_000), (1, 1_000), (2, 30_000)] {
                while pace.take(now, user, bytes) {
                    taken[user] += bytes;
                }
            }
        }
        let all: u64 = taken.iter().sum();
        assert!((9_900_000..=10_400_000).contains(&all), "{taken:?}");
        let share = all / 3;
        let fair = |t: &u64| t.abs_diff(share) < 200_000;
        assert!(taken.iter().all(fair), "{taken:?}");
        assert!(pace.stats.waited_ms > 10_000);
    }

    #[test]
    fn who_comes_late_has_saved_nothing_up() {
        let mut pace = Pace::new(1_000);
        for now in 0..100_000 {
            while pace.take(now, 0, 10) {}
        }
        let mut late = 0;
        for now in 100_000..101_000 {
            for user in [0, 1] {
                while pace.take(now, user, 10) {
                    late += 10 * user as u64;
                }
            }
        }
        assert!((400..=600).contains(&late), "{late}");
    }

    #[test]
    fn what_is_given_back_can_be_taken_by_others() {
        let mut pace = Pace::new(1_000);
        assert!(pace.take(0, 0, 250));
        assert!(!pace.take(0, 1, 1));
        pace.give_back(0, 250);
        assert!(pace.take(0, 1, 1));
        assert_eq!(pace.stats.bytes, 1);
    }

    #[test]
    fn who_left_is_not_waited_for() {
        let mut pace = Pace::new(1_000);
        assert!(pace.take(0, 0, 250));
        assert!(!pace.take(0, 1, 1));
        pace.leave(1);
        assert!(pace.take(10, 0, 1));
    }

    #[test]
    fn a_changed_bound_counts_at_once() {
        let mut pace = Pace::new(10);
        assert!(pace.take(0, 0, 1_000_000));
        pace.configure(0);
        assert!(pace.take(0, 0, 1_000_000));
        pace.configure(1_000);
        assert!(!pace.take(0, 0, 1));
        assert!(pace.take(10, 0, 1));
    }

    proptest! {
        #[test]
        fn never_more_than_the_budget_and_one_piece(
            rate in 1u64..1 << 40,
            asks in prop::collection::vec((0u64..500, 0usize..8, 1u64..1 << 32), 1..200)
        ) {
            let mut pace = Pace::new(rate);
            let (mut now, mut taken, mut longest) = (0, 0u128, 0);
            for (later, user, bytes) in asks {
                now += later;
                if pace.take(now, user, bytes) {
                    taken += u128::from(bytes);
                    longest = longest.max(bytes);
                }
                let budget = u128::from(rate) * u128::from(now + BURST_MS) / 1_000;
                prop_assert!(taken <= budget + u128::from(longest) + 1);
            }
        }
    }
}
