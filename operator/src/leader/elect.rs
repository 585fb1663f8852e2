//! The decision: what to do with the Lease, given what was read and the local clock. No time of another machine is believed: a holder
//! is gone when its record has not changed for the lease's duration on the local clock, and a holder ends its own term earlier than that
//! on its own. Two clocks may run at rates that differ by less than the root of duration / term, and still no two lead at once.
//! A lease that somebody deletes has still been seen: its holder is given the same time. Only a candidate that never saw one makes it at once.

use std::time::Duration;

/// How long things last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A record that did not change for so long has lost its holder.
    pub duration: Duration,
    /// A holder that could not renew for so long stops to lead.
    pub term: Duration,
    /// Time between two checks of the lease.
    pub period: Duration,
}

impl Default for Timing {
    /// A killed leader is followed within duration + 2 periods = 16 s.
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(12),
            term: Duration::from_secs(8),
            period: Duration::from_secs(2),
        }
    }
}

/// Longest duration of another's record that is respected: a record edited by hand must not keep everyone from leading for ever.
const DURATION_MAX: Duration = Duration::from_secs(60);

/// The holder in the lease, and the version of the lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Empty: given back.
    pub holder: String,
    /// Duration that its holder promised.
    pub duration: Option<Duration>,
    /// Changes with every write.
    pub version: String,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// There is no lease: make it, held by me.
    Create,
    /// Write me into the version that was read; `taken` when somebody else held it.
    Hold {
        /// The holder changes.
        taken: bool,
    },
    /// Somebody else holds it.
    Wait,
}

/// One candidate. Times are of the local monotonic clock, since any fixed moment.
#[derive(Debug)]
pub struct Candidate {
    me: String,
    timing: Timing,
    seen: Option<(Record, Duration)>,
    /// Since when there is no lease.
    gone: Option<Duration>,
    leads_until: Option<Duration>,
}

impl Candidate {
    /// `me` is the name of this process and of no other, also not of an earlier one.
    pub fn new(me: String, timing: Timing) -> Self {
        Self {
            me,
            timing,
            seen: None,
            gone: None,
            leads_until: None,
        }
    }

    /// Its name in the lease.
    pub fn name(&self) -> &str {
        &self.me
    }

    /// What to do, given the lease as it was just read (`None`: there is none).
    pub fn step(&mut self, read: Option<Record>, now: Duration) -> Action {
        let Some(record) = read else {
            return self.without(now);
        };
        self.gone = None;
        let since = match &self.seen {
            Some((seen, since)) if *seen == record => *since,
            _ => now,
        };
        let mine = record.holder == self.me;
        let free = record.holder.is_empty() || now.saturating_sub(since) >= self.patience(&record);
        self.seen = Some((record, since));
        match (mine, free) {
            (true, _) => Action::Hold { taken: false },
            (false, true) => Action::Hold { taken: true },
            (false, false) => {
                self.leads_until = None;
                Action::Wait
            }
        }
    }

    fn without(&mut self, now: Duration) -> Action {
        let since = *self.gone.get_or_insert(now);
        match &self.seen {
            Some((seen, _))
                if !seen.holder.is_empty()
                    && seen.holder != self.me
                    && now.saturating_sub(since) < self.patience(seen) =>
            {
                Action::Wait
            }
            _ => Action::Create,
        }
    }

    fn patience(&self, record: &Record) -> Duration {
        record
            .duration
            .unwrap_or(self.timing.duration)
            .min(DURATION_MAX)
            .max(self.timing.duration)
    }

    /// A write succeeded that was begun at `began`. The term counts from then: others may have seen the write at any moment since.
    pub fn held(&mut self, began: Duration) {
        self.leads_until = Some(began + self.timing.term);
    }

    /// Until when this candidate leads, unless a write prolongs it.
    pub fn leads_until(&self, now: Duration) -> Option<Duration> {
        self.leads_until.filter(|until| now < *until)
    }
}
