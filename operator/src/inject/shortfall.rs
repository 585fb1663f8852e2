//! The table of shortfalls: what an injected pod lacks. Its sidecar works.

crate::reasons::reasons! {
    "What an injected pod lacks. The name is used in the annotation, events, metrics and docs."

    SglangArgumentsMissing = "SGLang's container is started without arguments by which it uses the sidecar, so nothing is cached. The message has them. Add them to the container, or set the annotation `kvcachepool.io/hook: args`, if it starts SGLang with plain `args`.",
    GpuNotRequested = "The pool has `sidecar.gpuAccess: VisibleDevices`, and vLLM's container requests no NVIDIA GPU, neither by a resource such as `nvidia.com/gpu` nor by its own `NVIDIA_VISIBLE_DEVICES`. The sidecar has no GPU. For GPUs by resource claims use `ResourceClaim`. Where neither provides GPUs, set `NVIDIA_VISIBLE_DEVICES` in `sidecar.env`.",
    NoResourceClaim = "The pool has `sidecar.gpuAccess: ResourceClaim`, and vLLM's container uses no claim of the pod's `resourceClaims`. The sidecar has no GPU. For GPUs of a device plugin use `VisibleDevices`.",
    CpuLimited = "Each container of the pod has a CPU limit, so the sidecar has one too, and the pool chose none: its default request of 500m. Tiers below memory can need more. Set `cpu` in `sidecar.resources` of the pool: in `requests` for Guaranteed pods, otherwise in `limits`.",
    NoGpuAccess = "The pool has `sidecar.transfer: CudaWindow` and `sidecar.gpuAccess: None`, and vLLM's container requests a GPU. A window is memory of that GPU, which the sidecar does not see, so vLLM's worker copies itself (`NoDriver` in the status of its session). Set `gpuAccess: VisibleDevices`, or `ResourceClaim` for GPUs by resource claims, or omit `transfer`.",
}
