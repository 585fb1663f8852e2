//! A pool whose objects go with it (`deletionPolicy: Delete`) is held by a finalizer until a Job has purged its shared tiers, or has
//! failed for good: no pool, and no namespace, is held for ever.

use super::apply::ApplyError;
use super::events::Weight;
use super::pool::{Failed, Look};
use super::queue::object_ref;
use super::term::{State, Stored, Term};
use crate::api::KVCachePool;
use crate::desired::job::{self, PURGE_TIME_MAX};
use crate::names;
use crate::status::Reason;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::Status;
use kube::{Api, Resource, ResourceExt};
use serde_json::json;
use std::time::Duration;

/// The next look while a purge runs.
const PURGING: Duration = Duration::from_secs(2);
/// How long the making of a Job is tried.
const CREATE_TIME_MAX: SignedDuration = SignedDuration::from_mins(10);
/// A Job is given so much more than its own time, should nobody end it.
const OVERTIME: SignedDuration = SignedDuration::from_mins(2);

/// What is to be done with a pool that is being deleted.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Its Job runs.
    Wait,
    /// It may go; what is said of it.
    Go(Reason, String),
}

impl Look<'_> {
    /// Puts the finalizer where the pool's objects go with it, and takes it away where they do not.
    pub(super) async fn hold(&self) -> Result<(), ApplyError> {
        let held = held(self.pool);
        if job::purges(self.pool) == held {
            return Ok(());
        }
        let mut finalizers = others(self.pool);
        if !held {
            finalizers.push(names::PURGE.to_owned());
        }
        finalize(self.term, self.pool, finalizers)
            .await
            .map(drop)
            .map_err(|source| ApplyError::Api {
                kind: "KVCachePool".to_owned(),
                name: self.pool.name_any(),
                source: Box::new(source),
            })
    }
}

/// Whether a pool, also one that cannot be read, is held by us.
pub fn held(pool: &impl Resource<DynamicType = ()>) -> bool {
    pool.finalizers().iter().any(|name| name == names::PURGE)
}

/// Its finalizers but for ours.
fn others(pool: &impl Resource<DynamicType = ()>) -> Vec<String> {
    let others = pool
        .finalizers()
        .iter()
        .filter(|name| *name != names::PURGE);
    others.cloned().collect()
}

/// Writes a pool's finalizers. False: somebody has written the pool meanwhile, or it is gone; the next look sees that.
async fn finalize(
    term: &Term,
    pool: &impl Resource<DynamicType = ()>,
    finalizers: Vec<String>,
) -> Result<bool, kube::Error> {
    let kind = ApiResource::erase::<KVCachePool>(&());
    let namespace = pool.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(term.client.clone(), &namespace, &kind);
    let patch = json!({"metadata": {
        "finalizers": finalizers,
        "resourceVersion": pool.resource_version(),
    }});
    let params = PatchParams::default();
    match api
        .patch_metadata(&pool.name_any(), &params, &Patch::Merge(patch))
        .await
    {
        Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(false),
        written => written.map(|_| true),
    }
}

/// The next step with a pool that is being deleted and held.
pub async fn depart(stored: &Stored, term: &Term, state: &mut State) -> Result<Duration, Failed> {
    let about = match &stored.0 {
        Ok(pool) => object_ref(pool),
        Err(_) => stored.object_ref(&()),
    };
    let next = match &stored.0 {
        Ok(pool) if job::purges(pool) => purge(pool, term, &about, state).await,
        // Its policy was changed meanwhile.
        Ok(_) => None,
        Err(invalid) => Some(Next::Go(
            Reason::PurgeFailed,
            format!("the stored pool cannot be read: {}", invalid.error),
        )),
    };
    if let Some(Next::Wait) = next {
        return Ok(PURGING);
    }
    let gone = finalize(term, stored, others(stored))
        .await
        .map_err(|e| Failed::Released(Box::new(e)))?;
    if let Some(Next::Go(reason, note)) = next.filter(|_| gone) {
        let weight = match reason {
            Reason::Purged => Weight::Normal,
            _ => Weight::Warning,
        };
        let (events, name) = (&term.events, reason.name());
        events.publish(&about, weight, "Purge", name, &note).await;
    }
    Ok(PURGING)
}

/// `None`: there is nothing to purge, and nothing to say.
async fn purge(
    pool: &KVCachePool,
    term: &Term,
    about: &ObjectReference,
    state: &mut State,
) -> Option<Next> {
    let all = term.pools.state();
    let stay: Vec<&KVCachePool> = all
        .iter()
        .filter_map(|other| other.0.as_ref().ok())
        .filter(|other| other.uid() != pool.uid() && stays(other))
        .collect();
    let plan = match job::purge(pool, &stay, &term.defaults) {
        Ok(plan) => plan,
        Err(problems) => {
            let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let note = format!("the pool is not accepted: {}", all.join("; "));
            return Some(Next::Go(Reason::PurgeFailed, note));
        }
    };
    for (tier, by) in &plan.shared {
        let note = format!("{tier} is not purged: pool {by} has it too");
        let (events, reason) = (&term.events, Reason::PurgeSkipped.name());
        events.warn_once(about, "Purge", reason, &note).await;
    }
    let wanted = plan.job?;
    let namespace = pool.namespace().unwrap_or_default();
    let jobs: Api<Job> = Api::namespaced(term.client.clone(), &namespace);
    let name = job::purge_name(pool);
    let now = Timestamp::now();
    match jobs.get_opt(&name).await {
        Ok(Some(found)) => Some(match ended(&found, now) {
            None => Next::Wait,
            Some(Ok(())) => Next::Go(
                Reason::Purged,
                format!(
                    "the objects of the pool were removed by Job {name}, whose log counts them"
                ),
            ),
            Some(Err(why)) => {
                let said = last_words(term, &namespace, &name).await.unwrap_or(why);
                let note = format!("what Job {name} did not remove stays: {said}");
                Next::Go(Reason::PurgeFailed, note)
            }
        }),
        Ok(None) => match create(&jobs, wanted).await {
            Ok(()) => Some(Next::Wait),
            Err(e) => {
                let since = *state.purge_refused.get_or_insert(now);
                let note = format!("Job {name} cannot be made: {e}");
                if is_final(&e) || now.duration_since(since) > CREATE_TIME_MAX {
                    return Some(Next::Go(Reason::PurgeFailed, note));
                }
                let (events, reason) = (&term.events, Reason::ApplyFailed.name());
                events.warn_once(about, "Purge", reason, &note).await;
                Some(Next::Wait)
            }
        },
        Err(e) => {
            let since = *state.purge_refused.get_or_insert(now);
            let late = now.duration_since(since) > CREATE_TIME_MAX;
            let note = format!("Job {name} cannot be looked at: {e}");
            Some(if late {
                Next::Go(Reason::PurgeFailed, note)
            } else {
                Next::Wait
            })
        }
    }
}

/// Whether a pool keeps what it shares with one that goes.
fn stays(pool: &KVCachePool) -> bool {
    pool.meta().deletion_timestamp.is_none() || !job::purges(pool)
}

async fn create(jobs: &Api<Job>, wanted: serde_json::Value) -> Result<(), kube::Error> {
    let wanted: Job = serde_json::from_value(wanted).map_err(kube::Error::SerdeError)?;
    match jobs.create(&PostParams::default(), &wanted).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        made => made.map(drop),
    }
}

/// The namespace goes too: nothing can be made in it any more.
fn is_final(e: &kube::Error) -> bool {
    let ends = |status: &Status| status.message.contains("being terminated");
    matches!(e, kube::Error::Api(status) if status.code == 404 || (status.code == 403 && ends(status)))
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
async fn last_words(term: &Term, namespace: &str, job: &str) -> Option<String> {
    let pods: Api<Pod> = Api::namespaced(term.client.clone(), namespace);
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
    use serde_json::Value;

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
    fn a_namespace_that_goes_takes_no_job_and_other_refusals_may_pass() {
        let refused = |code: u16, message: &str| {
            kube::Error::Api(Box::new(Status {
                code,
                message: message.to_owned(),
                ..Status::default()
            }))
        };
        let going = "unable to create new content in namespace n because it is being terminated";
        assert!(is_final(&refused(403, going)));
        assert!(is_final(&refused(404, "namespaces \"n\" not found")));
        assert!(!is_final(&refused(
            403,
            "jobs.batch is forbidden: exceeded quota"
        )));
        assert!(!is_final(&refused(500, going)));
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
    fn finalizers_of_others_stay() {
        let mut pool = pool(json!({}));
        assert!(!held(&pool));
        let names = ["a", names::PURGE, "b"].map(str::to_owned);
        pool.metadata.finalizers = Some(names.to_vec());
        assert!(held(&pool));
        assert_eq!(others(&pool), ["a", "b"]);
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
