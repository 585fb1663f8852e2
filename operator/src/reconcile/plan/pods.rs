//! Plans the status of a pool, and the steps for its pods: events, replacements, evictions and updates. The state machines in `pods`
//! decide.

use super::restore::{current_status, restore_breaker, restore_update};
use super::write::{requeue, write};
use crate::api::{Mode, OnMissed, UpdateStrategyType};
use crate::canary::CanaryResult;
use crate::inject::Settings;
use crate::pods::{
    self, Breaker, BreakerInput, EvictionStep, Evictions, Goal, Pod, Resizes, UpdateBlocker, missed,
};
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::{Active, Observed, Outcome};
use crate::reconcile::report::{self, NOT_ALLOWED};
use crate::reconcile::step::Step;
use crate::status::{self, Observation};
use jiff::Timestamp;
use kube::Resource;
use std::sync::Arc;
use std::time::Duration;

/// Interval between passes while the pool has missed pods to evict.
const EVICTION_INTERVAL: Duration = Duration::from_secs(15);

/// `outcome` is that of the pool's objects.
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
    let updating = |pod: &Pod| update.is_some_and(|u| u.is_updating(pod));
    let next_faults = memory.faults.update(pods, updating, *now);
    let injects = settings.is_some() && active.spec.spec.injection.mode == Mode::Enabled;
    let input = BreakerInput {
        // Pods that hang are replaced also after somebody has disabled injection.
        pods: if settings.is_some() { pods } else { &[] },
        refused: if injects { &active.refused } else { &[] },
        injects,
        hash: &hash,
        updating: &updating,
        now: *now,
    };
    let breaker = memory
        .breaker
        .get_or_insert_with(|| restore_breaker(active.spec, &hash));
    let next_breaker = breaker.step(&input);
    let changes = breaker.take_changes();
    let to_replace = breaker.replaceable(&input);
    let closed = breaker.is_closed();

    let before = current_status(memory.written.as_ref(), active.spec);
    let blocker = settings.and_then(|settings| update_blocker(active, settings, memory));
    let resizes = settings
        .filter(|_| active.allow_pod_patch)
        .map(|settings| Resizes::of(pods, settings.memory_bytes))
        .unwrap_or_default();
    let unapplied = outcome.unapplied.as_ref();
    let unapplied = unapplied.map(|e| (e.reason(), e.to_string()));
    let default = Breaker::default();
    let observation = Observation {
        pool: active.spec,
        problems,
        pods,
        servers: &active.servers,
        refused_servers: &active.refused_servers,
        faults: &memory.faults,
        hash: &hash,
        usage: &active.usage,
        canary: &active.canary,
        breaker: memory.breaker.as_ref().unwrap_or(&default),
        blocker: blocker.as_ref(),
        resizes: &resizes,
        unapplied: unapplied.as_ref(),
    };
    let next = status::status(&observation, &before, *now);
    memory.planned = Some(next.clone());
    steps.extend(write(observed, &before, next, memory));

    let namespace = &observed.name.namespace;
    let changes = changes.iter();
    steps.extend(changes.flat_map(|change| report::breaker_change(change, namespace, about)));
    steps.extend(to_replace.into_iter().map(Step::Replace));
    let reported = report::pods(pods, &to_report(active, pods), &memory.faults, about, *now);
    steps.extend(reported.into_iter().map(Step::Event));
    let injects = injects && active.canary == CanaryResult::Injected && closed;
    steps.extend(evict(observed, active, injects, memory));
    if let Some(settings) = settings {
        steps.extend(self::update(observed, active, settings, memory));
    }
    steps.extend(requeue(next_breaker));
    steps.extend(requeue(next_faults));
    steps
}

/// Missed pods to report: none while injection is disabled.
fn to_report<'p>(active: &Active<'_>, pods: &'p [Arc<Pod>]) -> Vec<&'p Arc<Pod>> {
    match active.spec.spec.injection.mode {
        Mode::Enabled => missed(pods, created(active)).collect(),
        Mode::Disabled => Vec::new(),
    }
}

/// The next steps for missed pods, if the pool requests evictions and a new pod would be injected.
fn evict(
    observed: &Observed<'_>,
    active: &Active<'_>,
    injects: bool,
    memory: &mut Memory,
) -> Vec<Step> {
    if active.canary == CanaryResult::WebhookUnreachable {
        // Evictions that had no effect during the outage may have one afterwards.
        memory.evictions = Evictions::default();
    }
    let (pods, created) = (&observed.pods, created(active));
    let wanted = active.spec.spec.injection.on_missed == OnMissed::Evict;
    if !injects || !wanted || missed(pods, created).next().is_none() {
        return Vec::new();
    }
    let evictions = &mut memory.evictions;
    let next = evictions.next(pods, created, observed.now);
    let skipped = evictions.skipped(pods, created);
    let skipped = skipped
        .iter()
        .map(|(pod, why)| report::eviction_skipped(pod, why));
    let mut steps: Vec<Step> = skipped.map(Step::Event).collect();
    if let EvictionStep::Evict(pod) = next {
        steps.push(Step::Evict(pod));
    }
    steps.push(Step::Requeue(EVICTION_INTERVAL));
    steps
}

/// Why running pods are not updated, as known before this pass's update.
fn update_blocker(
    active: &Active<'_>,
    settings: &Settings,
    memory: &mut Memory,
) -> Option<UpdateBlocker> {
    let goal = goal(active, settings);
    if !active.allow_pod_patch {
        let not_allowed = UpdateBlocker::NotAllowed(NOT_ALLOWED.to_owned());
        return goal.in_place.then_some(not_allowed);
    }
    let restored = || restore_update(active.spec, &goal);
    memory
        .update
        .get_or_insert_with(restored)
        .blocker()
        .cloned()
}

/// The next step for running pods that differ from the pool's settings.
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
        pods::Step::Wait => requeue(update.next_check(observed.now)),
        step => Some(Step::Update(step, Box::new(settings.clone()))),
    }
}

fn goal<'s>(active: &Active<'_>, settings: &'s Settings) -> Goal<'s> {
    let strategy = active.spec.spec.sidecar.update_strategy.kind;
    Goal {
        image: &settings.image,
        generation: u64::try_from(settings.generation).unwrap_or(0),
        memory_bytes: settings.memory_bytes,
        in_place: strategy == UpdateStrategyType::InPlace,
    }
}

fn created(active: &Active<'_>) -> Timestamp {
    let created = active.spec.meta().creation_timestamp.as_ref();
    created.map(|t| t.0).unwrap_or_default()
}
