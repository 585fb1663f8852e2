//! A pool whose objects go with it (`deletionPolicy: Delete`) is held by a finalizer until a Job has purged its shared tiers, or has
//! failed for good: no pool, and no namespace, is held for ever.

use crate::names;
use crate::reconcile::events::Event;
use crate::reconcile::events::Weight::{self, Normal, Warning, WarningOnce};
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::Observed;
use crate::reconcile::purge::{JobState, Purge, PurgeJob};
use crate::reconcile::step::Step;
use crate::status::Reason;
use jiff::{SignedDuration, Timestamp};
use kube::core::Status;
use kube::{Resource, ResourceExt};
use std::time::Duration;

/// The next pass while a purge runs.
const PURGING: Duration = Duration::from_secs(2);
/// How long the operator tries to create a Job.
const CREATE_TIME_MAX: SignedDuration = SignedDuration::from_mins(10);

/// Whether a pool, also one that cannot be read, is held by us.
pub fn held(pool: &impl Resource<DynamicType = ()>) -> bool {
    pool.finalizers().iter().any(|name| name == names::PURGE)
}

/// Its finalizers but for ours.
pub fn others(pool: &impl Resource<DynamicType = ()>) -> Vec<String> {
    let others = pool
        .finalizers()
        .iter()
        .filter(|name| *name != names::PURGE);
    others.cloned().collect()
}

/// The next steps with a pool that is being deleted and held.
pub fn plan(observed: &Observed<'_>, purge: &Purge, memory: &mut Memory) -> Vec<Step> {
    let mut steps = match &observed.outcome {
        None => first(observed, purge, memory),
        Some(outcome) => {
            let refused = outcome.job_refused.as_ref();
            let refused = refused.map(|e| job_refused(observed, purge, e, memory));
            refused.into_iter().collect()
        }
    };
    steps.push(Step::Requeue(PURGING));
    steps
}

fn first(observed: &Observed<'_>, purge: &Purge, memory: &mut Memory) -> Vec<Step> {
    let (shared, job) = match purge {
        Purge::Wanted { shared, job } => (shared, job),
        Purge::NotWanted => return vec![release(observed, None)],
        Purge::NotAccepted(problems) => {
            let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let note = format!("the pool is not accepted: {}", all.join("; "));
            return vec![give_up(observed, note)];
        }
        Purge::Malformed(e) => {
            let note = format!("the stored pool cannot be read: {e}");
            return vec![give_up(observed, note)];
        }
    };
    let skipped = shared.iter().map(|(tier, by)| {
        let note = format!("{tier} is not purged: pool {by} has it too");
        Step::Event(event(observed, WarningOnce, Reason::PurgeSkipped, note))
    });
    let next = match job {
        None => Some(release(observed, None)),
        Some(job) => step_of_job(observed, job, memory),
    };
    skipped.chain(next).collect()
}

fn step_of_job(observed: &Observed<'_>, job: &PurgeJob, memory: &mut Memory) -> Option<Step> {
    let name = &job.name;
    match &job.found {
        Ok(None) => Some(Step::CreateJob(job.wanted.clone())),
        Ok(Some(JobState::Running)) => None,
        Ok(Some(JobState::Complete)) => {
            let note = format!(
                "the objects of the pool were removed by Job {name}, whose log counts them"
            );
            let event = event(observed, Normal, Reason::Purged, note);
            Some(release(observed, Some(event)))
        }
        Ok(Some(JobState::Failed(why))) => {
            let note = format!("what Job {name} did not remove stays: {why}");
            Some(give_up(observed, note))
        }
        Err(e) => {
            let note = format!("Job {name} cannot be looked at: {e}");
            is_late(observed.now, memory).then(|| give_up(observed, note))
        }
    }
}

fn job_refused(
    observed: &Observed<'_>,
    purge: &Purge,
    e: &kube::Error,
    memory: &mut Memory,
) -> Step {
    let late = is_late(observed.now, memory);
    let name = match purge {
        Purge::Wanted { job: Some(job), .. } => &*job.name,
        _ => "",
    };
    let note = format!("Job {name} cannot be made: {e}");
    match is_final(e) || late {
        true => give_up(observed, note),
        false => Step::Event(event(observed, WarningOnce, Reason::ApplyFailed, note)),
    }
}

fn is_late(now: Timestamp, memory: &mut Memory) -> bool {
    let since = *memory.purge_refused.get_or_insert(now);
    now.duration_since(since) > CREATE_TIME_MAX
}

fn give_up(observed: &Observed<'_>, note: String) -> Step {
    let event = event(observed, Warning, Reason::PurgeFailed, note);
    release(observed, Some(event))
}

fn release(observed: &Observed<'_>, event: Option<Event>) -> Step {
    Step::Release(others(observed.stored), event)
}

fn event(observed: &Observed<'_>, weight: Weight, reason: Reason, note: String) -> Event {
    Event::new(&observed.about, weight, "Purge", reason.name(), note)
}

/// The namespace goes too: nothing can be made in it any more.
fn is_final(e: &kube::Error) -> bool {
    let ends = |status: &Status| status.message.contains("being terminated");
    matches!(e, kube::Error::Api(status) if status.code == 404 || (status.code == 403 && ends(status)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::pool;
    use serde_json::json;

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
    fn finalizers_of_others_stay() {
        let mut pool = pool(json!({}));
        assert!(!held(&pool));
        let names = ["a", names::PURGE, "b"].map(str::to_owned);
        pool.metadata.finalizers = Some(names.to_vec());
        assert!(held(&pool));
        assert_eq!(others(&pool), ["a", "b"]);
    }
}
