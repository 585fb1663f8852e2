//! A pause of injection: its states, how long each lasts, and the part that a pool's status keeps.

use super::super::evidence::{Cause, Kind};
use super::super::pod::{Owner, Pod};
use jiff::{SignedDuration, Timestamp};
use std::sync::Arc;

/// Wait before the first probe. It doubles with each failed probe.
const PROBE_AFTER: SignedDuration = SignedDuration::from_mins(10);
/// Longest wait before a probe.
const PROBE_AFTER_MAX: SignedDuration = SignedDuration::from_hours(6);
/// A probe that has neither started nor failed after this time (for example, it was never scheduled) allows another one.
const PROBE_MAX: SignedDuration = SignedDuration::from_mins(10);
/// How long the cause is ignored for an owner whose pods fail without a sidecar too. It doubles each time.
const CLEARED: SignedDuration = SignedDuration::from_mins(5);
/// Longest time of that.
const CLEARED_MAX: SignedDuration = SignedDuration::from_hours(1);

/// State of a pause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Position {
    /// New pods start without a sidecar.
    Paused {
        /// A pod without a sidecar runs, so injection is known to be the cause.
        proven: bool,
    },
    /// The next pod gets a sidecar.
    Probing,
    /// The probe with this uid is being watched. Others start without a sidecar.
    Watching(Box<str>),
    /// Pods fail without a sidecar too. They are injected, and the cause is ignored for a while.
    Cleared,
}

/// A pause of injection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// The owner. `None` for the whole pool, or for pods without an owner.
    pub owner: Option<Owner>,
    pub cause: Cause,
    /// State of the pause.
    pub position: Position,
    /// Start of this state.
    pub since: Timestamp,
    /// Number of consecutive failed probes or comparisons.
    pub failures: u32,
    /// Last time that its owner had pods or refusals.
    pub(super) seen: Timestamp,
}

/// The part of a pause that a pool's status keeps for the next leader.
#[derive(Debug)]
pub struct StoredPause {
    /// The owner. `None` for pods without one.
    pub owner: Option<Owner>,
    /// Name of the cause.
    pub reason: Box<str>,
    pub message: Box<str>,
    /// Start of the pause.
    pub since: Timestamp,
    /// The next pod gets a sidecar.
    pub probing: bool,
    /// Number of failed probes.
    pub failures: u32,
}

impl Pause {
    pub(super) fn restored(stored: StoredPause) -> Self {
        let kind = match &*stored.reason {
            "PythonPathUnknown" | "EngineFails" => Kind::Engine,
            "NoNodeWithRoom" => Kind::Node,
            "DiskNotMounted" => Kind::Volumes,
            "PodsRefused" => Kind::Refusal,
            _ => Kind::Sidecar,
        };
        let position = match stored.probing {
            true => Position::Probing,
            false => Position::Paused { proven: true },
        };
        Self {
            owner: stored.owner,
            cause: Cause {
                kind,
                reason: stored.reason,
                message: stored.message,
                example: "".into(),
                failed: None,
            },
            position,
            since: stored.since,
            failures: stored.failures,
            seen: stored.since,
        }
    }

    /// Whether new pods start without a sidecar, except for a probe.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.position != Position::Cleared
    }

    pub(super) fn at(self, position: Position, now: Timestamp) -> Self {
        Self {
            position,
            since: now,
            ..self
        }
    }

    /// The pause after a failed probe. The next probe comes later.
    pub(super) fn failed(self, cause: Cause, now: Timestamp) -> Self {
        Self {
            cause,
            failures: self.failures.saturating_add(1),
            ..self.at(Position::Paused { proven: true }, now)
        }
    }

    /// Pods created after this time were let through.
    pub(super) fn start(&self) -> Timestamp {
        whole_seconds(self.since)
    }

    /// Whether the state ends now if nothing happens.
    pub(super) fn is_over(&self, now: Timestamp) -> bool {
        let duration = self.duration();
        duration.is_some_and(|duration| now.duration_since(self.since) >= duration)
    }

    /// Length of the state if nothing happens.
    pub(super) fn duration(&self) -> Option<SignedDuration> {
        let doubled = |first: SignedDuration, most: SignedDuration, times: u32| {
            (first * (1 << times.min(8))).min(most)
        };
        match self.position {
            Position::Paused { .. } => Some(doubled(PROBE_AFTER, PROBE_AFTER_MAX, self.failures)),
            Position::Cleared => Some(doubled(CLEARED, CLEARED_MAX, self.failures - 1)),
            Position::Watching(_) => Some(PROBE_MAX),
            Position::Probing => None,
        }
    }
}

/// Kubernetes times have whole seconds.
pub(super) fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

/// Pods of the owner that the breaker let through since a pause began.
pub(super) fn controls<'p>(
    pause: &'p Pause,
    pods: &'p [&Arc<Pod>],
) -> impl Iterator<Item = &'p Arc<Pod>> {
    pods.iter()
        .copied()
        .filter(|p| p.is_let_through() && !p.deleting && !p.disrupted && p.created >= pause.start())
}
