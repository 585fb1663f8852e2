//! Jitter of pauses: sidecars that lost a server at the same time must not all return at the same time.

use fastrand::Rng;
use parking_lot::Mutex;
use std::time::Duration;

#[derive(Debug)]
pub struct Chance(Mutex<Rng>);

impl Chance {
    /// `None`: a random seed.
    pub fn new(seed: Option<u64>) -> Self {
        Self(Mutex::new(seed.map_or_else(Rng::new, Rng::with_seed)))
    }

    /// A random duration between half of the pause and the whole pause.
    pub fn jittered(&self, pause: Duration) -> Duration {
        pause.mul_f64(0.5 + self.0.lock().f64() / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_between_its_half_and_its_whole_and_both_ends_occur() {
        let (chance, pause) = (Chance::new(Some(1)), Duration::from_secs(1));
        let drawn: Vec<_> = (0..1_000).map(|_| chance.jittered(pause)).collect();
        assert!(drawn.iter().all(|d| (pause / 2..=pause).contains(d)));
        assert!(drawn.iter().any(|d| *d < pause.mul_f64(0.51)));
        assert!(drawn.iter().any(|d| *d > pause.mul_f64(0.99)));
        assert_eq!(chance.jittered(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn a_stream_follows_from_its_seed_and_without_one_from_nothing() {
        let first = |seed| Chance::new(seed).jittered(Duration::from_secs(1));
        assert_eq!(first(Some(7)), first(Some(7)));
        assert_ne!(first(Some(7)), first(Some(8)));
        assert_ne!(first(None), first(None));
    }
}
