//! The leader's loop: creates the pod by dry run, checks it, and publishes the result.

use super::pod::{injected, sent};
use crate::defaults::Defaults;
use crate::metrics::Metrics;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, PostParams};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// Interval between checks.
pub const EVERY: Duration = Duration::from_secs(60);
/// Interval after a failed check, so that the status shows the end of an outage soon.
const EVERY_FAILED: Duration = Duration::from_secs(15);
/// Interval while a failure is not confirmed yet.
const EVERY_DOUBTED: Duration = Duration::from_secs(2);
/// A failure is confirmed when it lasts this long. A replica that starts or stops is no outage, and would cost two status writes per pool.
const BELIEVED: Duration = Duration::from_secs(10);
/// Timeout of a check. A webhook that does not answer costs the API server 3 s.
const TIME_MAX: Duration = Duration::from_secs(15);

/// Result of the last check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Seen {
    /// No check has ended yet.
    #[default]
    NotYet,
    /// The pod had the sidecar's containers.
    Injected,
    /// The pod had no sidecar: the API server did not reach the webhook, or did not trust its certificate.
    WebhookUnreachable,
    /// The API server refused the pod or did not answer, so the state of the webhook is unknown.
    Unknown(String),
}

impl Seen {
    /// Name in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotYet => "NotYet",
            Self::Injected => "Injected",
            Self::WebhookUnreachable => "WebhookUnreachable",
            Self::Unknown(_) => "Unknown",
        }
    }
}

/// Dependencies of the loop.
#[derive(Clone)]
pub struct Canary {
    /// Pods in the operator's namespace.
    pub pods: Api<Pod>,
    /// Defaults of the running operator.
    pub defaults: Arc<Defaults>,
    /// Receives the result.
    pub seen: watch::Sender<Seen>,
    pub metrics: Arc<Metrics>,
}

/// Runs forever.
pub async fn run(canary: Canary) {
    let mut doubt = Doubt::default();
    loop {
        let seen = check(&canary).await;
        canary.metrics.add("canary_checks_total", &[seen.name()], 1);
        if !doubt.believes(&seen, Instant::now()) {
            sleep(EVERY_DOUBTED).await;
            continue;
        }
        if canary.seen.send_replace(seen.clone()) != seen {
            match &seen {
                Seen::Injected => info!("canary injected"),
                Seen::Unknown(why) => warn!(reason = why, "canary refused by the API server"),
                _ => warn!("canary not injected: the API server does not reach the webhook"),
            }
        }
        let pause = if seen == Seen::Injected {
            EVERY
        } else {
            EVERY_FAILED
        };
        sleep(pause).await;
    }
}

/// Start of a series of failed checks.
#[derive(Debug, Default)]
struct Doubt(Option<Instant>);

impl Doubt {
    fn believes(&mut self, seen: &Seen, now: Instant) -> bool {
        if *seen != Seen::WebhookUnreachable {
            self.0 = None;
            return true;
        }
        now.duration_since(*self.0.get_or_insert(now)) >= BELIEVED
    }
}

async fn check(canary: &Canary) -> Seen {
    let params = PostParams {
        dry_run: true,
        field_manager: None,
    };
    let pod: Pod = match serde_json::from_value(sent(&canary.defaults)) {
        Ok(pod) => pod,
        Err(e) => return Seen::Unknown(e.to_string()),
    };
    match timeout(TIME_MAX, canary.pods.create(&params, &pod)).await {
        Ok(Ok(pod)) if injected(&pod) => Seen::Injected,
        Ok(Ok(_)) => Seen::WebhookUnreachable,
        Ok(Err(e)) => Seen::Unknown(e.to_string()),
        Err(_) => Seen::Unknown(format!("no answer within {TIME_MAX:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_miss_is_believed_when_it_lasts_and_everything_else_at_once() {
        let start = Instant::now();
        let mut doubt = Doubt::default();
        let mut believes = |seen: &Seen, seconds| {
            let now = start + Duration::from_secs(seconds);
            doubt.believes(seen, now)
        };
        let missed = Seen::WebhookUnreachable;
        assert!(!believes(&missed, 0));
        assert!(!believes(&missed, 9));
        assert!(believes(&Seen::Injected, 9));
        assert!(!believes(&missed, 60), "counted from the start");
        assert!(believes(&Seen::Unknown("quota".to_owned()), 62));
        assert!(!believes(&missed, 70));
        assert!(believes(&missed, 80));
        assert!(believes(&missed, 95), "and stays believed");
    }
}
