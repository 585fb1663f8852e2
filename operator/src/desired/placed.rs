//! The mapping from fields of a pool to keys of the sidecar's config.

use super::{files, redis};
use crate::api::{Duration, HttpVersion, KVCachePool, S3, Size};
use crate::names;
use kube::ResourceExt;
use kvcachepool_protocol::config::Config;
use serde::Serialize;
use serde_json::{Value, json};

/// A key of the sidecar's config that a pool's field or the operator sets.
pub(super) struct Placed {
    pub key: &'static str,
    /// Path of the field in a pool. `None` if the operator sets the key.
    pub field: Option<&'static str>,
    pub value: Value,
}

/// All keys that are set by their own field of a pool, or by the operator.
pub(super) fn placed(pool: &KVCachePool) -> Vec<Placed> {
    let (cache, memory) = (&pool.spec.cache, &pool.spec.local.memory);
    let disk = pool.spec.local.disk.as_ref();
    let write = &pool.spec.write;
    let no_bucket = S3::default();
    let s3 = pool.spec.shared.s3.as_ref().unwrap_or(&no_bucket);
    let bucket = files::of_s3(pool);
    let redis = pool.spec.shared.redis.as_ref();
    let servers = files::of_redis(pool);
    let own = |key, value| Placed {
        key,
        field: None,
        value,
    };
    let field = |key, field, value| Placed {
        key,
        field: Some(field),
        value,
    };
    vec![
        own("managed", json!(false)),
        own("pool.name", json!(pool.name_any())),
        own(
            "pool.namespace",
            json!(pool.namespace().unwrap_or_default()),
        ),
        own(
            "pool.generation",
            json!(pool.metadata.generation.unwrap_or_default()),
        ),
        field(
            "cache.chunkTokens",
            "spec.cache.chunkTokens",
            json!(cache.chunk_tokens),
        ),
        field("cache.save", "spec.cache.save", named(cache.save)),
        field(
            "cache.minLoadTokens",
            "spec.cache.minLoadTokens",
            json!(cache.min_load_tokens),
        ),
        field(
            "cache.loadTimeout",
            "spec.cache.loadTimeout",
            text(&cache.load_timeout),
        ),
        field(
            "memory.size",
            "spec.local.memory.perPod",
            size(&memory.per_pod),
        ),
        field(
            "memory.hugePages",
            "spec.local.memory.hugePages",
            named(memory.huge_pages),
        ),
        field(
            "memory.evictionPolicy",
            "spec.local.memory.evictionPolicy",
            named(memory.eviction_policy),
        ),
        own("disk.path", json!(disk.map_or("", |_| names::DISK_PATH))),
        field(
            "disk.size",
            "spec.local.disk.perPod",
            disk.map_or(json!(Config::default().disk.size.to_string()), |disk| {
                size(&disk.per_pod)
            }),
        ),
        field("write.policy", "spec.write.policy", named(write.policy)),
        field(
            "write.admission",
            "spec.write.admission",
            named(write.admission),
        ),
        field("write.codec", "spec.write.codec", named(write.codec)),
        field("redis.urls", REDIS, json!(redis_urls(pool))),
        field("redis.auth", REDIS, json!(servers.auth)),
        field("redis.ca", REDIS, json!(servers.ca)),
        field(
            "redis.ttl",
            "spec.shared.redis.ttl",
            redis.map_or(json!("0s"), |redis| text(&redis.ttl)),
        ),
        field("s3.bucket", "spec.shared.s3.bucket", json!(s3.bucket)),
        field("s3.region", "spec.shared.s3.region", json!(s3.region)),
        field("s3.endpoint", "spec.shared.s3.endpoint", json!(s3.endpoint)),
        field("s3.prefix", "spec.shared.s3.prefix", json!(s3.prefix)),
        field(
            "s3.addressingStyle",
            "spec.shared.s3.addressingStyle",
            named(s3.addressing_style),
        ),
        field(
            "s3.accelerate",
            "spec.shared.s3.accelerate",
            json!(s3.accelerate),
        ),
        field("s3.auth", "spec.shared.s3.auth", json!(bucket.auth)),
        field("s3.ca", "spec.shared.s3.ca", json!(bucket.ca)),
        field(
            "s3.checksums",
            "spec.shared.s3.checksums",
            named(s3.checksums),
        ),
        field(
            "s3.httpVersion",
            "spec.shared.s3.httpVersion",
            json!(http_version(s3.http_version)),
        ),
        field(
            "s3.maxConcurrency",
            "spec.shared.s3.maxConcurrency",
            json!(s3.max_concurrency),
        ),
        field(
            "s3.capacity",
            "spec.shared.s3.capacity",
            s3.capacity.as_ref().map_or(json!(0), size),
        ),
        field(
            "s3.evictAtPercent",
            "spec.shared.s3.evictAtPercent",
            json!(s3.evict_at_percent),
        ),
        field(
            "s3.evictToPercent",
            "spec.shared.s3.evictToPercent",
            json!(s3.evict_to_percent),
        ),
        field(
            "s3.expireAfter",
            "spec.shared.s3.expireAfter",
            s3.expire_after.as_ref().map_or(json!("0s"), text),
        ),
        field(
            "transfer.mode",
            "spec.sidecar.transfer",
            named(pool.spec.sidecar.transfer),
        ),
        field(
            "log.level",
            "spec.sidecar.logLevel",
            named(pool.spec.sidecar.log_level),
        ),
    ]
}

const REDIS: &str = "spec.shared.redis";

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

fn http_version(version: HttpVersion) -> &'static str {
    match version {
        HttpVersion::Auto => "Auto",
        HttpVersion::Http1 => "Http1",
        HttpVersion::Http2 => "Http2",
    }
}

pub(super) fn named(choice: impl Serialize) -> Value {
    json!(choice)
}

fn text(time: &Duration) -> Value {
    json!(time)
}

fn size(size: &Size) -> Value {
    json!(size)
}
