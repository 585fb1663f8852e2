//! What a pod shows of being kept from running by what injection added to it. Pure. Suspicion is enough: the breaker lets one pod
//! through without a sidecar and compares.

use super::pod::{Pod, WaitsFor};
use jiff::{SignedDuration, Timestamp};

/// In which way injection can keep pods from running. The order is that of their weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A container of ours does not start.
    Sidecar,
    /// vLLM fails again and again.
    Engine,
    /// No node has the room, or the volume, that the sidecar asks for.
    Node,
    /// The sidecar's volume cannot be mounted.
    Volumes,
    /// The API server does not take the pod.
    Refusal,
}

/// What keeps pods from running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// In which way.
    pub kind: Kind,
    /// Its name: the kubelet's, or one of docs/guides/troubleshooting.md.
    pub reason: Box<str>,
    /// The message that names the cause.
    pub message: Box<str>,
    /// A pod that shows it; empty for pods that were never stored.
    pub example: Box<str>,
    /// The container that fails, of kind [`Kind::Engine`], and how long it ran before.
    pub failed: Option<(Box<str>, SignedDuration)>,
}

impl Kind {
    /// How long a pod must show it before it counts. vLLM shall run 90 s after the first failure at the latest.
    pub fn patience(self) -> SignedDuration {
        match self {
            Self::Sidecar | Self::Node => SignedDuration::from_secs(30),
            // A disk of a cloud takes its time.
            Self::Volumes => SignedDuration::from_secs(60),
            // It failed more than once already.
            Self::Engine | Self::Refusal => SignedDuration::ZERO,
        }
    }
}

/// What an injected pod shows.
pub fn evidence(pod: &Pod) -> Option<Cause> {
    let cause = |kind, reason: &str, message: String| Cause {
        kind,
        reason: reason.into(),
        message: message.into(),
        example: pod.name.clone(),
        failed: None,
    };
    pod.sidecar.as_ref()?;
    if pod.is_active()
        && let Some(fault) = pod.fault()
    {
        return Some(cause(Kind::Sidecar, fault.reason, fault.message.to_owned()));
    }
    if let Some(engine) = pod.engine()
        && let Some(exit) = pod.crash_loop(engine)
    {
        let unknown = engine.path_unknown && exit.code == 1;
        let (reason, hint) = match unknown {
            true => (
                "PythonPathUnknown",
                "; injection replaces a PYTHONPATH that an image sets by ENV: where it sets one, write it into the annotation kvcachepool.io/python-path",
            ),
            false => ("EngineFails", ""),
        };
        let gap = if exit.message.is_empty() { "" } else { ": " };
        let message = format!(
            "container {} ends with code {} ({}) {} s after its start{gap}{}{hint}",
            engine.name,
            exit.code,
            exit.reason,
            exit.ran.as_secs(),
            exit.message,
        );
        return Some(Cause {
            failed: Some((engine.name.clone(), exit.ran)),
            ..cause(Kind::Engine, reason, message)
        });
    }
    let waits = pod.waits.as_ref().filter(|w| w.maybe_ours)?;
    if !pod.is_active() || pod.has_started() {
        return None;
    }
    Some(match waits.what {
        WaitsFor::Node => cause(Kind::Node, "NoNodeWithRoom", waits.message.to_string()),
        WaitsFor::Volumes => cause(
            Kind::Volumes,
            "DiskNotMounted",
            "its node does not mount the volume of the disk tier".to_owned(),
        ),
    })
}

/// How a pod fares that was let through without a sidecar: the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It runs: what injection adds was the reason.
    Runs,
    /// It fails in the same way: it was not.
    Fails,
}

/// A fault of an image or a configuration shows within this time on a pod that is on its node.
const NO_FAULT: SignedDuration = SignedDuration::from_secs(15);
/// A container that fails at its start is up if it runs for this, and for twice as long as it did before it failed.
const RUNS: SignedDuration = SignedDuration::from_secs(30);

/// Compares a pod without a sidecar with what pods with one show.
pub fn compare(control: &Pod, cause: &Cause, now: Timestamp) -> Option<Verdict> {
    let age = now.duration_since(control.created);
    let waits = control.waits.as_ref().map(|w| w.what);
    let late = age >= cause.kind.patience();
    match cause.kind {
        Kind::Refusal => Some(Verdict::Runs),
        Kind::Node if waits == Some(WaitsFor::Node) => late.then_some(Verdict::Fails),
        Kind::Node => Some(Verdict::Runs),
        Kind::Volumes if control.has_started() => Some(Verdict::Runs),
        Kind::Volumes if waits == Some(WaitsFor::Volumes) => late.then_some(Verdict::Fails),
        Kind::Volumes | Kind::Sidecar if control.has_started() => Some(Verdict::Runs),
        Kind::Volumes | Kind::Sidecar if waits.is_some() => None,
        Kind::Volumes | Kind::Sidecar => {
            match control.own.iter().any(|own| own.fault().is_some()) {
                true => late.then_some(Verdict::Fails),
                false => (age >= NO_FAULT).then_some(Verdict::Runs),
            }
        }
        Kind::Engine => {
            let (name, ran) = cause.failed.as_ref()?;
            let own = control.own.iter().find(|own| own.name == *name)?;
            if control.crash_loop(own).is_some() {
                return Some(Verdict::Fails);
            }
            let enough = RUNS.max(*ran * 2);
            let since = own.running_since().map(|since| now.duration_since(since));
            let ended_well = own.exit.as_ref().is_some_and(|e| e.code == 0);
            let runs = control.is_up(own, now) || since.is_some_and(|s| s >= enough) || ended_well;
            runs.then_some(Verdict::Runs)
        }
    }
}
