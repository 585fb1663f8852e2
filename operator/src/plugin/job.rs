//! Runs a Job of the sidecar's program for a pool, and reads its log. The Job is deleted in any case.

use super::read::{Cluster, failed};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerState, Event, Pod};
use kube::api::{DeleteParams, ListParams, LogParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::Value;
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, sleep};

/// Interval between two checks of the Job.
const PAUSE: Duration = Duration::from_millis(500);
/// The Job's own deadline exceeds the plugin's by this time, in case the plugin cannot delete it.
pub const OVERTIME: Duration = Duration::from_secs(30);
/// Waiting reasons of a container whose image cannot be pulled.
const NO_IMAGE: [&str; 4] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
];
/// Transient waiting reasons.
const PASSING: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// Why a Job has no result.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum JobError {
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
    /// The pod with this name has ended, for this reason.
    Ended(String, String),
}

/// A Job that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The log of its pod.
    pub log: String,
    /// How the pod ended, such as `exit code 1`.
    pub why: String,
}

impl Ended {
    /// The error of a Job without a report.
    pub fn no_report(&self) -> JobError {
        let last = self.log.trim().lines().last().unwrap_or_default();
        let why = &self.why;
        JobError::NoReport(format!("{why}; the last line of its log: {last}"))
    }
}

/// A random suffix of a Job's name.
pub fn suffix() -> String {
    (0..5).map(|_| fastrand::lowercase()).collect()
}

/// Creates the Job, waits until its pod has ended, and deletes the Job.
pub async fn run(
    cluster: &Cluster,
    wanted: Value,
    image: &str,
    time_limit: Duration,
) -> Result<Ended, Box<dyn std::error::Error>> {
    let wanted: Job = serde_json::from_value(wanted)?;
    let name = wanted.name_any();
    let jobs: Api<Job> = cluster.api();
    jobs.create(&PostParams::default(), &wanted)
        .await
        .map_err(|e| JobError::JobNotCreated(e.to_string()))?;
    let ended = watch(cluster, &name, image, time_limit).await;
    if let Err(e) = jobs.delete(&name, &DeleteParams::background()).await {
        super::warning(&format!("Job {name} was not deleted: {e}"));
    }
    ended
}

async fn watch(
    cluster: &Cluster,
    job: &str,
    image: &str,
    time_limit: Duration,
) -> Result<Ended, Box<dyn std::error::Error>> {
    let pods: Api<Pod> = cluster.api();
    let of = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
    let until = Instant::now() + time_limit;
    loop {
        let found = pods.list(&of).await.map_err(failed("pods"))?;
        let waits = match progress(found.items.first(), image)? {
            Progress::Ended(pod, why) => return Ok(ended(&pods, &pod, why).await?),
            Progress::Waits(what) => what,
            Progress::NoPod => match refused(cluster, job).await {
                Some(why) => return Err(JobError::PodNotCreated(why).into()),
                None => "no pod was created for the Job".to_owned(),
            },
        };
        if Instant::now() > until {
            return Err(JobError::TimedOut(time_limit, waits).into());
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
fn progress(pod: Option<&Pod>, image: &str) -> Result<Progress, JobError> {
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
        _ if NO_IMAGE.contains(&&*reason) => Err(JobError::ImageNotPullable {
            image: image.to_owned(),
            why,
        }),
        "" => Ok(Progress::Waits(format!("the Job's pod is {phase}"))),
        _ if PASSING.contains(&&*reason) => Ok(Progress::Waits(why)),
        _ => Err(JobError::NotStarted(why)),
    }
}

async fn ended(pods: &Api<Pod>, pod: &str, why: String) -> Result<Ended, JobError> {
    let log = pods.logs(pod, &LogParams::default()).await;
    let log = log.map_err(|e| JobError::NoReport(format!("{why}; its log cannot be read: {e}")))?;
    Ok(Ended { log, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn seen(status: Value) -> Result<Progress, JobError> {
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
            let failed = JobError::ImageNotPullable {
                image: "i:1".to_owned(),
                why: format!("{reason}: m"),
            };
            assert_eq!(seen(container(waiting(reason))), Err(failed));
        }
        assert_eq!(
            seen(container(waiting("CreateContainerConfigError"))),
            Err(JobError::NotStarted(
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
}
