//! What the operator's leader works with.

use crate::canary::Seen;
use crate::defaults::Defaults;
use crate::metrics::Metrics;
use jiff::SignedDuration;
use kube::Client;
use std::sync::Arc;
use tokio::sync::watch;

/// The cluster and the settings of the operator.
#[derive(Clone)]
pub struct Context {
    /// The API server.
    pub client: Client,
    /// Defaults of pools.
    pub defaults: Arc<Defaults>,
    /// The operator's own counters.
    pub metrics: Arc<Metrics>,
    /// The result of the last dry run.
    pub canary: watch::Receiver<Seen>,
    /// Name of this replica, for events.
    pub name: String,
    /// The operator may patch pods, so that it can update sidecars in place.
    pub allow_pod_patch: bool,
    /// The least time between two requests to a sidecar, and between two writes of the counts in a status.
    pub status_interval: SignedDuration,
}
