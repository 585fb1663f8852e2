//! Updates of running pods, where the operator may patch them: a newer config, and another image of the sidecar, one pod first.
//! Pure: pods and time in, at most one step out. Steps are taken by who calls this, and what became of them is told back.

use super::pod::{Pod, Sidecar, SidecarState, same_image};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How long a sidecar may be away before its old image is put back.
const UP_WITHIN: SignedDuration = SignedDuration::from_secs(60);
/// The kubelet writes a new config into the pod in this time; a sidecar that starts before would read the old one.
const CONFIG_WRITTEN: SignedDuration = SignedDuration::from_secs(2);
/// Between two looks while a sidecar is being exchanged.
const LOOK: SignedDuration = SignedDuration::from_secs(2);
/// How long nothing is tried after the API server refused a patch.
const PAUSE: SignedDuration = SignedDuration::from_secs(15);
/// Configs that are patched in one look.
const CONFIGS_MAX: usize = 20;
/// Sidecars that are exchanged at a time once one has proved the image: every tenth, and never more than this.
const AWAY_MAX: usize = 10;

/// What the pods of a pool shall have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goal<'a> {
    /// Image of the sidecar.
    pub image: &'a str,
    /// Generation of the pool, which its config carries.
    pub generation: u64,
    /// Sidecars that work are exchanged too (`updateStrategy: InPlace`).
    pub in_place: bool,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Rest,
    /// Give these pods the pool's config.
    Config(Vec<Arc<Pod>>),
    /// Give these pods the image.
    Image(Vec<Arc<Pod>>),
    /// Ask this pod's new sidecar for its status.
    Ask(Arc<Pod>),
    /// Give this pod the image that it had; its sidecar did not come up.
    Back(Arc<Pod>, Was),
}

/// What a pod had before its image was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Was {
    /// Image of the sidecar.
    pub image: Box<str>,
    /// Hash of its settings; empty when unknown.
    pub hash: Box<str>,
    /// Start of the sidecar; `None` when it did not run.
    running: Option<Timestamp>,
    /// When the image was changed.
    at: Timestamp,
}

/// Why pods are not as they shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setback {
    /// The operator may not patch pods.
    NotAllowed(String),
    /// The API server did not take a patch.
    Refused(String),
    /// A sidecar did not come up with the image; no more are exchanged until the pool changes.
    RolledBack(String),
}

/// The state machine of one pool.
#[derive(Debug, Default)]
pub struct Update {
    image: Box<str>,
    generation: u64,
    /// A sidecar answered with this image.
    proven: bool,
    /// Pods (by uid) whose sidecar is being exchanged.
    away: BTreeMap<Box<str>, Was>,
    config_at: Option<Timestamp>,
    setback: Option<Setback>,
    paused_until: Option<Timestamp>,
}

impl Update {
    /// The update of a leader before this one, which left its message in the status of this generation.
    #[must_use]
    pub fn rolled_back(goal: &Goal<'_>, message: &str) -> Self {
        Self {
            image: goal.image.into(),
            generation: goal.generation,
            setback: message
                .contains(goal.image)
                .then(|| Setback::RolledBack(message.to_owned())),
            ..Self::default()
        }
    }

    /// What keeps pods from being updated.
    #[must_use]
    pub fn setback(&self) -> Option<&Setback> {
        self.setback.as_ref()
    }

    /// Looks at the pool's pods.
    pub fn next(&mut self, pods: &[Arc<Pod>], goal: &Goal<'_>, now: Timestamp) -> Step {
        self.aim(goal);
        if self.paused_until.is_some_and(|until| now < until) {
            return Step::Rest;
        }
        if self.paused_until.take().is_some() && !self.gave_up() {
            self.setback = None;
        }
        let pods: Vec<&Arc<Pod>> = pods.iter().filter(|p| p.is_active()).collect();
        self.adopt(&pods, now);
        self.away
            .retain(|uid, _| pods.iter().any(|p| p.uid == *uid));
        let asked = self.arrived(&pods);
        if let Some(step) = self.overdue(&pods, now) {
            return step;
        }
        if let Some(pod) = asked {
            return Step::Ask(pod);
        }
        if let Some(step) = self.configs(&pods, goal, now) {
            return step;
        }
        self.images(&pods, goal)
    }

    /// When to look again if nothing changes before.
    #[must_use]
    pub fn look_again(&self, now: Timestamp) -> Option<SignedDuration> {
        let pause = self.paused_until.map(|until| until.duration_since(now));
        let config = self
            .config_at
            .map(|at| (at + CONFIG_WRITTEN).duration_since(now));
        let waits = [pause, config, (!self.away.is_empty()).then_some(LOOK)];
        waits
            .into_iter()
            .flatten()
            .filter(|wait| *wait > SignedDuration::ZERO)
            .min()
    }

    /// Pods were given the pool's config.
    pub fn configured(&mut self, now: Timestamp) {
        self.config_at = Some(now);
    }

    /// A pod was given the image.
    pub fn exchanged(&mut self, pod: &Pod, now: Timestamp) {
        // A sidecar that did not run has nothing to go back to.
        if pod.address().is_some() {
            self.away.insert(pod.uid.clone(), was(pod, now));
        }
    }

    /// A new sidecar answered.
    pub fn answered(&mut self, pod: &Pod) {
        self.proven = true;
        self.away.remove(&pod.uid);
    }

    /// A pod was given back what it had. Returns what to say of it.
    pub fn put_back(&mut self, pod: &Pod) -> String {
        self.away.remove(&pod.uid);
        let why = match pod.fault() {
            Some(fault) => format!("{}: {}", fault.reason, fault.message),
            None if pod.address().is_some() => {
                "its sidecar does not answer on port 9797".to_owned()
            }
            None => "its sidecar does not run".to_owned(),
        };
        let message = format!(
            "pod {} was not up with image {} within 60 s ({why}) and has its old image again; edit the pool to have it tried again",
            pod.name, self.image
        );
        self.setback = Some(Setback::RolledBack(message.clone()));
        message
    }

    /// The API server did not take a step; the next one waits a little.
    pub fn refused(&mut self, setback: Setback, now: Timestamp) {
        self.paused_until = Some(now + PAUSE);
        if !self.gave_up() {
            self.setback = Some(setback);
        }
    }

    fn gave_up(&self) -> bool {
        matches!(self.setback, Some(Setback::RolledBack(_)))
    }

    /// Another image, or an edit of the pool, is a new beginning.
    fn aim(&mut self, goal: &Goal<'_>) {
        if *self.image != *goal.image {
            *self = Self {
                image: goal.image.into(),
                generation: goal.generation,
                ..Self::default()
            };
        } else if self.generation != goal.generation {
            self.generation = goal.generation;
            self.setback = None;
        }
    }

    /// Takes over what a leader before this one left half done: a sidecar that was stopped for the image and did not come back.
    fn adopt(&mut self, pods: &[&Arc<Pod>], now: Timestamp) {
        for pod in pods {
            let Some(sidecar) = &pod.sidecar else {
                continue;
            };
            let stopped = matches!(sidecar.state, SidecarState::Terminated { .. });
            let named = !sidecar.image_in_use.starts_with("sha256:");
            if stopped && named && *sidecar.image == *self.image && pod.fault().is_some() {
                self.away.entry(pod.uid.clone()).or_insert_with(|| Was {
                    image: sidecar.image_in_use.clone(),
                    hash: "".into(),
                    running: None,
                    at: now,
                });
            }
        }
    }

    /// Forgets pods whose new sidecar runs, if the image is proven; else returns one to ask.
    fn arrived(&mut self, pods: &[&Arc<Pod>]) -> Option<Arc<Pod>> {
        let up = |p: &&&Arc<Pod>| {
            self.away
                .get(&p.uid)
                .is_some_and(|was| is_up(p, &self.image, was))
        };
        let up: Vec<Arc<Pod>> = pods.iter().filter(up).map(|p| Arc::clone(p)).collect();
        if !self.proven {
            return up.into_iter().next();
        }
        for pod in up {
            self.away.remove(&pod.uid);
        }
        None
    }

    fn overdue(&self, pods: &[&Arc<Pod>], now: Timestamp) -> Option<Step> {
        pods.iter().find_map(|pod| {
            let was = self.away.get(&pod.uid)?;
            (now.duration_since(was.at) >= UP_WITHIN)
                .then(|| Step::Back(Arc::clone(pod), was.clone()))
        })
    }

    fn configs(&mut self, pods: &[&Arc<Pod>], goal: &Goal<'_>, now: Timestamp) -> Option<Step> {
        let older = |p: &&&Arc<Pod>| {
            p.sidecar.is_some() && p.config_generation.is_some_and(|g| g < goal.generation)
        };
        let older: Vec<Arc<Pod>> = pods
            .iter()
            .filter(older)
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
            return Some(Step::Rest);
        }
        self.config_at = None;
        None
    }

    fn images(&self, pods: &[&Arc<Pod>], goal: &Goal<'_>) -> Step {
        if self.gave_up() {
            return Step::Rest;
        }
        let other: Vec<&Arc<Pod>> = pods
            .iter()
            .copied()
            .filter(|p| p.sidecar.as_ref().is_some_and(|s| *s.image != *goal.image))
            .filter(|p| !self.away.contains_key(&p.uid))
            .collect();
        // These have no sidecar to lose.
        let hanging: Vec<Arc<Pod>> = other
            .iter()
            .copied()
            .filter(|p| p.fault().is_some() || (goal.in_place && ended(p)))
            .cloned()
            .collect();
        if !hanging.is_empty() {
            return Step::Image(hanging.into_iter().take(AWAY_MAX).collect());
        }
        let room = if self.proven {
            (pods.len() / 10).clamp(1, AWAY_MAX)
        } else {
            1
        };
        let mut working: Vec<&Arc<Pod>> = other
            .into_iter()
            .filter(|p| p.address().is_some())
            .collect();
        working.sort_by_key(|p| !p.ready);
        let chosen: Vec<Arc<Pod>> = working
            .into_iter()
            .take(room.saturating_sub(self.away.len()))
            .cloned()
            .collect();
        if chosen.is_empty() || !goal.in_place {
            return Step::Rest;
        }
        Step::Image(chosen)
    }
}

/// Its sidecar ended and was not started again.
fn ended(pod: &Pod) -> bool {
    let ended = |s: &Sidecar| matches!(s.state, SidecarState::Terminated { .. });
    pod.sidecar.as_ref().is_some_and(ended)
}

fn running_since(pod: &Pod) -> Option<Timestamp> {
    match pod.sidecar.as_ref()?.state {
        SidecarState::Running { since } => Some(since),
        _ => None,
    }
}

fn was(pod: &Pod, now: Timestamp) -> Was {
    Was {
        image: pod.sidecar.as_ref().map_or("".into(), |s| s.image.clone()),
        hash: pod.hash().into(),
        running: running_since(pod),
        at: now,
    }
}

/// Its sidecar runs with the image: by its name, or, as runtimes give one image many names, because it was started since.
fn is_up(pod: &Pod, image: &str, was: &Was) -> bool {
    let Some(sidecar) = pod.sidecar.as_ref().filter(|s| *s.image == *image) else {
        return false;
    };
    let started = running_since(pod);
    started.is_some() && (started != was.running || same_image(&sidecar.image_in_use, image))
}

#[cfg(test)]
mod tests;
