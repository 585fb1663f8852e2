//! Keys of other transfers, of monitoring and of pods.

use super::super::convert;
use super::super::keys::Form::{Any, Flag, Number, Numbers, Text, Texts, Whole};
use super::super::keys::Outcome::{Automatic, NotSupported, Translated};
use super::super::keys::{Row, key, older};
use super::row;

pub const OTHERS: &[Row] = &[
    row(
        &[
            key("enable_pd", Flag),
            older("enable_xpyd", Flag, "enable_pd"),
            older("enable_nixl", Flag, "enable_pd"),
            key("pd_*", Any),
            older("nixl_role", Text, "pd_role"),
            older("nixl_receiver_host", Text, "pd_peer_host"),
            older("nixl_receiver_port", Any, "pd_peer_init_port"),
            key("nixl_enable_gc", Flag),
            older("nixl_peer_host", Text, "pd_peer_host"),
            older("nixl_peer_port", Any, "pd_peer_init_port"),
            older("nixl_peer_init_port", Any, "pd_peer_init_port"),
            older("nixl_peer_alloc_port", Any, "pd_peer_alloc_port"),
            older("nixl_proxy_host", Text, "pd_proxy_host"),
            older("nixl_proxy_port", Whole, "pd_proxy_port"),
            key("nixl_backends", Texts),
            key("nixl_buffer_size", Whole),
            key("nixl_buffer_device", Text),
            key("transfer_channel", Text),
            key("extra_config.nixl_*", Any),
            key("extra_config.enable_nixl_storage", Flag),
            key("spec.pd.*", Any),
        ],
        NotSupported("Use vLLM's own transport, with `injection.existingConnector: Compose`."),
    ),
    row(
        &[
            key("enable_p2p", Flag),
            key("p2p_*", Any),
            key("extra_config.p2p_*", Any),
            key("lookup_url", Text),
            key("distributed_url", Text),
        ],
        NotSupported("Pods share chunks through Redis, a shared file system or S3."),
    ),
    row(
        &[
            key("enable_controller", Flag),
            key("lmcache_instance_id", Text),
            key("controller_pull_url", Text),
            key("controller_reply_url", Text),
            older("controller_url", Text, "controller_pull_url"),
            key("lmcache_worker_ports", Numbers),
            older("lmcache_worker_port", Any, "lmcache_worker_ports"),
            key("lmcache_worker_ids", Numbers),
            key("lmcache_worker_heartbeat_delay_time", Whole),
            key("lmcache_worker_heartbeat_time", Whole),
            key("extra_config.heartbeat_url", Text),
            key("extra_config.kv_msg_batch_*", Number),
            key("extra_config.full_sync_*", Number),
            key("extra_config.worker_socket_*", Number),
            key("extra_config.controller_packages", Any),
            key("extra_config.disabled_controllers", Any),
            key("LMCACHE_CONTROLLER_*", Any),
            key("LMCACHE_COORDINATOR_*", Any),
            key("spec.coordinator.*", Any),
        ],
        Automatic(
            "No controller is needed: pods find each other's chunks in the shared tiers, and the pool's status says what they do.",
        ),
    ),
    row(
        &[key("mp_host", Text), key("mp_port", Whole)],
        NotSupported(
            "They are for SGLang, which uses the sidecar as a storage backend of its own.",
        ),
    ),
];

pub const OPERATION: &[Row] = &[
    row(
        &[key("LMCACHE_LOG_LEVEL", Text), key("spec.logLevel", Text)],
        Translated {
            to: &["log.level"],
            note: "CRITICAL is error.",
            by: convert::log_level,
        },
    ),
    row(
        &[
            key("internal_api_server_*", Any),
            older(
                "cache_engine_internal_api_server_enabled",
                Flag,
                "internal_api_server_enabled",
            ),
            older(
                "cache_engine_internal_api_server_port_start",
                Whole,
                "internal_api_server_port_start",
            ),
            key("extra_config.internal_api_server_*", Any),
            key("extra_config.enable_cache_usage_details_in_response", Flag),
            key("enable_chunk_statistics", Flag),
            key("chunk_statistics_*", Any),
            key("extra_config.chunk_statistics_*", Any),
            key("spec.prometheus.enabled", Flag),
            key("spec.prometheus.port", Whole),
            key("spec.server.httpPort", Whole),
        ],
        Automatic("Metrics and state are on port 9797 of every sidecar."),
    ),
    row(
        &[key("enable_kv_events", Flag)],
        Automatic("KV events are published if vLLM publishes its own."),
    ),
    row(
        &[
            key("py_enable_gc", Flag),
            key("use_gpu_connector_v3", Flag),
            key("pipelined_backend", Flag),
            key("extra_config.lmcache_rpc_port", Any),
            key("LMCACHE_USE_EXPERIMENTAL", Any),
            key("LMCACHE_TRACK_USAGE", Any),
            key("LMCACHE_USAGE_TRACK_*", Any),
            key("LMCACHE_REQUEST_TELEMETRY_*", Any),
            key("LMCACHE_DISABLE_BANNER", Any),
            key("LMCACHE_MP_TRANSFER_MODE", Any),
            key("LMCACHE_MQ_TIMEOUT", Any),
            key("LMCACHE_SERVER_URL", Any),
            key("LMCACHE_DEVICE_BACKEND", Any),
            key("LMCACHE_GPU_STAGING_BUFFER_BYTES", Any),
            key("LMCACHE_ROCM_*", Any),
            key("LMCACHE_MUSA_*", Any),
        ],
        Automatic("kvcachepool does not need it, and sends no data about its use."),
    ),
    row(
        &[
            key("script_allowed_imports", Texts),
            key("run_script_api_enabled", Flag),
            key("LMCACHE_RUN_SCRIPT_API_ENABLED", Any),
        ],
        NotSupported("A sidecar runs no code of callers."),
    ),
    row(
        &[key("remote_config_url", Text), key("app_id", Text)],
        NotSupported("The operator passes a changed pool to running pods."),
    ),
];

pub const KUBERNETES: &[Row] = &[
    row(
        &[key("spec.injection.targetContainer", Text)],
        Translated {
            to: &["spec.injection.container"],
            note: "",
            by: convert::container,
        },
    ),
    row(
        &[key("spec.gpuVendor", Text)],
        Translated {
            to: &[],
            note: "`nvidia` needs no field.",
            by: convert::vendor,
        },
    ),
    row(
        &[
            key("spec.image", Any),
            key("spec.imagePullSecrets", Any),
            key("spec.injection.payloadImage", Text),
            key("spec.injection.imagePullSecrets", Any),
            key("spec.injection.cudagraph", Any),
            key("spec.runtimeClassName", Text),
            key("spec.nodeSelector", Any),
            key("spec.affinity", Any),
            key("spec.tolerations", Any),
            key("spec.volumes", Any),
            key("spec.volumeMounts", Any),
            key("spec.initContainers", Any),
            key("spec.podAnnotations", Any),
            key("spec.podLabels", Any),
            key("spec.serviceAccountName", Text),
            key("spec.priorityClassName", Text),
            key("spec.hostNetwork", Flag),
            key("spec.hostIPC", Flag),
            key("spec.isolatedIPC", Flag),
            key("spec.privileged", Flag),
            key("spec.server.port", Whole),
            key("spec.server.maxWorkers", Whole),
        ],
        Automatic("The sidecar runs in vLLM's pod, without privileges, from an image of its own."),
    ),
    row(
        &[key("spec.resourceOverrides", Any), key("spec.env", Any)],
        NotSupported(
            "Write `sidecar.resources` and `sidecar.env`. The memory follows from `local.memory.perPod`.",
        ),
    ),
    row(
        &[
            key("spec.prometheus.serviceMonitor.enabled", Flag),
            key("spec.prometheus.serviceMonitor.interval", Text),
            key("spec.prometheus.serviceMonitor.labels", Any),
        ],
        NotSupported("Write `monitoring.podMonitor`; it needs the chart value `allowPodMonitors`."),
    ),
    row(
        &[key("spec.extraArgs", Texts)],
        NotSupported("The guide lists flags of `lmcache server`."),
    ),
];
