//! `reload`: makes kubelets update the files of a pool's ConfigMap and Secrets in its pods, and waits until the sidecars report the config.

use super::args::Reload as Args;
use super::injection::MANAGER;
use super::read::Cluster;
use super::table::table;
use crate::api::KVCachePool;
use crate::desired::config_map_name;
use crate::names;
use crate::pods::Pod;
use crate::status::{ACCEPTED, condition};
use futures::{StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod as FullPod};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kvcachepool_protocol::config::{Config, FILE_NAME};
use kvcachepool_protocol::status::Status;
use serde::Serialize;
use serde_json::json;
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, sleep};

/// Interval between two queries of a sidecar or of the pool's ConfigMap.
const PAUSE: Duration = Duration::from_millis(500);
/// Pods that are handled at the same time.
const CONCURRENT: usize = 16;

/// Why no sidecar was reloaded.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ReloadError {
    /// The operator ignores the spec.
    #[error("NotAccepted: the pool's spec is invalid, so sidecars keep the previous config: {0}")]
    NotAccepted(String),
    /// The config is not in the cluster yet.
    #[error(
        "NotApplied: the operator has not written the config of generation {0} into ConfigMap {1}; check that it runs: kubectl kvcachepool doctor"
    )]
    NotApplied(u64, String),
}

/// What became of a sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// It uses the config.
    Reloaded,
    /// It uses the config, except for keys that need a restart of the pod.
    RestartNeeded,
    /// It rejected the config and keeps the previous one.
    ConfigInvalid,
    /// It still reports an older config.
    TimedOut,
    /// The pod has no running sidecar.
    NotRunning,
    /// The pod could not be patched, or the sidecar could not be queried.
    Unreachable,
}

impl Outcome {
    fn failed(self) -> bool {
        matches!(
            self,
            Self::ConfigInvalid | Self::TimedOut | Self::Unreachable
        )
    }
}

/// A pod and what became of its sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    pub pod: String,
    pub outcome: Outcome,
    /// Keys that wait for a restart, or what went wrong.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Result of a reload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    pub pods: Vec<Row>,
}

/// Reloads the sidecars of a pool or of a pod.
pub async fn reload(cluster: &Cluster, args: &Args) -> Result<Report, Box<dyn std::error::Error>> {
    let until = Instant::now() + args.timeout;
    let pods = cluster.pods_of(&args.of).await?;
    let Some(first) = pods.first() else {
        return Ok(Report { pods: Vec::new() });
    };
    let pool = cluster.one(&first.pool).await?;
    let wanted = applied(cluster, &pool, until).await?;
    let rows = stream::iter(&pods).map(|pod| one(cluster, pod, wanted, until));
    let mut pods: Vec<_> = rows.buffer_unordered(CONCURRENT).collect().await;
    pods.sort_by(|a, b| a.pod.cmp(&b.pod));
    Ok(Report { pods })
}

/// Waits until the operator has written the pool's config. Returns its generation.
async fn applied(
    cluster: &Cluster,
    pool: &KVCachePool,
    until: Instant,
) -> Result<u64, Box<dyn std::error::Error>> {
    let conditions = pool.status.as_ref().map(|s| &*s.conditions);
    if let Some(c) = condition(conditions.unwrap_or_default(), ACCEPTED)
        && c.status == "False"
    {
        return Err(ReloadError::NotAccepted(c.message.clone()).into());
    }
    let wanted = pool.metadata.generation.unwrap_or(0).unsigned_abs();
    let name = config_map_name(pool.metadata.name.as_deref().unwrap_or_default());
    let maps: Api<ConfigMap> = cluster.api();
    loop {
        let map = maps.get_opt(&name).await;
        let map = map.map_err(super::read::failed(&format!("ConfigMap {name}")))?;
        let file = map.and_then(|map| map.data?.remove(FILE_NAME));
        let config = file.and_then(|text| Config::parse(&text, true).ok());
        match config {
            Some((config, _)) if config.pool.generation >= wanted => return Ok(wanted),
            _ if Instant::now() >= until => {
                return Err(ReloadError::NotApplied(wanted, name).into());
            }
            _ => sleep(PAUSE).await,
        }
    }
}

async fn one(cluster: &Cluster, pod: &Pod, wanted: u64, until: Instant) -> Row {
    let row = |outcome, message: String| Row {
        pod: pod.name.to_string(),
        outcome,
        message,
    };
    if pod.address().is_none() {
        return row(Outcome::NotRunning, String::new());
    }
    let api: Api<FullPod> = cluster.api();
    let now = Timestamp::now().to_string();
    let patch = Patch::Merge(json!({"metadata": {"annotations": {names::RELOADED_AT: now}}}));
    if let Err(e) = api
        .patch(&pod.name, &PatchParams::apply(MANAGER), &patch)
        .await
    {
        return row(Outcome::Unreachable, format!("cannot patch the pod: {e}"));
    }
    loop {
        let found = match cluster.sidecar(&pod.name).await {
            Ok(status) => judge(&status, wanted),
            Err(e) => (Outcome::Unreachable, e),
        };
        match found.0 {
            Outcome::TimedOut | Outcome::Unreachable if Instant::now() < until => {
                sleep(PAUSE).await;
            }
            _ => return row(found.0, found.1),
        }
    }
}

/// What the status of a sidecar means. `TimedOut`: not yet.
fn judge(status: &Status, wanted: u64) -> (Outcome, String) {
    if !status.config_error.is_empty() {
        return (Outcome::ConfigInvalid, status.config_error.clone());
    }
    if status.config_generation < wanted {
        let has = status.config_generation;
        let message = format!("the sidecar reports generation {has}, the pool has {wanted}");
        return (Outcome::TimedOut, message);
    }
    match status.restart_needed.is_empty() {
        true => (Outcome::Reloaded, String::new()),
        false => (Outcome::RestartNeeded, status.restart_needed.join(", ")),
    }
}

impl Report {
    /// Whether a sidecar does not use the config although it runs.
    pub fn failed(&self) -> bool {
        self.pods.iter().any(|row| row.outcome.failed())
    }

    /// The report as text.
    pub fn text(&self) -> String {
        if self.pods.is_empty() {
            return "the pool has no pods\n".to_owned();
        }
        let rows: Vec<_> = self
            .pods
            .iter()
            .map(|row| {
                vec![
                    row.pod.clone(),
                    format!("{:?}", row.outcome),
                    row.message.clone(),
                ]
            })
            .collect();
        table(&["POD", "RESULT", "MESSAGE"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sidecar_has_reloaded_when_it_reports_the_pools_generation() {
        let mut status = Status {
            config_generation: 3,
            ..Status::default()
        };
        assert_eq!(judge(&status, 4).0, Outcome::TimedOut);
        assert_eq!(judge(&status, 3), (Outcome::Reloaded, String::new()));
        status.restart_needed = vec!["memory.size".to_owned(), "disk.path".to_owned()];
        let keys = "memory.size, disk.path".to_owned();
        assert_eq!(judge(&status, 3), (Outcome::RestartNeeded, keys));
        status.config_error = "s3.bucket: too long".to_owned();
        let (outcome, message) = judge(&status, 3);
        assert_eq!(outcome, Outcome::ConfigInvalid);
        assert_eq!(message, "s3.bucket: too long");
    }

    #[test]
    fn a_pod_without_a_running_sidecar_is_no_failure() {
        let row = |outcome| Row {
            pod: "a".to_owned(),
            outcome,
            message: String::new(),
        };
        let pods = [
            Outcome::Reloaded,
            Outcome::NotRunning,
            Outcome::RestartNeeded,
        ]
        .map(row);
        let mut report = Report {
            pods: pods.to_vec(),
        };
        assert!(!report.failed());
        report.pods.push(row(Outcome::TimedOut));
        assert!(report.failed());
        assert!(report.text().contains("a     TimedOut"));
    }
}
