//! Names that users, other controllers and the sidecar see: labels, annotations, containers, volumes, paths.

/// API group of `KVCachePool`.
pub const GROUP: &str = "kvcachepool.io";
/// Label of a pod that a command about a pool runs in: it reaches the pool's servers, and is injected with nothing.
pub const TOOL: &str = "kvcachepool.io/tool-of";
/// Annotation of a pool's ConfigMap: the image that new sidecars have.
pub const IMAGE: &str = "kvcachepool.io/image";
/// Annotation of a user on a pool: as which service account its objects are purged.
pub const PURGE_ACCOUNT: &str = "kvcachepool.io/purge-service-account";
/// Finalizer of a pool whose objects go with it.
pub const PURGE: &str = "kvcachepool.io/purge";
/// Label of a pod (or annotation): the pool it shall use.
pub const POOL: &str = "kvcachepool.io/pool";
/// Pool name that the webhook answers from a built-in pool: the canary's.
pub const CANARY_POOL: &str = "kvcachepool-canary";
/// Annotation: what injection did to this pod, as JSON `{result, reason, version, hash}`.
pub const INJECTION: &str = "kvcachepool.io/injection";
/// Annotation: the sidecar's config, which the pod reads through the downward API.
pub const CONFIG: &str = "kvcachepool.io/config";
/// Annotation: what the sidecar was before its image was exchanged in place, as JSON `{image, hash, at}`.
pub const EXCHANGED: &str = "kvcachepool.io/exchanged";
/// Annotation of an object of a pool: what the operator applied last, as a hash.
pub const APPLIED: &str = "kvcachepool.io/applied";
/// Annotation of a user: memory of this pod, instead of the pool's `local.memory.perPod`.
pub const MEMORY: &str = "kvcachepool.io/memory";
/// Annotation of a user: which container runs vLLM.
pub const CONTAINER: &str = "kvcachepool.io/container";
/// Annotation of a user: what the image's own ENV says of PYTHONPATH, where a pod does not.
pub const PYTHON_PATH: &str = "kvcachepool.io/python-path";
/// Annotation of a user: `args` = the connector by launch argument instead of the plugin.
pub const HOOK: &str = "kvcachepool.io/hook";

/// The native sidecar.
pub const SIDECAR_CONTAINER: &str = "kvcachepool";
/// The ordinary init container behind it, the last entry.
pub const INIT_CONTAINER: &str = "kvcachepool-init";
/// The container of a pod that a command about a pool runs in.
pub const TOOL_CONTAINER: &str = "kvcachepool-tool";
/// Memory emptyDir with socket, connector and lock file.
pub const SHARED_VOLUME: &str = "kvcachepool";
/// Where it is mounted in every container, and the entry of PYTHONPATH.
pub const SHARED_PATH: &str = "/kvcachepool";
/// Projected volume with the config from the annotation (`pod/`) and from the pool's ConfigMap (`pool/`), and with credentials and
/// certificates of the tiers that pods share.
pub const CONFIG_VOLUME: &str = "kvcachepool-config";
/// Where it is mounted in the sidecar.
pub const CONFIG_PATH: &str = "/etc/kvcachepool";
/// Volume of the disk tier.
pub const DISK_VOLUME: &str = "kvcachepool-disk";
/// Where it is mounted in the sidecar.
pub const DISK_PATH: &str = "/var/lib/kvcachepool";
/// Empty volume over the service account's token.
pub const NO_TOKEN_VOLUME: &str = "kvcachepool-no-token";
/// Port of the sidecar's admin HTTP.
pub const ADMIN_PORT: u16 = 9797;
/// Name of that port in the container, for monitors.
pub const ADMIN_PORT_NAME: &str = "kvcachepool";
/// Field manager of server-side apply.
pub const FIELD_MANAGER: &str = "kvcachepool-operator";
