//! A slim pod: its name, its owner, the result of injection, and the state of its sidecar.

use super::resize::Memory;
use crate::inject::Verdict;
use crate::names;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A pod with the pool label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    pub name: Box<str>,
    pub namespace: Box<str>,
    /// Uid. A StatefulSet reuses names.
    pub uid: Box<str>,
    /// Value of the pool label.
    pub pool: Box<str>,
    /// Creation time.
    pub created: Timestamp,
    /// Deletion was requested.
    pub deleting: bool,
    pub phase: Phase,
    /// All containers and readiness gates are ready.
    pub ready: bool,
    /// IP address, once it has one.
    pub ip: Option<IpAddr>,
    pub owner: Option<Owner>,
    /// The LeaderWorkerSet of the pod's group. It has several controllers, which are recreated with the group, and all pods of a group are
    /// recreated once a container of one of them has restarted, even a sidecar.
    pub group: Option<Box<Owner>>,
    /// The webhook's annotation. `None` if the webhook did not see the pod.
    pub injection: Option<Injection>,
    /// Generation of the pool in the pod's config. `None` without a readable config.
    pub config_generation: Option<u64>,
    /// The sidecar's memory. `None` if it cannot change while the sidecar runs: the pod has its own size, huge pages or a window, or no
    /// readable config.
    pub memory: Option<Box<Memory>>,
    /// The sidecar. `None` if the pod was not injected.
    pub sidecar: Option<Sidecar>,
    /// The record of the last change of its image in place. `None` if there was none.
    pub image_change: Option<Box<ImageChange>>,
    /// What the pod waits for before any container can start. `None` if nothing is known.
    pub waits: Option<Box<Waits>>,
    /// The pod's own containers that are tracked: vLLM's container of an injected pod, all containers of a pod that the breaker let
    /// through, otherwise none.
    pub own: Box<[Own]>,
    /// The pod was evicted, preempted or ended with its node. The exit of a container then means nothing.
    pub disrupted: bool,
}

/// What a pod without a started container waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waits {
    pub what: WaitsFor,
    /// Injection can be the cause.
    pub maybe_injection: bool,
    /// The scheduler's message, truncated; empty for volumes.
    pub message: Box<str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// A node with enough resources.
    Node,
    /// The node has not created the pod's sandbox, usually because a volume cannot be mounted.
    Volumes,
}

/// A container of the pod's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    pub name: Box<str>,
    pub state: SidecarState,
    /// Restarts by the kubelet.
    pub restarts: u32,
    /// Whether it has a readiness probe, so that the pod's readiness includes it.
    pub probed: bool,
    /// Injection has set PYTHONPATH without knowing the image's own value.
    pub path_unknown: bool,
    /// Its last exit.
    pub exit: Option<Box<Exit>>,
}

/// The exit of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    pub code: i32,
    /// `Error`, `OOMKilled`, ...
    pub reason: Box<str>,
    /// The container's termination message, truncated.
    pub message: Box<str>,
    /// How long it had run.
    pub ran: SignedDuration,
}

/// A container that ran longer than this had started. Its exit is not a failure to start.
const STARTED: SignedDuration = SignedDuration::from_mins(10);

/// Stamped into a pod when the image of a working sidecar is changed in place, so that the next leader can restore it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageChange {
    /// Previous image.
    pub image: Box<str>,
    /// Hash of the previous settings.
    #[serde(default)]
    pub hash: Box<str>,
    /// Time of the change.
    pub at: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum Phase {
    /// Not all containers have been started.
    #[default]
    Pending,
    /// Scheduled and started.
    Running,
    /// All containers ended successfully.
    Succeeded,
    /// A container ended with an error.
    Failed,
    /// The node does not answer, or the phase is unknown.
    #[serde(other)]
    Unknown,
}

/// The controller of a pod, as needed for events, or the LeaderWorkerSet of its group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// For example `apps/v1`.
    pub api_version: Box<str>,
    /// For example `ReplicaSet`.
    pub kind: Box<str>,
    pub name: Box<str>,
    pub uid: Box<str>,
}

impl Owner {
    /// Of a pod with the label of a LeaderWorkerSet.
    pub fn leader_worker_set(name: &str) -> Self {
        Self {
            api_version: "leaderworkerset.x-k8s.io/v1".into(),
            kind: "LeaderWorkerSet".into(),
            name: name.into(),
            uid: names::group_uid(name).into(),
        }
    }
}

/// The kept part of the webhook's annotation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Injection {
    /// Whether the webhook injected the pod. `None` if the annotation does not say so.
    pub result: Option<Verdict>,
    /// Name of the refusal or the shortfall; empty without one.
    pub reason: Box<str>,
    /// What the reason means for this pod.
    pub message: Box<str>,
    /// Version of the operator that decided.
    pub version: Box<str>,
    /// Hash of the injected settings.
    pub hash: Box<str>,
}

/// The native sidecar in spec and status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sidecar {
    /// Image in the spec.
    pub image: Box<str>,
    /// Image reported by the kubelet.
    pub image_in_use: Box<str>,
    /// Restarts by the kubelet.
    pub restarts: u32,
    pub state: SidecarState,
    /// State of the added init container, which has the same image and can block the pod too. `None` if nothing is known.
    pub init: Option<Box<SidecarState>>,
}

/// State of the sidecar's container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SidecarState {
    /// The kubelet has not reported it yet.
    Unseen,
    Waiting {
        /// `PodInitializing`, `ErrImagePull`, ...
        reason: Box<str>,
        /// The kubelet's message, truncated.
        message: Box<str>,
    },
    Running {
        /// Start of the process.
        since: Timestamp,
    },
    /// Ended and not restarted yet.
    Terminated {
        /// `Completed`, `OOMKilled`, ...
        reason: Box<str>,
    },
}

/// Why a sidecar does not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault<'a> {
    /// Name of the reason: the kubelet's, or `ImageNotPulled`.
    pub reason: &'a str,
    /// The kubelet's message; may be empty.
    pub message: &'a str,
}

/// Reason of a container that exited with 0.
const COMPLETED: &str = "Completed";

/// Persistent reasons of a waiting container: image, configuration, crash.
const STUCK: [&str; 13] = [
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "PostStartHookError",
    "RegistryUnavailable",
    "RunContainerError",
    "SignatureValidationFailed",
    "StartError",
];

impl Pod {
    /// Whether the pod has neither ended nor is being deleted. Status counts these pods.
    #[must_use]
    pub fn is_active(&self) -> bool {
        !self.deleting && !matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }

    /// Name of the webhook's refusal.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        let injection = self.injection.as_ref()?;
        let refused = self.sidecar.is_none() && injection.result != Some(Verdict::Injected);
        (refused && !injection.reason.is_empty()).then_some(&*injection.reason)
    }

    /// Whether the pod has no sidecar because injection is paused.
    #[must_use]
    pub fn is_let_through(&self) -> bool {
        self.refusal() == Some(crate::inject::Reason::InjectionPaused.name())
    }

    /// Name of the shortfall that the webhook recorded.
    #[must_use]
    pub fn shortfall(&self) -> Option<&str> {
        let injection = self.injection.as_ref()?;
        let injected = self.sidecar.is_some() && injection.result == Some(Verdict::Injected);
        (injected && !injection.reason.is_empty()).then_some(&*injection.reason)
    }

    /// Hash of its settings; empty if unknown.
    #[must_use]
    pub fn hash(&self) -> &str {
        self.injection.as_ref().map_or("", |i| &i.hash)
    }

    /// Why its sidecar does not start, if so.
    #[must_use]
    pub fn fault(&self) -> Option<Fault<'_>> {
        self.sidecar.as_ref().and_then(Sidecar::fault)
    }

    /// vLLM's container of an injected pod.
    #[must_use]
    pub fn engine(&self) -> Option<&Own> {
        self.own.first().filter(|_| self.sidecar.is_some())
    }

    /// Whether vLLM of an injected pod, or a container of a pod that was let through, has run.
    #[must_use]
    pub fn has_started(&self) -> bool {
        self.own.iter().any(Own::has_started)
    }

    /// Whether vLLM of an injected pod is running.
    #[must_use]
    pub fn engine_runs(&self) -> bool {
        self.engine().is_some_and(|e| e.running_since().is_some())
    }

    /// The exit of a container that fails repeatedly. Without restarts, one failure is enough.
    #[must_use]
    pub fn crash_loop<'p>(&self, own: &'p Own) -> Option<&'p Exit> {
        let exit = own.exit.as_deref()?;
        let ended = own.running_since().is_none() && !self.disrupted;
        let again = own.restarts > 0 || self.phase == Phase::Failed;
        (ended && again && exit.code != 0 && exit.ran < STARTED).then_some(exit)
    }

    /// Whether this container has started for good: it is ready according to a probe, or without a probe it has run for a while.
    #[must_use]
    pub fn is_up(&self, own: &Own, now: Timestamp) -> bool {
        let ran = own.running_since().map(|since| now.duration_since(since));
        ran.is_some_and(|ran| ran >= STARTED || (own.probed && self.ready))
    }

    /// Address of its sidecar, while the sidecar runs.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        let running = self.sidecar.as_ref().is_some_and(Sidecar::runs);
        self.ip.filter(|_| running && self.is_active())
    }
}

impl Own {
    /// Whether it runs or has run.
    #[must_use]
    pub fn has_started(&self) -> bool {
        self.exit.is_some() || self.running_since().is_some()
    }

    /// Start of the current process.
    #[must_use]
    pub fn running_since(&self) -> Option<Timestamp> {
        self.state.since()
    }

    /// Why it does not start, if its image or its configuration is the cause.
    #[must_use]
    pub fn fault(&self) -> Option<Fault<'_>> {
        self.state.stuck()
    }
}

impl Sidecar {
    /// Whether its process is running.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.state.since().is_some()
    }

    /// Whether the added init container has finished, so that the pod's own containers start.
    #[must_use]
    pub fn lets_the_pod_start(&self) -> bool {
        let ended = |s: &SidecarState| matches!(s, SidecarState::Terminated { reason } if &**reason == COMPLETED);
        self.init.as_deref().is_some_and(ended)
    }

    /// Why the sidecar or the init container does not start, if so. After a change in place, an image that cannot be pulled shows as a
    /// completed container with another image than the spec's, never as a pull error. A container that ended otherwise is being restarted.
    #[must_use]
    pub fn fault(&self) -> Option<Fault<'_>> {
        let stuck = [Some(&self.state), self.init.as_deref()]
            .into_iter()
            .flatten()
            .find_map(SidecarState::stuck);
        if stuck.is_some() {
            return stuck;
        }
        let ended =
            matches!(&self.state, SidecarState::Terminated { reason } if &**reason == COMPLETED);
        (ended && !same_image(&self.image, &self.image_in_use)).then_some(Fault {
            reason: "ImageNotPulled",
            message: "the old sidecar was stopped, and the new image is not on the node",
        })
    }
}

impl SidecarState {
    /// Start of its process, while it runs.
    #[must_use]
    pub fn since(&self) -> Option<Timestamp> {
        match self {
            Self::Running { since } => Some(*since),
            _ => None,
        }
    }

    /// Why its container cannot be started, if that lasts.
    pub(super) fn stuck(&self) -> Option<Fault<'_>> {
        match self {
            Self::Waiting { reason, message } if STUCK.contains(&&**reason) => {
                Some(Fault { reason, message })
            }
            _ => None,
        }
    }
}

/// Whether two references name the same image. Runtimes add the default registry.
pub(super) fn same_image(a: &str, b: &str) -> bool {
    fn short(image: &str) -> &str {
        let image = image.strip_prefix("docker.io/").unwrap_or(image);
        image.strip_prefix("library/").unwrap_or(image)
    }
    short(a) == short(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sidecar(state: SidecarState) -> Sidecar {
        Sidecar {
            image: "kvcachepool:2".into(),
            image_in_use: "docker.io/library/kvcachepool:1".into(),
            restarts: 0,
            state,
            init: None,
        }
    }

    fn waiting(reason: &str) -> Sidecar {
        sidecar(SidecarState::Waiting {
            reason: reason.into(),
            message: "".into(),
        })
    }

    #[test]
    fn pull_config_and_crash_reasons_are_faults_and_initializing_is_not() {
        for reason in STUCK {
            assert_eq!(waiting(reason).fault().unwrap().reason, reason);
        }
        assert_eq!(waiting("PodInitializing").fault(), None);
        assert_eq!(waiting("ContainerCreating").fault(), None);
        assert_eq!(sidecar(SidecarState::Unseen).fault(), None);
    }

    #[test]
    fn a_completed_sidecar_whose_image_differs_from_the_spec_is_stuck() {
        let mut patched = sidecar(SidecarState::Terminated {
            reason: "Completed".into(),
        });
        assert_eq!(patched.fault().unwrap().reason, "ImageNotPulled");
        patched.image_in_use = "docker.io/library/kvcachepool:2".into();
        assert_eq!(
            patched.fault(),
            None,
            "the same image: it is being restarted"
        );
        patched.image_in_use = "sha256:0a".into();
        patched.state = SidecarState::Terminated {
            reason: "OOMKilled".into(),
        };
        assert_eq!(
            patched.fault(),
            None,
            "it was not stopped for another image"
        );
    }

    #[test]
    fn an_init_container_that_cannot_start_is_a_fault_of_the_pod() {
        let mut pod = sidecar(SidecarState::Running {
            since: Timestamp::UNIX_EPOCH,
        });
        pod.init = Some(Box::new(waiting("CreateContainerConfigError").state));
        assert_eq!(pod.fault().unwrap().reason, "CreateContainerConfigError");
        assert!(!pod.lets_the_pod_start());
        pod.init = Some(Box::new(SidecarState::Terminated {
            reason: "Completed".into(),
        }));
        assert_eq!(pod.fault(), None);
        assert!(pod.lets_the_pod_start());
    }

    #[test]
    fn a_shortfall_is_no_refusal() {
        let at = SidecarState::Unseen;
        let mut pod = crate::pods::tests::injected("a", at);
        assert_eq!((pod.refusal(), pod.shortfall()), (None, None));
        if let Some(injection) = &mut pod.injection {
            injection.reason = "GpuNotRequested".into();
        }
        assert_eq!(
            (pod.refusal(), pod.shortfall()),
            (None, Some("GpuNotRequested"))
        );
        pod.sidecar = None;
        assert_eq!(
            (pod.refusal(), pod.shortfall()),
            (None, None),
            "it was taken away"
        );
        let refused = crate::pods::tests::refused("a", "PoolNotFound");
        assert_eq!(
            (refused.refusal(), refused.shortfall()),
            (Some("PoolNotFound"), None)
        );
    }

    #[test]
    fn a_pod_stays_small() {
        assert!(size_of::<Pod>() <= 432, "{}", size_of::<Pod>());
    }
}
