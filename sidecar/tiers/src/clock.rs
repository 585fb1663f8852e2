//! The time of the server that dates a tier's objects. Its own dates say how old an object is; the clock of this node may be wrong.

use parking_lot::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The last known time of the server, and when it was learned.
#[derive(Debug, Default)]
pub struct Clock(Mutex<Option<(u64, Instant)>>);

impl Clock {
    /// Records the server's present time, Unix seconds.
    pub fn is_now(&self, unix_s: u64) {
        *self.0.lock() = Some((unix_s, Instant::now()));
    }

    /// Unix seconds of the server; `None` before it is known.
    pub fn unix_s(&self) -> Option<u64> {
        let known = *self.0.lock();
        known.map(|(unix_s, at)| unix_s.saturating_add(at.elapsed().as_secs()))
    }

    /// The same, or this node's time.
    pub fn unix_s_or_own(&self) -> u64 {
        let own = || SystemTime::now().duration_since(UNIX_EPOCH);
        self.unix_s()
            .unwrap_or_else(|| own().map_or(0, |since| since.as_secs()))
    }
}
