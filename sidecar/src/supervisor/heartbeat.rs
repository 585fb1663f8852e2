//! Whether the engine still answers: it says so once a second, through the lock that everything it does goes through.

use std::time::{Duration, Instant};

/// An engine that says nothing for this long hangs and is ended. Far above any wait of a healthy one, but for the reading of a slot
/// table, of which it tells beforehand.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// For every row of a table that is read the silence may be longer by this, and for every chunk record, whose key is computed anew,
/// by ten times as much. Each ten times what a processor of its own takes.
const PER_ROW: Duration = Duration::from_micros(1);
const PER_CHUNK: Duration = Duration::from_micros(10);

/// While the engine is silent the supervisor looks this often.
const LOOK: Duration = Duration::from_secs(5);

/// How long the engine has been silent, counting only time in which the supervisor itself ran: a container that was frozen, or
/// stopped by a debugger, is no reason to end its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    looked: Instant,
    silent: Duration,
    /// Silence that is too long.
    silence_max: Duration,
}

impl Heartbeat {
    /// A new engine.
    pub fn new(now: Instant) -> Self {
        Self {
            looked: now,
            silent: Duration::ZERO,
            silence_max: SILENCE_MAX,
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

    /// The engine gave a sign of life.
    pub fn heard(&mut self) {
        self.silent = Duration::ZERO;
        self.silence_max = SILENCE_MAX;
    }

    /// The engine reads a slot table before its next sign of life.
    pub fn reads(&mut self, rows: u32, chunks: u32) {
        self.silent = Duration::ZERO;
        self.silence_max = SILENCE_MAX + PER_ROW * rows + PER_CHUNK * chunks;
    }

    /// For how long it has said nothing, where that is too long.
    pub fn too_long(&self) -> Option<Duration> {
        (self.silent >= self.silence_max).then_some(self.silence_max)
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
