//! The leader's loop: creates the pod by dry run, checks it, and publishes the result.

use super::pod::{canary_pod, injected};
use crate::defaults::Defaults;
use crate::metrics::Metrics;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, PostParams};
use kube::{Client, Config};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// Interval between checks.
pub const INTERVAL: Duration = Duration::from_secs(60);
/// Interval after a failed check, so that the status shows the end of an outage soon.
const FAILED_INTERVAL: Duration = Duration::from_secs(15);
/// Interval while a failure is not confirmed yet.
const UNCONFIRMED_INTERVAL: Duration = Duration::from_secs(2);
/// A failure is confirmed when it lasts this long. A replica that starts or stops is no outage, and would cost two status writes per pool.
const CONFIRM_AFTER: Duration = Duration::from_secs(10);
/// Checks that are remembered, without repetitions after a failure.
const REMEMBERED: usize = 10;
/// Failures among these from which the path to the webhook is partly broken.
const FAILURES_PARTLY: usize = 3;
/// Timeout of a check. A webhook that does not answer costs the API server 3 s.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Result of the last check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CanaryResult {
    /// No check has ended yet.
    #[default]
    NotYet,
    /// The pod had the sidecar's containers.
    Injected,
    /// The pod had no sidecar: the API server did not reach the webhook, or did not trust its certificate.
    WebhookUnreachable,
    /// The pod had a sidecar, but several pods before had none: some API servers do not reach the webhook, or not all its replicas.
    Partly,
    /// The API server refused the pod or did not answer, so the state of the webhook is unknown.
    Unknown(String),
}

impl CanaryResult {
    /// Name in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotYet => "NotYet",
            Self::Injected => "Injected",
            Self::WebhookUnreachable => "WebhookUnreachable",
            Self::Partly => "Partly",
            Self::Unknown(_) => "Unknown",
        }
    }
}

/// Dependencies of the loop.
#[derive(Clone)]
pub struct Canary {
    /// How to connect to an API server. Each check uses a new connection, and so in time all API servers.
    pub config: Config,
    /// Defaults of the running operator.
    pub defaults: Arc<Defaults>,
    /// Receives the result.
    pub result: watch::Sender<CanaryResult>,
    pub metrics: Arc<Metrics>,
}

/// Runs forever.
pub async fn run(canary: Canary) {
    // The result of an earlier leader session may be old.
    canary.result.send_replace(CanaryResult::default());
    let mut confirmation = Confirmation::default();
    let mut history = History::default();
    loop {
        let result = check(&canary).await;
        canary
            .metrics
            .add("canary_checks_total", &[result.name()], 1);
        if confirmation.0.is_none() {
            history.add(&result);
        }
        if !confirmation.confirms(&result, Instant::now()) {
            sleep(UNCONFIRMED_INTERVAL).await;
            continue;
        }
        let result = history.judge(result);
        if canary.result.send_replace(result.clone()) != result {
            match &result {
                CanaryResult::Injected => info!("canary got a sidecar"),
                CanaryResult::Unknown(why) => {
                    warn!(
                        reason = why,
                        "dry run of the canary failed; it is unknown whether pods get a sidecar"
                    )
                }
                CanaryResult::Partly => warn!(
                    "some canaries got no sidecar: some API servers do not reach the webhook, or not all its replicas"
                ),
                _ => warn!(
                    "canary got no sidecar: the API server does not reach the webhook or does not trust its certificate"
                ),
            }
        }
        let pause = match result {
            CanaryResult::Injected | CanaryResult::Partly => INTERVAL,
            _ => FAILED_INTERVAL,
        };
        sleep(pause).await;
    }
}

/// Start of a series of failed checks.
#[derive(Debug, Default)]
struct Confirmation(Option<Instant>);

impl Confirmation {
    fn confirms(&mut self, result: &CanaryResult, now: Instant) -> bool {
        if *result != CanaryResult::WebhookUnreachable {
            self.0 = None;
            return true;
        }
        now.duration_since(*self.0.get_or_insert(now)) >= CONFIRM_AFTER
    }
}

/// Whether the last checks failed, the oldest first.
#[derive(Debug, Default)]
struct History(VecDeque<bool>);

impl History {
    fn add(&mut self, result: &CanaryResult) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0
            .push_back(*result == CanaryResult::WebhookUnreachable);
    }

    /// The result of the last check in view of those before.
    fn judge(&self, result: CanaryResult) -> CanaryResult {
        let failures = self.0.iter().filter(|failed| **failed).count();
        match result {
            CanaryResult::Injected if failures >= FAILURES_PARTLY => CanaryResult::Partly,
            result => result,
        }
    }
}

async fn check(canary: &Canary) -> CanaryResult {
    let params = PostParams {
        dry_run: true,
        field_manager: None,
    };
    let pod: Pod = match serde_json::from_value(canary_pod(&canary.defaults.image)) {
        Ok(pod) => pod,
        Err(e) => return CanaryResult::Unknown(e.to_string()),
    };
    let client = match Client::try_from(canary.config.clone()) {
        Ok(client) => client,
        Err(e) => return CanaryResult::Unknown(e.to_string()),
    };
    let pods: Api<Pod> = Api::namespaced(client, &canary.defaults.namespace);
    match timeout(TIMEOUT, pods.create(&params, &pod)).await {
        Ok(Ok(pod)) if injected(&pod) => CanaryResult::Injected,
        Ok(Ok(_)) => CanaryResult::WebhookUnreachable,
        Ok(Err(e)) => CanaryResult::Unknown(e.to_string()),
        Err(_) => CanaryResult::Unknown(format!("no answer within {TIMEOUT:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_often_fails_is_partly_broken_until_ten_checks_forget_it() {
        let mut history = History::default();
        let mut next = |result: CanaryResult| {
            history.add(&result);
            history.judge(result)
        };
        let missed = || CanaryResult::WebhookUnreachable;
        let injected = || CanaryResult::Injected;
        next(missed());
        next(missed());
        assert_eq!(next(injected()), injected(), "a replica that restarts");
        assert_eq!(next(missed()), missed());
        for _ in 0..6 {
            assert_eq!(next(injected()), CanaryResult::Partly);
        }
        assert_eq!(next(injected()), injected());
    }

    #[test]
    fn only_a_missed_injection_needs_confirmation() {
        let start = Instant::now();
        let mut confirmation = Confirmation::default();
        let mut confirms = |result: &CanaryResult, seconds| {
            let now = start + Duration::from_secs(seconds);
            confirmation.confirms(result, now)
        };
        let missed = CanaryResult::WebhookUnreachable;
        assert!(!confirms(&missed, 0));
        assert!(!confirms(&missed, 9));
        assert!(confirms(&CanaryResult::Injected, 9));
        assert!(!confirms(&missed, 60), "counted from the start");
        assert!(confirms(&CanaryResult::Unknown("quota".to_owned()), 62));
        assert!(!confirms(&missed, 70));
        assert!(confirms(&missed, 80));
        assert!(confirms(&missed, 95), "and stays believed");
    }
}
