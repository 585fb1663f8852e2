//! Chance for pauses: many sidecars that lost one server at one moment shall not come back at one moment.

use parking_lot::Mutex;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// A stream of random numbers (SplitMix64).
#[derive(Debug)]
pub struct Chance(Mutex<u64>);

impl Chance {
    /// The stream of a seed; none = another one in each process.
    pub fn new(seed: Option<u64>) -> Self {
        // The standard library seeds its hash maps from the system.
        Self(Mutex::new(
            seed.unwrap_or_else(|| RandomState::new().hash_one(0u8)),
        ))
    }

    fn bits(&self) -> u64 {
        let mut state = self.0.lock();
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Between half of a pause and all of it.
    pub fn jittered(&self, pause: Duration) -> Duration {
        let share = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        pause.mul_f64(0.5 + share / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_between_its_half_and_its_whole_and_never_twice_the_same() {
        let (chance, pause) = (Chance::new(Some(1)), Duration::from_secs(1));
        let drawn: Vec<_> = (0..1_000).map(|_| chance.jittered(pause)).collect();
        assert!(drawn.iter().all(|d| (pause / 2..=pause).contains(d)));
        assert!(drawn.iter().any(|d| *d < pause.mul_f64(0.51)));
        assert!(drawn.iter().any(|d| *d > pause.mul_f64(0.99)));
        assert_eq!(chance.jittered(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn a_stream_follows_from_its_seed_and_without_one_from_nothing() {
        let first = |seed| Chance::new(seed).bits();
        assert_eq!(first(Some(7)), first(Some(7)));
        assert_ne!(first(Some(7)), first(Some(8)));
        assert_ne!(first(None), first(None));
    }
}
