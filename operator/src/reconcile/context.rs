//! The dependencies and settings of the watches and of leader sessions.

use crate::canary::CanaryResult;
use crate::defaults::Defaults;
use crate::metrics::Metrics;
use crate::scope::Scope;
use jiff::SignedDuration;
use kube::Client;
use std::sync::Arc;
use tokio::sync::watch;

#[derive(Clone)]
pub struct Context {
    pub client: Client,
    pub scope: Scope,
    pub defaults: Arc<Defaults>,
    pub metrics: Arc<Metrics>,
    /// The result of the last dry run.
    pub canary: watch::Receiver<CanaryResult>,
    /// Name of the MutatingWebhookConfiguration.
    pub webhook_configuration: String,
    /// Name of this replica, for events.
    pub name: String,
    /// Whether the operator may patch pods, which it needs to update sidecars in place.
    pub allow_pod_patch: bool,
    /// Minimum time between two requests to a sidecar, and between two status writes that only change counts.
    pub status_interval: SignedDuration,
}
