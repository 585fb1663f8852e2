//! The one table of reasons of conditions, tiers and events. Those of `Accepted` stand with the rules of the spec, those of refused pods with
//! injection.

crate::reasons::reasons! {
    "Why a condition or a tier is as it is, or what an event tells."

    Ready = "All other conditions are True.",
    NotAccepted = "The spec is not accepted, so nothing else is done for the pool; the condition Accepted says why.",
    NoneConfigured = "The pool has no tier that pods share.",
    WebhookAnswers = "A labelled pod, created by dry run every minute, comes back with its sidecar.",
    CanaryPending = "The first dry run of a labelled pod is not back yet. This passes within a minute after a leader was elected.",
    CanaryRefused = "The API server refused the dry run of a labelled pod in the operator's namespace, so it is not known whether pods are injected; the message has its words. A quota or an admission policy of that namespace does so.",
    WebhookUnreachable = "A labelled pod, created by dry run, came back without a sidecar twice in a row: the API server does not reach the webhook, or does not trust its certificate. Pods start without a cache. Look at the MutatingWebhookConfiguration `kvcachepool-injector`, at the endpoints of its Service, and for firewalls between the API server and port 10250 of the nodes.",
    InjectionDisabled = "The pool says `injection.mode: Disabled`: new pods start without a sidecar; pods that have one keep it.",
    SidecarCannotStart = "The sidecar of two or more pods of the same settings hangs for a minute in pulling its image, in its configuration or in a crash, and so do these pods. New pods start without a cache; every ten minutes one is tried. Correct `sidecar.image`, pull secrets or settings: another spec is tried at once.",
    TryingOnePod = "Sidecars could not start; the next pod gets one again, to see whether they can now.",
    NoPods = "No pod has a sidecar of this pool. Pods get one when they are created with the label `kvcachepool.io/pool`.",
    SidecarsStarting = "No sidecar of this pool runs yet. Pods wait for a node, or for their own init containers.",
    AllRunning = "Sidecars run as configured.",
    SomeDegraded = "Sidecars run, but some not as configured; the message has the sidecar's own reason.",
    PodPatchNotAllowed = "The operator may not patch pods, so `updateStrategy: InPlace` does nothing, or the API server refused it; the message has its words. Set the chart value `allowPodPatch`, or `updateStrategy: OnPodRestart`. Sidecars run as they are.",
    PodPatchFailed = "The API server did not take a change of a running pod; the message has its words. It is tried again, with growing pauses; other pods do not wait for it. Sidecars run as they are.",
    UpdateRolledBack = "A sidecar was not up within 60 s after its image was changed in place, or did not stay up, so it has the old image again, and no more are changed; the message has the pod and the cause. Correct the image; any edit of the pool has it tried again.",
    SidecarsFailing = "Sidecars cannot start or crash; the message has the kubelet's reason. Their pods are not Ready, and new ones do not start.",
    SidecarsOff = "Sidecars run and serve nothing; the message has the sidecar's own reason. vLLM works without a cache.",
    PodsRefused = "The cluster refuses to create pods of a workload with this pool's label (quota, limit range, validation); the message has the API server's words. It is no error while sidecars of other pods run. The sidecar's resources are added to those of the pod.",
    NoSidecarYet = "No sidecar has said anything about this tier yet.",
    Unreachable = "No sidecar could be asked: port 9797 of the pods is closed to the operator (NetworkPolicy, strict mTLS). Caching works; numbers in the status are old.",
    Missed = "The pod has the label and was created without the webhook being asked: the operator was away, or its namespace is excluded. It runs without a cache until it is created again; `injection.onMissed: Evict` has that done.",
    Evicted = "A missed pod was evicted (`injection.onMissed: Evict`), so that its controller makes one with a sidecar.",
    EvictionRefused = "A missed pod cannot be evicted: a PodDisruptionBudget holds it, or the operator has no right to (chart value `allowPodEviction`). It is tried again.",
    EvictionFutile = "The pod that took the place of an evicted one was missed too, or none took its place within ten minutes; no more pods of its controller are evicted for six hours, or until the webhook has been away and is back. Look whether the webhook's namespaceSelector excludes the namespace.",
    UpdatingInPlace = "Sidecars of running pods were given another image: one first, the others once it has run for 30 s and answered, and those that could not start. vLLM runs on.",
    NotEvicted = "A missed pod is left alone although the pool says `injection.onMissed: Evict`: only pods of a ReplicaSet, StatefulSet or DaemonSet whose template names the pool are evicted, because only for those another pod comes that is better. Make the pod again yourself, or put the label into the template.",
    SetRight = "Somebody changed an object that the operator keeps for the pool; it was set right. Change the pool instead.",
    NameTaken = "An object of a name that the pool needs exists and does not belong to it; it is left as it is. Rename it, or the pool.",
    ApplyFailed = "The API server did not take an object of the pool; the message has its words. It is tried again with growing pauses. PodMonitors need the chart value `allowPodMonitors`.",
}
