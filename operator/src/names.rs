//! Names that users, other controllers and the sidecar see: labels, annotations, containers, volumes, paths.

/// API group of `KVCachePool`.
pub const GROUP: &str = "kvcachepool.io";
/// Label of a pod that runs a command for a pool. The pod may connect to the pool's servers, and is not injected.
pub const TOOL: &str = "kvcachepool.io/tool-of";
/// Annotation of a pool's ConfigMap: the image of new sidecars.
pub const IMAGE: &str = "kvcachepool.io/image";
/// Annotation that a user sets on a pool: the service account that purges its objects.
pub const PURGE_ACCOUNT: &str = "kvcachepool.io/purge-service-account";
/// Finalizer of a pool whose objects are deleted with it.
pub const PURGE: &str = "kvcachepool.io/purge";
/// Label (or annotation) of a pod: the pool that it uses.
pub const POOL: &str = "kvcachepool.io/pool";
/// Label of pods of a LeaderWorkerSet: its name.
pub const LEADER_WORKER_SET: &str = "leaderworkerset.sigs.k8s.io/name";

/// In place of the uid of an owner. The pods of a group have several controllers, which are recreated with the group.
pub fn group_uid(leader_worker_set: &str) -> String {
    format!("leaderworkerset/{leader_worker_set}")
}

/// Name of the canary's pool, which is built into the webhook.
pub const CANARY_POOL: &str = "kvcachepool-canary";
/// Annotation: the result of injection, as JSON `{result, reason, version, hash}`.
pub const INJECTION: &str = "kvcachepool.io/injection";
/// Annotation: the sidecar's config, which the pod reads through the downward API.
pub const CONFIG: &str = "kvcachepool.io/config";
/// Annotation: the sidecar before its image was changed in place, as JSON `{image, hash, at}`.
pub const EXCHANGED: &str = "kvcachepool.io/exchanged";
/// Annotation while the memory of a pod is being changed: what its container is lowered to when the sidecar does not use more, as JSON
/// `{request, limit, refused}`.
pub const LOWERED: &str = "kvcachepool.io/lowered";
/// Annotation that the plugin sets on a pod, so that the kubelet updates the pod's files: the time of the last reload.
pub const RELOADED_AT: &str = "kvcachepool.io/reloaded-at";
/// Annotation of a manager's pod: the shape that it gives the cluster of managed servers.
pub const SHAPE: &str = "kvcachepool.io/shape";
/// Annotation of the StatefulSet of a cluster: its number of servers.
pub const REPLICAS: &str = "kvcachepool.io/servers";
/// Annotation of a pool's object: hash of what the operator last applied.
pub const APPLIED: &str = "kvcachepool.io/applied";
/// Annotation that a user sets on a pod: memory of this pod, instead of the pool's `local.memory.perPod`.
pub const MEMORY: &str = "kvcachepool.io/memory";
/// Annotation that a user sets on a pod: name of the container that runs vLLM.
pub const CONTAINER: &str = "kvcachepool.io/container";
/// Annotation that a user sets on a pod: the PYTHONPATH that the image sets with ENV.
pub const PYTHON_PATH: &str = "kvcachepool.io/python-path";
/// Annotation that a user sets on a pod: `args` configures the connector by a launch argument instead of the plugin.
pub const HOOK: &str = "kvcachepool.io/hook";

/// The native sidecar.
pub const SIDECAR_CONTAINER: &str = "kvcachepool";
/// The ordinary init container after the sidecar, the last entry.
pub const INIT_CONTAINER: &str = "kvcachepool-init";
/// The container of a pod that runs a command for a pool.
pub const TOOL_CONTAINER: &str = "kvcachepool-tool";
/// The memory emptyDir with socket, connector and lock file.
pub const SHARED_VOLUME: &str = "kvcachepool";
/// Mount path of that volume in every container, and the entry of PYTHONPATH.
pub const SHARED_PATH: &str = "/kvcachepool";
/// Projected volume with the config from the annotation (`pod/`) and from the pool's ConfigMap (`pool/`), and with credentials and
/// certificates of shared tiers.
pub const CONFIG_VOLUME: &str = "kvcachepool-config";
/// Mount path of that volume in the sidecar.
pub const CONFIG_PATH: &str = "/etc/kvcachepool";
/// Volume of the disk tier.
pub const DISK_VOLUME: &str = "kvcachepool-disk";
/// Mount path of that volume in the sidecar.
pub const DISK_PATH: &str = "/var/lib/kvcachepool";
/// Volume of the file system tier.
pub const FILE_SYSTEM_VOLUME: &str = "kvcachepool-filesystem";
/// Mount path of that volume in the sidecar.
pub const FILE_SYSTEM_PATH: &str = "/mnt/kvcachepool";
/// Empty volume that hides the service account's token.
pub const NO_TOKEN_VOLUME: &str = "kvcachepool-no-token";
/// Port of the sidecar's admin HTTP.
pub const ADMIN_PORT: u16 = 9797;
/// Name of that port in the container.
pub const ADMIN_PORT_NAME: &str = "kvcachepool";
/// Label of pods: the program that they run.
pub const NAME: &str = "app.kubernetes.io/name";
/// Value of that label for managed servers.
pub const SERVERS: &str = "kvcachepool-redis";
/// Value of that label for the manager of a cluster of managed servers.
pub const MANAGER: &str = "kvcachepool-redis-cluster";
/// Label of managed servers and their manager: their pool.
pub const INSTANCE: &str = "app.kubernetes.io/instance";
/// Field manager of server-side apply.
pub const FIELD_MANAGER: &str = "kvcachepool-operator";
