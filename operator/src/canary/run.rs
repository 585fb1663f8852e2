//! The round of the leader: send, look, tell.

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

/// Between two rounds.
pub const EVERY: Duration = Duration::from_secs(60);
/// Between two rounds while the last one did not pass: an outage ends sooner in the status than it began.
const EVERY_FAILED: Duration = Duration::from_secs(15);
/// Between two looks while a miss is not believed yet.
const EVERY_DOUBTED: Duration = Duration::from_secs(2);
/// A miss is believed when it lasts: a replica that comes or goes is no outage, and each pool's status would tell of it twice.
const BELIEVED: Duration = Duration::from_secs(10);
/// Longest round; a webhook that does not answer costs the API server 3 s.
const TIME_MAX: Duration = Duration::from_secs(15);

/// What the last round saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Seen {
    /// No round has ended yet.
    #[default]
    NotYet,
    /// The pod came back with our containers.
    Injected,
    /// It came back without them: the API server did not reach the webhook, or did not believe it.
    WebhookUnreachable,
    /// The API server refused the pod or did not answer; of the webhook this says nothing.
    Unknown(String),
}

impl Seen {
    /// As metrics name it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotYet => "NotYet",
            Self::Injected => "Injected",
            Self::WebhookUnreachable => "WebhookUnreachable",
            Self::Unknown(_) => "Unknown",
        }
    }
}

/// What the canary needs.
#[derive(Clone)]
pub struct Canary {
    /// Pods in the operator's namespace.
    pub pods: Api<Pod>,
    /// Of the running operator.
    pub defaults: Arc<Defaults>,
    /// Where the result goes.
    pub seen: watch::Sender<Seen>,
    /// Where rounds are counted.
    pub metrics: Arc<Metrics>,
}

/// Goes round without end.
pub async fn run(canary: Canary) {
    let mut doubt = Doubt::default();
    loop {
        let seen = look(&canary).await;
        canary.metrics.add("canary_checks_total", &[seen.name()], 1);
        if !doubt.believes(&seen, Instant::now()) {
            sleep(EVERY_DOUBTED).await;
            continue;
        }
        if canary.seen.send_replace(seen.clone()) != seen {
            match &seen {
                Seen::Injected => info!("the webhook answers: a test pod was injected"),
                Seen::Unknown(why) => warn!(why, "the test pod was refused"),
                _ => warn!(
                    "a test pod came back without a sidecar: the API server does not reach the webhook"
                ),
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

/// Since when the test pod comes back without a sidecar.
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

async fn look(canary: &Canary) -> Seen {
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
        assert!(!believes(&missed, 60), "counted anew");
        assert!(believes(&Seen::Unknown("quota".to_owned()), 62));
        assert!(!believes(&missed, 70));
        assert!(believes(&missed, 80));
        assert!(believes(&missed, 95), "and stays believed");
    }
}
