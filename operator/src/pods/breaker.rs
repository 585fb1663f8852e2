//! The breaker of a pool. What injection adds to a pod must not keep it from running. One pod whose failure looks like that is enough:
//! injection is paused for its owner, the owner's next pod starts without a sidecar, and that pod decides. If it runs, injection stays
//! paused until a probe (one pod with a sidecar) works. If it fails in the same way, injection is not the cause and continues. Pure: pods,
//! refusals and time in; pauses and pods to replace out. Webhooks of all replicas read the pauses from the pool's status.

mod owners;
mod pause;
mod replace;
mod started;

pub use pause::{Pause, Position, StoredPause};
pub(super) use started::{STEADY, may_fall_back};

use super::evidence::{Cause, Kind, Verdict, compare, evidence};
use super::pod::{Owner, Pod};
use super::pod_backoff::PodBackoff;
use super::refused::Refused;
use jiff::{SignedDuration, Timestamp};
use owners::{by_owner, newest, owner, owner_uid};
use pause::controls;
use replace::Replacing;
use started::{is_up, running_since};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Webhooks have seen a pause after this time.
const PAUSE_SEEN: SignedDuration = SignedDuration::from_secs(2);
/// A refusal this long after the start of a pause was of a pod without a sidecar. Event times have whole seconds.
const REFUSED_AFTER: SignedDuration = SignedDuration::from_secs(5);
/// How long a refusal counts.
const REFUSAL_VALID: SignedDuration = SignedDuration::from_mins(2);
/// Pauses of owners without pods are dropped after this time.
const DROP_AFTER: SignedDuration = SignedDuration::from_mins(10);
/// Interval between checks while a change is in progress.
const CHECK_INTERVAL: SignedDuration = SignedDuration::from_secs(5);
/// How long a change counts as in progress.
const IN_PROGRESS: SignedDuration = SignedDuration::from_mins(3);
/// With this many owners that have the same fault of the sidecar's containers, the whole pool is paused.
const OWNERS_TO_PAUSE_POOL: usize = 2;
/// Maximum owners in a status. With more, the whole pool is paused.
pub const OWNERS_MAX: usize = 16;

/// A change of the breaker, for events and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BreakerChange {
    Paused(Option<Owner>, Cause),
    /// A pod with a sidecar works, and injection continues.
    Resumed(Option<Owner>),
    /// Pods fail without a sidecar too, and injection continues.
    Cleared(Option<Owner>, Cause),
}

/// Input of one check.
#[derive(Clone, Copy)]
pub struct BreakerInput<'a> {
    /// Pods of the pool.
    pub pods: &'a [Arc<Pod>],
    /// Owners whose pods the API server refused recently.
    pub refused: &'a [Refused],
    /// Whether new pods get a sidecar, unless their owner is paused.
    pub injects: bool,
    /// Hash of the settings of new pods.
    pub hash: &'a str,
    /// Whether a pod's sidecar is being updated. It may be down then.
    pub updating: &'a (dyn Fn(&Pod) -> bool + Sync),
    pub now: Timestamp,
}

/// The state machine of one pool, for settings with one hash.
#[derive(Debug, Default)]
pub struct Breaker {
    hash: Box<str>,
    /// Start of these settings. Earlier refusals do not count.
    hash_since: Timestamp,
    /// As in the last input.
    injects: bool,
    /// By uid of the owner; empty for pods without one.
    pauses: BTreeMap<Box<str>, Pause>,
    /// Pause of every pod of the pool.
    pool_pause: Option<Pause>,
    /// By uid of a pod: what it shows, and since when.
    hung: HashMap<Box<str>, (Kind, Timestamp)>,
    /// Pods that hung when injection was resumed. They were compared already, and do not pause injection again.
    compared: HashSet<Box<str>>,
    /// Owners with a vLLM that started with these settings. A failure of theirs does not count.
    up: HashSet<Box<str>>,
    /// By uid of the owner: the pod that is being replaced.
    replacing: HashMap<Box<str>, Replacing>,
    backoff: PodBackoff,
    changes: Vec<BreakerChange>,
}

impl Breaker {
    /// Restores the breaker for these settings from the pool's status, which an earlier leader wrote.
    #[must_use]
    pub fn restored(
        hash: &str,
        pool_pause: Option<StoredPause>,
        owners: impl IntoIterator<Item = StoredPause>,
    ) -> Self {
        let uid = |pause: &Pause| pause.owner.as_ref().map(|o| o.uid.clone());
        Self {
            hash: hash.into(),
            pool_pause: pool_pause.map(Pause::restored),
            pauses: owners
                .into_iter()
                .map(Pause::restored)
                .map(|pause| (uid(&pause).unwrap_or_default(), pause))
                .collect(),
            ..Self::default()
        }
    }

    /// The pause of the whole pool.
    #[must_use]
    pub fn pool_pause(&self) -> Option<&Pause> {
        self.pool_pause.as_ref()
    }

    /// Pauses of owners, the oldest first.
    #[must_use]
    pub fn owners(&self) -> Vec<&Pause> {
        let mut pauses: Vec<&Pause> = self.pauses.values().filter(|p| p.holds()).collect();
        pauses.sort_by_key(|p| p.since);
        pauses
    }

    /// Hash of the settings that the breaker applies to.
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Whether every new pod is injected.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.pool_pause.is_none() && !self.pauses.values().any(Pause::holds)
    }

    /// Changes since the last call.
    pub fn take_changes(&mut self) -> Vec<BreakerChange> {
        std::mem::take(&mut self.changes)
    }

    /// Checks the pool's pods. Returns the wait until the next check if nothing changes before.
    pub fn step(&mut self, input: &BreakerInput<'_>) -> Option<SignedDuration> {
        if *self.hash != *input.hash {
            *self = Self {
                hash: input.hash.into(),
                hash_since: input.now,
                replacing: std::mem::take(&mut self.replacing),
                backoff: std::mem::take(&mut self.backoff),
                ..Self::default()
            };
        }
        self.injects = input.injects;
        self.record_hung(input);
        let groups = by_owner(input.pods);
        self.record_started(&groups, input.now);
        let refused: HashMap<&str, &Refused> = input
            .refused
            .iter()
            .filter(|r| r.at >= self.hash_since)
            .map(|r| (&*r.owner.uid, r))
            .collect();
        let known = self.pauses.keys().map(|uid| uid.to_string());
        let seen = groups
            .keys()
            .chain(refused.keys())
            .map(|uid| (*uid).to_owned());
        for uid in known.chain(seen).collect::<BTreeSet<String>>() {
            let pods = groups.get(&*uid).map_or(&[][..], |pods| &**pods);
            let before = self.pauses.remove(&*uid);
            let next = self.next_pause(before, pods, refused.get(&*uid).copied(), input.now);
            if let Some(pause) = next {
                self.pauses.insert(uid.into(), pause);
            }
        }
        self.pause_pool_if_shared(input);
        self.next_check(input)
    }

    /// Records hanging pods, with any settings, and since when they hang.
    fn record_hung(&mut self, input: &BreakerInput<'_>) {
        let newest = newest(input.pods);
        let mut hung = HashMap::new();
        for pod in input
            .pods
            .iter()
            .filter(|p| !p.deleting && !(input.updating)(p))
        {
            let of_interest = pod.is_active() || newest.contains(&pod.uid);
            let before = self.hung.get(&pod.uid).copied();
            let found = match evidence(pod).filter(|_| of_interest) {
                Some(cause) => match before {
                    Some((kind, since)) if kind == cause.kind => Some((kind, since)),
                    _ => Some((cause.kind, input.now)),
                },
                None => before.filter(|_| may_fall_back(pod, input.now)),
            };
            if let Some(found) = found {
                hung.insert(pod.uid.clone(), found);
            }
        }
        self.compared.retain(|uid| hung.contains_key(uid));
        self.backoff.retain(|uid| hung.contains_key(uid));
        self.hung = hung;
    }

    fn record_started(&mut self, groups: &BTreeMap<&str, Vec<&Arc<Pod>>>, now: Timestamp) {
        self.up.retain(|uid| groups.contains_key(&**uid));
        for (uid, pods) in groups {
            if pods.iter().any(|p| self.is_current(p) && is_up(p, now)) {
                self.up.insert((*uid).into());
            }
        }
        let existing: HashSet<&str> = groups.keys().copied().collect();
        self.replacing.retain(|uid, _| existing.contains(&**uid));
    }

    /// Whether the pod has a sidecar with the current settings.
    fn is_current(&self, pod: &Pod) -> bool {
        pod.sidecar.is_some() && *self.hash == *pod.hash()
    }

    /// The next state of an owner's pause.
    fn next_pause(
        &mut self,
        before: Option<Pause>,
        pods: &[&Arc<Pod>],
        refused: Option<&Refused>,
        now: Timestamp,
    ) -> Option<Pause> {
        let Some(mut pause) = before else {
            return self.trip(pods, refused, 0, now);
        };
        if !self.injects {
            return self.pause_without_injection(pause, pods, now);
        }
        if refused.is_some() || pods.iter().any(|p| p.is_active()) {
            pause.seen = now;
        } else if now.duration_since(pause.seen) > DROP_AFTER {
            return None;
        }
        if pause.holds() && pods.iter().any(|p| self.works(p, &pause, now)) {
            self.resumed(&pause, pods);
            return None;
        }
        let over = pause.is_over(now);
        match &pause.position {
            Position::Paused { proven: false } => match self.verdict(&pause, pods, refused, now) {
                Some(Verdict::Runs) => {
                    pause.position = Position::Paused { proven: true };
                    Some(pause)
                }
                Some(Verdict::Fails) => {
                    pause.failures = pause.failures.saturating_add(1);
                    let (owner, cause) = (pause.owner.clone(), pause.cause.clone());
                    self.changes.push(BreakerChange::Cleared(owner, cause));
                    Some(pause.at(Position::Cleared, now))
                }
                None if over => Some(pause.at(Position::Probing, now)),
                None => Some(pause),
            },
            Position::Paused { proven: true } if over => Some(pause.at(Position::Probing, now)),
            Position::Paused { .. } => Some(pause),
            Position::Probing => {
                if let Some(refused) = refused.filter(|r| r.at > pause.since) {
                    return Some(pause.failed(refusal(refused), now));
                }
                let start = pause.start();
                let probe = pods
                    .iter()
                    .find(|p| self.is_current(p) && p.created >= start);
                match probe {
                    Some(probe) => Some(pause.at(Position::Watching(probe.uid.clone()), now)),
                    None => Some(pause),
                }
            }
            Position::Watching(uid) => match pods.iter().find(|p| p.uid == *uid) {
                Some(pod) => match self.hangs(pod, now) {
                    Some(cause) => Some(pause.failed(cause, now)),
                    None if over => Some(pause.at(Position::Probing, now)),
                    None => Some(pause),
                },
                None => Some(pause.at(Position::Probing, now)),
            },
            Position::Cleared if over => self.trip(pods, refused, pause.failures, now),
            Position::Cleared => Some(pause),
        }
    }

    /// The next state of a pause while no new pod gets a sidecar. There is nothing to compare or to probe, so all pods that hang are replaced,
    /// and then the pause ends.
    fn pause_without_injection(
        &self,
        pause: Pause,
        pods: &[&Arc<Pod>],
        now: Timestamp,
    ) -> Option<Pause> {
        let hang = pods.iter().any(|p| self.hung.contains_key(&p.uid));
        let position = match pause.position {
            Position::Cleared => Position::Cleared,
            _ => Position::Paused { proven: true },
        };
        let probes = matches!(pause.position, Position::Probing | Position::Watching(_));
        hang.then(|| match probes || pause.is_over(now) {
            true => pause.at(position, now),
            false => Pause { position, ..pause },
        })
    }

    /// The new pause that a single pod causes, if any.
    fn trip(
        &mut self,
        pods: &[&Arc<Pod>],
        refused: Option<&Refused>,
        failures: u32,
        now: Timestamp,
    ) -> Option<Pause> {
        let hanging = |pod: &&Arc<Pod>| {
            let cause = self.hangs(pod, now)?;
            let fails_alone = cause.kind == Kind::Engine && self.up.contains(owner_uid(pod));
            let new = !self.compared.contains(&pod.uid) && self.is_current(pod) && !fails_alone;
            new.then(|| (owner(pod).cloned(), cause))
        };
        let shown = pods
            .iter()
            .filter_map(hanging)
            .min_by_key(|(_, cause)| cause.kind);
        let made = |r: &Refused| pods.iter().any(|p| p.created > r.at);
        let refusal = || {
            let fresh =
                refused.filter(|r| now.duration_since(r.at) <= REFUSAL_VALID && !made(r))?;
            Some((Some(fresh.owner.clone()), refusal(fresh)))
        };
        let (owner, cause) = shown.or_else(refusal)?;
        self.changes
            .push(BreakerChange::Paused(owner.clone(), cause.clone()));
        Some(Pause {
            owner,
            cause,
            position: Position::Paused { proven: false },
            since: now,
            failures,
            seen: now,
        })
    }

    /// What a pod shows, if it has shown it long enough.
    fn hangs(&self, pod: &Pod, now: Timestamp) -> Option<Cause> {
        let (kind, since) = self.hung.get(&pod.uid)?;
        let confirmed = now.duration_since(*since) >= kind.grace_period();
        evidence(pod).filter(|cause| confirmed && cause.kind == *kind)
    }

    /// The result of the comparison with pods that were let through.
    fn verdict(
        &self,
        pause: &Pause,
        pods: &[&Arc<Pod>],
        refused: Option<&Refused>,
        now: Timestamp,
    ) -> Option<Verdict> {
        let verdicts: Vec<Verdict> = controls(pause, pods)
            .filter_map(|pod| compare(pod, &pause.cause, now))
            .collect();
        let refused_again = pause.cause.kind == Kind::Refusal
            && refused.is_some_and(|r| r.at.duration_since(pause.since) >= REFUSED_AFTER);
        match verdicts.contains(&Verdict::Runs) {
            true => Some(Verdict::Runs),
            false => (refused_again || !verdicts.is_empty()).then_some(Verdict::Fails),
        }
    }

    /// Whether a pod with these settings works, unlike the pods that caused the pause.
    fn works(&self, pod: &Pod, pause: &Pause, now: Timestamp) -> bool {
        // A probe may have started before it was seen, or in the same second in which it was created.
        let watched = matches!(&pause.position, Position::Watching(uid) if *uid == pod.uid);
        let started = running_since(pod)
            .is_some_and(|at| (watched || at > pause.since) && now.duration_since(at) >= STEADY);
        let late = pause.cause.kind != Kind::Refusal || pod.created >= pause.start();
        let up = pause.cause.kind != Kind::Engine || is_up(pod, now);
        late && up && self.is_current(pod) && pod.is_active() && started
    }

    fn resumed(&mut self, pause: &Pause, pods: &[&Arc<Pod>]) {
        let hung = pods.iter().filter(|p| self.hung.contains_key(&p.uid));
        self.compared.extend(hung.map(|p| p.uid.clone()));
        self.changes
            .push(BreakerChange::Resumed(pause.owner.clone()));
    }

    /// Pauses the whole pool if several owners have the same fault of the sidecar's containers, or if too many owners are paused.
    fn pause_pool_if_shared(&mut self, input: &BreakerInput<'_>) {
        let pods: Vec<&Arc<Pod>> = input.pods.iter().collect();
        if let Some(pause) = self.pool_pause.take() {
            let next = self.next_pause(Some(pause), &pods, None, input.now);
            if next.is_none() {
                self.pauses.retain(|_, p| p.cause.kind != Kind::Sidecar);
            }
            self.pool_pause = next;
            return;
        }
        let held = || self.pauses.values().filter(|p| p.holds());
        let proven = |p: &&Pause| {
            p.cause.kind == Kind::Sidecar && p.position == Position::Paused { proven: true }
        };
        let mut reasons: HashMap<&str, usize> = HashMap::new();
        for pause in held().filter(proven) {
            *reasons.entry(&pause.cause.reason).or_default() += 1;
        }
        let shared = |p: &&Pause| {
            reasons
                .get(&*p.cause.reason)
                .is_some_and(|n| *n >= OWNERS_TO_PAUSE_POOL)
        };
        let several = held().filter(proven).find(shared);
        let many = (held().count() > OWNERS_MAX)
            .then(|| held().next())
            .flatten();
        self.pool_pause = several.or(many).map(|pause| Pause {
            owner: None,
            cause: pause.cause.clone(),
            position: Position::Paused { proven: true },
            since: input.now,
            failures: 0,
            seen: input.now,
        });
    }

    fn next_check(&self, input: &BreakerInput<'_>) -> Option<SignedDuration> {
        let now = input.now;
        let confirmed = self
            .hung
            .values()
            .map(|(kind, since)| *since + kind.grace_period());
        let pauses = || self.pauses.values().chain(&self.pool_pause);
        let over = pauses().filter_map(|p| Some(p.since + p.duration()?));
        let pause_seen = pauses().map(|p| p.since + PAUSE_SEEN);
        let young = |at: Timestamp| now.duration_since(at) < IN_PROGRESS;
        let in_progress = pauses().any(|p| p.holds() && young(p.since))
            || self.replacing.values().any(|r| young(r.at));
        let in_progress = in_progress.then(|| now + CHECK_INTERVAL);
        let held = self.backoff.next_at();
        let steady = input
            .pods
            .iter()
            .filter(|_| !self.is_closed())
            .filter_map(|p| Some(running_since(p)? + STEADY));
        confirmed
            .chain(over)
            .chain(pause_seen)
            .chain(in_progress)
            .chain(held)
            .chain(steady)
            .filter(|at| *at > now)
            .min()
            .map(|at| at.duration_since(now))
    }
}

fn refusal(refused: &Refused) -> Cause {
    Cause {
        kind: Kind::Refusal,
        reason: "PodsRefused".into(),
        message: refused.message.clone(),
        example: "".into(),
        failed: None,
    }
}

#[cfg(test)]
mod tests;
