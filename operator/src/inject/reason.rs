//! The table of reasons why a pod starts without a cache.

crate::reasons::reasons! {
    "Why a pod was not injected. The name is used in annotations, events, metrics and docs."

    PoolNotFound = "The pod's namespace has no KVCachePool of that name, or the pool is being deleted. Create the pool or correct the label, then create the pod again.",
    NamespaceNotWatched = "The operator does not watch the pod's namespace (chart value `watchNamespaces`). Add the namespace, or remove the label.",
    PoolNotAccepted = "The KVCachePool has an invalid field. Its condition Accepted names the field. Correct it, then create the pod again.",
    PoolDisabled = "The pool has `injection.mode: Disabled`.",
    InjectionPaused = "Injection is paused for this owner, or for the pool, because it kept pods from running (condition InjectionReady). New pods start without a cache until a probe works.",
    ContainerAmbiguous = "More than one container could run vLLM. Name it in the annotation `kvcachepool.io/container` or in the pool's `injection.container`.",
    ContainerNotFound = "The pod has no container of the name in the annotation or the pool. Correct the name.",
    OtherCachePresent = "The engine starts with another KV cache: LMCache, an offloading connector without the tier `kvcachepool.vllm_tier`, `--kv-offloading-size`, or another storage backend of SGLang. Remove it, or the label.",
    ConnectorPresent = "vLLM starts with a connector for disaggregated prefill. `injection.existingConnector: Compose` adds kvcachepool beside it.",
    MultiNodeUnsupported = "The ranks of one engine run in several pods, and not by vLLM's --nnodes. A sidecar serves only the ranks of its own pod, so no chunk would be complete.",
    PythonIsolated = "The engine's Python is started with `-I` or `-E` and ignores PYTHONPATH, by which it finds the connector. Remove the option, or the label.",
    HostNetworkConflict = "The pod uses the network of its node, where the sidecar's port could be in use. Remove `hostNetwork`, or the label.",
    PortTaken = "Another container of the pod uses the sidecar's port, 9797. Give that container another port.",
    ResourcesExceeded = "The annotation `kvcachepool.io/memory` exceeds the pool's `injection.memoryMax` or the cluster's policy. Reduce the annotation, or raise the limit.",
    AnnotationInvalid = "An annotation of the pod under `kvcachepool.io/` is invalid. The message names it and the expected value.",
    HookUnsupported = "`kvcachepool.io/hook: args` needs a container that starts its engine with plain `args`. Without the annotation, injection adds no argument.",
    AlreadyInjectedByOther = "The pod has containers, volumes or mounts of its own with names or paths that injection uses. Rename them, or remove the label.",
    OsUnsupported = "The pod does not run on Linux. Remove the label.",
    ArchUnsupported = "The pod's nodeSelector or required node affinity allows only nodes of another architecture than amd64 and arm64, for which there is no sidecar. Remove the label.",
    PodTooLarge = "With a sidecar the pod would exceed the API server's size limit. Shorten its annotations or environment variables.",
    InjectionBroken = "The patch would have made an invalid pod, so the webhook sent none. The message has the details; please report it.",
}
