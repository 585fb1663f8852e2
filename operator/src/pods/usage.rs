//! The statuses of one pool's sidecars: which sidecars to query next, the last answer of each, and their sum.

use super::fetch::FetchError;
use super::pod::Pod;
use super::window::{Counted, HitRate, Window};
use jiff::{SignedDuration, Timestamp};
use kvcachepool_protocol::status::{State, Status};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Pods of one pool that are queried per round, if there are as many.
pub const QUERIED_MIN: usize = 20;
/// Rounds until every pod of a large pool was queried. A round takes a minute at most.
const CYCLE: usize = 2;
/// Time for which an answer is valid.
const FRESH: SignedDuration = SignedDuration::from_mins(10);
/// Maximum distinct reasons. A sidecar has only a few codes.
const TROUBLES_MAX: usize = 8;

/// Answers of one pool's sidecars.
#[derive(Debug, Default)]
pub struct PoolUsage {
    pods: HashMap<Box<str>, Known>,
    window: Window,
    /// Every pod was queried once. Sums before that are too small.
    known: bool,
    /// `known` becomes true when the current round ends.
    completes: bool,
    /// Number of queries so far.
    turn: u64,
}

#[derive(Debug, Default)]
struct Known {
    /// Number of the last query of this pod.
    turn: Option<u64>,
    answer: Option<Answer>,
    /// Error of the last query.
    failed: Option<FetchError>,
}

/// The kept part of a sidecar's status.
#[derive(Debug)]
struct Answer {
    at: Timestamp,
    counted: Counted,
    attached: bool,
    version: Box<str>,
    state: State,
    /// Code and message of the first reason.
    reason: Option<(Box<str>, Box<str>)>,
    tiers: Vec<TierUse>,
    /// Why its memory does not have the size of its config; empty if it has.
    resize_waits: Box<str>,
}

/// A tier of one sidecar, or of all queried sidecars.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierUse {
    /// `memory`, ...
    pub name: Box<str>,
    /// Of one sidecar: its state. Of all: `Ready`, `Degraded` if some are not ready, `Off` if none serves, `Starting` if none has opened it
    /// yet.
    pub state: State,
    /// Code of the reason.
    pub reason: Box<str>,
    /// Message of the reason.
    pub message: Box<str>,
    /// Bytes in use.
    pub used: u64,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Of all sidecars: a pod that reports an error of the tier; empty = none.
    pub example: Box<str>,
}

/// Tiers that all pods share. Each sidecar reports the size of the whole tier.
pub const SHARED: [&str; 3] = ["redis", "filesystem", "s3"];

/// Sidecars that do not work as configured, by reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// Code of the reason.
    pub reason: Box<str>,
    /// Message of the reason.
    pub message: Box<str>,
    /// Number of pods.
    pub pods: u32,
    /// Number of these pods that serve nothing.
    pub off: u32,
    /// Name of one of the pods.
    pub example: Box<str>,
}

/// The sum over a pool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Summary {
    /// Every pod was queried once. Before that, a new leader has incomplete numbers.
    pub known: bool,
    /// Pods with a valid answer.
    pub observed: u32,
    /// Pods of these whose vLLM is connected and registered.
    pub attached: u32,
    /// Pods that answered the last query.
    pub answering: u32,
    /// Pods that did not answer the last query.
    pub unreachable: u32,
    /// Name of one of them, and the error.
    pub unreachable_example: Option<(Box<str>, FetchError)>,
    pub hit_rate: HitRate,
    pub tiers: Vec<TierUse>,
    /// Troubles, the most frequent first.
    pub troubles: Vec<Trouble>,
    /// Name of a pod whose sidecar has not the memory of its config yet, and why.
    pub resize_waits: Option<(Box<str>, Box<str>)>,
    /// Injected pods by version of the sidecar.
    pub versions: BTreeMap<Box<str>, u32>,
}

impl PoolUsage {
    /// The pods to query in this round: those with the oldest queries, so that every pod is queried in turn. Removes deleted pods.
    pub fn round(&mut self, pods: &[Arc<Pod>]) -> Vec<Arc<Pod>> {
        let existing: HashSet<&str> = pods.iter().map(|p| &*p.uid).collect();
        self.pods.retain(|uid, _| existing.contains(&**uid));
        let mut due: Vec<&Arc<Pod>> = pods.iter().filter(|p| p.address().is_some()).collect();
        let queried = |p: &&Arc<Pod>| self.pods.get(&p.uid).is_some_and(|k| k.turn.is_some());
        let count = due.len().div_ceil(CYCLE).max(QUERIED_MIN);
        self.completes = due.iter().filter(|p| !queried(p)).count() <= count;
        due.sort_by_key(|p| self.pods.get(&p.uid).and_then(|k| k.turn));
        due.truncate(count);
        for pod in &due {
            self.turn += 1;
            self.pods.entry(pod.uid.clone()).or_default().turn = Some(self.turn);
        }
        due.into_iter().cloned().collect()
    }

    /// Records that all queries of a round have ended.
    pub fn round_ended(&mut self) {
        self.known |= self.completes;
    }

    /// Whether every pod was queried once.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// Records an answer or an error. The address may belong to another pod by now, so answers of another pool's sidecar are dropped.
    pub fn take(&mut self, pod: &Pod, answer: Result<Status, FetchError>, now: Timestamp) {
        let known = self.pods.entry(pod.uid.clone()).or_default();
        match answer {
            Err(failed) => known.failed = Some(failed),
            Ok(status) if is_of_another_pool(&status, pod) => {
                known.failed = Some(FetchError::NoStatus);
            }
            Ok(status) => {
                let answer = Answer::of(status, now);
                let before = known.answer.as_ref().map(|a| &a.counted);
                self.window.add(now, before, &answer.counted);
                known.answer = Some(answer);
                known.failed = None;
            }
        }
    }

    /// The sum over the existing pods.
    #[must_use]
    pub fn summary(&self, pods: &[Arc<Pod>], now: Timestamp) -> Summary {
        let mut sum = Summary {
            known: self.known,
            hit_rate: self.window.rate(now),
            ..Summary::default()
        };
        let mut tiers: BTreeMap<Box<str>, Tally> = BTreeMap::new();
        let mut troubles: BTreeMap<Box<str>, Trouble> = BTreeMap::new();
        for pod in pods.iter().filter(|p| p.is_active() && p.sidecar.is_some()) {
            let known = self.pods.get(&pod.uid);
            if let Some(failed) = known
                .and_then(|k| k.failed)
                .filter(|_| pod.address().is_some())
            {
                sum.unreachable += 1;
                sum.unreachable_example
                    .get_or_insert_with(|| (pod.name.clone(), failed));
            }
            let answers = known.is_some_and(|k| k.failed.is_none() && k.answer.is_some());
            sum.answering += u32::from(answers && pod.address().is_some());
            let answer = known
                .and_then(|k| k.answer.as_ref())
                .filter(|a| now.duration_since(a.at) <= FRESH);
            let stamped = pod.injection.as_ref().map(|i| &i.version);
            let version = answer.map(|a| &a.version).or(stamped);
            if let Some(version) = version.filter(|v| !v.is_empty()) {
                *sum.versions.entry(version.clone()).or_default() += 1;
            }
            let Some(answer) = answer.filter(|_| pod.address().is_some()) else {
                continue;
            };
            sum.observed += 1;
            sum.attached += u32::from(answer.attached);
            for tier in &answer.tiers {
                let tally = tiers.entry(tier.name.clone()).or_default();
                tally.add(tier, &pod.name);
            }
            answer.count_trouble(pod, &mut troubles);
            if !answer.resize_waits.is_empty() {
                sum.resize_waits
                    .get_or_insert_with(|| (pod.name.clone(), answer.resize_waits.clone()));
            }
        }
        sum.tiers = tiers
            .into_iter()
            .map(|(name, tally)| tally.sum(name))
            .collect();
        sum.troubles = troubles.into_values().collect();
        sum.troubles.sort_by_key(|t| std::cmp::Reverse(t.pods));
        sum.troubles.truncate(TROUBLES_MAX);
        sum
    }
}

fn is_of_another_pool(status: &Status, pod: &Pod) -> bool {
    let reported = &status.pool;
    let differs = |reported: &str, expected: &str| !reported.is_empty() && *reported != *expected;
    differs(&reported.name, &pod.pool) || differs(&reported.namespace, &pod.namespace)
}

impl Answer {
    fn of(status: Status, at: Timestamp) -> Self {
        let hit = status
            .counters
            .hit_tokens
            .values()
            .fold(0, |a: u64, b| a.saturating_add(*b));
        Self {
            at,
            counted: Counted {
                boot: status.boot,
                uptime_s: status.uptime_s,
                requested: status.counters.requested_tokens,
                hit,
            },
            attached: status.sessions.iter().any(|s| s.registered && s.connected),
            version: short(&status.version),
            state: status.state,
            resize_waits: short(&status.memory.resize_waits),
            reason: status
                .reasons
                .first()
                .map(|r| (short(&r.code), short(&r.message))),
            tiers: status
                .tiers
                .iter()
                .take(TROUBLES_MAX)
                .map(|t| TierUse {
                    name: short(&t.name),
                    state: t.state,
                    reason: short(&t.reason),
                    message: short(&t.message),
                    used: t.used_bytes,
                    capacity: t.capacity_bytes,
                    ..TierUse::default()
                })
                .collect(),
        }
    }

    fn count_trouble(&self, pod: &Pod, troubles: &mut BTreeMap<Box<str>, Trouble>) {
        let (Some((reason, message)), State::Degraded | State::Off) = (&self.reason, self.state)
        else {
            return;
        };
        let trouble = troubles.entry(reason.clone()).or_insert_with(|| Trouble {
            reason: reason.clone(),
            message: message.clone(),
            pods: 0,
            off: 0,
            example: pod.name.clone(),
        });
        trouble.pods += 1;
        trouble.off += u32::from(self.state == State::Off);
    }
}

/// Truncates a text from a pod, because any pod can have the label.
fn short(text: &str) -> Box<str> {
    text.chars().take(200).collect::<String>().into()
}

/// One tier over several sidecars.
#[derive(Debug, Default)]
struct Tally {
    used: u64,
    capacity: u64,
    serves: u32,
    fails: u32,
    reason: Box<str>,
    message: Box<str>,
    example: Box<str>,
}

impl Tally {
    fn add(&mut self, tier: &TierUse, pod: &str) {
        if SHARED.contains(&&*tier.name) {
            self.used = self.used.max(tier.used);
            self.capacity = self.capacity.max(tier.capacity);
        } else {
            self.used = self.used.saturating_add(tier.used);
            self.capacity = self.capacity.saturating_add(tier.capacity);
        }
        // Starting and draining are transient: the tier neither serves nor fails.
        self.serves += u32::from(matches!(tier.state, State::Ready | State::Degraded));
        if matches!(tier.state, State::Degraded | State::Off) {
            self.fails += 1;
            if self.example.is_empty() {
                self.reason = tier.reason.clone();
                self.message = tier.message.clone();
                self.example = pod.into();
            }
        }
    }

    fn sum(self, name: Box<str>) -> TierUse {
        TierUse {
            name,
            state: match (self.serves, self.fails) {
                (0, 0) => State::Starting,
                (0, _) => State::Off,
                (_, 0) => State::Ready,
                _ => State::Degraded,
            },
            reason: self.reason,
            message: self.message,
            used: self.used,
            capacity: self.capacity,
            example: self.example,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::{at, running, waiting};
    use serde_json::json;

    fn status(value: serde_json::Value) -> Status {
        serde_json::from_value(value).unwrap()
    }

    fn good(requested: u64, hit: u64) -> Status {
        status(json!({
            "version": "0.1.0", "boot": 1, "uptime_s": 60, "state": "ready",
            "sessions": [{"id": 1, "role": "worker", "registered": true, "connected": true}],
            "tiers": [{"name": "memory", "state": "ready", "used_bytes": 10, "capacity_bytes": 100}],
            "counters": {"requested_tokens": requested, "hit_tokens": {"memory": hit}},
        }))
    }

    fn arcs(pods: impl IntoIterator<Item = Pod>) -> Vec<Arc<Pod>> {
        pods.into_iter().map(Arc::new).collect()
    }

    #[test]
    fn every_pod_with_a_running_sidecar_is_queried_in_turn() {
        let pods = arcs(
            (0..45)
                .map(|i| running(&format!("p{i}")))
                .chain([waiting("w", "ErrImagePull")]),
        );
        let mut usage = PoolUsage::default();
        let mut queried: HashMap<Box<str>, u32> = HashMap::new();
        for _ in 0..9 {
            let due = usage.round(&pods);
            assert_eq!(due.len(), 23);
            for pod in due {
                *queried.entry(pod.name.clone()).or_default() += 1;
            }
        }
        assert_eq!(queried.len(), 45);
        assert!(queried.values().all(|n| (4..=5).contains(n)), "{queried:?}");
        usage.round(&pods[..3]);
        assert_eq!(usage.pods.len(), 3, "deleted pods are removed");
    }

    #[test]
    fn answers_are_summed() {
        let pods = arcs([running("a"), running("b"), running("c")]);
        let mut usage = PoolUsage::default();
        usage.take(&pods[0], Ok(good(100, 80)), at(0));
        let mut lonely = good(100, 0);
        lonely.sessions[0].connected = false;
        lonely.version = "0.2.0".into();
        usage.take(&pods[1], Ok(lonely), at(0));
        let sum = usage.summary(&pods, at(1));
        assert_eq!((sum.observed, sum.attached, sum.unreachable), (2, 1, 0));
        assert_eq!(sum.hit_rate, HitRate::Percent(40));
        assert_eq!((sum.tiers[0].used, sum.tiers[0].capacity), (20, 200));
        assert_eq!(sum.tiers[0].state, State::Ready);
        assert_eq!(
            sum.versions,
            [("0.1.0".into(), 2), ("0.2.0".into(), 1)].into()
        );
    }

    #[test]
    fn shared_tiers_are_counted_once_and_local_tiers_are_summed() {
        let reported = || {
            status(json!({"tiers": [
                {"name": "disk", "state": "ready", "used_bytes": 10, "capacity_bytes": 100},
                {"name": "redis", "state": "ready", "used_bytes": 10, "capacity_bytes": 100},
            ]}))
        };
        let pods = arcs([running("a"), running("b")]);
        let mut usage = PoolUsage::default();
        for pod in &pods {
            usage.take(pod, Ok(reported()), at(0));
        }
        let tiers = usage.summary(&pods, at(1)).tiers;
        let bytes: Vec<_> = tiers
            .iter()
            .map(|t| (&*t.name, t.used, t.capacity))
            .collect();
        assert_eq!(bytes, [("disk", 20, 200), ("redis", 10, 100)]);
    }

    #[test]
    fn a_tier_serves_once_a_sidecar_has_opened_it() {
        let pods = arcs([running("a"), running("b")]);
        let table = [
            (["starting", "starting"], State::Starting),
            (["starting", "ready"], State::Ready),
            (["starting", "off"], State::Off),
            (["ready", "off"], State::Degraded),
        ];
        for (reported, state) in table {
            let mut usage = PoolUsage::default();
            for (pod, state) in pods.iter().zip(reported) {
                let answer = json!({"tiers": [{"name": "s3", "state": state, "reason": "why"}]});
                usage.take(pod, Ok(status(answer)), at(0));
            }
            assert_eq!(
                usage.summary(&pods, at(1)).tiers[0].state,
                state,
                "{reported:?}"
            );
        }
    }

    #[test]
    fn a_failed_query_keeps_the_last_answer_until_it_expires() {
        let pods = arcs([running("a")]);
        let mut usage = PoolUsage::default();
        usage.take(&pods[0], Ok(good(1, 1)), at(0));
        usage.take(&pods[0], Err(FetchError::TimedOut), at(60));
        let sum = usage.summary(&pods, at(600));
        assert_eq!((sum.observed, sum.attached, sum.unreachable), (1, 1, 1));
        assert_eq!(
            sum.unreachable_example,
            Some(("a".into(), FetchError::TimedOut))
        );
        let sum = usage.summary(&pods, at(601));
        assert_eq!((sum.observed, sum.attached, sum.unreachable), (0, 0, 1));
        usage.take(&pods[0], Ok(good(1, 1)), at(660));
        assert_eq!(usage.summary(&pods, at(661)).unreachable, 0);
    }

    #[test]
    fn sums_are_known_once_every_pod_was_queried() {
        let pods = arcs((0..45).map(|i| running(&format!("p{i}"))));
        let mut usage = PoolUsage::default();
        for known in [false, true] {
            usage.round(&pods);
            assert!(!usage.summary(&pods, at(0)).known, "the round is under way");
            usage.round_ended();
            assert_eq!(usage.summary(&pods, at(0)).known, known);
        }
        let more = arcs((0..99).map(|i| running(&format!("q{i}"))));
        usage.round(&more);
        usage.round_ended();
        assert!(usage.is_known(), "growth does not make it forget");
    }

    #[test]
    fn the_answer_of_another_pools_sidecar_does_not_count() {
        let pods = arcs([running("a")]);
        for (name, namespace, observed) in
            [("p", "n", 1), ("q", "n", 0), ("p", "m", 0), ("", "", 1)]
        {
            let mut usage = PoolUsage::default();
            let mut answer = good(1, 1);
            (answer.pool.name, answer.pool.namespace) = (name.into(), namespace.into());
            usage.take(&pods[0], Ok(answer), at(0));
            assert_eq!(
                usage.summary(&pods, at(1)).observed,
                observed,
                "{namespace}/{name}"
            );
        }
    }

    #[test]
    fn every_pod_of_a_large_pool_is_queried_within_two_rounds() {
        for (pods, queries) in [(1000, [500, 500]), (39, [20, 20]), (12, [12, 12])] {
            let pods = arcs((0..pods).map(|i| running(&format!("p{i}"))));
            let mut usage = PoolUsage::default();
            let rounds = [usage.round(&pods), usage.round(&pods)];
            assert_eq!(rounds.each_ref().map(Vec::len), queries);
            let queried: HashSet<_> = rounds.iter().flatten().map(|p| &p.name).collect();
            assert_eq!(queried.len(), pods.len());
        }
    }

    #[test]
    fn a_sidecar_that_stopped_attaches_nobody() {
        let mut usage = PoolUsage::default();
        usage.take(&running("a"), Ok(good(1, 1)), at(0));
        let sum = usage.summary(&arcs([waiting("a", "CrashLoopBackOff")]), at(1));
        assert_eq!((sum.observed, sum.attached), (0, 0));
    }

    #[test]
    fn a_sidecar_that_waits_for_its_memory_is_named() {
        let waits = |why: &str| status(json!({"state": "ready", "memory": {"resize_waits": why}}));
        let pods = arcs([running("a"), running("b")]);
        let mut usage = PoolUsage::default();
        usage.take(&pods[0], Ok(waits("")), at(0));
        assert_eq!(usage.summary(&pods, at(1)).resize_waits, None);
        usage.take(&pods[1], Ok(waits("pins")), at(0));
        let named = Some(("b".into(), "pins".into()));
        assert_eq!(usage.summary(&pods, at(1)).resize_waits, named);
    }

    #[test]
    fn troubles_are_counted_by_reason_and_make_a_tier_degraded_or_off() {
        let bad = |state: &str| {
            status(json!({
                "state": state, "reasons": [{"code": "ArenaTooLarge", "message": "m".repeat(900)}],
                "tiers": [{"name": "memory", "state": state, "reason": "ArenaTooLarge"}],
            }))
        };
        let pods = arcs([running("a"), running("b")]);
        let mut usage = PoolUsage::default();
        usage.take(&pods[0], Ok(bad("off")), at(0));
        let sum = usage.summary(&pods, at(1));
        assert_eq!(
            (sum.tiers[0].state, &*sum.tiers[0].reason),
            (State::Off, "ArenaTooLarge")
        );
        usage.take(&pods[1], Ok(bad("degraded")), at(0));
        let sum = usage.summary(&pods, at(1));
        assert_eq!(sum.tiers[0].state, State::Degraded);
        let trouble = &sum.troubles[0];
        assert_eq!(
            (
                &*trouble.reason,
                trouble.pods,
                trouble.off,
                trouble.message.len()
            ),
            ("ArenaTooLarge", 2, 1, 200)
        );
    }
}
