//! The one table of what an injected pod may lack of what its pool wants. It has its sidecar and its cache all the same.

crate::reasons::reasons! {
    "What a pod with a sidecar lacks. The name goes into the annotation, events, metrics and docs."

    GpuNotRequested = "The pool says `sidecar.gpuAccess: VisibleDevices`, and vLLM's container asks for no NVIDIA GPU: neither by a resource such as `nvidia.com/gpu` nor by a `NVIDIA_VISIBLE_DEVICES` of its own. The sidecar has no GPU. For GPUs by resource claims write `ResourceClaim`; where GPUs are handed out by neither, set `NVIDIA_VISIBLE_DEVICES` in `sidecar.env`.",
    NoResourceClaim = "The pool says `sidecar.gpuAccess: ResourceClaim`, and vLLM's container uses no claim of the pod's `resourceClaims`. The sidecar has no GPU. For GPUs of a device plugin write `VisibleDevices`.",
    NoGpuAccess = "The pool says `sidecar.transfer: CudaWindow` and `sidecar.gpuAccess: None`, and vLLM's container asks for a GPU. A window would be memory of that GPU, which the sidecar does not see, so vLLM's worker copies itself (`NoDriver` in the status of its session). Write `gpuAccess: VisibleDevices`, or `ResourceClaim` for GPUs by resource claims; or leave `transfer` away.",
}
