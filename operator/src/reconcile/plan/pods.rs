//! The status of a pool, and what its pods need: judged by the state machines of `pods`, reported, replaced, evicted, updated.

use super::restore::{last, restored, rolled_back};
use super::write::{requeue, write};
use crate::api::{Mode, OnMissed, UpdateStrategyType};
use crate::inject::Settings;
use crate::pods::{self, Breaker, Evictions, Goal, Look, Missed, Pod, Setback, missed};
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::{Active, Observed, Outcome};
use crate::reconcile::report::{self, NOT_ALLOWED};
use crate::reconcile::step::Step;
use crate::status::{self, Canary, Seen};
use jiff::Timestamp;
use kube::Resource;
use std::sync::Arc;
use std::time::Duration;

/// The next pass while a missed pod is being replaced.
const EVICTING: Duration = Duration::from_secs(15);

/// `outcome`: what became of the pool's objects.
pub fn plan(
    observed: &Observed<'_>,
    active: &Active<'_>,
    outcome: &Outcome,
    memory: &mut Memory,
) -> Vec<Step> {
    let Observed {
        now, about, pods, ..
    } = observed;
    let settings = active.settings.as_ref().ok();
    let problems = active.settings.as_ref().err().map_or(&[][..], |p| p);
    let hash = settings.map(Settings::hash).unwrap_or_default();
    let mut steps = Vec::new();

    let update = memory.update.as_ref();
    let exchanged = |pod: &Pod| update.is_some_and(|u| u.is_away(pod));
    let steady = memory.faults.look(pods, exchanged, *now);
    let injects = settings.is_some() && active.spec.spec.injection.mode == Mode::Enabled;
    let look = Look {
        pods: if injects { pods } else { &[] },
        refused: if injects { &active.refused } else { &[] },
        hash: &hash,
        exchanged: &exchanged,
        now: *now,
    };
    let breaker = memory
        .breaker
        .get_or_insert_with(|| restored(active.spec, &hash));
    let again = breaker.step(&look);
    let turns = breaker.turns();
    let to_replace = breaker.replaceable(&look);
    let quiet = breaker.is_closed();

    let before = last(memory.written.as_ref(), active.spec);
    let setback = settings.and_then(|settings| setback(active, settings, memory));
    let unapplied = outcome.unapplied.as_ref();
    let unapplied = unapplied.map(|e| (e.reason(), e.to_string()));
    let closed = Breaker::default();
    let seen = Seen {
        pool: active.spec,
        problems,
        pods,
        faults: &memory.faults,
        hash: &hash,
        usage: &active.usage,
        canary: &active.canary,
        breaker: memory.breaker.as_ref().unwrap_or(&closed),
        setback: setback.as_ref(),
        unapplied: unapplied.as_ref(),
    };
    let next = status::status(&seen, &before, *now);
    steps.extend(write(observed, &before, next, memory));

    let turns = turns.iter();
    steps.extend(turns.flat_map(|turn| report::turn(turn, &observed.name.namespace, about)));
    steps.extend(to_replace.into_iter().map(Step::Replace));
    let reported = report::pods(pods, &to_report(active, pods), &memory.faults, about, *now);
    steps.extend(reported.into_iter().map(Step::Event));
    let injects = injects && active.canary == Canary::Works && quiet;
    steps.extend(evict(observed, active, injects, memory));
    if let Some(settings) = settings {
        steps.extend(self::update(observed, active, settings, memory));
    }
    steps.extend(requeue(again));
    steps.extend(requeue(steady));
    steps
}

/// Missed pods, where new ones are injected.
fn to_report<'p>(active: &Active<'_>, pods: &'p [Arc<Pod>]) -> Vec<&'p Arc<Pod>> {
    match active.spec.spec.injection.mode {
        Mode::Enabled => missed(pods, created(active)).collect(),
        Mode::Disabled => Vec::new(),
    }
}

/// The next step with missed pods, where the pool asks for it and a new pod would be injected.
fn evict(
    observed: &Observed<'_>,
    active: &Active<'_>,
    injects: bool,
    memory: &mut Memory,
) -> Vec<Step> {
    if active.canary == Canary::Unreachable {
        // An eviction that changed nothing during the outage may do so afterwards.
        memory.evictions = Evictions::default();
    }
    let (pods, created) = (&observed.pods, created(active));
    let wanted = active.spec.spec.injection.on_missed == OnMissed::Evict;
    if !injects || !wanted || missed(pods, created).next().is_none() {
        return Vec::new();
    }
    let evictions = &mut memory.evictions;
    let next = evictions.next(pods, created, observed.now);
    let alone = evictions.alone(pods, created);
    let alone = alone.iter().map(|(pod, why)| report::left_alone(pod, why));
    let mut steps: Vec<Step> = alone.map(Step::Event).collect();
    if let Missed::Evict(pod) = next {
        steps.push(Step::Evict(pod));
    }
    steps.push(Step::Requeue(EVICTING));
    steps
}

/// What keeps running pods from being updated, as far as it is known before this pass's update.
fn setback(active: &Active<'_>, settings: &Settings, memory: &mut Memory) -> Option<Setback> {
    let goal = goal(active, settings);
    if !active.allow_pod_patch {
        let not_allowed = Setback::NotAllowed(NOT_ALLOWED.to_owned());
        return goal.in_place.then_some(not_allowed);
    }
    let restored = || rolled_back(active.spec, &goal);
    memory
        .update
        .get_or_insert_with(restored)
        .setback()
        .cloned()
}

/// The next step with running pods that differ from the pool's settings.
fn update(
    observed: &Observed<'_>,
    active: &Active<'_>,
    settings: &Settings,
    memory: &mut Memory,
) -> Option<Step> {
    let goal = goal(active, settings);
    if !active.allow_pod_patch {
        let event = || Step::Event(report::update_not_allowed(&observed.about));
        return goal.in_place.then(event);
    }
    let update = memory.update.as_mut()?;
    match update.next(&observed.pods, &goal, observed.now) {
        pods::Step::Rest => requeue(update.look_again(observed.now)),
        step => Some(Step::Update(step, Box::new(settings.clone()))),
    }
}

fn goal<'s>(active: &Active<'_>, settings: &'s Settings) -> Goal<'s> {
    let strategy = active.spec.spec.sidecar.update_strategy.kind;
    Goal {
        image: &settings.image,
        generation: u64::try_from(settings.generation).unwrap_or(0),
        in_place: strategy == UpdateStrategyType::InPlace,
    }
}

fn created(active: &Active<'_>) -> Timestamp {
    let created = active.spec.meta().creation_timestamp.as_ref();
    created.map(|t| t.0).unwrap_or_default()
}
