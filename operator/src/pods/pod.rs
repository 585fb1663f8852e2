//! The slim pod: its name, its owner, what injection did to it, and how its sidecar is.

use crate::inject::Verdict;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A pod with the pool label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Name.
    pub name: Box<str>,
    /// Namespace.
    pub namespace: Box<str>,
    /// Uid: a StatefulSet gives the same name again.
    pub uid: Box<str>,
    /// Value of the pool label.
    pub pool: Box<str>,
    /// When the API server stored it.
    pub created: Timestamp,
    /// Deletion was asked for.
    pub deleting: bool,
    /// Phase.
    pub phase: Phase,
    /// All its containers are ready, its readiness gates too.
    pub ready: bool,
    /// Address, once it has one.
    pub ip: Option<IpAddr>,
    /// Its controller.
    pub owner: Option<Owner>,
    /// What the webhook stamped; absent = the webhook did not see it.
    pub injection: Option<Injection>,
    /// Generation of the pool in its config; absent = it has no config that can be read.
    pub config_generation: Option<u64>,
    /// Our sidecar; absent = it was not injected.
    pub sidecar: Option<Sidecar>,
    /// What the last exchange of its image in place left to know; absent = there was none.
    pub exchange: Option<Box<Exchange>>,
    /// What it waits for before any container can start; absent = nothing that is known.
    pub waits: Option<Box<Waits>>,
    /// Containers of its own: of an injected pod vLLM's alone, of one that the breaker let through all, of others none.
    pub own: Box<[Own]>,
    /// It was evicted, preempted or ended with its node: that a container ended then says nothing about it.
    pub disrupted: bool,
}

/// What a pod without a started container waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waits {
    /// For what.
    pub what: WaitsFor,
    /// What injection adds to a pod can be the reason.
    pub maybe_ours: bool,
    /// The scheduler's sentence, shortened; empty for volumes.
    pub message: Box<str>,
}

/// See [`Waits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// No node takes the pod.
    Node,
    /// It has a node that does not make its sandbox, mostly because a volume cannot be mounted.
    Volumes,
}

/// A container of the pod's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    /// Name.
    pub name: Box<str>,
    /// State.
    pub state: SidecarState,
    /// Restarts by the kubelet.
    pub restarts: u32,
    /// Has a readiness probe, so that a ready pod says something about it.
    pub probed: bool,
    /// Injection has set PYTHONPATH without knowing what the image sets by ENV.
    pub path_unknown: bool,
    /// How it ended last.
    pub exit: Option<Box<Exit>>,
}

/// How a container ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// Exit code.
    pub code: i32,
    /// `Error`, `OOMKilled`, ...
    pub reason: Box<str>,
    /// Its last words, where it leaves any; shortened.
    pub message: Box<str>,
    /// How long it had run.
    pub ran: SignedDuration,
}

/// A container that ran longer than this before it ended had started: its end is no failure to start.
const STARTED: SignedDuration = SignedDuration::from_mins(10);

/// Stamped into a pod when the image of a working sidecar is exchanged in place, so that the next leader can take it back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    /// Image before.
    pub image: Box<str>,
    /// Hash of its settings before.
    #[serde(default)]
    pub hash: Box<str>,
    /// When.
    pub at: Time,
}

/// Phase of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum Phase {
    /// Not all containers were started once.
    #[default]
    Pending,
    /// On a node, started.
    Running,
    /// Ended well.
    Succeeded,
    /// Ended badly.
    Failed,
    /// The node does not answer, or a phase that is not known here.
    #[serde(other)]
    Unknown,
}

/// The controller of a pod, as events need it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// `apps/v1`.
    pub api_version: Box<str>,
    /// `ReplicaSet`.
    pub kind: Box<str>,
    /// Name.
    pub name: Box<str>,
    /// Uid.
    pub uid: Box<str>,
}

/// What is kept of the webhook's annotation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Injection {
    /// Whether the webhook gave it a sidecar; absent = it does not say so.
    pub result: Option<Verdict>,
    /// Name of the refusal, or of what an injected pod lacks; empty where there is neither.
    pub reason: Box<str>,
    /// What it means for this pod.
    pub message: Box<str>,
    /// Version of the operator that answered.
    pub version: Box<str>,
    /// Hash of the settings that were injected.
    pub hash: Box<str>,
}

/// The native sidecar in spec and status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sidecar {
    /// Image in the spec.
    pub image: Box<str>,
    /// Image that the kubelet reports.
    pub image_in_use: Box<str>,
    /// Restarts by the kubelet.
    pub restarts: u32,
    /// State.
    pub state: SidecarState,
    /// State of our init container, which uses the same image and holds the pod up as the sidecar does; absent = nothing is known.
    pub init: Option<Box<SidecarState>>,
}

/// State of the sidecar's container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SidecarState {
    /// The kubelet has said nothing about it yet.
    Unseen,
    /// It is not started.
    Waiting {
        /// `PodInitializing`, `ErrImagePull`, ...
        reason: Box<str>,
        /// Sentence of the kubelet, shortened.
        message: Box<str>,
    },
    /// It runs.
    Running {
        /// Start of the process.
        since: Timestamp,
    },
    /// It ended and was not started again yet.
    Terminated {
        /// `Completed`, `OOMKilled`, ...
        reason: Box<str>,
    },
}

/// Why a sidecar does not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault<'a> {
    /// Name: the kubelet's, or `ImageNotPulled`.
    pub reason: &'a str,
    /// Sentence of the kubelet; may be empty.
    pub message: &'a str,
}

/// Of a container that ended with 0.
const COMPLETED: &str = "Completed";

/// Reasons of a waiting container that do not pass by themselves: image, configuration, crash.
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
    /// Neither ended nor about to go: what status counts.
    #[must_use]
    pub fn is_active(&self) -> bool {
        !self.deleting && !matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }

    /// Name of the refusal that the webhook stamped.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        let injection = self.injection.as_ref()?;
        let refused = self.sidecar.is_none() && injection.result != Some(Verdict::Injected);
        (refused && !injection.reason.is_empty()).then_some(&*injection.reason)
    }

    /// It asked for a pool and has no sidecar because injection is paused.
    #[must_use]
    pub fn is_let_through(&self) -> bool {
        self.refusal() == Some(crate::inject::Reason::InjectionPaused.name())
    }

    /// Name of what it lacks although it was injected, as the webhook stamped it.
    #[must_use]
    pub fn shortfall(&self) -> Option<&str> {
        let injection = self.injection.as_ref()?;
        let injected = self.sidecar.is_some() && injection.result == Some(Verdict::Injected);
        (injected && !injection.reason.is_empty()).then_some(&*injection.reason)
    }

    /// Hash of the settings in it; empty when unknown.
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

    /// vLLM of an injected pod, or something in one that was let through, has run.
    #[must_use]
    pub fn has_started(&self) -> bool {
        self.own.iter().any(Own::has_started)
    }

    /// vLLM of an injected pod runs now.
    #[must_use]
    pub fn engine_runs(&self) -> bool {
        self.engine().is_some_and(|e| e.running_since().is_some())
    }

    /// How this container ended that fails again and again; where it is not restarted, once is enough.
    #[must_use]
    pub fn crash_loop<'p>(&self, own: &'p Own) -> Option<&'p Exit> {
        let exit = own.exit.as_deref()?;
        let ended = own.running_since().is_none() && !self.disrupted;
        let again = own.restarts > 0 || self.phase == Phase::Failed;
        (ended && again && exit.code != 0 && exit.ran < STARTED).then_some(exit)
    }

    /// This container has started for good: it is ready where it says so by a probe, else it has run for a while.
    #[must_use]
    pub fn is_up(&self, own: &Own, now: Timestamp) -> bool {
        let ran = own.running_since().map(|since| now.duration_since(since));
        ran.is_some_and(|ran| ran >= STARTED || (own.probed && self.ready))
    }

    /// Where its sidecar answers; only while it runs.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        let running = self.sidecar.as_ref().is_some_and(Sidecar::runs);
        self.ip.filter(|_| running && self.is_active())
    }
}

impl Own {
    /// It runs or has run.
    #[must_use]
    pub fn has_started(&self) -> bool {
        self.exit.is_some() || self.running_since().is_some()
    }

    /// Start of the process that runs now.
    #[must_use]
    pub fn running_since(&self) -> Option<Timestamp> {
        match self.state {
            SidecarState::Running { since } => Some(since),
            _ => None,
        }
    }

    /// Why it does not start, if its image or its configuration is the reason.
    #[must_use]
    pub fn fault(&self) -> Option<Fault<'_>> {
        self.state.stuck()
    }
}

impl Sidecar {
    /// Its process is alive.
    #[must_use]
    pub fn runs(&self) -> bool {
        matches!(self.state, SidecarState::Running { .. })
    }

    /// Our init container has done its work, so that the pod's own containers start.
    #[must_use]
    pub fn lets_the_pod_start(&self) -> bool {
        let ended = |s: &SidecarState| matches!(s, SidecarState::Terminated { reason } if &**reason == COMPLETED);
        self.init.as_deref().is_some_and(ended)
    }

    /// Why it, or the init container, does not start, if so. An image that was patched in place and cannot be pulled shows as a
    /// completed container with another image than the spec's, never as a pull error; one that ended otherwise is being restarted.
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
            message: "the old sidecar was stopped and the new image is not there",
        })
    }
}

impl SidecarState {
    fn stuck(&self) -> Option<Fault<'_>> {
        match self {
            Self::Waiting { reason, message } if STUCK.contains(&&**reason) => {
                Some(Fault { reason, message })
            }
            _ => None,
        }
    }
}

/// Whether two references name one image: runtimes write the default registry out.
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
    fn pull_config_and_crash_reasons_are_faults_and_waiting_for_its_turn_is_not() {
        for reason in STUCK {
            assert_eq!(waiting(reason).fault().unwrap().reason, reason);
        }
        assert_eq!(waiting("PodInitializing").fault(), None);
        assert_eq!(waiting("ContainerCreating").fault(), None);
        assert_eq!(sidecar(SidecarState::Unseen).fault(), None);
    }

    #[test]
    fn a_completed_sidecar_with_another_image_than_the_specs_is_stuck() {
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
    fn what_an_injected_pod_lacks_is_no_refusal() {
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
