//! Conversions of values. `redis` and `s3` have those of the shared tiers.

pub mod redis;
pub mod s3;

use super::translation::{Draft, Fate};
use kvcachepool_protocol::config::ByteSize;
use serde_yaml::Value;

/// Memory of a worker whose file names none, in GiB.
pub const DEFAULT_GIB: f64 = 5.0;

/// Objects in a bucket begin with this, below LMCache's own prefix.
const PREFIX: &str = "kvcachepool";

/// GiB as a size in whole MiB.
fn size(gib: f64) -> String {
    let mib = (gib * 1024.0).max(0.0) as u64;
    ByteSize(mib.saturating_mul(1 << 20)).to_string()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

/// A time in the parts that a pool allows: `36h`, `1h30m`, `500ms`.
fn time(seconds: f64) -> String {
    let ms = (seconds * 1000.0).max(0.0) as u64;
    let parts = [
        (ms / 3_600_000, "h"),
        (ms / 60_000 % 60, "m"),
        (ms / 1_000 % 60, "s"),
        (ms % 1_000, "ms"),
    ];
    let parts = parts.iter().filter(|(n, _)| *n > 0);
    let text: String = parts.map(|(n, unit)| format!("{n}{unit}")).collect();
    if text.is_empty() {
        "0ms".to_owned()
    } else {
        text
    }
}

fn whole(value: &Value) -> String {
    value.as_i64().unwrap_or_default().to_string()
}

pub fn chunk_tokens(draft: &mut Draft<'_>, value: &Value) -> Fate {
    draft.set("cache.chunkTokens", whole(value))
}

pub fn save(draft: &mut Draft<'_>, value: &Value) -> Fate {
    if skips_save(draft) {
        return Fate::Automatic("It has no effect with LMCACHE_FORCE_SKIP_SAVE.");
    }
    let decode = value.as_bool() == Some(true);
    draft.set(
        "cache.save",
        if decode { "PromptAndDecode" } else { "Prompt" },
    )
}

/// LMCache takes every text but the empty one for true.
fn skips_save(draft: &Draft<'_>) -> bool {
    let set = draft.text("LMCACHE_FORCE_SKIP_SAVE");
    set.is_some_and(|text| !text.is_empty())
}

pub fn skip_save(draft: &mut Draft<'_>, _: &Value) -> Fate {
    match skips_save(draft) {
        true => draft.set("cache.save", "None"),
        false => Fate::Automatic("It is empty."),
    }
}

pub fn min_load_tokens(draft: &mut Draft<'_>, value: &Value) -> Fate {
    draft.set("cache.minLoadTokens", whole(value))
}

pub fn load_timeout(draft: &mut Draft<'_>, value: &Value) -> Fate {
    draft.set("cache.loadTimeout", time(number(value)))
}

pub fn log_level(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let level = match value
        .as_str()
        .unwrap_or_default()
        .to_ascii_uppercase()
        .as_str()
    {
        "DEBUG" => "debug",
        "INFO" => "info",
        "WARNING" | "WARN" => "warn",
        "ERROR" | "CRITICAL" => "error",
        _ => return Fate::Bad("DEBUG, INFO, WARNING, ERROR or CRITICAL".to_owned()),
    };
    draft.set("log.level", level)
}

/// Sets the memory of a pod with this many GiB per worker.
pub fn memory_of_process(draft: &mut Draft<'_>, gib: f64) -> Fate {
    let workers = f64::from(draft.options.workers);
    let first = draft.get("first_rank_max_local_cpu_size").map(number);
    let all = match first.filter(|_| may_save_only_first_rank(draft)) {
        Some(first) => first + gib * (workers - 1.0),
        None => gib * workers,
    };
    draft.set("memory.size", size(all))
}

pub fn memory_per_worker(draft: &mut Draft<'_>, value: &Value) -> Fate {
    memory_of_process(draft, number(value))
}

/// Whether the first rank may have more memory than others. Without `save_only_first_rank` it does with MLA.
fn may_save_only_first_rank(draft: &Draft<'_>) -> bool {
    let set = draft.get("save_only_first_rank");
    set.is_none_or(|set| set.as_bool() == Some(true))
}

pub fn memory_first_rank(draft: &mut Draft<'_>, _: &Value) -> Fate {
    if !may_save_only_first_rank(draft) {
        return Fate::Automatic("It has no effect without save_only_first_rank.");
    }
    if draft.get("save_only_first_rank").is_none() {
        draft.note(
            "local.memory.perPod includes first_rank_max_local_cpu_size, which LMCache uses for models with MLA. \
             For another model, remove that key and translate again."
                .to_owned(),
        );
    }
    let gib = draft.get("max_local_cpu_size").map_or(DEFAULT_GIB, number);
    memory_of_process(draft, gib)
}

pub fn memory_per_node(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let pods = f64::from(draft.options.pods_per_node);
    draft.set("memory.size", size(number(value) / pods))
}

pub fn huge_pages(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let huge = value.as_bool() == Some(true);
    draft.set("memory.hugePages", if huge { "2Mi" } else { "None" })
}

pub fn eviction(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let policy = match value
        .as_str()
        .unwrap_or_default()
        .to_ascii_uppercase()
        .as_str()
    {
        "LRU" => "LRU",
        "LFU" => "LFU",
        "FIFO" => "FIFO",
        "MRU" | "NOOP" | "ARC" | "ISOLATEDLRU" => {
            return Fate::NotSupported(
                "The orders of eviction are S3FIFO (default), LRU, LFU and FIFO.",
            );
        }
        _ => return Fate::Bad("LRU, LFU, FIFO, MRU, ARC, IsolatedLRU or noop".to_owned()),
    };
    draft.set("memory.evictionPolicy", policy)
}

pub fn device(_: &mut Draft<'_>, value: &Value) -> Fate {
    match value.as_str() {
        Some("cpu") => Fate::Automatic("The memory tier is always on."),
        Some("cuda") => Fate::NotSupported("vLLM's own prefix cache holds KV on the GPU."),
        _ => Fate::NotSupported("Write local.disk with a size."),
    }
}

pub fn disk_folder(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let folder = value.as_str().unwrap_or_default();
    if folder.is_empty() {
        return Fate::Automatic("The key is empty.");
    }
    let sizes = ["max_local_disk_size", "max_capacity_gb"];
    if !sizes.iter().any(|name| is_positive(draft, name)) {
        return Fate::NotSupported("A disk tier needs a size: write local.disk.perPod.");
    }
    let first = folder
        .split(',')
        .map(str::trim)
        .find(|part| !part.is_empty());
    let first = first.unwrap_or_default().trim_start_matches("file://");
    if !first.starts_with('/') || first.contains('\0') {
        return Fate::Bad("an absolute path".to_owned());
    }
    draft.set(
        "disk.path",
        format!("{}/{PREFIX}", first.trim_end_matches('/')),
    )
}

fn is_positive(draft: &Draft<'_>, name: &str) -> bool {
    draft.get(name).map(number) > Some(0.0)
}

/// Whether there is a disk tier besides what is shared.
fn has_disk(draft: &Draft<'_>) -> bool {
    draft
        .text("local_disk")
        .is_some_and(|folder| !folder.is_empty())
        && is_positive(draft, "max_local_disk_size")
}

/// The folder of the adapters `fs` and `fs_native`.
pub fn base_path(draft: &mut Draft<'_>, value: &Value) -> Fate {
    match of_adapter(draft, &["fs", "fs_native"]) {
        true => disk_folder(draft, value),
        false => OTHER_ADAPTER,
    }
}

pub fn disk_size(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let folder = draft.text("local_disk").unwrap_or_default();
    if folder.is_empty() || number(value) <= 0.0 {
        return Fate::Automatic("There is no disk tier without a folder and a size.");
    }
    let workers = f64::from(draft.options.workers);
    draft.set("disk.size", size(number(value) * workers))
}

pub fn serde(draft: &mut Draft<'_>, value: &Value) -> Fate {
    if shared(draft) == Shared::Other && !of_adapter(draft, &["fs", "fs_native"]) {
        return Fate::Automatic("It has no effect without a remote server.");
    }
    let lossy = !matches!(value.as_str(), Some("naive" | "torch"));
    if lossy && has_disk(draft) {
        return Fate::NotSupported(
            "A codec would change what local.disk holds, too, which LMCache keeps exact.",
        );
    }
    match value.as_str().unwrap_or_default() {
        "naive" | "torch" => draft.set("write.codec", "None"),
        "cachegen" => draft.set("write.codec", "CacheGen"),
        "fp8" => draft.set("write.codec", "FP8"),
        _ => Fate::NotSupported("Choose another write.codec."),
    }
}

/// The shared tier that LMCache uses.
#[derive(PartialEq, Eq)]
enum Shared {
    Redis,
    S3,
    Other,
}

fn shared(draft: &Draft<'_>) -> Shared {
    let address = draft.text("remote_url").unwrap_or_default();
    let scheme = address.split_once("://").map_or("", |(scheme, _)| scheme);
    let adapter = draft.text("spec.l2Backend.raw.type");
    match of_scheme(adapter.unwrap_or(scheme)) {
        Shared::Other if draft.text("spec.l2Backend.resp.host").is_some() => Shared::Redis,
        shared => shared,
    }
}

/// The shared tier of a scheme of `remote_url`, or of a type of an adapter.
fn of_scheme(scheme: &str) -> Shared {
    match scheme {
        "redis" | "rediss" | "redis-sentinel" | "redis-cluster" | "resp" | "valkey" => {
            Shared::Redis
        }
        "s3" => Shared::S3,
        _ => Shared::Other,
    }
}

const OTHER_ADAPTER: Fate =
    Fate::NotSupported("Use shared.redis, shared.fileSystem, shared.s3 or local.disk.");

/// Whether the adapter of an LMCacheEngine is one of these.
fn of_adapter(draft: &Draft<'_>, kinds: &[&str]) -> bool {
    draft
        .text("spec.l2Backend.raw.type")
        .is_some_and(|kind| kinds.contains(&kind))
}

pub fn remote_url(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let url = value.as_str().unwrap_or_default();
    if url.is_empty() {
        return Fate::Automatic("The key is empty.");
    }
    let Some((scheme, rest)) = url.split_once("://") else {
        return Fate::Bad("an address such as redis://host:6379 or s3://bucket".to_owned());
    };
    match (of_scheme(scheme), scheme) {
        (Shared::Redis, _) => redis::redis(draft, scheme, rest),
        (Shared::S3, _) => s3::bucket(draft, rest),
        (_, "unix") => Fate::NotSupported(
            "The sidecars of a pool reach Redis over the network: write a host in shared.redis.external.url.",
        ),
        (_, "lm") => Fate::NotSupported(
            "LMCache's own server is not used: let the operator run Valkey (shared.redis.managed).",
        ),
        (_, "fs") => Fate::NotSupported(
            "Write shared.fileSystem with a PersistentVolumeClaim, or local.disk for a folder of one pod.",
        ),
        _ => Fate::NotSupported("Use shared.redis, shared.fileSystem or shared.s3."),
    }
}

/// A key that is a part of the address of Redis.
pub fn in_address(draft: &mut Draft<'_>, _: &Value) -> Fate {
    match shared(draft) {
        Shared::Redis | Shared::S3 => Fate::Translated,
        Shared::Other => Fate::Automatic("It has no effect without a Redis or a bucket."),
    }
}

/// The type of the adapter of an LMCacheEngine.
pub fn adapter(_: &mut Draft<'_>, value: &Value) -> Fate {
    match value.as_str().unwrap_or_default() {
        "s3" | "valkey" | "resp" | "fs" | "fs_native" => {
            Fate::Automatic("The keys of config say which tier it is.")
        }
        _ => OTHER_ADAPTER,
    }
}

/// The capacity of an adapter: that of the bucket, or of the disk.
pub fn capacity(draft: &mut Draft<'_>, value: &Value) -> Fate {
    if number(value) <= 0.0 {
        return Fate::Automatic("There is no limit.");
    }
    match draft.text("spec.l2Backend.raw.type") {
        Some("s3") => draft.set("s3.capacity", size(number(value))),
        Some("fs" | "fs_native") if draft.text("base_path").unwrap_or_default().is_empty() => {
            Fate::Automatic("There is no disk tier without a folder.")
        }
        Some("fs" | "fs_native") => {
            let pods = f64::from(draft.options.pods_per_node);
            draft.set("disk.size", size(number(value) / pods))
        }
        _ => Fate::NotSupported("Set maxmemory of the server."),
    }
}

pub fn vendor(_: &mut Draft<'_>, value: &Value) -> Fate {
    match value.as_str() {
        Some("nvidia") => Fate::Automatic("The sidecar needs no GPU while vLLM's worker copies."),
        _ => Fate::NotSupported("GPUs other than NVIDIA's are not served."),
    }
}

pub fn container(draft: &mut Draft<'_>, value: &Value) -> Fate {
    draft.set(
        "spec.injection.container",
        value.as_str().unwrap_or_default(),
    )
}
