//! Keys of servers that pods share.

use super::super::convert;
use super::super::keys::Form::{Any, Flag, Number, Text, Texts, Whole};
use super::super::keys::Outcome::{self, Automatic, NotSupported, Translated};
use super::super::keys::{Row, key, older};
use super::row;

const ADDRESS: Outcome = Translated {
    to: &["redis.urls"],
    note: "A part of the address.",
    by: convert::in_address,
};

pub const REDIS: &[Row] = &[
    row(
        &[key("remote_url", Text)],
        Translated {
            to: &[
                "redis.urls",
                "redis.auth",
                "redis.ttl",
                "s3.bucket",
                "s3.endpoint",
                "s3.prefix",
            ],
            note: "The schemes of Redis and `s3`; others are not supported. User and password go into a Secret.",
            by: convert::remote_url,
        },
    ),
    row(
        &[
            key("spec.l2Backend.resp.host", Text),
            key("spec.l2Backend.raw.config.host", Text),
        ],
        Translated {
            to: &["redis.urls", "redis.ttl"],
            note: "With the port.",
            by: convert::redis::resp_host,
        },
    ),
    row(
        &[key("spec.l2Backend.raw.config.startup_nodes", Any)],
        Translated {
            to: &["redis.urls", "redis.ttl"],
            note: "The first node, or all nodes of a cluster.",
            by: convert::redis::startup_nodes,
        },
    ),
    row(
        &[
            key("spec.l2Backend.resp.port", Whole),
            key("spec.l2Backend.raw.config.port", Whole),
            key("spec.l2Backend.raw.config.cluster_mode", Flag),
            key("spec.l2Backend.raw.config.database_id", Whole),
            key("spec.l2Backend.raw.config.tls_enable", Flag),
            key("extra_config.tls_enable", Flag),
            key("extra_config.valkey_mode", Text),
            key("extra_config.valkey_database", Whole),
        ],
        ADDRESS,
    ),
    row(
        &[
            key("extra_config.username", Text),
            key("extra_config.password", Text),
            key("extra_config.valkey_username", Text),
            key("extra_config.valkey_password", Text),
            key("spec.l2Backend.raw.config.username", Text),
            key("spec.l2Backend.raw.config.password", Text),
            key("LMCACHE_RESP_USERNAME", Text),
            key("LMCACHE_RESP_PASSWORD", Text),
        ],
        Translated {
            to: &["redis.auth"],
            note: "A Secret has the value.",
            by: convert::redis::login,
        },
    ),
    row(
        &[key("spec.l2Backend.resp.authSecretRef.name", Text)],
        Translated {
            to: &["redis.auth"],
            note: "A Secret with the keys `password` and `username`.",
            by: convert::redis::secret_name,
        },
    ),
    row(
        &[
            key("extra_config.valkey_ttl_sec", Number),
            key("spec.l2Backend.raw.config.ttl_seconds", Number),
        ],
        Translated {
            to: &["redis.ttl"],
            note: "It restarts with every read.",
            by: convert::redis::ttl,
        },
    ),
    row(
        &[
            key("extra_config.valkey_enable_ttl", Flag),
            key("extra_config.valkey_num_workers", Whole),
            key("extra_config.valkey_sync_num_workers", Whole),
            key("extra_config.resp_num_threads", Whole),
            key("extra_config.request_timeout", Number),
            key("extra_config.connection_timeout", Number),
            key("extra_config.ping_timeout", Number),
            key("extra_config.ping_interval", Number),
            key("spec.l2Backend.resp.numWorkers", Whole),
            key("spec.l2Backend.raw.config.num_workers", Whole),
            key("spec.l2Backend.raw.config.key_prefix", Text),
            key("spec.l2Backend.resp.authSecretRef.namespace", Text),
        ],
        Automatic(
            "The sidecar sets connections and deadlines itself. Its keys begin with `kvcp:`, and expire.",
        ),
    ),
    row(
        &[
            key("remote_serde", Text),
            key("spec.l2Backend.raw.config.serde.type", Text),
        ],
        Translated {
            to: &["write.codec"],
            note: "`naive`, `torch`, `cachegen` and `fp8`; others are not supported. The codecs are lossy, so that beside a disk tier none is set.",
            by: convert::serde,
        },
    ),
    row(
        &[key("spec.l2Backend.raw.type", Text)],
        Translated {
            to: &[],
            note: "`s3`, `valkey`, `resp`, `fs` and `fs_native`; other adapters are not supported.",
            by: convert::adapter,
        },
    ),
    row(
        &[
            key("extra_config.audit_*", Any),
            key("error_handling", Flag),
        ],
        Automatic(
            "Every section has a digest, which is compared before its bytes are used. A tier that fails is paused and tried again.",
        ),
    ),
    row(
        &[
            key("audit_actual_remote_url", Text),
            key("extra_config.audit_actual_remote_url", Text),
            key("extra_config.redis_url", Text),
            key("extra_config.remote_storage_plugin.*", Any),
            key("LMCACHE_RESP_HOST", Text),
            key("LMCACHE_RESP_PORT", Text),
        ],
        NotSupported("Write the address as `remote_url`, and translate again."),
    ),
    row(
        &[
            key("storage_plugins", Texts),
            older("external_backends", Texts, "storage_plugins"),
            key("remote_storage_plugins", Texts),
            key("runtime_plugin_locations", Texts),
            older("plugin_locations", Texts, "runtime_plugin_locations"),
            key("extra_config.storage_plugin.*", Any),
            key("extra_config.external_backend.*", Any),
            key("LMCACHE_PLUGIN_*", Any),
            key("LMCACHE_RUNTIME_PLUGIN_*", Any),
        ],
        NotSupported(
            "There are no plugins. Use Redis, a shared file system or S3, or serve the store by a Python class (`kvcachepool.store`).",
        ),
    ),
    row(
        &[
            key("extra_config.azure_*", Any),
            key("extra_config.bigtable*", Any),
            key("extra_config.hf*", Any),
            key("extra_config.sagemaker_hyperpod_*", Any),
            key("extra_config.infinistore_*", Any),
            key("extra_config.fs_*", Any),
            key("extra_config.mooncake_*", Any),
            key("extra_config.local_hostname", Text),
            key("extra_config.metadata_server", Text),
            key("extra_config.master_server_address", Text),
            key("extra_config.global_segment_size", Whole),
            key("extra_config.local_buffer_size", Whole),
            key("extra_config.protocol", Text),
            key("extra_config.device_name", Text),
            key("extra_config.transfer_timeout", Number),
            key("extra_config.storage_root_dir", Text),
            key("LMCACHE_AEROSPIKE_*", Any),
            key("spec.l2Backend.raw.config.*", Any),
        ],
        NotSupported(
            "Other servers are not used. Use Redis, a shared file system or S3, or serve the store by a Python class (`kvcachepool.store`).",
        ),
    ),
    row(
        &[
            key("retrieve_locations", Texts),
            key("store_location", Text),
            key("spec.l2Backend.storePolicy", Text),
            key("spec.l2Backend.prefetchPolicy", Text),
            key("spec.l2Backend.prefetchMaxInFlight", Whole),
        ],
        NotSupported(
            "Everything passes through memory. `write.policy` and `write.admission` say what lower tiers get.",
        ),
    ),
    row(
        &[key("spec.l2Backend.serde.*", Any)],
        NotSupported("For encryption at rest use the server's own."),
    ),
];

pub const S3: &[Row] = &[
    row(
        &[key("spec.l2Backend.raw.config.s3_endpoint", Text)],
        Translated {
            to: &["s3.bucket", "s3.endpoint", "s3.prefix"],
            note: "`bucket.host[:port]`; the prefix is `kvcachepool`.",
            by: convert::s3::endpoint,
        },
    ),
    row(
        &[
            key("spec.l2Backend.raw.config.s3_bucket", Text),
            key("spec.l2Backend.raw.config.disable_tls", Flag),
            key("extra_config.disable_tls", Flag),
            key("extra_config.s3_file_prefix", Text),
        ],
        Translated {
            to: &["s3.bucket", "s3.endpoint", "s3.prefix"],
            note: "A part of the address. The prefix is `kvcachepool` below LMCache's.",
            by: convert::in_address,
        },
    ),
    row(
        &[
            key("extra_config.s3_region", Text),
            key("spec.l2Backend.raw.config.s3_region", Text),
        ],
        Translated {
            to: &["s3.region"],
            note: "",
            by: convert::s3::region,
        },
    ),
    row(
        &[key("spec.l2Backend.raw.config.s3_addressing_style", Text)],
        Translated {
            to: &["s3.addressingStyle"],
            note: "",
            by: convert::s3::addressing_style,
        },
    ),
    row(
        &[key("spec.l2Backend.raw.config.s3_ca_bundle", Text)],
        Translated {
            to: &["s3.ca"],
            note: "A ConfigMap has the certificates.",
            by: convert::s3::authority,
        },
    ),
    row(
        &[
            key("extra_config.aws_access_key_id", Text),
            key("extra_config.aws_secret_access_key", Text),
            key("spec.l2Backend.raw.config.aws_access_key_id", Text),
            key("spec.l2Backend.raw.config.aws_secret_access_key", Text),
        ],
        Translated {
            to: &["s3.auth"],
            note: "A Secret has the value. Without the keys the pod's own identity is used.",
            by: convert::s3::key,
        },
    ),
    row(
        &[
            key("extra_config.s3_prefer_http2", Flag),
            key("spec.l2Backend.raw.config.s3_prefer_http2", Flag),
        ],
        Automatic("Connections use HTTP/1.1, one per transfer."),
    ),
    row(
        &[
            key("extra_config.s3_max_inflight_reqs", Whole),
            key("extra_config.s3_num_io_threads", Whole),
            key("spec.l2Backend.raw.config.s3_num_io_threads", Whole),
        ],
        Translated {
            to: &["s3.maxConcurrency"],
            note: "Requests at a time of a pod, not threads.",
            by: convert::s3::concurrency,
        },
    ),
    row(
        &[
            key("spec.l2Backend.raw.config.max_capacity_gb", Number),
            key("spec.l2Backend.resp.maxCapacityGB", Number),
        ],
        Translated {
            to: &["s3.capacity", "disk.size"],
            note: "GiB below the prefix of a bucket, or of a disk, divided by `--pods-per-node`. For Redis set `maxmemory`.",
            by: convert::capacity,
        },
    ),
    row(
        &[
            key("extra_config.s3_enable_s3express", Flag),
            key("spec.l2Backend.raw.config.s3_enable_s3express", Flag),
        ],
        Automatic("The bucket's name says whether it is a directory bucket (`--x-s3`)."),
    ),
    row(
        &[
            key("extra_config.s3_max_io_concurrency", Whole),
            key("spec.l2Backend.raw.config.eviction", Any),
        ],
        Automatic(
            "Fields of `shared.s3` have defaults: `evictAtPercent`, `evictToPercent`, `maxConcurrency`.",
        ),
    ),
];
