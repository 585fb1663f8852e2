//! The shell around the decision: reads and writes the lease, reports the leadership, gives the lease back at the end.

use super::elect::{Action, Candidate, Timing};
use super::lease::{Holder, Object, record};
use crate::metrics::Metrics;
use crate::shutdown::{Phase, Shutdown};
use k8s_openapi::api::coordination::v1::Lease;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// Whether this replica leads.
#[derive(Debug, Clone)]
pub struct Leadership(watch::Receiver<bool>);

impl Leadership {
    /// A value to set, and what follows it. Nobody leads at first.
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (set, seen) = watch::channel(false);
        (set, Self(seen))
    }

    /// Now.
    pub fn leads(&self) -> bool {
        *self.0.borrow()
    }

    /// Ends when a leader session begins or ends; never when the election itself has ended.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    async fn until(&mut self, leads: bool) -> bool {
        self.0.wait_for(|now| *now == leads).await.is_ok()
    }

    /// Runs `work` anew in every leader session, and drops it where it stands when the session ends. Ends with the election.
    pub async fn during<F: Future<Output = ()>>(mut self, mut work: impl FnMut() -> F) {
        while self.until(true).await {
            let mut lost = self.clone();
            tokio::select! {
                known = lost.until(false) => if !known { return },
                () = work() => {
                    // Work without end that ended: not again before the next session.
                    let _lost = self.until(false).await;
                }
            }
        }
    }
}

/// What an election needs.
pub struct Election {
    /// The lease.
    pub lease: kube::Api<Lease>,
    /// Its name.
    pub name: String,
    /// Name of this process.
    pub me: String,
    /// Times.
    pub timing: Timing,
    /// Where leader sessions are counted.
    pub metrics: Arc<Metrics>,
}

/// Takes part until `Phase::Leaving`, then gives the lease back.
pub async fn run(election: Election, leads: watch::Sender<bool>, mut shutdown: Shutdown) {
    let mut shell = Shell {
        lease: Object::new(election.lease, election.name),
        candidate: Candidate::new(election.me, election.timing),
        timing: election.timing,
        start: Instant::now(),
        last: None,
        metrics: election.metrics,
        leads,
    };
    while shutdown.phase() < Phase::Leaving {
        // The next check shows the result of a write that was begun and not answered; it did not extend the session.
        let mut leaving = shutdown.clone();
        tokio::select! {
            () = leaving.reached(Phase::Leaving) => break,
            () = shell.check_in_time() => {}
        }
        shell.report();
        let pause = shell.pause();
        shutdown.unless(Phase::Leaving, sleep(pause)).await;
        shell.report();
    }
    shell.give_back().await;
}

struct Shell {
    lease: Object,
    candidate: Candidate,
    timing: Timing,
    start: Instant,
    /// The lease as it was last read or written.
    last: Option<Lease>,
    metrics: Arc<Metrics>,
    leads: watch::Sender<bool>,
}

impl Shell {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// One check of the lease and what follows from it, for no longer than the session lasts.
    async fn check_in_time(&mut self) {
        let left = match self.candidate.leads_until(self.now()) {
            Some(until) => until.saturating_sub(self.now()).min(self.timing.term / 2),
            None => self.timing.term / 2,
        };
        match timeout(left, self.check()).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => warn!(error = %e, "the lease could not be read or written; trying again"),
            Err(_) => warn!("the API server did not answer about the lease; trying again"),
        }
    }

    async fn check(&mut self) -> Result<(), kube::Error> {
        let read = self.lease.read().await?;
        let action = self.candidate.step(read.as_ref().map(record), self.now());
        let began = self.now();
        let me = self.candidate.name().to_owned();
        let holder = |taken| Holder {
            name: &me,
            timing: self.timing,
            taken,
        };
        self.last = read.clone();
        let written = match (action, read) {
            (Action::Wait, _) | (Action::Hold { .. }, None) => return Ok(()),
            (Action::Create, _) => self.lease.create(holder(true)).await,
            (Action::Hold { taken }, Some(read)) => self.lease.replace(read, holder(taken)).await,
        };
        match written {
            Ok(lease) => {
                self.last = Some(lease);
                self.candidate.held(began);
                Ok(())
            }
            // Somebody else was quicker.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Time to the next check, or to the end of the session if that is sooner.
    fn pause(&self) -> Duration {
        let now = self.now();
        match self.candidate.leads_until(now) {
            Some(until) => until.saturating_sub(now).min(self.timing.period),
            None => self.timing.period,
        }
    }

    fn report(&self) {
        let leads = self.candidate.leads_until(self.now()).is_some();
        self.set(leads);
    }

    fn set(&self, leads: bool) {
        // Receivers wake only when it changes.
        let changed = |now: &mut bool| std::mem::replace(now, leads) != leads;
        if self.leads.send_if_modified(changed) {
            let to = if leads { "leading" } else { "following" };
            info!(state = to, name = self.candidate.name(), "leadership");
            self.metrics.add("leader_transitions_total", &[to], 1);
        }
        self.metrics
            .set("leader", &[], if leads { 1.0 } else { 0.0 });
    }

    /// Lets the next one lead at once instead of after the lease's duration.
    async fn give_back(mut self) {
        let led = self.candidate.leads_until(self.now()).is_some();
        self.set(false);
        let Some(last) = self.last.take().filter(|_| led) else {
            return;
        };
        let nobody = Holder {
            name: "",
            timing: self.timing,
            taken: false,
        };
        match timeout(self.timing.period, self.lease.replace(last, nobody)).await {
            Ok(Ok(_)) => info!("lease given back"),
            _ => warn!("the lease could not be given back; it ends by itself"),
        }
    }
}
