//! Names that existed recently: a bounded number, each for a bounded time. Other names may exist too.

use kvcachepool_protocol::object::ObjectName;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The names in two halves: the older half is dropped when the newer one is full.
#[derive(Debug)]
pub struct Known {
    most: usize,
    long: Duration,
    halves: Mutex<[HashMap<ObjectName, Instant>; 2]>,
}

impl Known {
    /// At most `most` names, each for `long`.
    pub fn new(most: usize, long: Duration) -> Self {
        Self {
            most,
            long,
            halves: Mutex::default(),
        }
    }

    /// Records that the object exists.
    pub fn add(&self, name: &ObjectName) {
        let mut halves = self.halves.lock();
        let [young, old] = &mut *halves;
        if young.len() >= (self.most / 2).max(1) {
            *old = std::mem::take(young);
        }
        old.remove(name);
        young.insert(name.clone(), Instant::now());
    }

    /// Removes a name that does not or may not exist.
    pub fn forget(&self, name: &ObjectName) {
        for half in &mut *self.halves.lock() {
            half.remove(name);
        }
    }

    /// Whether the object existed recently.
    pub fn has(&self, name: &ObjectName) -> bool {
        let halves = self.halves.lock();
        let mut seen = halves.iter().filter_map(|half| half.get(name));
        seen.any(|at| at.elapsed() < self.long)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::Sample;

    fn name(number: u64) -> ObjectName {
        Sample::new(1, number, &[1]).name()
    }

    #[test]
    fn a_name_is_known_until_it_is_forgotten_or_its_time_is_over() {
        let known = Known::new(10, Duration::from_secs(3_600));
        assert!(!known.has(&name(1)));
        known.add(&name(1));
        assert!(known.has(&name(1)) && !known.has(&name(2)));
        known.forget(&name(1));
        assert!(!known.has(&name(1)));
        let short = Known::new(10, Duration::ZERO);
        short.add(&name(1));
        assert!(!short.has(&name(1)));
    }

    #[test]
    fn there_are_never_more_than_the_bound_and_the_youngest_stay() {
        let known = Known::new(10, Duration::from_secs(3_600));
        for number in 0..100 {
            known.add(&name(number % 50));
            let held: usize = known.halves.lock().iter().map(HashMap::len).sum();
            assert!(held <= 10, "{held}");
            assert!(known.has(&name(number % 50)));
        }
        assert!(known.has(&name(46)) && !known.has(&name(30)));
    }
}
