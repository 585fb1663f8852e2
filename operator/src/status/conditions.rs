//! The five conditions, each a function of the observed state. `Ready` summarizes the others.

use super::counts::{Counts, size};
use super::paused;
use super::servers;
use super::tiers::is_configured;
use super::{Observation, Reason};
use crate::api::{self, ManagedServers, Mode, Problem};
use crate::canary::CanaryResult;
use crate::desired::redis::manager_name;
use crate::pods::{Fault, Pod, Position, SHARED, UpdateBlocker};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kvcachepool_protocol::status::State;

/// The spec is valid.
pub const ACCEPTED: &str = "Accepted";
/// The shared tiers are available.
pub const SHARED_TIERS_READY: &str = "SharedTiersReady";
/// New pods get a sidecar.
pub const INJECTION_READY: &str = "InjectionReady";
pub const SIDECARS_READY: &str = "SidecarsReady";
/// All other conditions are True.
pub const READY: &str = "Ready";

/// Longest message in bytes, so that it fits into an event.
pub(super) const MESSAGE_BYTES_MAX: usize = 900;

/// The content of a condition.
#[derive(Clone)]
struct Verdict {
    status: &'static str,
    reason: String,
    message: String,
}

fn verdict(status: &'static str, reason: Reason, message: impl Into<String>) -> Verdict {
    Verdict {
        status,
        reason: reason.name().to_owned(),
        message: message.into(),
    }
}

const TRUE: &str = "True";
const FALSE: &str = "False";
const UNKNOWN: &str = "Unknown";

/// Finds a condition by its type.
#[must_use]
pub fn condition<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.type_ == type_)
}

pub fn conditions(
    observed: &Observation<'_>,
    counts: &Counts,
    previous: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let parts = vec![
        (ACCEPTED, accepted(observed.problems)),
        (INJECTION_READY, injection_or_previous(observed, previous)),
        (
            SIDECARS_READY,
            sidecars_or_previous(observed, counts, previous),
        ),
        (SHARED_TIERS_READY, shared_or_previous(observed, previous)),
    ];
    let parts = summed(parts, observed.unapplied);
    dated(parts, observed.pool.metadata.generation, previous, now)
}

pub fn malformed(
    error: &str,
    generation: Option<i64>,
    previous: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let accepted = Verdict {
        status: FALSE,
        reason: api::Reason::Malformed.name().to_owned(),
        message: format!("this version of the operator cannot read the stored pool: {error}"),
    };
    let parts = summed(vec![(ACCEPTED, accepted)], None);
    dated(parts, generation, previous, now)
}

/// Reasons that depend only on the canary.
const CANARY: [Reason; 3] = [
    Reason::WebhookAnswers,
    Reason::WebhookUnreachable,
    Reason::CanaryRefused,
];
/// Reasons that sidecars report.
const REPORTED: [Reason; 2] = [Reason::SidecarsOff, Reason::SomeDegraded];
/// Reasons that sidecars report for shared tiers.
const OF_TIERS: [Reason; 3] = [
    Reason::SharedTierDown,
    Reason::SomeDegraded,
    Reason::TiersServe,
];

/// The result of the previous leader's canary, while the canary has no result yet.
fn injection_or_previous(observed: &Observation<'_>, previous: &[Condition]) -> Verdict {
    let verdict = injection(observed);
    if verdict.reason != Reason::CanaryPending.name() {
        return verdict;
    }
    kept(previous, INJECTION_READY, &CANARY).unwrap_or(verdict)
}

/// The sidecars' reports to the previous leader, until sidecars were queried.
fn sidecars_or_previous(
    observed: &Observation<'_>,
    counts: &Counts,
    previous: &[Condition],
) -> Verdict {
    let verdict = sidecars(observed, counts);
    if observed.usage.known || verdict.reason != Reason::AllRunning.name() {
        return verdict;
    }
    kept(previous, SIDECARS_READY, &REPORTED).unwrap_or(verdict)
}

fn kept(previous: &[Condition], type_: &str, reasons: &[Reason]) -> Option<Verdict> {
    let before = condition(previous, type_)?;
    let status = [TRUE, FALSE, UNKNOWN]
        .into_iter()
        .find(|s| *s == before.status)?;
    reasons
        .iter()
        .any(|r| r.name() == before.reason)
        .then(|| Verdict {
            status,
            reason: before.reason.clone(),
            message: before.message.clone(),
        })
}

/// Adds `Ready`: False with the first condition that is False or the first object that is not as desired, otherwise Unknown with the first
/// unknown condition.
fn summed(
    mut parts: Vec<(&'static str, Verdict)>,
    unapplied: Option<&(Reason, String)>,
) -> Vec<(&'static str, Verdict)> {
    // Disabled injection is what the user wants.
    let counts = |v: &Verdict| v.reason != Reason::InjectionDisabled.name();
    let worst = [FALSE, UNKNOWN].into_iter().find_map(|status| {
        let mut parts = parts.iter();
        parts.find(|(_, v)| v.status == status && counts(v))
    });
    let ready = match worst {
        worst if unapplied.is_some() && worst.is_none_or(|(_, v)| v.status != FALSE) => {
            let (reason, message) = unapplied
                .cloned()
                .unwrap_or((Reason::ApplyFailed, String::new()));
            verdict(FALSE, reason, message)
        }
        None => verdict(TRUE, Reason::Ready, ""),
        Some((type_, v)) => Verdict {
            status: v.status,
            reason: v.reason.clone(),
            message: format!("{type_}: {}", v.message),
        },
    };
    parts.push((READY, ready));
    parts
}

/// Kubernetes times have whole seconds.
pub(super) fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn dated(
    parts: Vec<(&'static str, Verdict)>,
    generation: Option<i64>,
    previous: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let now = whole_seconds(now);
    parts
        .into_iter()
        .map(|(type_, mut v)| {
            v.message
                .truncate(v.message.floor_char_boundary(MESSAGE_BYTES_MAX));
            let since = condition(previous, type_)
                .filter(|c| c.status == v.status)
                .map_or(Time(now), |c| c.last_transition_time.clone());
            Condition {
                type_: type_.to_owned(),
                status: v.status.to_owned(),
                reason: v.reason,
                message: v.message,
                observed_generation: generation,
                last_transition_time: since,
            }
        })
        .collect()
}

fn accepted(problems: &[Problem]) -> Verdict {
    let Some(first) = problems.first() else {
        return Verdict {
            status: TRUE,
            reason: api::Reason::Accepted.name().to_owned(),
            message: String::new(),
        };
    };
    let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
    Verdict {
        status: FALSE,
        reason: first.reason.name().to_owned(),
        message: all.join("; "),
    }
}

/// The shared tiers, as sidecars report them. The operator itself has no credentials.
fn shared(observed: &Observation<'_>) -> Verdict {
    if !observed.problems.is_empty() {
        return verdict(UNKNOWN, Reason::NotAccepted, "the pool's spec is invalid");
    }
    let configured = SHARED
        .iter()
        .filter(|name| is_configured(name, observed.pool));
    let all: Vec<Verdict> = configured.map(|name| shared_tier(name, observed)).collect();
    let worst = [FALSE, UNKNOWN]
        .into_iter()
        .find_map(|status| all.iter().find(|v| v.status == status));
    let some = || all.iter().find(|v| !v.message.is_empty());
    match worst.or_else(some).or(all.first()) {
        Some(verdict) => verdict.clone(),
        None => verdict(TRUE, Reason::NoneConfigured, ""),
    }
}

fn shared_tier(name: &str, observed: &Observation<'_>) -> Verdict {
    if name == "redis"
        && let Some(verdict) = managed_servers(observed)
    {
        return verdict;
    }
    let Some(tier) = observed.usage.tiers.iter().find(|t| *t.name == *name) else {
        let silent = silent(observed);
        return match silent.is_empty() {
            true => verdict(
                UNKNOWN,
                Reason::NoSidecarYet,
                format!("no sidecar has reported the state of tier {name} yet"),
            ),
            false => verdict(
                UNKNOWN,
                Reason::Unreachable,
                format!("tier {name}: {silent}"),
            ),
        };
    };
    let report = || {
        format!(
            "tier {name}: {}: {} (reported by pod {})",
            tier.reason, tier.message, tier.example
        )
    };
    match tier.state {
        State::Off => verdict(FALSE, Reason::SharedTierDown, report()),
        State::Degraded => verdict(TRUE, Reason::SomeDegraded, report()),
        State::Starting | State::Draining => verdict(
            UNKNOWN,
            Reason::TierStarting,
            format!("no sidecar has opened tier {name} yet"),
        ),
        State::Ready => verdict(TRUE, Reason::TiersServe, ""),
    }
}

/// What the pods of managed servers say: one cannot run or is refused, or the first ones are starting. `None` if the sidecars' reports say
/// more.
fn managed_servers(observed: &Observation<'_>) -> Option<Verdict> {
    let ManagedServers { desired, ready } = servers::count(observed)?;
    let some = format!("{ready} of {desired} managed servers are ready");
    let reported = observed.usage.tiers.iter().any(|t| *t.name == *"redis");
    if let Some(server) = servers::failing(observed, reported) {
        let (reason, why) = server.trouble.as_ref()?;
        let gap = if why.is_empty() { "" } else { ": " };
        let name = &server.name;
        let message = format!("{some}; pod {name}: {reason}{gap}{why}");
        return Some(verdict(FALSE, Reason::ServersFailing, message));
    }
    if let Some(refused) = servers::refused(observed, reported) {
        let (owner, why) = (&refused.owner, &refused.message);
        let message = format!("{some}; {} {}: {why}", owner.kind, owner.name);
        return Some(verdict(FALSE, Reason::ServersFailing, message));
    }
    if reported {
        return None;
    }
    if servers::are_joining(observed) {
        let manager = manager_name(observed.pool);
        let message =
            format!("{some}; the log of Deployment {manager} has the steps that form the cluster");
        return Some(verdict(UNKNOWN, Reason::ServersJoining, message));
    }
    (ready < desired).then(|| verdict(UNKNOWN, Reason::ServersStarting, some))
}

/// The sidecars' reports to the previous leader, until sidecars were queried.
fn shared_or_previous(observed: &Observation<'_>, previous: &[Condition]) -> Verdict {
    let verdict = shared(observed);
    let nothing = [Reason::NoSidecarYet, Reason::TierStarting];
    if observed.usage.known || nothing.iter().all(|r| r.name() != verdict.reason) {
        return verdict;
    }
    kept(previous, SHARED_TIERS_READY, &OF_TIERS).unwrap_or(verdict)
}

/// Problems of all pools come before those of this one.
fn injection(observed: &Observation<'_>) -> Verdict {
    if !observed.problems.is_empty() {
        return verdict(
            FALSE,
            Reason::NotAccepted,
            "new pods start without a sidecar while the pool's spec is invalid",
        );
    }
    if observed.pool.spec.injection.mode == Mode::Disabled {
        return verdict(
            FALSE,
            Reason::InjectionDisabled,
            "injection.mode is Disabled: new pods start without a sidecar",
        );
    }
    let pause = observed.breaker.pool_pause();
    let pause = pause.or_else(|| observed.breaker.owners().first().copied());
    match (observed.canary, pause) {
        (CanaryResult::WebhookUnreachable, _) => verdict(
            FALSE,
            Reason::WebhookUnreachable,
            "the API server does not call the injection webhook or does not trust its certificate: a pod that the operator created by dry run got no sidecar, and neither do new pods",
        ),
        (CanaryResult::Partly, _) => verdict(
            FALSE,
            Reason::WebhookUnreachable,
            "several of the last ten pods that the operator created by dry run got no sidecar: some API servers do not reach the webhook, or not all its replicas, so some new pods get no sidecar",
        ),
        (_, Some(pause)) => {
            let reason = match pause.position {
                Position::Probing => Reason::TryingOnePod,
                _ => Reason::PodsHeldBack,
            };
            verdict(FALSE, reason, paused::sentence(observed.breaker))
        }
        (CanaryResult::NotYet, None) => verdict(
            UNKNOWN,
            Reason::CanaryPending,
            "the operator has not finished its first dry run of a labelled pod yet",
        ),
        (CanaryResult::Unknown(why), None) => verdict(
            UNKNOWN,
            Reason::CanaryRefused,
            format!("the operator's dry run of a labelled pod failed: {why}"),
        ),
        (CanaryResult::Injected, None) => verdict(TRUE, Reason::WebhookAnswers, ""),
    }
}

fn sidecars(observed: &Observation<'_>, counts: &Counts) -> Verdict {
    if let Some(first) = counts.failing.first()
        && let Some(fault) = observed.faults.of(first)
    {
        return verdict(
            FALSE,
            Reason::SidecarsFailing,
            failing(counts, first, fault),
        );
    }
    if let Some(off) = observed.usage.troubles.iter().find(|t| t.off > 0) {
        let message = format!(
            "{} of {} queried sidecars serve nothing, for example in pod {}: {}: {}",
            off.off, observed.usage.observed, off.example, off.reason, off.message
        );
        return verdict(FALSE, Reason::SidecarsOff, message);
    }
    if counts.pods.injected > 0 && counts.running == 0 {
        return verdict(UNKNOWN, Reason::SidecarsStarting, "no sidecar runs yet");
    }
    if let Some(blocker) = observed.blocker {
        return held_back(blocker);
    }
    if let Some(message) = &observed.resizes.refused {
        return verdict(TRUE, Reason::MemoryNotResized, message);
    }
    if counts.pods.injected == 0 {
        return verdict(TRUE, Reason::NoPods, "");
    }
    match observed.usage.troubles.first() {
        Some(t) => {
            let message = format!(
                "{} of {} queried sidecars report this, for example in pod {}: {}: {}",
                t.pods, observed.usage.observed, t.example, t.reason, t.message
            );
            verdict(TRUE, Reason::SomeDegraded, message)
        }
        None => resizing(observed, counts)
            .unwrap_or_else(|| verdict(TRUE, Reason::AllRunning, silent(observed))),
    }
}

/// Pods whose memory is being changed, and a sidecar that waits.
fn resizing(observed: &Observation<'_>, counts: &Counts) -> Option<Verdict> {
    let resizes = observed.resizes;
    let running = (resizes.running > 0).then(|| {
        format!(
            "the memory of {} of {} pods is being changed, for example of pod {}",
            resizes.running, counts.pods.injected, resizes.example
        )
    });
    let waits = observed.usage.resize_waits.as_ref();
    let waits = waits.map(|(pod, why)| format!("the sidecar of pod {pod} reports: {why}"));
    let parts: Vec<String> = running.into_iter().chain(waits).collect();
    (!parts.is_empty()).then(|| verdict(TRUE, Reason::MemoryResizing, parts.join("; ")))
}

/// Sidecars work, but not all have the pool's current settings.
fn held_back(blocker: &UpdateBlocker) -> Verdict {
    let (reason, message) = match blocker {
        UpdateBlocker::NotAllowed(message) => (Reason::PodPatchNotAllowed, message),
        UpdateBlocker::Refused(message) => (Reason::PodPatchFailed, message),
        UpdateBlocker::NotResized(message) => (Reason::MemoryNotResized, message),
        UpdateBlocker::RolledBack(message) => (Reason::UpdateRolledBack, message),
    };
    verdict(TRUE, reason, message)
}

fn failing(counts: &Counts, first: &Pod, fault: Fault<'_>) -> String {
    let gap = if fault.message.is_empty() { "" } else { ": " };
    format!(
        "{} of {} sidecars fail, for example in pod {}: {}{gap}{}",
        size(counts.failing.len()),
        counts.pods.injected,
        first.name,
        fault.reason,
        fault.message
    )
}

fn silent(observed: &Observation<'_>) -> String {
    match &observed.usage.unreachable_example {
        Some((pod, why)) => format!(
            "{} of {} queried sidecars did not answer, for example in pod {pod}: {why}",
            observed.usage.unreachable,
            observed.usage.unreachable + observed.usage.answering
        ),
        None => String::new(),
    }
}
