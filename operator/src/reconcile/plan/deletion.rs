//! The deletion of a pool with `deletionPolicy: Delete`. A finalizer blocks it until a Job has purged the pool's shared tiers, or has failed
//! permanently, so that neither a pool nor its namespace is blocked forever.

use crate::names;
use crate::reconcile::events::Event;
use crate::reconcile::events::Severity::{self, Normal, Warning, WarningHourly};
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::Observed;
use crate::reconcile::purge::{JobState, Purge, PurgeJob};
use crate::reconcile::step::Step;
use crate::status::Reason;
use jiff::{SignedDuration, Timestamp};
use kube::core::Status;
use kube::{Resource, ResourceExt};
use std::time::Duration;

/// Interval between passes while a purge runs.
const PURGE_INTERVAL: Duration = Duration::from_secs(2);
/// How long the operator retries the creation of a Job.
const CREATE_RETRY_MAX: SignedDuration = SignedDuration::from_mins(10);

/// Whether the operator's finalizer blocks the deletion of a pool. Works for malformed pools too.
pub fn has_finalizer(pool: &impl Resource<DynamicType = ()>) -> bool {
    pool.finalizers().iter().any(|name| name == names::PURGE)
}

/// The pool's finalizers except for the operator's own.
pub fn foreign_finalizers(pool: &impl Resource<DynamicType = ()>) -> Vec<String> {
    let foreign = pool
        .finalizers()
        .iter()
        .filter(|name| *name != names::PURGE);
    foreign.cloned().collect()
}

/// The next steps for a pool whose deletion the finalizer blocks.
pub fn plan(observed: &Observed<'_>, purge: &Purge, memory: &mut Memory) -> Vec<Step> {
    let mut steps = match &observed.outcome {
        None => first_steps(observed, purge, memory),
        Some(outcome) => {
            let refused = outcome.job_refused.as_ref();
            let refused = refused.map(|e| job_refused(observed, purge, e, memory));
            refused.into_iter().collect()
        }
    };
    steps.push(Step::Requeue(PURGE_INTERVAL));
    steps
}

fn first_steps(observed: &Observed<'_>, purge: &Purge, memory: &mut Memory) -> Vec<Step> {
    let (shared, job) = match purge {
        Purge::Wanted { shared, job } => (shared, job),
        Purge::NotWanted => return vec![release(observed, None)],
        Purge::NotAccepted(problems) => {
            let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let note = format!(
                "objects of the deleted pool were not removed, because its spec is invalid: {}",
                all.join("; ")
            );
            return vec![give_up(observed, note)];
        }
        Purge::Malformed(e) => {
            let note = format!(
                "objects of the deleted pool were not removed, because the stored pool cannot be read: {e}"
            );
            return vec![give_up(observed, note)];
        }
    };
    let skipped = shared.iter().map(|(tier, by)| {
        let note =
            format!("objects of the deleted pool remain in {tier}, because pool {by} uses it too");
        Step::Event(event(observed, WarningHourly, Reason::PurgeSkipped, note))
    });
    let next = match job {
        None => Some(release(observed, None)),
        Some(job) => job_step(observed, job, memory),
    };
    skipped.chain(next).collect()
}

fn job_step(observed: &Observed<'_>, job: &PurgeJob, memory: &mut Memory) -> Option<Step> {
    let name = &job.name;
    if matches!(job.found, Ok(Some(_))) {
        memory.purge_refused = None;
    }
    match &job.found {
        Ok(None) => Some(Step::CreateJob(job.wanted.clone())),
        Ok(Some(JobState::Running)) => None,
        Ok(Some(JobState::Complete)) => {
            let note =
                format!("Job {name} deleted the objects of the pool; the counts are in its log");
            let event = event(observed, Normal, Reason::Purged, note);
            Some(release(observed, Some(event)))
        }
        Ok(Some(JobState::Failed(why))) => {
            let note = format!("Job {name} failed, and objects of the pool may remain: {why}");
            Some(give_up(observed, note))
        }
        Err(e) => {
            let note =
                format!("Job {name} cannot be read, and objects of the pool may remain: {e}");
            is_overdue(observed.now, memory).then(|| give_up(observed, note))
        }
    }
}

fn job_refused(
    observed: &Observed<'_>,
    purge: &Purge,
    e: &kube::Error,
    memory: &mut Memory,
) -> Step {
    let overdue = is_overdue(observed.now, memory);
    let name = match purge {
        Purge::Wanted { job: Some(job), .. } => &*job.name,
        _ => "",
    };
    let note = format!("Job {name} cannot be created: {e}");
    match is_permanent(e) || overdue {
        true => give_up(observed, note),
        false => Step::Event(event(observed, WarningHourly, Reason::ApplyFailed, note)),
    }
}

fn is_overdue(now: Timestamp, memory: &mut Memory) -> bool {
    let since = *memory.purge_refused.get_or_insert(now);
    now.duration_since(since) > CREATE_RETRY_MAX
}

fn give_up(observed: &Observed<'_>, note: String) -> Step {
    let event = event(observed, Warning, Reason::PurgeFailed, note);
    release(observed, Some(event))
}

fn release(observed: &Observed<'_>, event: Option<Event>) -> Step {
    Step::Release(foreign_finalizers(observed.stored), event)
}

fn event(observed: &Observed<'_>, severity: Severity, reason: Reason, note: String) -> Event {
    Event::new(&observed.about, severity, "Purge", reason.name(), note)
}

/// Whether the namespace is being deleted too, so that no object can be created in it.
fn is_permanent(e: &kube::Error) -> bool {
    let terminating = |status: &Status| status.message.contains("being terminated");
    matches!(e, kube::Error::Api(status) if status.code == 404 || (status.code == 403 && terminating(status)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::pool;
    use serde_json::json;

    #[test]
    fn only_a_terminating_namespace_refuses_a_job_permanently() {
        let refused = |code: u16, message: &str| {
            kube::Error::Api(Box::new(Status {
                code,
                message: message.to_owned(),
                ..Status::default()
            }))
        };
        let terminating =
            "unable to create new content in namespace n because it is being terminated";
        assert!(is_permanent(&refused(403, terminating)));
        assert!(is_permanent(&refused(404, "namespaces \"n\" not found")));
        assert!(!is_permanent(&refused(
            403,
            "jobs.batch is forbidden: exceeded quota"
        )));
        assert!(!is_permanent(&refused(500, terminating)));
    }

    #[test]
    fn foreign_finalizers_are_kept() {
        let mut pool = pool(json!({}));
        assert!(!has_finalizer(&pool));
        let names = ["a", names::PURGE, "b"].map(str::to_owned);
        pool.metadata.finalizers = Some(names.to_vec());
        assert!(has_finalizer(&pool));
        assert_eq!(foreign_finalizers(&pool), ["a", "b"]);
    }
}
