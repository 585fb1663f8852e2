//! Runs the election: reads and writes the Lease, publishes whether this replica leads, and releases the Lease at shutdown.

use super::elect::{Action, Candidate, Timing};
use super::lease::{Holder, LeaseClient, record};
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
    /// A sender and its receiver. At first this replica does not lead.
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (tx, rx) = watch::channel(false);
        (tx, Self(rx))
    }

    pub fn leads(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until a leader session starts or ends. Waits forever if the election has ended.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    async fn until(&mut self, leads: bool) -> bool {
        self.0.wait_for(|now| *now == leads).await.is_ok()
    }

    /// Starts `work` in every leader session and drops it when the session ends. Returns when the election ends.
    pub async fn during<F: Future<Output = ()>>(mut self, mut work: impl FnMut() -> F) {
        while self.until(true).await {
            let mut lost = self.clone();
            tokio::select! {
                running = lost.until(false) => if !running { return },
                () = work() => {
                    // Work that returned early is not started again before the next session.
                    let _lost = self.until(false).await;
                }
            }
        }
    }
}

/// Dependencies of an election.
pub struct Election {
    pub lease: kube::Api<Lease>,
    /// Name of the Lease.
    pub name: String,
    /// Identity of this process. No other process may have the same name.
    pub identity: String,
    pub timing: Timing,
    pub metrics: Arc<Metrics>,
}

/// Takes part in the election until `Phase::Leaving`, then releases the Lease.
pub async fn run(election: Election, leads: watch::Sender<bool>, mut shutdown: Shutdown) {
    let mut elector = Elector {
        lease: LeaseClient::new(election.lease, election.name),
        candidate: Candidate::new(election.identity, election.timing),
        timing: election.timing,
        start: Instant::now(),
        last: None,
        metrics: election.metrics,
        leads,
    };
    while shutdown.phase() < Phase::Leaving {
        // A write without a response does not extend the session. The next check reads its result.
        let mut leaving = shutdown.clone();
        tokio::select! {
            () = leaving.reached(Phase::Leaving) => break,
            () = elector.check_with_timeout() => {}
        }
        elector.publish();
        let pause = elector.pause();
        shutdown.unless(Phase::Leaving, sleep(pause)).await;
        elector.publish();
    }
    elector.release().await;
}

struct Elector {
    lease: LeaseClient,
    candidate: Candidate,
    timing: Timing,
    start: Instant,
    /// The Lease that was last read or written.
    last: Option<Lease>,
    metrics: Arc<Metrics>,
    leads: watch::Sender<bool>,
}

impl Elector {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Checks the Lease, with a timeout at the end of the session.
    async fn check_with_timeout(&mut self) {
        let left = match self.candidate.leads_until(self.now()) {
            Some(until) => until
                .saturating_sub(self.now())
                .min(self.timing.renew_deadline / 2),
            None => self.timing.renew_deadline / 2,
        };
        match timeout(left, self.check()).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => warn!(reason = %e, "the Lease could not be read or written; retrying"),
            Err(_) => warn!("timeout reading or writing the Lease; retrying"),
        }
    }

    async fn check(&mut self) -> Result<(), kube::Error> {
        let read = self.lease.read().await?;
        let action = self.candidate.step(read.as_ref().map(record), self.now());
        let started = self.now();
        let identity = self.candidate.identity().to_owned();
        let holder = |taken| Holder {
            name: &identity,
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
                self.candidate.record_renewal(started);
                Ok(())
            }
            // Another candidate wrote it first.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Wait until the next check, or until the end of the session if that is sooner.
    fn pause(&self) -> Duration {
        let now = self.now();
        match self.candidate.leads_until(now) {
            Some(until) => until.saturating_sub(now).min(self.timing.retry_period),
            None => self.timing.retry_period,
        }
    }

    fn publish(&self) {
        let leads = self.candidate.leads_until(self.now()).is_some();
        self.set(leads);
    }

    fn set(&self, leads: bool) {
        // Wake receivers only if the value changes.
        let changed = |now: &mut bool| std::mem::replace(now, leads) != leads;
        if self.leads.send_if_modified(changed) {
            let to = if leads { "leading" } else { "following" };
            info!(
                state = to,
                identity = self.candidate.identity(),
                "leadership changed"
            );
            self.metrics.add("leader_transitions_total", &[to], 1);
        }
        self.metrics
            .set("leader", &[], if leads { 1.0 } else { 0.0 });
    }

    /// Lets another candidate lead immediately instead of after the lease duration.
    async fn release(mut self) {
        let led = self.candidate.leads_until(self.now()).is_some();
        self.set(false);
        let Some(last) = self.last.take().filter(|_| led) else {
            return;
        };
        let released = Holder {
            name: "",
            timing: self.timing,
            taken: false,
        };
        match timeout(self.timing.retry_period, self.lease.replace(last, released)).await {
            Ok(Ok(_)) => info!("Lease released"),
            Ok(Err(e)) => warn!(reason = %e, "the Lease could not be released; it expires"),
            Err(_) => warn!("timeout releasing the Lease; it expires"),
        }
    }
}
