//! One look at one pool: judge its pods, apply its objects, write its status, tell what turned.

use super::apply::{self, ApplyError, Outcome};
use super::backoff::spread;
use super::events::Weight;
use super::password;
use super::purge;
use super::queue::{object_ref, pool_ref};
use super::restore::{last, restored, rolled_back};
use super::term::{State, Stored, Term};
use super::update::{NOT_ALLOWED, Updating};
use crate::api::{KVCachePool, KVCachePoolStatus, Mode, Problem, UpdateStrategyType};
use crate::canary;
use crate::desired::{desired, redis, settings};
use crate::inject::Settings;
use crate::names;
use crate::pods::{Breaker, Goal, Look as PodsLook, Pod, PoolRef, Setback};
use crate::status::{self, Canary, READY, Reason, Seen, Write};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::time::timeout;

/// The next look if nothing happens.
const LOOK: Duration = Duration::from_secs(600);
/// The least time to the next one.
const SOON: Duration = Duration::from_secs(1);
/// Longest look: an API server that does not answer must not hold a pool up for ever.
const LOOK_TIME_MAX: Duration = Duration::from_secs(30);

/// Why a look was not completed.
#[derive(Debug, Error)]
pub enum Failed {
    /// An object; all else was done.
    #[error("{source}")]
    Object {
        /// Why.
        source: ApplyError,
        /// When to look again for other reasons.
        within: Duration,
    },
    /// The status.
    #[error("the status cannot be written: {0}")]
    Status(#[source] Box<kube::Error>),
    /// The finalizer of a pool that may go.
    #[error("the finalizer cannot be taken away: {0}")]
    Released(#[source] Box<kube::Error>),
    /// The API server did not answer.
    #[error("it took longer than {:?}", LOOK_TIME_MAX)]
    TimedOut,
}

impl Failed {
    /// Longest pause before the next look.
    pub fn within(&self) -> Duration {
        match self {
            Self::Object { within, .. } => *within,
            Self::Status(_) | Self::Released(_) | Self::TimedOut => Duration::MAX,
        }
    }
}

/// Looks at one pool and counts it.
pub async fn reconcile(stored: Arc<Stored>, term: Arc<Term>) -> Result<Action, Failed> {
    let began = Instant::now();
    let result = timeout(LOOK_TIME_MAX, look(&stored, &term)).await;
    let result = result.unwrap_or(Err(Failed::TimedOut));
    let name = if result.is_ok() { "done" } else { "failed" };
    term.metrics.add("reconciles_total", &[name], 1);
    term.metrics
        .observe("reconcile_seconds", &[], began.elapsed());
    result.map(Action::requeue)
}

async fn look(stored: &Stored, term: &Term) -> Result<Duration, Failed> {
    // Counts of a list that is under way would be wrong. When it is complete, every pool is due.
    if !term.pods.is_complete() {
        return Ok(LOOK);
    }
    let going = stored.meta().deletion_timestamp.is_some();
    if going && !purge::held(stored) {
        return Ok(LOOK);
    }
    let name = pool_ref(&ObjectRef::from_obj(stored));
    let state = term.state(&name);
    let mut state = state.lock().await;
    let uid = stored.meta().uid.clone().unwrap_or_default();
    if state.uid != uid {
        *state = State {
            uid,
            ..State::default()
        };
    }
    if going {
        return purge::depart(stored, term, &mut state).await;
    }
    let now = Timestamp::now();
    match &stored.0 {
        Ok(pool) => {
            Look {
                term,
                name,
                pool,
                now,
            }
            .run(&mut state)
            .await
        }
        Err(invalid) => {
            let before = state.written.clone().map(|(s, _)| s).unwrap_or_default();
            let next = status::malformed(&invalid.error, stored.meta().generation, &before, now);
            let about = stored.object_ref(&());
            write(term, &name, &about, &mut state, &before, next, now).await?;
            Ok(spread(LOOK))
        }
    }
}

/// A look at a pool that can be read.
pub(super) struct Look<'a> {
    pub(super) term: &'a Term,
    pub(super) name: PoolRef,
    pub(super) pool: &'a KVCachePool,
    pub(super) now: Timestamp,
}

impl Look<'_> {
    async fn run(self, state: &mut State) -> Result<Duration, Failed> {
        let pods = self.term.pods.of(&self.name);
        let (settings, problems) = match settings(self.pool, &self.term.defaults) {
            Ok(settings) => (Some(settings), Vec::new()),
            Err(problems) => (None, problems),
        };
        let hash = settings.as_ref().map(Settings::hash).unwrap_or_default();
        let applied = self.objects(&problems, state).await;
        let unapplied = applied.as_ref().err().map(|e| (e.reason(), e.to_string()));

        let canary = canary_seen(&self.term.canary.borrow());
        let update = state.update.as_ref();
        let exchanged = |pod: &Pod| update.is_some_and(|u| u.is_away(pod));
        let steady = state.faults.look(&pods, exchanged, self.now);
        let refused = match canary {
            // Pods that are not injected are not refused for it.
            Canary::Unreachable => Vec::new(),
            _ => self.term.refusals.of(&self.name, self.now),
        };
        let injects = problems.is_empty() && self.pool.spec.injection.mode == Mode::Enabled;
        let look = PodsLook {
            pods: if injects { &pods } else { &[] },
            refused: if injects { &refused } else { &[] },
            hash: &hash,
            exchanged: &exchanged,
            now: self.now,
        };
        let breaker = state
            .breaker
            .get_or_insert_with(|| restored(self.pool, &hash));
        let again = breaker.step(&look);
        let turns = breaker.turns();
        let to_replace = breaker.replaceable(&look);
        let usage = self
            .term
            .usage
            .with(&self.name, |u| u.summary(&pods, self.now));
        let before = last(state.written.as_ref(), self.pool);
        let setback = self.setback(settings.as_ref(), state);
        let closed = Breaker::default();
        let seen = Seen {
            pool: self.pool,
            problems: &problems,
            pods: &pods,
            faults: &state.faults,
            hash: &hash,
            usage: &usage,
            canary: &canary,
            breaker: state.breaker.as_ref().unwrap_or(&closed),
            setback: setback.as_ref(),
            unapplied: unapplied.as_ref(),
        };
        let next = status::status(&seen, &before, self.now);
        let about = object_ref(self.pool);
        let wait = write(
            self.term, &self.name, &about, state, &before, next, self.now,
        )
        .await?;
        self.tell_turns(&turns, &about).await;
        self.replace(&to_replace, &about, state).await;
        self.tell(&pods, &state.faults, &about).await;
        let quiet = state.breaker.as_ref().is_none_or(Breaker::is_closed);
        let injects = injects && canary == Canary::Works && quiet;
        let evicting = self.evict(&pods, &about, &canary, injects, state).await;
        let updating = self.update(&pods, settings.as_ref(), &about, state).await;
        let span = |d: SignedDuration| Duration::try_from(d).ok();
        let times = [
            updating,
            again.and_then(span),
            steady.and_then(span),
            wait,
            evicting,
        ];
        let within = times
            .into_iter()
            .flatten()
            .min()
            .unwrap_or_else(|| spread(LOOK))
            .max(SOON);
        match applied {
            Ok(()) => Ok(within),
            Err(source) => Err(Failed::Object { source, within }),
        }
    }

    /// Applies and prunes, unless the spec is not accepted: then everything stays as it is.
    async fn objects(&self, problems: &[Problem], state: &mut State) -> Result<(), ApplyError> {
        let Ok(objects) = desired(self.pool, &self.term.defaults) else {
            return Ok(());
        };
        if !problems.is_empty() {
            return Ok(());
        }
        let (client, children) = (&self.term.client, &self.term.children);
        let about = object_ref(self.pool);
        let events = &self.term.events;
        // First, and whatever becomes of its objects: pods may have stored something already.
        let held = self.hold().await;
        if let Err(e) = &held {
            self.not_applied(&about, e).await;
        }
        if redis::managed(self.pool).is_some() {
            let made = password::ensure(client, self.pool, &mut state.password).await;
            if let Err(e) = made {
                self.not_applied(&about, &e).await;
                return Err(e);
            }
        }
        for object in &objects {
            match apply::apply(client, object, &state.uid, children, &mut state.applied).await {
                Ok(Outcome::SetRight) => {
                    let note = format!(
                        "{} was changed by somebody and was set right",
                        object.name_any()
                    );
                    events
                        .warn_once(&about, "Apply", Reason::SetRight.name(), &note)
                        .await;
                }
                Ok(Outcome::Same | Outcome::Applied | Outcome::NoSuchKind) => {}
                Err(e) => {
                    self.not_applied(&about, &e).await;
                    return Err(e);
                }
            }
        }
        apply::prune(
            client,
            &self.name.namespace,
            &state.uid,
            &objects,
            children,
            &mut state.applied,
        )
        .await?;
        held
    }

    async fn not_applied(&self, about: &ObjectReference, e: &ApplyError) {
        let (reason, note) = (e.reason().name(), e.to_string());
        let events = &self.term.events;
        events.warn_once(about, "Apply", reason, &note).await;
    }

    /// What keeps running pods from being updated, as far as it is known before this look's step.
    fn setback(&self, settings: Option<&Settings>, state: &mut State) -> Option<Setback> {
        let goal = self.goal(settings?);
        if !self.term.allow_pod_patch {
            let not_allowed = Setback::NotAllowed(NOT_ALLOWED.to_owned());
            return goal.in_place.then_some(not_allowed);
        }
        let restored = || rolled_back(self.pool, &goal);
        state.update.get_or_insert_with(restored).setback().cloned()
    }

    /// The next step with running pods that are not as the pool says now.
    async fn update(
        &self,
        pods: &[Arc<Pod>],
        settings: Option<&Settings>,
        about: &ObjectReference,
        state: &mut State,
    ) -> Option<Duration> {
        let settings = settings?;
        let goal = self.goal(settings);
        if let Some(update) = state.update.as_mut().filter(|_| self.term.allow_pod_patch) {
            let updating = Updating {
                term: self.term,
                settings,
                goal,
                about,
                now: self.now,
            };
            return updating.run(pods, update).await;
        }
        if goal.in_place {
            let reason = Reason::PodPatchNotAllowed.name();
            let events = &self.term.events;
            events.warn_once(about, "Update", reason, NOT_ALLOWED).await;
        }
        None
    }

    fn goal<'s>(&self, settings: &'s Settings) -> Goal<'s> {
        Goal {
            image: &settings.image,
            generation: u64::try_from(settings.generation).unwrap_or(0),
            in_place: self.pool.spec.sidecar.update_strategy.kind == UpdateStrategyType::InPlace,
        }
    }

    pub(super) fn created(&self) -> Timestamp {
        self.pool
            .meta()
            .creation_timestamp
            .as_ref()
            .map(|t| t.0)
            .unwrap_or_default()
    }
}

fn canary_seen(seen: &canary::Seen) -> Canary {
    match seen {
        canary::Seen::NotYet => Canary::Pending,
        canary::Seen::Injected => Canary::Works,
        canary::Seen::WebhookUnreachable => Canary::Unreachable,
        canary::Seen::Unknown(why) => Canary::Refused(why.clone()),
    }
}

/// Writes a status if it is worth it, and tells which conditions turned. Returns when to look again if it has to wait.
async fn write(
    term: &Term,
    name: &PoolRef,
    about: &ObjectReference,
    state: &mut State,
    before: &KVCachePoolStatus,
    next: KVCachePoolStatus,
    now: Timestamp,
) -> Result<Option<Duration>, Failed> {
    match status::due(before, &next, &state.writes, term.status_interval, now) {
        Write::No => return Ok(None),
        Write::In(time) => return Ok(Duration::try_from(time).ok()),
        Write::Now => {}
    }
    let kind = ApiResource::erase::<KVCachePool>(&());
    let patch = json!({
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": name.name, "namespace": name.namespace},
        "status": next,
    });
    let api: Api<DynamicObject> = Api::namespaced_with(term.client.clone(), &name.namespace, &kind);
    let params = PatchParams::apply(names::FIELD_MANAGER).force();
    let written = api
        .patch_status(&name.name, &params, &Patch::Apply(patch))
        .await;
    let stored = match written {
        // It was deleted meanwhile.
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(None),
        written => written.map_err(|e| Failed::Status(Box::new(e)))?,
    };
    term.metrics.add("status_writes_total", &[], 1);
    for turned in next.conditions.iter().filter(|c| c.type_ != READY) {
        let old = status::condition(&before.conditions, &turned.type_);
        let same = old.is_some_and(|o| o.status == turned.status && o.reason == turned.reason);
        // At first sight only what is wrong is worth a word.
        if same || (old.is_none() && turned.status != "False") {
            continue;
        }
        let weight = if turned.status == "False" {
            Weight::Warning
        } else {
            Weight::Normal
        };
        let gap = if turned.message.is_empty() { "" } else { ": " };
        let note = format!(
            "{} is {}{gap}{}",
            turned.type_, turned.status, turned.message
        );
        term.events
            .publish(about, weight, "Observe", &turned.reason, &note)
            .await;
    }
    state.written = Some((next, stored.resource_version().unwrap_or_default()));
    state.writes.add(now);
    Ok(None)
}
