//! Deadlines for every probe: neither a hanging driver nor a hanging disk may block the rest.

use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Time for all probes together.
const WHOLE: Duration = Duration::from_secs(10);

/// The deadline of the whole command.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    at: Instant,
}

impl Deadline {
    /// Starts the time.
    pub fn start() -> Self {
        Self {
            at: Instant::now() + WHOLE,
        }
    }

    /// The result of `look`; `None` when it takes longer than `longest` or than the remaining time. A hanging probe stays on its thread,
    /// which ends with the process.
    pub fn within<T: Send + 'static>(
        self,
        longest: Duration,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (found, wait) = mpsc::sync_channel(1);
        let left = self.at.saturating_duration_since(Instant::now());
        let name = "doctor".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            // The receiver no longer waits after a timeout.
            let _ = found.send(look());
        });
        spawned.ok()?;
        wait.recv_timeout(longest.min(left)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_left_behind() {
        let deadline = Deadline::start();
        let (hold, held) = mpsc::channel::<()>();
        let short = Duration::from_millis(10);
        assert_eq!(deadline.within(short, move || held.recv().is_ok()), None);
        drop(hold);
        assert_eq!(deadline.within(WHOLE, || 7), Some(7));
    }

    #[test]
    fn when_all_time_is_spent_nothing_more_is_waited_for() {
        let spent = Deadline { at: Instant::now() };
        let (_hold, held) = mpsc::channel::<()>();
        assert_eq!(spent.within(WHOLE, move || held.recv().is_ok()), None);
    }
}
