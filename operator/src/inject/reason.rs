//! The one table of reasons why a pod starts without a cache.

crate::reasons::reasons! {
    "Why a pod was left as it is. The name goes into annotations, events, metrics and docs."

    PoolNotFound = "No KVCachePool of that name exists in the pod's namespace, or it is being deleted. Create it, or correct the label, and make the pod again.",
    PoolNotAccepted = "The KVCachePool has a field that cannot be used; its condition Accepted says which.",
    PoolDisabled = "The pool says `injection.mode: Disabled`.",
    InjectionPaused = "What injection adds keeps pods of this owner, or of the pool, from running at present (condition InjectionReady); they start without a cache until a probe works.",
    ContainerAmbiguous = "Several containers could be vLLM's. Name it in the annotation `kvcachepool.io/container` or in the pool's `injection.container`.",
    ContainerNotFound = "The pod has no container of the name that the annotation or the pool gives.",
    OtherCachePresent = "vLLM is started with a KV cache of its own (LMCache, an offloading connector, `--kv-offloading-size`): take that away, or the label.",
    ConnectorPresent = "vLLM is started with a connector between prefill and decode. `injection.existingConnector: Compose` puts ours beside it.",
    MultiNodeUnsupported = "The ranks of one engine are spread over several pods. A sidecar holds the ranks of its own pod only, so no chunk would ever be whole.",
    HostNetworkConflict = "The pod uses the node's network, where the sidecar's port is not its own.",
    PortTaken = "Another container of the pod listens on the sidecar's port, 9797. Give that container another one.",
    ResourcesExceeded = "The annotation `kvcachepool.io/memory` asks for more than the pool's `injection.memoryMax`.",
    AnnotationInvalid = "An annotation of the pod under `kvcachepool.io/` cannot be used; the message says which and what to write.",
    HookUnsupported = "`kvcachepool.io/hook: args` needs a container that starts vLLM by plain `args`. Without the annotation nothing has to be added to them.",
    AlreadyInjectedByOther = "The pod has containers, volumes or mounts with our names which are not ours.",
    OsUnsupported = "The pod does not run on Linux.",
    PodTooLarge = "With the sidecar the pod would be larger than the API server stores.",
    InjectionBroken = "The patch would have made a pod that is not valid, so none was sent. The message says what is wrong; please report it.",
}
