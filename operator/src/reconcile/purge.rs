//! Reads the state of a deleted pool's purge from the cluster: its Job, and the error of a failed Job.

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

/// A Job that has not ended this long after its own deadline counts as failed.
const DEADLINE_GRACE: SignedDuration = SignedDuration::from_mins(2);

#[derive(Debug)]
pub enum Purge {
    /// The stored pool cannot be deserialized, with this error.
    Malformed(String),
    /// The pool no longer requests a purge.
    NotWanted,
    /// The spec is not accepted.
    NotAccepted(Vec<Problem>),
    Wanted {
        /// Tiers that are not purged, each with another pool that uses it.
        shared: Vec<(&'static str, String)>,
        /// `None` if there is nothing to purge.
        job: Option<PurgeJob>,
    },
}

#[derive(Debug)]
pub struct PurgeJob {
    pub name: String,
    /// The manifest to create.
    pub wanted: Value,
    /// `None` if the Job does not exist.
    pub found: Result<Option<JobState>, kube::Error>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum JobState {
    Running,
    Complete,
    /// The Job failed permanently, with this message.
    Failed(String),
}

pub async fn purge(stored: &Stored, context: &Context, caches: &Caches, now: Timestamp) -> Purge {
    let pool = match &stored.0 {
        Ok(pool) if job::purges(pool) => pool,
        Ok(_) => return Purge::NotWanted,
        Err(invalid) => return Purge::Malformed(invalid.error.clone()),
    };
    let all = caches.pools.state();
    let others: Vec<&KVCachePool> = all
        .iter()
        .filter_map(|other| other.0.as_ref().ok())
        .filter(|other| other.uid() != pool.uid() && keeps_objects(other))
        .collect();
    let mut unreadable = all.iter().filter_map(|other| other.0.as_ref().err());
    let unreadable = unreadable.next().map(|invalid| {
        let (namespace, name) = (
            invalid.metadata.namespace.as_deref(),
            &invalid.metadata.name,
        );
        let name = name.as_deref().unwrap_or_default();
        format!(
            "{}/{name} (which cannot be read)",
            namespace.unwrap_or_default()
        )
    });
    let (shared, wanted) = match job::purge(pool, &others, unreadable.as_deref(), &context.defaults)
    {
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
        Ok(Some(found)) => Ok(Some(match result(&found, now) {
            None => JobState::Running,
            Some(Ok(())) => JobState::Complete,
            Some(Err(why)) => JobState::Failed(
                failure_message(client, &namespace, &name)
                    .await
                    .unwrap_or(why),
            ),
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

/// Whether a pool still needs the objects that it shares with a deleted pool.
fn keeps_objects(pool: &KVCachePool) -> bool {
    pool.meta().deletion_timestamp.is_none() || !job::purges(pool)
}

/// The result of a Job, or `None` while it runs.
fn result(job: &Job, now: Timestamp) -> Option<Result<(), String>> {
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
    let created = job.metadata.creation_timestamp.as_ref()?.0;
    let longest = SignedDuration::try_from(PURGE_TIME_MAX).ok()? + DEADLINE_GRACE;
    let overdue = now.duration_since(created) > longest;
    overdue.then(|| Err("the Job did not end within its deadline".to_owned()))
}

/// The last output of the last attempt, or why it did not start.
async fn failure_message(client: &Client, namespace: &str, job: &str) -> Option<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let of = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
    let mut pods = pods.list(&of).await.ok()?.items;
    pods.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|t| t.0));
    pods.iter().rev().find_map(container_message)
}

fn container_message(pod: &Pod) -> Option<String> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    let state = containers.first()?.state.as_ref()?;
    let output = state.terminated.as_ref().and_then(|t| t.message.clone());
    let waiting = state.waiting.as_ref().map(|w| {
        let [reason, message] = [&w.reason, &w.message].map(|t| t.as_deref().unwrap_or_default());
        format!("{reason}: {message}")
    });
    let message = output.or(waiting)?;
    let last = message.trim().lines().last()?.trim();
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
    fn a_job_that_exceeds_its_deadline_counts_as_failed() {
        let running = with(json!([]));
        assert_eq!(result(&running, at(719)), None);
        assert_eq!(
            result(&running, at(721)),
            Some(Err("the Job did not end within its deadline".to_owned()))
        );
        let suspended = with(json!([{"type": "Failed", "status": "False"}]));
        assert_eq!(result(&suspended, at(1)), None);
    }

    #[test]
    fn a_job_completes_or_fails_with_a_message() {
        let done = with(json!([{"type": "Complete", "status": "True"}]));
        assert_eq!(result(&done, at(1)), Some(Ok(())));
        let message = "Job has reached the specified backoff limit";
        let failed = with(json!([{"type": "Failed", "status": "True", "message": message}]));
        assert_eq!(result(&failed, at(1)), Some(Err(message.to_owned())));
    }

    #[test]
    fn the_last_line_of_a_failed_attempt_is_reported() {
        let pod = |state: Value| -> Pod {
            let status = json!({"containerStatuses": [{
                "name": "a", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
            }]});
            serde_json::from_value(json!({"status": status})).unwrap()
        };
        let output = "a warning\nerror: s3: Denied: s3:DeleteObject denied\n";
        let ended = pod(json!({"terminated": {"exitCode": 1, "message": output}}));
        let last = "error: s3: Denied: s3:DeleteObject denied";
        assert_eq!(container_message(&ended).as_deref(), Some(last));
        let waiting = pod(json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}}));
        assert_eq!(
            container_message(&waiting).as_deref(),
            Some("ErrImagePull: not found")
        );
        assert_eq!(container_message(&pod(json!({"running": {}}))), None);
    }

    #[test]
    fn a_pool_that_is_purged_too_does_not_keep_objects() {
        let s3 = json!({"s3": {"bucket": "kv"}});
        let mut both = pool(json!({"deletionPolicy": "Delete", "shared": s3}));
        let mut retained = pool(json!({"shared": s3}));
        assert!(keeps_objects(&both) && keeps_objects(&retained));
        for pool in [&mut both, &mut retained] {
            let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(0));
            pool.metadata.deletion_timestamp = Some(now);
        }
        assert!(!keeps_objects(&both) && keeps_objects(&retained));
    }
}
