//! The server's time. Its own dates say how old an object is; the clock of this node may be wrong.

use aws_sdk_s3::primitives::{DateTime, DateTimeFormat};
use parking_lot::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The last `Date` of a response, and when it arrived.
#[derive(Debug, Default)]
pub struct Clock(Mutex<Option<(u64, Instant)>>);

impl Clock {
    /// Records the `Date` of a response; ignores an invalid one.
    pub fn heard(&self, date: &str) {
        let date = DateTime::from_str(date, DateTimeFormat::HttpDate).ok();
        if let Some(unix_s) = date.and_then(|at| u64::try_from(at.secs()).ok()) {
            *self.0.lock() = Some((unix_s, Instant::now()));
        }
    }

    /// Unix seconds of the server; `None` before the first response.
    pub fn unix_s(&self) -> Option<u64> {
        let heard = *self.0.lock();
        heard.map(|(unix_s, at)| unix_s.saturating_add(at.elapsed().as_secs()))
    }

    /// The same, or this node's time.
    pub fn unix_s_or_own(&self) -> u64 {
        let own = || SystemTime::now().duration_since(UNIX_EPOCH);
        self.unix_s()
            .unwrap_or_else(|| own().map_or(0, |since| since.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_hour_is_believed_and_what_is_none_is_let_be() {
        let clock = Clock::default();
        assert_eq!(clock.unix_s(), None);
        assert!(clock.unix_s_or_own() > 1_700_000_000);
        clock.heard("Sun, 06 Nov 1994 08:49:37 GMT");
        for none in ["", "yesterday", "Sun, 99 Nov 1994 08:49:37 GMT"] {
            clock.heard(none);
        }
        let told = clock.unix_s().unwrap();
        assert!((784_111_777..784_111_787).contains(&told), "{told}");
        assert!(clock.unix_s_or_own() < 1_000_000_000);
    }
}
