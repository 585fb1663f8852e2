//! Estimates fetch time by bytes from earlier fetches, with integer arithmetic. Time is an argument.
//! A linear fit over the last bursts of fetches gives the tier's latency (intercept) and bandwidth (inverse slope).

/// Bursts required for an estimate.
const BURSTS_MIN: u32 = 3;
/// A longer burst is cut here, in ms, so that a tier that is never idle is measured as well.
const BURST_MS_MAX: u64 = 1_000;
/// An estimate expires this long after the last burst, in ms. A tier that was avoided for being slow then gets another chance.
const AGE_MS_MAX: u64 = 30_000;
/// Each burst reduces the weight of earlier ones by one over this.
const FADES: u128 = 8;
/// Weight of a burst in the fixed-point sums.
const WEIGHT: u128 = 1 << 16;
/// The slope is used only if the standard deviation of the bursts' bytes is at least their mean over the square root of this.
const ALIKE: u128 = 64;
/// Limit on the counted bytes (KiB) and time (µs) of one burst, so that no sum overflows.
const KIB_MAX: u64 = 1 << 34;
const US_MAX: u64 = 1 << 30;

/// Expected speed of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// Fixed time per fetch. Microseconds.
    pub latency_us: u64,
    /// Additional time per MiB. Microseconds.
    pub us_per_mib: u64,
}

impl Estimate {
    /// Expected time for this many bytes. Microseconds.
    pub fn us(&self, bytes: u64) -> u64 {
        let transfer = u128::from(bytes) * u128::from(self.us_per_mib) / (1 << 20);
        let transfer = u64::try_from(transfer).unwrap_or(u64::MAX);
        self.latency_us.saturating_add(transfer)
    }

    /// Bandwidth without latency, in bytes per second.
    pub fn bytes_per_s(&self) -> u64 {
        (1_000_000 << 20) / self.us_per_mib.max(1)
    }
}

/// Overlapping fetches that began while the tier was idle.
#[derive(Debug, Clone, Copy, Default)]
struct Burst {
    since_ms: u64,
    /// Continuation of a cut burst: its first bytes were mostly read earlier.
    cut: bool,
    landed_bytes: u64,
    lost_bytes: u64,
}

/// Decaying sums over bursts: weights, KiB, µs and their products.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    n: u128,
    x: u128,
    y: u128,
    xx: u128,
    xy: u128,
}

/// Measurements of a tier's fetches.
#[derive(Debug, Clone, Default)]
pub(crate) struct Speed {
    burst: Option<Burst>,
    sums: Sums,
    bursts: u32,
    us_per_mib: Option<u64>,
    last_ms: u64,
}

impl Speed {
    /// A fetch begins. `running`: other fetches in flight.
    pub fn begins(&mut self, now_ms: u64, running: u32) {
        if running == 0 {
            self.burst = Some(Burst {
                since_ms: now_ms,
                ..Burst::default()
            });
        }
    }

    /// A fetch ended. `running`: other fetches still in flight.
    pub fn ends(&mut self, now_ms: u64, bytes: u64, landed: bool, running: u32) {
        let Some(mut burst) = self.burst.take() else {
            return;
        };
        if landed {
            burst.landed_bytes = burst.landed_bytes.saturating_add(bytes);
        } else {
            burst.lost_bytes = burst.lost_bytes.saturating_add(bytes);
        }
        let took_ms = now_ms.saturating_sub(burst.since_ms);
        if running > 0 && took_ms < BURST_MS_MAX {
            self.burst = Some(burst);
            return;
        }
        // cancelled and failed fetches took time for an unknown number of bytes
        let whole = took_ms >= BURST_MS_MAX || !burst.cut;
        if whole && burst.landed_bytes > burst.lost_bytes {
            self.seen(now_ms, burst.landed_bytes, took_ms);
        }
        if running > 0 {
            self.burst = Some(Burst {
                since_ms: now_ms,
                cut: true,
                ..Burst::default()
            });
        }
    }

    /// A request's wait ended before its fetches did: `bytes` are in flight. How much longer they take is never seen, because they are
    /// cancelled. Counts them with twice the time so far, unless most of the burst has landed, that time was expected, or most of the wait
    /// passed before it.
    pub fn given_up(&mut self, now_ms: u64, bytes: u64, waited_ms: u64) {
        let Some(burst) = self.burst else { return };
        let took_ms = now_ms.saturating_sub(burst.since_ms);
        let whole = burst.landed_bytes.saturating_add(bytes);
        let expected = |e: Estimate| e.us(whole) >= took_ms.saturating_mul(1_000);
        if burst.landed_bytes > bytes
            || took_ms < waited_ms / 2
            || self.estimate(now_ms).is_some_and(expected)
        {
            return;
        }
        self.seen(now_ms, whole, took_ms.saturating_mul(2));
        self.burst = Some(Burst {
            since_ms: now_ms,
            cut: true,
            ..Burst::default()
        });
    }

    fn seen(&mut self, now_ms: u64, bytes: u64, took_ms: u64) {
        let x = u128::from((bytes >> 10).clamp(1, KIB_MAX));
        let y = u128::from(took_ms.saturating_mul(1_000).clamp(1, US_MAX));
        if self.is_old(now_ms) {
            // The tier may have recovered: one burst is enough to know.
            self.sums = Sums::default();
            self.bursts = self.bursts.min(BURSTS_MIN - 1);
        }
        let fade = |sum: &mut u128, add: u128| *sum = *sum - *sum / FADES + add * WEIGHT;
        let s = &mut self.sums;
        fade(&mut s.n, 1);
        fade(&mut s.x, x);
        fade(&mut s.y, y);
        fade(&mut s.xx, x * x);
        fade(&mut s.xy, x * y);
        self.bursts = self.bursts.saturating_add(1);
        self.last_ms = now_ms;
        // n * sum((x - mean)^2), and the same for y
        let spread = (s.n * s.xx).saturating_sub(s.x * s.x);
        let rises = (s.n * s.xy).saturating_sub(s.x * s.y);
        let us_per_mib = (rises / (spread >> 10).max(1)).min(u128::from(US_MAX));
        let differ = spread > s.x * s.x / ALIKE;
        self.us_per_mib = u64::try_from(us_per_mib).ok().filter(|_| differ);
    }

    fn is_old(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.last_ms) > AGE_MS_MAX
    }

    /// The current estimate. None after too few bursts, or none for a long time.
    pub fn estimate(&self, now_ms: u64) -> Option<Estimate> {
        if self.bursts < BURSTS_MIN || self.is_old(now_ms) {
            return None;
        }
        let mean = |sum: u128| u64::try_from(sum / self.sums.n.max(1)).unwrap_or(u64::MAX);
        let (kib, us) = (mean(self.sums.x).max(1), mean(self.sums.y));
        Some(match self.us_per_mib {
            Some(us_per_mib) => {
                let transfer = u128::from(kib) * u128::from(us_per_mib) / 1024;
                Estimate {
                    latency_us: us.saturating_sub(u64::try_from(transfer).unwrap_or(u64::MAX)),
                    us_per_mib,
                }
            }
            // all bursts had the same size: half of the time counts as latency
            None => Estimate {
                latency_us: us / 2,
                us_per_mib: us.saturating_mul(512) / kib,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    /// A burst of a tier with this latency in ms and a bandwidth of one MiB per ms.
    fn burst(speed: &mut Speed, at_ms: &mut u64, latency_ms: u64, mib: u64) {
        for n in 0..mib as u32 {
            speed.begins(*at_ms, n);
        }
        for n in (0..mib as u32).rev() {
            let landed_ms = *at_ms + latency_ms + (mib - u64::from(n));
            speed.ends(landed_ms, MIB, true, n);
        }
        *at_ms += latency_ms + mib + 5;
    }

    #[test]
    fn one_burst_says_nothing_and_three_of_different_sizes_say_both() {
        let (mut speed, mut now) = (Speed::default(), 1_000);
        burst(&mut speed, &mut now, 50, 1);
        burst(&mut speed, &mut now, 50, 20);
        assert_eq!(speed.estimate(now), None);
        for mib in [4, 100, 1, 30] {
            burst(&mut speed, &mut now, 50, mib);
        }
        let e = speed.estimate(now).unwrap();
        assert!((990..=1010).contains(&e.us_per_mib), "{e:?}");
        assert!((49_000..=51_000).contains(&e.latency_us), "{e:?}");
        assert!((149_000..=151_000).contains(&e.us(100 * MIB)));
        assert!((1_000 * MIB..1_100 * MIB).contains(&e.bytes_per_s()));
    }

    #[test]
    fn bursts_of_one_size_are_taken_for_half_latency() {
        let (mut speed, mut now) = (Speed::default(), 0);
        for _ in 0..10 {
            burst(&mut speed, &mut now, 92, 8);
        }
        let e = speed.estimate(now).unwrap();
        assert!((99_900..=100_100).contains(&e.us(8 * MIB)), "{e:?}");
        assert!((149_900..=150_100).contains(&e.us(16 * MIB)), "{e:?}");
    }

    #[test]
    fn a_tier_that_becomes_slow_is_seen_and_gets_another_chance() {
        let (mut speed, mut now) = (Speed::default(), 0);
        for mib in [1, 10, 3, 20, 5] {
            burst(&mut speed, &mut now, 1, mib);
        }
        let before = speed.estimate(now).unwrap().us(10 * MIB);
        for mib in [1, 10, 3, 20, 5, 8] {
            burst(&mut speed, &mut now, 500, mib);
        }
        let after = speed.estimate(now).unwrap().us(10 * MIB);
        assert!(before < 20_000 && after > 200_000, "{before} {after}");
        assert_eq!(speed.estimate(now + AGE_MS_MAX + 1), None);
    }

    #[test]
    fn a_tier_that_is_never_idle_is_learned_of_all_the_same() {
        let mut speed = Speed::default();
        speed.begins(0, 0);
        speed.begins(0, 1);
        for n in 1..5_000 {
            speed.ends(n, MIB, true, 1);
            speed.begins(n, 1);
        }
        let e = speed.estimate(5_000).unwrap();
        let ms = e.us(1_000 * MIB) / 1_000;
        assert!((950..=1_050).contains(&ms), "{e:?}");
    }

    #[test]
    fn bursts_that_were_mostly_cancelled_do_not_count() {
        let (mut speed, mut now) = (Speed::default(), 0);
        for _ in 0..20 {
            speed.begins(now, 0);
            speed.begins(now, 1);
            speed.ends(now + 1_000, MIB, false, 1);
            speed.ends(now + 1_000, MIB, true, 0);
            now += 2_000;
        }
        assert_eq!(speed.estimate(now), None);
        // nor do ends without a beginning
        speed.ends(now, MIB, true, 0);
        assert_eq!(speed.bursts, 0);
    }

    /// Fetches of so many MiB whose request stops waiting after 2 s, and their ends.
    fn given_up(speed: &mut Speed, at_ms: &mut u64, mib: u64) {
        for n in 0..mib as u32 {
            speed.begins(*at_ms, n);
        }
        *at_ms += 2_000;
        speed.given_up(*at_ms, mib * MIB, 2_000);
        for n in (0..mib as u32).rev() {
            speed.ends(*at_ms, MIB, false, n);
        }
        *at_ms += 100;
    }

    #[test]
    fn a_tier_that_finishes_nothing_in_time_is_slow_for_loads_of_any_size() {
        let (mut speed, mut now) = (Speed::default(), 0);
        for mib in [256, 200, 100] {
            assert_eq!(speed.estimate(now), None);
            given_up(&mut speed, &mut now, mib);
        }
        for mib in [1, 50, 256, 1_000] {
            assert!(
                speed.estimate(now).unwrap().us(mib * MIB) > 2_000_000,
                "{mib}"
            );
        }
        assert_eq!(speed.estimate(now + AGE_MS_MAX), None);
    }

    #[test]
    fn a_tier_that_stalled_once_is_quick_again_after_one_burst() {
        let (mut speed, mut now) = (Speed::default(), 0);
        for _ in 0..20 {
            burst(&mut speed, &mut now, 20, 100);
        }
        given_up(&mut speed, &mut now, 256);
        assert!(speed.estimate(now).unwrap().us(100 * MIB) > 1_000_000);
        now += AGE_MS_MAX + 1;
        burst(&mut speed, &mut now, 20, 100);
        let us = speed.estimate(now).unwrap().us(100 * MIB);
        assert!((100_000..200_000).contains(&us), "{us}");
        given_up(&mut speed, &mut now, 100);
        assert!(speed.estimate(now).unwrap().us(100 * MIB) > 1_000_000);
    }

    #[test]
    fn a_slope_ends_with_the_differences_that_it_came_from() {
        let (mut speed, mut now) = (Speed::default(), 0);
        given_up(&mut speed, &mut now, 256);
        for _ in 0..100 {
            burst(&mut speed, &mut now, 20, 10);
        }
        let us = speed.estimate(now).unwrap().us(10 * MIB);
        assert!((29_000..31_000).contains(&us), "{us}");
    }

    #[test]
    fn small_loads_stay_quick_beside_large_ones_that_are_given_up() {
        let (mut speed, mut now) = (Speed::default(), 0);
        for mib in [20, 256, 40, 10, 256, 30, 20] {
            match mib {
                256 => given_up(&mut speed, &mut now, mib),
                _ => burst(&mut speed, &mut now, 9 * mib, mib),
            }
        }
        let e = speed.estimate(now).unwrap();
        assert!(e.us(256 * MIB) > 2_000_000, "{e:?}");
        assert!((200_000..600_000).contains(&e.us(30 * MIB)), "{e:?}");
    }

    #[test]
    fn what_was_expected_to_be_late_or_began_late_says_nothing_new() {
        let (mut speed, mut now) = (Speed::default(), 0);
        for mib in [1, 2, 3] {
            burst(&mut speed, &mut now, 1_000 * mib, mib);
        }
        let before = speed.estimate(now);
        given_up(&mut speed, &mut now, 4);
        assert_eq!(speed.estimate(now), before, "4 s were expected");
        let mut speed = Speed::default();
        speed.begins(now, 0);
        speed.given_up(now + 999, MIB, 2_000);
        assert_eq!(speed.bursts, 0, "it began late");
        speed.given_up(now + 1_000, MIB, 2_000);
        speed.given_up(now + 1_000, MIB, 2_000);
        assert_eq!(speed.bursts, 1, "once for all requests that wait for it");
        let mut speed = Speed::default();
        speed.begins(now, 0);
        speed.begins(now, 1);
        speed.ends(now + 900, 3 * MIB, true, 1);
        speed.given_up(now + 950, MIB, 1_000);
        speed.ends(now + 960, MIB, false, 0);
        assert_eq!(speed.bursts, 1, "most of it came");
        let us = speed.sums.y / speed.sums.n;
        assert_eq!(us, 960_000, "in the time that it took");
    }

    proptest! {
        #[test]
        fn whatever_is_seen_no_sum_overflows(
            seen in prop::collection::vec((any::<u64>(), any::<u64>()), 1..200), bytes in any::<u64>()
        ) {
            let mut speed = Speed::default();
            for (size, took) in seen {
                speed.seen(0, size, took);
            }
            if let Some(e) = speed.estimate(0) {
                prop_assert!(e.us(bytes) >= e.latency_us);
                prop_assert!(e.bytes_per_s() > 0);
            }
        }
    }
}
