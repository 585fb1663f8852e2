//! `check`: runs a Job that checks a pool's shared tiers like its pods would, with their service account, image, Secrets and network, and
//! prints the result. The Job is deleted in any case.

use super::args::Check;
use super::read::{Cluster, ReadError};
use super::table::table;
use crate::api::KVCachePool;
use crate::defaults::Defaults;
use crate::desired::{config_map_name, job, settings};
use crate::inject::Settings;
use crate::names;
use crate::policy::Policy;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, ContainerState, Event, Pod};
use kube::api::{DeleteParams, ListParams, LogParams, PostParams};
use kube::{Api, ResourceExt};
use kvcachepool_protocol::check::Report;
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, sleep};

/// Interval between two checks of the Job.
const PAUSE: Duration = Duration::from_millis(500);
/// The Job's own deadline exceeds the plugin's by this time, in case the plugin cannot delete it.
const OVERTIME: Duration = Duration::from_secs(30);
/// Waiting reasons of a container whose image cannot be pulled.
const NO_IMAGE: [&str; 4] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
];
/// Transient waiting reasons.
const PASSING: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// Why the state of the tiers is unknown.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Unchecked {
    /// The pool is invalid.
    #[error("NotAccepted: the pool's spec is invalid: {0}")]
    NotAccepted(String),
    /// The pool has nothing to check.
    #[error("NoSharedTier: pool {0} has no shared tier")]
    NoSharedTier(String),
    /// The image of sidecars is unknown.
    #[error("ImageUnknown: ConfigMap {0} does not have the image of sidecars; set --image")]
    ImageUnknown(String),
    /// The API server rejected the Job.
    #[error("JobNotCreated: the API server rejected the Job: {0}")]
    JobNotCreated(String),
    /// The Job has no pod: missing service account, a quota, an admission policy.
    #[error("PodNotCreated: {0}")]
    PodNotCreated(String),
    /// The sidecar's image cannot be pulled, so pods of the pool cannot pull it either.
    #[error("ImageNotPullable: {image}: {why}")]
    ImageNotPullable {
        image: String,
        /// The kubelet's message.
        why: String,
    },
    /// The container does not start.
    #[error("NotStarted: the container of the Job did not start: {0}")]
    NotStarted(String),
    /// The container ended without a report.
    #[error("NoReport: the Job ended without a report: {0}")]
    NoReport(String),
    /// The Job exceeded the timeout.
    #[error("TimedOut: the Job did not end within {0:?}: {1}")]
    TimedOut(Duration, String),
}

/// Progress of the Job.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// The Job has no pod yet.
    NoPod,
    /// The pod waits for this.
    Waits(String),
    /// The pod with this name has ended, with this result.
    Ended(String, String),
}

/// Checks the tiers of a pool.
pub async fn check(cluster: &Cluster, args: &Check) -> Result<Report, Box<dyn std::error::Error>> {
    let pool = cluster.one(&args.pool).await?;
    let settings = sidecar_settings(cluster, &pool, args).await?;
    let suffix: String = (0..5).map(|_| fastrand::lowercase()).collect();
    let time_limit = args.timeout;
    let account = &args.service_account;
    let wanted = job::check(&pool, &settings, account, time_limit + OVERTIME, &suffix);
    let wanted: Job = serde_json::from_value(wanted)?;
    let name = wanted.name_any();
    let jobs: Api<Job> = cluster.api();
    jobs.create(&PostParams::default(), &wanted)
        .await
        .map_err(|e| Unchecked::JobNotCreated(e.to_string()))?;
    let report = watch(cluster, &name, &settings.image, time_limit).await;
    if let Err(e) = jobs.delete(&name, &DeleteParams::background()).await {
        eprintln!("warning: Job {name} was not deleted: {e}");
    }
    report
}

/// The settings of the pool's sidecars, with the image.
async fn sidecar_settings(
    cluster: &Cluster,
    pool: &KVCachePool,
    args: &Check,
) -> Result<Settings, Box<dyn std::error::Error>> {
    let named = args.image.clone();
    let image = match named.filter(|i| !i.is_empty()) {
        Some(image) => image,
        None if !pool.spec.sidecar.image.is_empty() => pool.spec.sidecar.image.clone(),
        None => image(cluster, &pool.name_any()).await?,
    };
    let settings = accepted(pool, image)?;
    if !job::has_shared_tier(&settings.config) {
        return Err(Unchecked::NoSharedTier(pool.name_any()).into());
    }
    Ok(settings)
}

/// The settings of the pool's sidecars, with this default image.
pub fn accepted(pool: &KVCachePool, image: String) -> Result<Settings, Unchecked> {
    let defaults = Defaults {
        image,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        namespace: String::new(),
        redis_image: String::new(),
        redis_run_as_user: None,
        image_pull_secrets: Vec::new(),
        // The operator has accepted or refused the pool.
        policy: Policy::default(),
    };
    settings(pool, &defaults).map_err(|problems| {
        let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
        Unchecked::NotAccepted(all.join("; "))
    })
}

/// The image that the operator uses for new sidecars.
async fn image(cluster: &Cluster, pool: &str) -> Result<String, Box<dyn std::error::Error>> {
    let name = config_map_name(pool);
    let maps: Api<ConfigMap> = cluster.api();
    let map = maps.get_opt(&name).await.map_err(|source| ReadError::Api {
        what: format!("ConfigMap {name}"),
        source: Box::new(source),
    })?;
    let image = map.and_then(|map| map.annotations().get(names::IMAGE).cloned());
    Ok(image.ok_or(Unchecked::ImageUnknown(name))?)
}

async fn watch(
    cluster: &Cluster,
    job: &str,
    image: &str,
    time_limit: Duration,
) -> Result<Report, Box<dyn std::error::Error>> {
    let pods: Api<Pod> = cluster.api();
    let of = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
    let until = Instant::now() + time_limit;
    loop {
        let found = pods.list(&of).await.map_err(|source| ReadError::Api {
            what: "pods".to_owned(),
            source: Box::new(source),
        })?;
        let waits = match progress(found.items.first(), image)? {
            Progress::Ended(pod, why) => return Ok(report(&pods, &pod, &why).await?),
            Progress::Waits(what) => what,
            Progress::NoPod => match refused(cluster, job).await {
                Some(why) => return Err(Unchecked::PodNotCreated(why).into()),
                None => "no pod was created for the Job".to_owned(),
            },
        };
        if Instant::now() > until {
            return Err(Unchecked::TimedOut(time_limit, waits).into());
        }
        sleep(PAUSE).await;
    }
}

/// Why no pod was created. `None` if the user may not read events.
async fn refused(cluster: &Cluster, job: &str) -> Option<String> {
    let events: Api<Event> = cluster.api();
    let of = format!("involvedObject.name={job},reason=FailedCreate");
    let found = events.list(&ListParams::default().fields(&of)).await.ok()?;
    found.items.into_iter().find_map(|event| event.message)
}

/// Progress of a Job, from its pod.
fn progress(pod: Option<&Pod>, image: &str) -> Result<Progress, Unchecked> {
    let Some(pod) = pod else {
        return Ok(Progress::NoPod);
    };
    let status = pod.status.clone().unwrap_or_default();
    let state = status
        .container_statuses
        .iter()
        .flatten()
        .find_map(|c| c.state.clone())
        .unwrap_or_default();
    let ContainerState {
        terminated,
        waiting,
        ..
    } = state;
    let phase = status.phase.unwrap_or_default();
    if terminated.is_some() || phase == "Failed" || phase == "Succeeded" {
        let code = terminated.map(|t| format!("exit code {}", t.exit_code));
        let why = status.message.or(status.reason).or(code);
        return Ok(Progress::Ended(pod.name_any(), why.unwrap_or_default()));
    }
    let Some(waiting) = waiting else {
        let conditions = status.conditions.into_iter().flatten();
        let unscheduled = conditions
            .filter(|c| c.type_ == "PodScheduled" && c.status == "False")
            .find_map(|c| c.message);
        let what = unscheduled.unwrap_or_else(|| format!("the Job's pod is {phase}"));
        return Ok(Progress::Waits(what));
    };
    let reason = waiting.reason.unwrap_or_default();
    let why = match waiting.message {
        Some(message) => format!("{reason}: {message}"),
        None => reason.clone(),
    };
    match &*reason {
        _ if NO_IMAGE.contains(&&*reason) => Err(Unchecked::ImageNotPullable {
            image: image.to_owned(),
            why,
        }),
        "" => Ok(Progress::Waits(format!("the Job's pod is {phase}"))),
        _ if PASSING.contains(&&*reason) => Ok(Progress::Waits(why)),
        _ => Err(Unchecked::NotStarted(why)),
    }
}

async fn report(pods: &Api<Pod>, pod: &str, why: &str) -> Result<Report, Unchecked> {
    let log = pods.logs(pod, &LogParams::default()).await;
    let log =
        log.map_err(|e| Unchecked::NoReport(format!("{why}; its log cannot be read: {e}")))?;
    read(&log).ok_or_else(|| {
        let last = log.trim().lines().last().unwrap_or_default();
        Unchecked::NoReport(format!("{why}; the last line of its log: {last}"))
    })
}

/// Finds the report in a log that may have other lines.
fn read(log: &str) -> Option<Report> {
    let documents = log.lines().rev().filter(|line| line.starts_with('{'));
    documents
        .filter(|line| line.contains("\"tiers\""))
        .find_map(|line| serde_json::from_str(line).ok())
}

/// The report as text.
pub fn text(report: &Report) -> String {
    let row = |tier: &kvcachepool_protocol::check::Tier| {
        let state = if tier.ready { "Ready" } else { "Unavailable" };
        let cells = [&tier.tier, state, &tier.place, &tier.reason, &tier.message];
        cells.map(str::to_owned).to_vec()
    };
    let rows: Vec<_> = report.tiers.iter().map(row).collect();
    table(&["TIER", "STATE", "WHERE", "REASON", "MESSAGE"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_protocol::check::Tier;
    use serde_json::{Value, json};

    fn seen(status: Value) -> Result<Progress, Unchecked> {
        let pod = json!({"metadata": {"name": "p"}, "status": status});
        progress(Some(&serde_json::from_value(pod).unwrap()), "i:1")
    }

    fn container(state: Value) -> Value {
        let status = json!({"name": "a", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state});
        json!({"phase": "Pending", "containerStatuses": [status]})
    }

    #[test]
    fn only_a_permanent_start_failure_ends_the_check() {
        assert_eq!(progress(None, "i"), Ok(Progress::NoPod));
        let waits = |text: &str| Ok(Progress::Waits(text.to_owned()));
        assert_eq!(
            seen(json!({"phase": "Pending"})),
            waits("the Job's pod is Pending")
        );
        let full = "0/3 nodes are available";
        let condition = json!({"type": "PodScheduled", "status": "False", "message": full});
        assert_eq!(seen(json!({"conditions": [condition]})), waits(full));
        let waiting = |reason: &str| json!({"waiting": {"reason": reason, "message": "m"}});
        assert_eq!(
            seen(container(waiting("ContainerCreating"))),
            waits("ContainerCreating: m")
        );
        for reason in NO_IMAGE {
            let failed = Unchecked::ImageNotPullable {
                image: "i:1".to_owned(),
                why: format!("{reason}: m"),
            };
            assert_eq!(seen(container(waiting(reason))), Err(failed));
        }
        assert_eq!(
            seen(container(waiting("CreateContainerConfigError"))),
            Err(Unchecked::NotStarted(
                "CreateContainerConfigError: m".to_owned()
            ))
        );
    }

    #[test]
    fn the_result_of_an_ended_pod_is_read_in_every_form() {
        let ended = |why: &str| Ok(Progress::Ended("p".to_owned(), why.to_owned()));
        let state = container(json!({"terminated": {"exitCode": 1}}));
        assert_eq!(seen(state), ended("exit code 1"));
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "too much"});
        assert_eq!(seen(evicted), ended("too much"));
        assert_eq!(seen(json!({"phase": "Succeeded"})), ended(""));
    }

    #[test]
    fn the_report_is_found_among_other_lines() {
        let report = Report::of(vec![Tier {
            tier: "s3".to_owned(),
            place: "s3://kv".to_owned(),
            ready: false,
            reason: "Denied".to_owned(),
            message: "s3:PutObject denied on bucket kv".to_owned(),
        }]);
        let line = serde_json::to_string(&report).unwrap();
        let log = format!("warning: a key\n{{\"level\": \"warn\"}}\n{line}\n");
        assert_eq!(read(&log), Some(report.clone()));
        assert_eq!(read("error: ConfigInvalid\n"), None);
        assert_eq!(
            text(&report),
            "TIER   STATE         WHERE     REASON   MESSAGE\n\
             s3     Unavailable   s3://kv   Denied   s3:PutObject denied on bucket kv\n"
        );
    }
}
