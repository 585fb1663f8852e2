//! Detects an engine that hangs. The engine sends a heartbeat once a second, after taking the lock that all its work takes.

use std::time::{Duration, Instant};

/// An engine without a heartbeat for this long hangs and is ended. A healthy engine is never silent for nearly as long, except while it
/// reads a slot table, which it announces.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Extra silence allowed per row of a slot table that is read; ten times as much per chunk record, whose key is computed again. Each is
/// ten times the duration on a dedicated core.
const PER_ROW: Duration = Duration::from_micros(1);
const PER_CHUNK: Duration = Duration::from_micros(10);

/// Check interval while the engine is silent.
const LOOK: Duration = Duration::from_secs(5);

/// How long the engine has been silent. Counts only time in which the supervisor itself ran: a frozen container, or one stopped by a
/// debugger, is no reason to end its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    looked: Instant,
    silent: Duration,
    silence_max: Duration,
}

impl Heartbeat {
    /// Starts to watch a new engine.
    pub fn new(now: Instant) -> Self {
        Self {
            looked: now,
            silent: Duration::ZERO,
            silence_max: SILENCE_MAX,
        }
    }

    /// Latest time of the next check.
    pub fn next_look(&self) -> Instant {
        self.looked + LOOK
    }

    /// Counts the time since the last check. A gap longer than planned is time in which the supervisor did not run.
    pub fn look(&mut self, now: Instant) {
        self.silent += now.saturating_duration_since(self.looked).min(LOOK);
        self.looked = now;
    }

    /// Records a heartbeat.
    pub fn heard(&mut self) {
        self.silent = Duration::ZERO;
        self.silence_max = SILENCE_MAX;
    }

    /// The engine reads a slot table before its next heartbeat.
    pub fn reads(&mut self, rows: u32, chunks: u32) {
        self.silent = Duration::ZERO;
        self.silence_max = SILENCE_MAX + PER_ROW * rows + PER_CHUNK * chunks;
    }

    /// How long the engine has been silent, if that is too long.
    pub fn too_long(&self) -> Option<Duration> {
        (self.silent >= self.silence_max).then_some(self.silence_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Checks as often as the supervisor does while the engine is silent, until `end`.
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
        assert!(heartbeat.too_long().is_none());
        silent_until(&mut heartbeat, start + SILENCE_MAX);
        assert!(heartbeat.too_long().is_some());
    }

    #[test]
    fn whatever_is_heard_begins_the_wait_anew() {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::new(start);
        silent_until(&mut heartbeat, start + 29 * SECOND);
        heartbeat.heard();
        silent_until(&mut heartbeat, start + 58 * SECOND);
        assert!(heartbeat.too_long().is_none());
        silent_until(&mut heartbeat, start + 59 * SECOND);
        assert!(heartbeat.too_long().is_some());
    }

    #[test]
    fn whoever_reads_a_large_table_is_granted_the_time_for_it_once() {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::new(start);
        heartbeat.reads(400_000_000, 1_000_000);
        silent_until(&mut heartbeat, start + 439 * SECOND);
        assert_eq!(heartbeat.too_long(), None);
        silent_until(&mut heartbeat, start + 440 * SECOND);
        assert_eq!(heartbeat.too_long(), Some(440 * SECOND));
        heartbeat.heard();
        silent_until(&mut heartbeat, start + 470 * SECOND);
        assert_eq!(heartbeat.too_long(), Some(SILENCE_MAX));
    }

    #[test]
    fn time_in_which_the_supervisor_did_not_run_does_not_count() {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::new(start);
        heartbeat.look(start + 3600 * SECOND);
        assert!(heartbeat.too_long().is_none());
        silent_until(&mut heartbeat, start + 3624 * SECOND);
        assert!(heartbeat.too_long().is_none());
        silent_until(&mut heartbeat, start + 3625 * SECOND);
        assert!(heartbeat.too_long().is_some());
    }
}
