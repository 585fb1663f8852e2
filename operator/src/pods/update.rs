//! Updates of running pods, if the operator may patch them: a newer config, another size of the memory tier, and a new image of the sidecar,
//! with one pod as the canary.
//! Pure: pods and time in, at most one step out. The caller executes the steps and reports the results.

use resizing::{Resizing, is_resized};
pub use step::{Goal, PreviousSidecar, Step, UpdateBlocker};

use super::pod::{Pod, Sidecar, SidecarState};
use super::pod_backoff::PodBackoff;
use super::rollout::{Failure, Rollout};
use jiff::{SignedDuration, Timestamp};
use kvcachepool_protocol::status::State;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The kubelet writes a new config into the pod within this time. A sidecar that starts earlier would read the old one.
const CONFIG_WRITTEN: SignedDuration = SignedDuration::from_secs(2);
/// Interval between checks while a sidecar is being updated.
const CHECK_INTERVAL: SignedDuration = SignedDuration::from_secs(2);
/// Wait after the API server refused several patches in a row.
const PAUSE: SignedDuration = SignedDuration::from_secs(15);
/// How long an update by an earlier leader may be rolled back.
const ADOPTED_WITHIN: SignedDuration = SignedDuration::from_mins(10);
/// Maximum configs patched per check.
const CONFIGS_MAX: usize = 20;
/// Maximum sidecars updated at a time after the image is proven, or resized at a time: a tenth of the pods, and at most this.
const UPDATING_MAX: usize = 10;

/// The state machine of one pool.
#[derive(Debug, Default)]
pub struct Update {
    image: Box<str>,
    generation: u64,
    /// A sidecar with this image has run for a while and reported that it serves.
    proven: bool,
    /// Pods (by uid) whose sidecar is being updated.
    updating: BTreeMap<Box<str>, Rollout>,
    /// Pods whose sidecar was updated and started. They are watched while others wait.
    done: BTreeMap<Box<str>, Rollout>,
    /// Pods whose memory is being changed.
    resizing: Resizing,
    config_at: Option<Timestamp>,
    blocker: Option<UpdateBlocker>,
    paused_until: Option<Timestamp>,
    backoff: PodBackoff,
}

impl Update {
    /// Restores the update of an earlier leader, which left its message in the status of this generation.
    #[must_use]
    pub fn rolled_back(goal: &Goal<'_>, message: &str) -> Self {
        Self {
            image: goal.image.into(),
            generation: goal.generation,
            blocker: message
                .contains(goal.image)
                .then(|| UpdateBlocker::RolledBack(message.to_owned())),
            ..Self::default()
        }
    }

    /// Why pods are not updated, if so.
    #[must_use]
    pub fn blocker(&self) -> Option<&UpdateBlocker> {
        self.blocker.as_ref()
    }

    /// Whether this pod's sidecar is being updated. It may be down for a moment then.
    #[must_use]
    pub fn is_updating(&self, pod: &Pod) -> bool {
        self.updating.contains_key(&pod.uid)
    }

    /// The next step for the pool's pods.
    pub fn next(&mut self, pods: &[Arc<Pod>], goal: &Goal<'_>, now: Timestamp) -> Step {
        self.set_goal(goal);
        let pods: Vec<&Arc<Pod>> = pods.iter().filter(|p| p.is_active()).collect();
        let waits = |uid: &str| {
            let pod = pods.iter().find(|p| *p.uid == *uid);
            pod.is_some_and(|p| self.updating.contains_key(uid) || needs_change(p, goal))
        };
        self.backoff.retain(waits);
        if self.backoff.is_empty() && !self.is_rolled_back() {
            self.blocker = None;
        }
        if self.paused_until.is_some_and(|until| now < until) {
            return Step::Wait;
        }
        self.paused_until = None;
        self.adopt(&pods, now);
        let exists = |uid: &str| pods.iter().any(|p| *p.uid == *uid);
        self.updating.retain(|uid, _| exists(uid));
        self.done.retain(|uid, _| exists(uid));
        let to_query = self.complete_arrived(&pods, now);
        if let Some(step) = self.failed_rollout(&pods, now) {
            return step;
        }
        if let Some(pod) = to_query {
            return Step::Query(pod);
        }
        let free: Vec<&Arc<Pod>> = pods
            .iter()
            .copied()
            .filter(|p| self.backoff.allows(&p.uid, now))
            .collect();
        if let Some(step) = self.update_hanging(&free, goal) {
            return step;
        }
        if let Some(step) = self.configs(&free, goal, now) {
            return step;
        }
        let updating = |pod: &Pod| self.updating.contains_key(&pod.uid);
        let free_to_resize = free.iter().copied().filter(|p| !updating(p));
        let resized = self.resizing.next(&pods, free_to_resize, goal, now);
        if !resized.is_empty() {
            return Step::Resize(resized);
        }
        self.images(&pods, &free, goal, now)
    }

    /// When to check again if nothing changes before.
    #[must_use]
    pub fn next_check(&self, now: Timestamp) -> Option<SignedDuration> {
        let pause = self.paused_until.map(|until| until.duration_since(now));
        let config = self
            .config_at
            .map(|at| (at + CONFIG_WRITTEN).duration_since(now));
        let held = self.backoff.next_at().map(|at| at.duration_since(now));
        let shrunk = self.resizing.check_at();
        let shrunk = shrunk.map(|at| at.duration_since(now));
        let waits = [
            pause,
            config,
            held,
            shrunk,
            (!self.updating.is_empty()).then_some(CHECK_INTERVAL),
        ];
        waits
            .into_iter()
            .flatten()
            .filter(|wait| *wait > SignedDuration::ZERO)
            .min()
    }

    /// Records that pods got the pool's config.
    pub fn record_configs(&mut self, now: Timestamp) {
        self.config_at = Some(now);
    }

    /// Records that a step of a pod's resize is about to be taken.
    pub fn record_resize(&mut self, pod: &Pod, now: Timestamp) {
        self.resizing.record_begin(pod, now);
    }

    /// Records that a sidecar has not shrunk yet.
    pub fn record_not_shrunk(&mut self, pod: &Pod, now: Timestamp) {
        self.resizing.record_not_shrunk(pod, now);
    }

    /// Records that a pod is about to get the image. Called before the API request, because its response may be lost.
    pub fn record_image_change(&mut self, pod: &Pod, now: Timestamp) {
        // A sidecar that did not run cannot be rolled back to a working state.
        if pod.address().is_some() {
            self.updating.insert(pod.uid.clone(), Rollout::of(pod, now));
        }
    }

    /// Records that the pod was not changed.
    pub fn record_not_changed(&mut self, pod: &Pod) {
        self.updating.remove(&pod.uid);
    }

    /// Records the answer of a new sidecar.
    pub fn record_answer(&mut self, pod: &Pod, state: State) {
        let Some(rollout) = self.updating.get_mut(&pod.uid) else {
            return;
        };
        rollout.serves_nothing = state == State::Off;
        if matches!(state, State::Ready | State::Degraded) {
            self.proven = true;
            self.done.extend(self.updating.remove_entry(&pod.uid));
        }
    }

    /// Records that a pod was rolled back. Returns the message for its event.
    pub fn record_rollback(&mut self, pod: &Pod, previous: &PreviousSidecar) -> String {
        self.updating.remove(&pod.uid);
        self.done.remove(&pod.uid);
        self.backoff.record_success(&pod.uid);
        let message = format!(
            "the sidecar of pod {} {}, and its previous image was restored; correct the image, or edit the pool to retry",
            pod.name,
            previous.failure.sentence(pod, &self.image)
        );
        self.blocker = Some(UpdateBlocker::RolledBack(message.clone()));
        message
    }

    /// Records that the API server accepted a change of a pod.
    pub fn record_accepted(&mut self, pod: &Pod) {
        self.backoff.record_success(&pod.uid);
    }

    /// Records that the API server refused a change of a pod. Retries of that pod come at growing intervals.
    pub fn record_refused(&mut self, pod: &Pod, blocker: UpdateBlocker, now: Timestamp) {
        self.backoff.record_refusal(&pod.uid, now);
        if !self.is_rolled_back() {
            self.blocker = Some(blocker);
        }
    }

    /// Records that all of several changes were refused. Nothing is tried for a moment.
    pub fn pause(&mut self, now: Timestamp) {
        self.paused_until = Some(now + PAUSE);
    }

    fn is_rolled_back(&self) -> bool {
        matches!(self.blocker, Some(UpdateBlocker::RolledBack(_)))
    }

    /// Starts again after another image or an edit of the pool.
    fn set_goal(&mut self, goal: &Goal<'_>) {
        if *self.image != *goal.image {
            *self = Self {
                image: goal.image.into(),
                generation: goal.generation,
                ..Self::default()
            };
        } else if self.generation != goal.generation {
            self.generation = goal.generation;
            self.blocker = None;
            self.backoff = PodBackoff::default();
        }
    }

    /// Takes over unfinished updates of an earlier leader: sidecars that have not started since their image was changed, according to the
    /// stamp in the pod.
    fn adopt(&mut self, pods: &[&Arc<Pod>], now: Timestamp) {
        for pod in pods {
            let (Some(sidecar), Some(change)) = (&pod.sidecar, &pod.image_change) else {
                continue;
            };
            let recent = now.duration_since(change.at.0) < ADOPTED_WITHIN;
            let known = self.updating.contains_key(&pod.uid) || self.done.contains_key(&pod.uid);
            if recent && !known && *sidecar.image == *self.image && pod.fault().is_some() {
                self.updating
                    .insert(pod.uid.clone(), Rollout::adopted(pod, change, now));
            }
        }
    }

    /// Completes pods whose new sidecar has run for a while, if the image is proven. Otherwise returns one to query.
    fn complete_arrived(&mut self, pods: &[&Arc<Pod>], now: Timestamp) -> Option<Arc<Pod>> {
        let mut steady = Vec::new();
        for pod in pods {
            if let Some(rollout) = self.updating.get_mut(&pod.uid)
                && rollout.is_steady(pod, &self.image, now)
            {
                steady.push(Arc::clone(pod));
            }
        }
        if !self.proven {
            return steady.into_iter().next();
        }
        for pod in steady {
            self.done.extend(self.updating.remove_entry(&pod.uid));
        }
        None
    }

    /// A rollback of a pod whose new sidecar does not start or does not keep running.
    fn failed_rollout(&self, pods: &[&Arc<Pod>], now: Timestamp) -> Option<Step> {
        pods.iter()
            .filter(|pod| self.backoff.allows(&pod.uid, now))
            .find_map(|pod| {
                let rollout = self.updating.get(&pod.uid)?;
                let failure = rollout.failure(pod, self.proven, now)?;
                Some(roll_back(pod, rollout, failure))
            })
    }

    fn configs(&mut self, pods: &[&Arc<Pod>], goal: &Goal<'_>, now: Timestamp) -> Option<Step> {
        let older: Vec<Arc<Pod>> = pods
            .iter()
            .filter(|p| has_older_config(p, goal))
            .take(CONFIGS_MAX)
            .map(|p| Arc::clone(p))
            .collect();
        if !older.is_empty() {
            return Some(Step::Config(older));
        }
        let settling = self
            .config_at
            .is_some_and(|at| now.duration_since(at) < CONFIG_WRITTEN);
        if settling {
            return Some(Step::Wait);
        }
        self.config_at = None;
        None
    }

    /// Hanging pods have no working sidecar to lose, so they get another image independent of the pool's update strategy.
    fn update_hanging(&self, pods: &[&Arc<Pod>], goal: &Goal<'_>) -> Option<Step> {
        if self.is_rolled_back() {
            return None;
        }
        let hanging: Vec<Arc<Pod>> = self
            .others(pods, goal)
            .filter(|p| hangs(p, goal))
            .take(UPDATING_MAX)
            .cloned()
            .collect();
        (!hanging.is_empty()).then_some(Step::Image(hanging))
    }

    fn images(
        &self,
        all: &[&Arc<Pod>],
        free: &[&Arc<Pod>],
        goal: &Goal<'_>,
        now: Timestamp,
    ) -> Step {
        if self.is_rolled_back() || !goal.in_place {
            return Step::Wait;
        }
        let room = if self.proven { share(all.len()) } else { 1 };
        let mut working: Vec<&Arc<Pod>> = self
            .others(free, goal)
            // They get another image with their group's next restart.
            .filter(|p| p.address().is_some())
            .filter(|p| p.group.is_none())
            .collect();
        working.sort_by_key(|p| !p.ready);
        let chosen: Vec<Arc<Pod>> = working
            .into_iter()
            .take(room.saturating_sub(self.updating.len()))
            .cloned()
            .collect();
        if chosen.is_empty() {
            return Step::Wait;
        }
        self.roll_back_crashing(all, goal, now)
            .unwrap_or(Step::Image(chosen))
    }

    fn others<'p>(
        &self,
        pods: &[&'p Arc<Pod>],
        goal: &Goal<'_>,
    ) -> impl Iterator<Item = &'p Arc<Pod>> {
        pods.iter()
            .copied()
            .filter(|p| p.sidecar.as_ref().is_some_and(|s| *s.image != *goal.image))
            .filter(|p| !self.updating.contains_key(&p.uid))
    }

    /// Runs before another sidecar is put at risk. Rolls back an updated sidecar that crashes, and waits while another one with the image
    /// crashes.
    fn roll_back_crashing(
        &self,
        pods: &[&Arc<Pod>],
        goal: &Goal<'_>,
        now: Timestamp,
    ) -> Option<Step> {
        let crashed = pods.iter().find_map(|pod| {
            let rollout = self.done.get(&pod.uid)?;
            let step = || match self.backoff.allows(&pod.uid, now) {
                true => roll_back(pod, rollout, Failure::Crashed),
                false => Step::Wait,
            };
            rollout.crashed(pod).then(step)
        });
        let crashes = |p: &&Arc<Pod>| {
            p.sidecar.as_ref().is_some_and(|s| *s.image == *goal.image)
                && p.fault().is_some_and(|f| f.reason == CRASHES)
        };
        crashed.or_else(|| pods.iter().any(crashes).then_some(Step::Wait))
    }
}

/// How many of these pods are changed at a time.
fn share(pods: usize) -> usize {
    (pods / 10).clamp(1, UPDATING_MAX)
}

/// The kubelet's reason for a container that crashed more than once.
const CRASHES: &str = "CrashLoopBackOff";

fn roll_back(pod: &Arc<Pod>, rollout: &Rollout, failure: Failure) -> Step {
    let previous = PreviousSidecar {
        image: rollout.image.clone(),
        hash: rollout.hash.clone(),
        failure,
    };
    Step::RollBack(Arc::clone(pod), previous)
}

fn has_older_config(pod: &Pod, goal: &Goal<'_>) -> bool {
    pod.sidecar.is_some() && pod.config_generation.is_some_and(|g| g < goal.generation)
}

fn hangs(pod: &Pod, goal: &Goal<'_>) -> bool {
    pod.fault().is_some() || (goal.in_place && ended(pod))
}

/// Whether the pod needs a change.
fn needs_change(pod: &Pod, goal: &Goal<'_>) -> bool {
    let other = pod
        .sidecar
        .as_ref()
        .is_some_and(|s| *s.image != *goal.image);
    has_older_config(pod, goal)
        || is_resized(pod, goal)
        || (other && (goal.in_place || hangs(pod, goal)))
}

/// Whether its sidecar has ended and was not restarted.
fn ended(pod: &Pod) -> bool {
    let ended = |s: &Sidecar| matches!(s.state, SidecarState::Terminated { .. });
    pod.sidecar.as_ref().is_some_and(ended)
}

mod resizing;
mod step;
#[cfg(test)]
mod tests;
