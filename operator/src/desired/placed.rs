//! The values of the sidecar's config that a pool's fields or the operator set.

use super::{files, redis};
use crate::api::{KVCachePool, at};
use crate::names;
use kube::ResourceExt;
use kvcachepool_protocol::config::pool_keys;
use serde_json::{Value, json};

/// A key of the sidecar's config that a pool's field or the operator sets.
pub(super) struct Placed {
    pub key: &'static str,
    /// Path of the field in a pool. `None` if the operator sets the key.
    pub field: Option<&'static str>,
    /// `None` if the field or its section is absent.
    pub value: Option<Value>,
}

/// All keys that are set by their own field of a pool, or by the operator.
pub(super) fn placed(pool: &KVCachePool) -> Vec<Placed> {
    let fields = json!({"spec": pool.spec});
    let of_fields = pool_keys().iter().map(|set| Placed {
        key: set.key,
        field: Some(set.field),
        value: at(&fields, set.field).cloned(),
    });
    of_fields.chain(computed(pool)).collect()
}

/// The keys whose values are not those of a field.
fn computed(pool: &KVCachePool) -> Vec<Placed> {
    const REDIS: Option<&str> = Some("spec.shared.redis");
    let disk = pool.spec.local.disk.as_ref();
    let folder = pool.spec.shared.file_system.as_ref();
    let (servers, bucket) = (files::of_redis(pool), files::of_s3(pool));
    let key = |key, field, value| Placed {
        key,
        field,
        value: Some(value),
    };
    vec![
        key("managed", None, json!(false)),
        key("pool.name", None, json!(pool.name_any())),
        key(
            "pool.namespace",
            None,
            json!(pool.namespace().unwrap_or_default()),
        ),
        key(
            "pool.generation",
            None,
            json!(pool.metadata.generation.unwrap_or_default()),
        ),
        key(
            "disk.path",
            None,
            json!(disk.map_or("", |_| names::DISK_PATH)),
        ),
        key(
            "fileSystem.path",
            Some("spec.shared.fileSystem"),
            json!(folder.map_or("", |_| names::FILE_SYSTEM_PATH)),
        ),
        key("redis.urls", REDIS, json!(redis_urls(pool))),
        key("redis.auth", REDIS, json!(servers.auth)),
        key("redis.ca", REDIS, json!(servers.ca)),
        key(
            "redis.clientCertificate",
            REDIS,
            json!(servers.client_certificate),
        ),
        key("s3.auth", Some("spec.shared.s3.auth"), json!(bucket.auth)),
        key("s3.ca", Some("spec.shared.s3.ca"), json!(bucket.ca)),
    ]
}

fn redis_urls(pool: &KVCachePool) -> Vec<String> {
    if let Some(managed) = redis::managed(pool) {
        return redis::urls(pool, managed);
    }
    let redis = pool.spec.shared.redis.as_ref();
    let Some(external) = redis.and_then(|redis| redis.external.as_ref()) else {
        return Vec::new();
    };
    external.url.iter().chain(&external.urls).cloned().collect()
}
