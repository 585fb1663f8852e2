//! Whether the engine still answers: it says so once a second, through the lock that everything it does goes through.

use std::time::{Duration, Instant};

/// An engine that says nothing for this long hangs and is ended. Far above any wait of a healthy one: the longest is the reading
/// of a slot table at its start, well under a second per million rows.
pub const SILENCE_MAX: Duration = Duration::from_secs(30);

/// While the engine is silent the supervisor looks this often.
const LOOK: Duration = Duration::from_secs(5);

/// How long the engine has been silent, counting only time in which the supervisor itself ran: a container that was frozen, or
/// stopped by a debugger, is no reason to end its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    looked: Instant,
    silent: Duration,
}

impl Heartbeat {
    /// A new engine.
    pub fn new(now: Instant) -> Self {
        Self {
            looked: now,
            silent: Duration::ZERO,
        }
    }

    /// When to look again at the latest.
    pub fn next_look(&self) -> Instant {
        self.looked + LOOK
    }

    /// Time has passed. A gap longer than the one that was planned is time in which the supervisor did not run.
    pub fn look(&mut self, now: Instant) {
        self.silent += now.saturating_duration_since(self.looked).min(LOOK);
        self.looked = now;
    }

    /// The engine said something.
    pub fn heard(&mut self) {
        self.silent = Duration::ZERO;
    }

    /// It has said nothing for [`SILENCE_MAX`].
    pub fn is_over(&self) -> bool {
        self.silent >= SILENCE_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Looks as often as the supervisor does while it hears nothing, until `end`.
    fn silent_until(heartbeat: &mut Heartbeat, end: Instant) {
        while heartbeat.next_look() < end {
            heartbeat.look(heartbeat.next_look());
        }
        heartbeat.look(end);
    }

    #[test]
    fn silence_ends_an_engine_after_the_longest_wait_and_not_before() {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::new(start);
        silent_until(&mut heartbeat, start + SILENCE_MAX - SECOND);
        assert!(!heartbeat.is_over());
        silent_until(&mut heartbeat, start + SILENCE_MAX);
        assert!(heartbeat.is_over());
    }

    #[test]
    fn whatever_is_heard_begins_the_wait_anew() {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::new(start);
        silent_until(&mut heartbeat, start + 29 * SECOND);
        heartbeat.heard();
        silent_until(&mut heartbeat, start + 58 * SECOND);
        assert!(!heartbeat.is_over());
        silent_until(&mut heartbeat, start + 59 * SECOND);
        assert!(heartbeat.is_over());
    }

    #[test]
    fn time_in_which_the_supervisor_did_not_run_does_not_count() {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::new(start);
        heartbeat.look(start + 3600 * SECOND);
        assert!(!heartbeat.is_over());
        silent_until(&mut heartbeat, start + 3624 * SECOND);
        assert!(!heartbeat.is_over());
        silent_until(&mut heartbeat, start + 3625 * SECOND);
        assert!(heartbeat.is_over());
    }
}
