//! The purge of a deleted pool, as the cluster shows it: its Job, and why that failed.

use super::caches::{Caches, Stored};
use super::context::Context;
use crate::api::{KVCachePool, Problem};
use crate::desired::job::{self, PURGE_TIME_MAX};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::Value;

/// A Job is given so much more than its own time, should nobody end it.
const OVERTIME: SignedDuration = SignedDuration::from_mins(2);

/// The purge of a deleted pool.
#[derive(Debug)]
pub enum Purge {
    /// The stored pool cannot be read, for this reason.
    Malformed(String),
    /// The pool does not ask for a purge any more.
    NotWanted,
    /// The spec is not accepted.
    NotAccepted(Vec<Problem>),
    /// What is left to be done.
    Wanted {
        /// Tiers that are not purged, and which pool shares each.
        shared: Vec<(&'static str, String)>,
        /// The Job; `None`: there is nothing that it could purge.
        job: Option<PurgeJob>,
    },
}

/// The Job of a purge.
#[derive(Debug)]
pub struct PurgeJob {
    pub name: String,
    pub wanted: Value,
    /// `None`: there is no such Job.
    pub found: Result<Option<JobState>, kube::Error>,
}

/// The state of a Job.
#[derive(Debug, PartialEq, Eq)]
pub enum JobState {
    Running,
    Complete,
    /// It failed for good, and this is why.
    Failed(String),
}

/// Reads the purge of a deleted pool.
pub async fn purge(stored: &Stored, context: &Context, caches: &Caches, now: Timestamp) -> Purge {
    let pool = match &stored.0 {
        Ok(pool) if job::purges(pool) => pool,
        Ok(_) => return Purge::NotWanted,
        Err(invalid) => return Purge::Malformed(invalid.error.clone()),
    };
    let all = caches.pools.state();
    let stay: Vec<&KVCachePool> = all
        .iter()
        .filter_map(|other| other.0.as_ref().ok())
        .filter(|other| other.uid() != pool.uid() && stays(other))
        .collect();
    let (shared, wanted) = match job::purge(pool, &stay, &context.defaults) {
        Ok(job::Purge { shared, job }) => (shared, job),
        Err(problems) => return Purge::NotAccepted(problems),
    };
    let Some(wanted) = wanted else {
        return Purge::Wanted { shared, job: None };
    };
    let client = &context.client;
    let namespace = pool.namespace().unwrap_or_default();
    let jobs: Api<Job> = Api::namespaced(client.clone(), &namespace);
    let name = job::purge_name(pool);
    let found = match jobs.get_opt(&name).await {
        Ok(Some(found)) => Ok(Some(match ended(&found, now) {
            None => JobState::Running,
            Some(Ok(())) => JobState::Complete,
            Some(Err(why)) => {
                JobState::Failed(last_words(client, &namespace, &name).await.unwrap_or(why))
            }
        })),
        Ok(None) => Ok(None),
        Err(e) => Err(e),
    };
    let job = Some(PurgeJob {
        name,
        wanted,
        found,
    });
    Purge::Wanted { shared, job }
}

/// Whether a pool keeps what it shares with one that goes.
fn stays(pool: &KVCachePool) -> bool {
    pool.meta().deletion_timestamp.is_none() || !job::purges(pool)
}

/// How a Job ended; `None`: it has not.
fn ended(job: &Job, now: Timestamp) -> Option<Result<(), String>> {
    let status = job.status.as_ref();
    let conditions = status
        .and_then(|s| s.conditions.as_deref())
        .unwrap_or_default();
    let is = |kind: &str| {
        conditions
            .iter()
            .find(|c| c.type_ == kind && c.status == "True")
    };
    if is("Complete").is_some() {
        return Some(Ok(()));
    }
    if let Some(failed) = is("Failed") {
        return Some(Err(failed.message.clone().unwrap_or_default()));
    }
    let made = job.metadata.creation_timestamp.as_ref()?.0;
    let longest = SignedDuration::try_from(PURGE_TIME_MAX).ok()? + OVERTIME;
    let late = now.duration_since(made) > longest;
    late.then(|| Err("it did not end in time".to_owned()))
}

/// What the last attempt wrote before it failed, or why it did not start.
async fn last_words(client: &Client, namespace: &str, job: &str) -> Option<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let of = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
    let mut pods = pods.list(&of).await.ok()?.items;
    pods.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|t| t.0));
    pods.iter().rev().find_map(words)
}

fn words(pod: &Pod) -> Option<String> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    let state = containers.first()?.state.as_ref()?;
    let ended = state.terminated.as_ref().and_then(|t| t.message.clone());
    let waits = state.waiting.as_ref().map(|w| {
        let [reason, message] = [&w.reason, &w.message].map(|t| t.as_deref().unwrap_or_default());
        format!("{reason}: {message}")
    });
    let said = ended.or(waits)?;
    let last = said.trim().lines().last()?.trim();
    (!last.is_empty()).then(|| last.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::pool;
    use serde_json::json;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn with(conditions: Value) -> Job {
        serde_json::from_value(json!({
            "metadata": {"creationTimestamp": at(0).to_string()},
            "status": {"conditions": conditions},
        }))
        .unwrap()
    }

    #[test]
    fn a_job_that_nobody_ends_does_not_hold_its_pool_for_ever() {
        let running = with(json!([]));
        assert_eq!(ended(&running, at(719)), None);
        assert_eq!(
            ended(&running, at(721)),
            Some(Err("it did not end in time".to_owned()))
        );
        let suspended = with(json!([{"type": "Failed", "status": "False"}]));
        assert_eq!(ended(&suspended, at(1)), None);
    }

    #[test]
    fn a_job_ends_well_or_with_a_reason() {
        let done = with(json!([{"type": "Complete", "status": "True"}]));
        assert_eq!(ended(&done, at(1)), Some(Ok(())));
        let message = "Job has reached the specified backoff limit";
        let failed = with(json!([{"type": "Failed", "status": "True", "message": message}]));
        assert_eq!(ended(&failed, at(1)), Some(Err(message.to_owned())));
    }

    #[test]
    fn the_last_line_of_a_failed_attempt_is_what_is_told() {
        let pod = |state: Value| -> Pod {
            let status = json!({"containerStatuses": [{
                "name": "a", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
            }]});
            serde_json::from_value(json!({"status": status})).unwrap()
        };
        let said = "a warning\nerror: s3: Denied: s3:DeleteObject denied\n";
        let ended = pod(json!({"terminated": {"exitCode": 1, "message": said}}));
        let last = "error: s3: Denied: s3:DeleteObject denied";
        assert_eq!(words(&ended).as_deref(), Some(last));
        let waits = pod(json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}}));
        assert_eq!(words(&waits).as_deref(), Some("ErrImagePull: not found"));
        assert_eq!(words(&pod(json!({"running": {}}))), None);
    }

    #[test]
    fn a_pool_that_is_purged_too_keeps_nothing() {
        let s3 = json!({"s3": {"bucket": "kv"}});
        let mut both = pool(json!({"deletionPolicy": "Delete", "shared": s3}));
        let mut retained = pool(json!({"shared": s3}));
        assert!(stays(&both) && stays(&retained));
        for pool in [&mut both, &mut retained] {
            let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(0));
            pool.metadata.deletion_timestamp = Some(now);
        }
        assert!(!stays(&both) && stays(&retained));
    }
}
