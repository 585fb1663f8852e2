//! A cache of pools that the API server reported missing. A wrong label in a loop of pods costs one read per second instead of one per pod.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long an entry is valid. It is short, because the pool may be created at any time. The watch then reports it, and is consulted first.
const HOLDS: Duration = Duration::from_secs(1);
/// Maximum number of names.
const NAMES_MAX: usize = 1_024;

/// By namespace and name: time of the read.
#[derive(Debug, Default)]
pub struct Missing(Mutex<HashMap<(String, String), Instant>>);

impl Missing {
    /// Whether this pool was missing a moment ago.
    pub fn holds(&self, namespace: &str, name: &str, now: Instant) -> bool {
        let key = (namespace.to_owned(), name.to_owned());
        let names = self.0.lock();
        names
            .get(&key)
            .is_some_and(|at| now.duration_since(*at) < HOLDS)
    }

    /// Records that this pool is missing.
    pub fn add(&self, namespace: &str, name: &str, now: Instant) {
        let mut names = self.0.lock();
        if names.len() >= NAMES_MAX {
            names.retain(|_, at| now.duration_since(*at) < HOLDS);
        }
        if names.len() < NAMES_MAX {
            names.insert((namespace.to_owned(), name.to_owned()), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_name_is_cached_briefly_per_namespace() {
        let (missing, now) = (Missing::default(), Instant::now());
        missing.add("n", "p", now);
        assert!(missing.holds("n", "p", now));
        assert!(!missing.holds("m", "p", now));
        assert!(!missing.holds("n", "p", now + HOLDS));
    }

    #[test]
    fn missing_names_use_bounded_memory() {
        let (missing, now) = (Missing::default(), Instant::now());
        for i in 0..2 * NAMES_MAX {
            missing.add("n", &i.to_string(), now);
        }
        assert_eq!(missing.0.lock().len(), NAMES_MAX);
        missing.add("n", "late", now + HOLDS);
        assert!(missing.holds("n", "late", now + HOLDS));
        assert_eq!(missing.0.lock().len(), 1);
    }
}
