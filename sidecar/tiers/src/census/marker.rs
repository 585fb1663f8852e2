//! The file or object that says when the place was counted last, and what was found.

use super::{Sum, Turn};
use std::time::Duration;

/// Prefix of its text.
const MARK: &str = "kvcachepool counted here:";
/// Longest text that it can contain.
pub const TEXT_BYTES: usize = 256;
/// Clocks that date it may differ by this much. A date further ahead would keep the turn until that time.
const AHEAD_MAX_S: u64 = 300;

/// The marker as it was found.
#[derive(Debug)]
pub struct Marker {
    /// `None`: not counted yet, or not written by this build.
    pub sum: Option<Sum>,
    /// `None`: unknown.
    age: Option<Duration>,
}

impl Marker {
    /// A marker of this date, and the time now by the clock that dates it; `None`: unknown.
    pub fn new(sum: Option<Sum>, written_s: Option<u64>, now_s: Option<u64>) -> Self {
        let dates = written_s.zip(now_s);
        let dates = dates.filter(|(written, now)| *written <= now.saturating_add(AHEAD_MAX_S));
        let age = dates.map(|(written, now)| Duration::from_secs(now.saturating_sub(written)));
        Self { sum, age }
    }

    /// The turn, if another sidecar began or finished a count within `young`; `None`: the turn is free.
    pub fn taken(&self, young: Duration) -> Option<Turn> {
        let taken = self.age.is_some_and(|age| age < young);
        taken.then(|| self.sum.map_or(Turn::Counting, Turn::Counted))
    }
}

/// Its text before and after a count. All texts differ, so that a condition can tell them apart.
pub fn text(sum: Option<Sum>) -> String {
    let one = fastrand::u64(..);
    match sum {
        Some(Sum { objects, bytes }) => {
            format!("{MARK} {objects} objects of {bytes} bytes ({one:016x})\n")
        }
        None => format!("kvcachepool counts here ({one:016x})\n"),
    }
}

/// The count of a text.
pub fn read_text(text: &[u8]) -> Option<Sum> {
    let text = std::str::from_utf8(text).ok()?.strip_prefix(MARK)?;
    let (objects, rest) = text.trim_start().split_once(" objects of ")?;
    let (bytes, _) = rest.split_once(" bytes ")?;
    Some(Sum {
        objects: objects.parse().ok()?,
        bytes: bytes.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_from_the_future_takes_no_turn() {
        let now = 1_000_000;
        let taken = |written_s| {
            let marker = Marker::new(None, Some(written_s), Some(now));
            marker.taken(Duration::from_secs(60)).is_some()
        };
        assert!(taken(now) && taken(now - 59) && taken(now + AHEAD_MAX_S));
        assert!(!taken(now - 60) && !taken(now + AHEAD_MAX_S + 1) && !taken(u64::MAX));
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        let sum = Sum {
            objects: 3,
            bytes: u64::MAX,
        };
        let (one, other) = (text(Some(sum)), text(Some(sum)));
        assert!(one.len() <= TEXT_BYTES && one != other);
        let read = |text: &str| read_text(text.as_bytes());
        assert_eq!((read(&one), read(&other)), (Some(sum), Some(sum)));
        for none in [
            &*text(None),
            "",
            "kvcachepool counted here: x objects of 1 bytes\n",
            "a web page",
        ] {
            assert_eq!(read(none), None, "{none}");
        }
    }
}
