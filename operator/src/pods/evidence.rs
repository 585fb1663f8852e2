//! Evidence that injection keeps a pod from running. Pure. A suspicion is enough: the breaker then lets one pod through without a sidecar
//! and compares.

use super::pod::{Pod, WaitsFor};
use jiff::{SignedDuration, Timestamp};

/// How injection can keep pods from running, in order of severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A container that injection added does not start.
    Sidecar,
    /// vLLM fails repeatedly.
    Engine,
    /// No node has the room or the volume that the sidecar needs.
    Node,
    /// The sidecar's volume cannot be mounted.
    Volumes,
    /// The API server rejects the pod.
    Refusal,
}

/// Why pods do not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    pub kind: Kind,
    /// Name of the cause: the kubelet's, or one of this project.
    pub reason: Box<str>,
    pub message: Box<str>,
    /// Name of a pod with this cause; empty for pods that were never stored.
    pub example: Box<str>,
    /// For [`Kind::Engine`]: the failing container, and how long it ran.
    pub failed: Option<(Box<str>, SignedDuration)>,
}

impl Kind {
    /// How long a pod must show the cause before it counts. The target is that vLLM runs at most 90 s after the first failure.
    pub fn grace_period(self) -> SignedDuration {
        match self {
            Self::Sidecar | Self::Node => SignedDuration::from_secs(30),
            // Cloud disks take some time.
            Self::Volumes => SignedDuration::from_secs(60),
            // The failure has already occurred more than once.
            Self::Engine | Self::Refusal => SignedDuration::ZERO,
        }
    }
}

/// The cause that an injected pod shows, if any.
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
                "; injection replaces the PYTHONPATH that an image sets with ENV: if the image sets one, write it into the annotation kvcachepool.io/python-path",
            ),
            false => ("EngineFails", ""),
        };
        let gap = if exit.message.is_empty() { "" } else { ": " };
        let message = format!(
            "container {} exited with code {} ({}) {} s after its start{gap}{}{hint}",
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
    let waits = pod.waits.as_ref().filter(|w| w.maybe_injection)?;
    if !pod.is_active() || pod.has_started() {
        return None;
    }
    Some(match waits.what {
        WaitsFor::Node => cause(Kind::Node, "NoNodeWithRoom", waits.message.to_string()),
        WaitsFor::Volumes => cause(
            Kind::Volumes,
            "DiskNotMounted",
            "its node does not mount the volume of a tier".to_owned(),
        ),
    })
}

/// Result of the comparison with a pod that was let through without a sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The pod runs: injection is the cause.
    Runs,
    /// The pod fails in the same way: injection is not the cause.
    Fails,
}

/// Faults of an image or a configuration show within this time after a pod was scheduled.
const NO_FAULT: SignedDuration = SignedDuration::from_secs(15);
/// A container that fails at its start has started if it runs for this time, and for twice as long as before its failure.
const RUNS: SignedDuration = SignedDuration::from_secs(30);

/// Compares a pod without a sidecar with the cause that pods with one show.
pub fn compare(control: &Pod, cause: &Cause, now: Timestamp) -> Option<Verdict> {
    let age = now.duration_since(control.created);
    let waits = control.waits.as_ref().map(|w| w.what);
    let late = age >= cause.kind.grace_period();
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
