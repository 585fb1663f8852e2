//! Decides what to do with the Lease, from the Lease that was read and from the local clock. Times of other machines are not used. A
//! candidate takes a Lease that has not changed for `lease_duration` on its own clock, and a holder stops leading after `renew_deadline`,
//! which is shorter. No two candidates lead at once as long as the rates of their clocks differ by less than the square root of
//! `lease_duration / renew_deadline`. If a Lease is deleted, candidates that have seen its holder wait for the same time; others create
//! it at once.

use std::time::Duration;

/// Times of the election, named as in Kubernetes' own leader election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A Lease that has not changed for this long may be taken.
    pub lease_duration: Duration,
    /// A holder that could not renew its Lease for this long stops leading.
    pub renew_deadline: Duration,
    /// Interval between checks of the Lease.
    pub retry_period: Duration,
}

impl Default for Timing {
    /// A killed leader is replaced within `lease_duration + 2 * retry_period` = 16 s.
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(12),
            renew_deadline: Duration::from_secs(8),
            retry_period: Duration::from_secs(2),
        }
    }
}

/// Maximum `lease_duration` of another holder that is respected. A Lease edited by hand must not block the election forever.
const LEASE_DURATION_MAX: Duration = Duration::from_secs(60);

/// Holder and version of a Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Identity of the holder. Empty if the Lease was released.
    pub holder: String,
    /// Lease duration that the holder wrote.
    pub lease_duration: Option<Duration>,
    /// Resource version, which changes with every write.
    pub version: String,
}

/// The next write of the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// There is no Lease. Create it with this candidate as the holder.
    Create,
    /// Replace the version that was read, with this candidate as the holder.
    Hold {
        /// Another candidate held it before.
        taken: bool,
    },
    /// Another candidate holds it.
    Wait,
}

/// One candidate. Times are those of the local monotonic clock, since any fixed moment.
#[derive(Debug)]
pub struct Candidate {
    identity: String,
    timing: Timing,
    /// The Lease that was last read, and since when it is unchanged.
    seen: Option<(Record, Duration)>,
    /// Since when there is no Lease.
    missing_since: Option<Duration>,
    leads_until: Option<Duration>,
}

impl Candidate {
    /// `identity` names this process. No other process may have the same name, including earlier ones.
    pub fn new(identity: String, timing: Timing) -> Self {
        Self {
            identity,
            timing,
            seen: None,
            missing_since: None,
            leads_until: None,
        }
    }

    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Decides after a read of the Lease. `None` if there is none.
    pub fn step(&mut self, read: Option<Record>, now: Duration) -> Action {
        let Some(record) = read else {
            return self.step_without_lease(now);
        };
        self.missing_since = None;
        let since = match &self.seen {
            Some((seen, since)) if *seen == record => *since,
            _ => now,
        };
        let mine = record.holder == self.identity;
        let free = record.holder.is_empty()
            || now.saturating_sub(since) >= self.lease_duration_of(&record);
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

    fn step_without_lease(&mut self, now: Duration) -> Action {
        let since = *self.missing_since.get_or_insert(now);
        match &self.seen {
            Some((seen, _))
                if !seen.holder.is_empty()
                    && seen.holder != self.identity
                    && now.saturating_sub(since) < self.lease_duration_of(seen) =>
            {
                Action::Wait
            }
            _ => Action::Create,
        }
    }

    fn lease_duration_of(&self, record: &Record) -> Duration {
        record
            .lease_duration
            .unwrap_or(self.timing.lease_duration)
            .min(LEASE_DURATION_MAX)
            .max(self.timing.lease_duration)
    }

    /// Records a successful write that started at `started`. The deadline counts from then, because other candidates may have seen the
    /// write at any time since.
    pub fn record_renewal(&mut self, started: Duration) {
        self.leads_until = Some(started + self.timing.renew_deadline);
    }

    /// Time until which this candidate leads unless it renews the Lease. `None` if it does not lead.
    pub fn leads_until(&self, now: Duration) -> Option<Duration> {
        self.leads_until.filter(|until| now < *until)
    }
}
