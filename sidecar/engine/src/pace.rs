//! A budget of bytes per second that several users share: none of them takes what another waits for. Time is an argument.
//! There are two: of bytes that come into memory from tiers, and of bytes that go from memory to tiers or are compared with their digests.

use super::lower::TIERS_MAX;

/// Users that can share a budget.
const USERS_MAX: usize = TIERS_MAX + 1;
/// Checks that nobody waits for, as a user; tiers are by their place.
pub(crate) const CHECKS: usize = TIERS_MAX;
/// Bytes of so long may be taken at once after a pause, in ms: the shell's timers are not finer than a few of these.
const BURST_MS: u64 = 250;
/// Who waited and has not asked again for so long does not wait any more, in ms.
const WAITS_MS: u64 = 500;

/// One user of a budget.
#[derive(Debug, Clone, Copy, Default)]
struct User {
    /// Bytes that it took, while others waited or not.
    taken: u64,
    /// Since when it waits, and when it asked last; none = it does not wait.
    waits: Option<[u64; 2]>,
}

/// What a budget did since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PaceStats {
    /// Bytes that were taken, bounded or not.
    pub bytes: u64,
    /// Time that users waited for their turn, added up, in ms.
    pub waited_ms: u64,
}

/// A budget of bytes per second.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    /// 0 = no bound.
    bytes_per_s: u64,
    /// Bytes that may be taken now; below 0: what was taken beyond that, since one piece is never cut.
    level: i64,
    at_ms: u64,
    users: [User; USERS_MAX],
    /// What the user who was served last had taken before: who begins to ask has no less behind it.
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

    /// Bytes per second; 0 = no bound.
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
            // what is less than a byte is earned by the next call
            self.at_ms = now_ms;
            let earned = i64::try_from(earned).unwrap_or(i64::MAX);
            self.level = self.level.saturating_add(earned).min(self.burst());
        }
    }

    /// Takes so many bytes now, if it is this user's turn; else it waits, and asks again.
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

    /// What was taken last was not needed after all.
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

    /// There is nothing that this user would take.
    pub fn leave(&mut self, user: usize) {
        if let Some(user) = self.users.get_mut(user) {
            user.waits = None;
        }
    }

    /// Who did not wait until now saved nothing up meanwhile.
    fn asks(&mut self, now_ms: u64, user: usize) {
        let served = self.served;
        if let Some(user) = self.users.get_mut(user).filter(|u| !u.waits_at(now_ms)) {
            user.waits = None;
            user.taken = user.taken.max(served);
        }
    }

    /// Nobody who waits took less than this one.
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
