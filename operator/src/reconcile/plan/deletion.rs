//! A pool whose objects go with it (`deletionPolicy: Delete`) is held by a finalizer until a Job has purged its shared tiers, or has
//! failed for good: no pool, and no namespace, is held for ever.

use crate::names;
use crate::reconcile::events::{Event, Weight};
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::Observed;
use crate::reconcile::purge::{JobState, Purge};
use crate::reconcile::step::Step;
use crate::status::Reason;
use jiff::{SignedDuration, Timestamp};
use kube::Resource;
use kube::ResourceExt;
use kube::core::Status;
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
        Some(outcome) => match (&outcome.job_refused, purge) {
            (Some(e), Purge::Wanted { job: Some(job), .. }) => {
                job_refused(observed, &job.name, e, memory)
            }
            _ => Vec::new(),
        },
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
            return vec![give_up(observed, &note)];
        }
        Purge::Malformed(e) => {
            let note = format!("the stored pool cannot be read: {e}");
            return vec![give_up(observed, &note)];
        }
    };
    let skipped = shared.iter().map(|(tier, by)| {
        let note = format!("{tier} is not purged: pool {by} has it too");
        let reason = Reason::PurgeSkipped.name();
        Step::Event(Event::warn_once(&observed.about, "Purge", reason, &note))
    });
    let next = job.as_ref().map(|job| match &job.found {
        Ok(Some(JobState::Running)) => None,
        Ok(Some(JobState::Complete)) => {
            let note = format!(
                "the objects of the pool were removed by Job {}, whose log counts them",
                job.name
            );
            let reason = Reason::Purged.name();
            let event = Event::new(&observed.about, Weight::Normal, "Purge", reason, &note);
            Some(release(observed, Some(event)))
        }
        Ok(Some(JobState::Failed(why))) => {
            let note = format!("what Job {} did not remove stays: {why}", job.name);
            Some(give_up(observed, &note))
        }
        Ok(None) => Some(Step::CreateJob(job.wanted.clone())),
        Err(e) => {
            let note = format!("Job {} cannot be looked at: {e}", job.name);
            is_late(observed.now, memory).then(|| give_up(observed, &note))
        }
    });
    let next = next.unwrap_or_else(|| Some(release(observed, None)));
    skipped.chain(next).collect()
}

/// The API server refuses the Job.
fn job_refused(
    observed: &Observed<'_>,
    job: &str,
    e: &kube::Error,
    memory: &mut Memory,
) -> Vec<Step> {
    let note = format!("Job {job} cannot be made: {e}");
    let late = is_late(observed.now, memory);
    vec![if is_final(e) || late {
        give_up(observed, &note)
    } else {
        let reason = Reason::ApplyFailed.name();
        Step::Event(Event::warn_once(&observed.about, "Purge", reason, &note))
    }]
}

fn is_late(now: Timestamp, memory: &mut Memory) -> bool {
    let since = *memory.purge_refused.get_or_insert(now);
    now.duration_since(since) > CREATE_TIME_MAX
}

fn release(observed: &Observed<'_>, event: Option<Event>) -> Step {
    Step::Release(others(observed.stored), event)
}

fn give_up(observed: &Observed<'_>, note: &str) -> Step {
    let reason = Reason::PurgeFailed.name();
    let event = Event::new(&observed.about, Weight::Warning, "Purge", reason, note);
    release(observed, Some(event))
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
