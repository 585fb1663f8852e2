//! The table of rules.

use super::Rule;
use super::sidecar::{self, QUALIFIED_NAME, SUBDOMAIN};
use crate::api::{Duration, ManagedRedis, RedisMode, S3, Size};
use crate::forms::{is_qualified, within};
use crate::names;
use kvcachepool_protocol::config::{
    self, AddressingStyle, ByteSize, Form, PoolKey, SERVERS, Values, pool_keys,
};
use std::ops::RangeInclusive;

const MI: u64 = 1 << 20;
const TI: u64 = 1 << 40;
const HOUR_MS: u64 = 3_600_000;
/// Smallest number of shards of a cluster, whose masters agree by majority that one is lost.
const CLUSTER_SHARDS: i64 = 3;
/// Maximum replicas of a shard.
const REPLICAS: u64 = 3;
/// Longest key of a label or annotation.
const KEY_BYTES: usize = 240;
/// Longest name of a pool. Names of its objects add a prefix, a suffix and what Kubernetes appends.
const POOL_NAME_CHARS: usize = 40;

/// The name of an object: a DNS subdomain.
pub(super) const NAME: Form = Form {
    pattern: "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
    write: "the name of an object: lower-case letters, digits, - and ., a letter or digit at both ends",
    matches: |text| within(text, u8::is_ascii_lowercase, b"-."),
};
/// The name of a container: a DNS label.
const LABEL: Form = Form {
    pattern: "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    write: "the name of a container: lower-case letters, digits and -, a letter or digit at both ends",
    matches: |text| within(text, u8::is_ascii_lowercase, b"-"),
};
/// The address of a Redis.
const REDIS_URL: Form = Form {
    pattern: "^(rediss?://[^/ @?#,]+(/[0-9]{1,4})?|(redis-cluster://[^/ @?#]+|redis-sentinel://[^/ @?#]+/[-a-zA-Z0-9._]+)([?]tls=true)?)$",
    write: "redis:// or rediss:// and a host, such as rediss://cache.example.com:6379, redis-cluster://host,host or redis-sentinel://host,host/name, \
            the latter two with ?tls=true appended for TLS; user and password belong into the Secret of auth",
    matches: redis_url,
};

pub(super) fn rules() -> Vec<Rule> {
    let mut rules = vec![pool_name()];
    rules.extend(pool_keys().iter().filter_map(of_key));
    rules.extend(local());
    rules.extend(redis());
    rules.extend(file_system());
    rules.extend(s3());
    rules.extend(pods());
    rules.extend(monitoring());
    rules.extend(sidecar::rules());
    rules
}

/// The rule of a field that sets a key of the sidecar's config.
pub(in crate::api) fn of_key(set: &PoolKey) -> Option<Rule> {
    match &set.values {
        Values::Size(bytes) => Some(size(set.field, bytes.clone())),
        Values::Time(ms) => Some(time(set.field, ms.clone())),
        Values::Number(numbers) => Some(number(set.field, numbers.clone())),
        Values::Text(form) if set.required => Some(text(set.field, form)),
        Values::Text(form) => Some(optional_text(set.field, form)),
        Values::Choice(_) | Values::Other => None,
    }
}

/// The range of a field that sets this key of the sidecar's config.
fn size_of(key: &str) -> RangeInclusive<u64> {
    let set = pool_keys().iter().find(|set| set.key == key);
    match set.map(|set| &set.values) {
        Some(Values::Size(bytes)) => bytes.clone(),
        _ => 0..=0,
    }
}

fn local() -> Vec<Rule> {
    vec![
        one_of("spec.local.disk", ["emptyDir", "ephemeral"]),
        text("spec.local.disk.ephemeral.storageClassName", &NAME),
    ]
}

fn redis() -> Vec<Rule> {
    const AT: &str = "spec.shared.redis";
    vec![
        one_of(AT, ["managed", "external"]),
        Rule {
            at: AT,
            cel: "has(self.managed) == has(oldSelf.managed)".to_string(),
            message: "managed and external cannot be exchanged in one step, because the objects in the old servers are lost: \
                      remove spec.shared.redis, apply, then add it again"
                .to_string(),
            // Applies to changes only, and a stored object does not show one.
            holds: Box::new(|_, _| true),
        },
        number("spec.shared.redis.managed.shards", 1..=SERVERS as u64),
        number("spec.shared.redis.managed.replicasPerShard", 0..=REPLICAS),
        size("spec.shared.redis.managed.memoryPerShard", 64 * MI..=16 * TI),
        of_managed(
            "self.mode == oldSelf.mode".to_string(),
            "mode cannot be changed, because the objects in the old servers are lost: remove spec.shared.redis, apply, then add it again"
                .to_string(),
            // Applies to changes only, as above.
            |_| true,
        ),
        of_managed(
            format!("self.mode != 'Cluster' || self.shards >= {CLUSTER_SHARDS}"),
            format!(
                "write at least {CLUSTER_SHARDS} shards with mode Cluster, whose servers agree by majority that one is lost"
            ),
            |redis| redis.mode != RedisMode::Cluster || redis.shards >= CLUSTER_SHARDS,
        ),
        of_managed(
            "self.mode == 'Cluster' || self.replicasPerShard <= 0".to_string(),
            "write replicasPerShard with mode Cluster only: standalone servers have no replicas"
                .to_string(),
            |redis| redis.mode == RedisMode::Cluster || redis.replicas_per_shard <= 0,
        ),
        of_managed(
            format!(
                "self.replicasPerShard <= 0 || self.shards <= {SERVERS} / (1 + self.replicasPerShard)"
            ),
            format!("write shards and replicasPerShard for at most {SERVERS} servers together"),
            |redis| {
                redis.replicas_per_shard <= 0
                    || redis.shards <= SERVERS as i64 / redis.replicas_per_shard.saturating_add(1)
            },
        ),
        size(
            "spec.shared.redis.managed.persistence.size",
            128 * MI..=64 * TI,
        ),
        optional_text(
            "spec.shared.redis.managed.persistence.storageClassName",
            &NAME,
        ),
        time(
            "spec.shared.redis.managed.persistence.snapshotInterval",
            60_000..=24 * HOUR_MS,
        ),
        of_managed(
            "self.mode != 'Cluster' || !has(self.persistence)".to_string(),
            "write persistence with mode Standalone only: a server of a cluster that starts again gets its chunks from its replicas".to_string(),
            |redis| redis.mode != RedisMode::Cluster || redis.persistence.is_none(),
        ),
        of_managed(
            format!(
                "!has(self.persistence) || {} >= 2.0 * {}",
                float("self.persistence.size"),
                float("self.memoryPerShard")
            ),
            "write a persistence.size of at least twice memoryPerShard, because the volume holds the last snapshot beside the next one".to_string(),
            |redis| {
                let bytes = |size: &Size| size.bytes().map_or(0, |bytes| bytes.0);
                let volume = redis.persistence.as_ref().map(|one| bytes(&one.size));
                volume.is_none_or(|volume| volume / 2 >= bytes(&redis.memory_per_shard))
            },
        ),
        of_managed(
            "has(self.persistence) == has(oldSelf.persistence) && (!has(self.persistence) || \
             self.persistence.size == oldSelf.persistence.size && \
             self.persistence.storageClassName == oldSelf.persistence.storageClassName)"
                .to_string(),
            "persistence cannot be changed except for its snapshotInterval, because Kubernetes does not replace the volumes of running servers: \
             remove spec.shared.redis, apply, then add it again"
                .to_string(),
            // Applies to changes only, as above.
            |_| true,
        ),
        optional_text("spec.shared.redis.managed.priorityClassName", &NAME),
        pod_keys("spec.shared.redis.managed.metadata.labels"),
        Rule {
            at: "spec.shared.redis.managed.metadata.labels",
            cel: format!("self.all(k, self[k] == '' || self[k].matches('^{QUALIFIED_NAME}$'))"),
            message: "write values of letters, digits, -, _ and ., a letter or digit at both ends".to_string(),
            holds: Box::new(|_, labels| {
                let mut labels = labels.as_object().into_iter().flatten();
                labels.all(|(_, value)| {
                    let value = value.as_str().unwrap_or_default();
                    value.is_empty() || !value.contains('/') && is_qualified(value)
                })
            }),
        },
        pod_keys("spec.shared.redis.managed.metadata.annotations"),
        one_of("spec.shared.redis.external", ["url", "urls"]),
        text("spec.shared.redis.external.url", &REDIS_URL),
        Rule {
            at: "spec.shared.redis.external.urls",
            cel: format!("self.all(v, v.matches('{}'))", REDIS_URL.pattern),
            message: format!("write {}", REDIS_URL.write),
            holds: Box::new(|_, urls| {
                let mut urls = urls.as_array().into_iter().flatten();
                urls.all(|url| url.as_str().is_some_and(redis_url))
            }),
        },
        text("spec.shared.redis.external.auth.secretName", &NAME),
        text("spec.shared.redis.external.ca.name", &NAME),
        text(
            "spec.shared.redis.external.clientCertificate.secretName",
            &NAME,
        ),
    ]
}

/// The keys of a pod's labels or annotations.
fn pod_keys(at: &'static str) -> Rule {
    const OWN: [&str; 2] = ["kvcachepool.io/", "app.kubernetes.io/"];
    let [a, b] = OWN;
    Rule {
        at,
        cel: format!(
            "self.all(k, k.size() <= {KEY_BYTES} && k.matches('^({SUBDOMAIN}/)?{QUALIFIED_NAME}$') && \
             !k.startsWith('{a}') && !k.startsWith('{b}'))"
        ),
        message: format!("write keys such as team or example.com/team, none below {a} or {b}"),
        holds: Box::new(|_, keys| {
            let mut keys = keys.as_object().into_iter().flatten();
            keys.all(|(key, _)| {
                let own = OWN.iter().any(|own| key.starts_with(own));
                key.len() <= KEY_BYTES && is_qualified(key) && !own
            })
        }),
    }
}

/// A rule of the managed servers as a whole.
fn of_managed(cel: String, message: String, holds: fn(&ManagedRedis) -> bool) -> Rule {
    Rule {
        at: "spec.shared.redis.managed",
        cel,
        message,
        holds: Box::new(move |pool, _| {
            let redis = pool.spec.shared.redis.as_ref();
            redis
                .and_then(|redis| redis.managed.as_ref())
                .is_none_or(holds)
        }),
    }
}

fn file_system() -> Vec<Rule> {
    vec![
        text(
            "spec.shared.fileSystem.persistentVolumeClaim.claimName",
            &NAME,
        ),
        Rule {
            at: "spec.shared.fileSystem",
            cel: "self.evictToPercent < self.evictAtPercent".to_string(),
            message: "write an evictToPercent below evictAtPercent".to_string(),
            holds: Box::new(|pool, _| {
                let folder = pool.spec.shared.file_system.as_ref();
                folder.is_none_or(|folder| folder.evict_to_percent < folder.evict_at_percent)
            }),
        },
    ]
}

fn s3() -> Vec<Rule> {
    const AT: &str = "spec.shared.s3";
    vec![
        text("spec.shared.s3.auth.secretName", &NAME),
        text("spec.shared.s3.ca.name", &NAME),
        Rule {
            at: AT,
            cel: "self.evictToPercent < self.evictAtPercent".to_string(),
            message: "write an evictToPercent below evictAtPercent".to_string(),
            holds: Box::new(|pool, _| {
                let s3 = pool.spec.shared.s3.as_ref();
                s3.is_none_or(|s3| s3.evict_to_percent < s3.evict_at_percent)
            }),
        },
        Rule {
            at: AT,
            cel: "!has(self.accelerate) || !self.accelerate || \
                  (!has(self.endpoint) || self.endpoint == '') && self.addressingStyle != 'Path' && !self.bucket.matches('[.]|--x-s3$')"
                .to_string(),
            message: "write accelerate: true for buckets of AWS alone: without an endpoint, with an addressingStyle other than Path, \
                      and neither a dot nor a zone in the bucket's name"
                .to_string(),
            holds: Box::new(|pool, _| {
                let s3 = pool.spec.shared.s3.as_ref();
                s3.is_none_or(|s3| !s3.accelerate || can_be_accelerated(s3))
            }),
        },
    ]
}

/// The Transfer Acceleration endpoint requires the bucket's name in the host, and does not support directory buckets.
fn can_be_accelerated(s3: &S3) -> bool {
    let in_host = s3.addressing_style != AddressingStyle::Path && !s3.bucket.contains('.');
    s3.endpoint.is_empty() && in_host && !s3.bucket.ends_with("--x-s3")
}

fn pods() -> Vec<Rule> {
    vec![
        optional_text("spec.injection.container", &LABEL),
        size("spec.injection.memoryMax", size_of("memory.size")),
        Rule {
            at: "spec",
            cel: format!(
                "!has(self.injection.memoryMax) || {} >= {}",
                float("self.injection.memoryMax"),
                float("self.local.memory.perPod")
            ),
            message: "write an injection.memoryMax that is at least local.memory.perPod"
                .to_string(),
            holds: Box::new(|pool, _| {
                let bytes = |size: &Size| size.bytes().ok();
                let least = bytes(&pool.spec.local.memory.per_pod);
                let most = pool.spec.injection.memory_max.as_ref();
                most.is_none_or(|most| bytes(most) >= least)
            }),
        },
    ]
}

fn monitoring() -> Vec<Rule> {
    const RANGE: RangeInclusive<u64> = 1_000..=24 * HOUR_MS;
    vec![
        time("spec.monitoring.podMonitor.interval", RANGE),
        time("spec.monitoring.podMonitor.scrapeTimeout", RANGE),
        Rule {
            at: "spec.monitoring.podMonitor",
            cel: "!has(self.interval) || !has(self.scrapeTimeout) || \
                  duration(self.scrapeTimeout) <= duration(self.interval)"
                .to_string(),
            message: "write a scrapeTimeout that is at most the interval".to_string(),
            holds: Box::new(|pool, _| {
                let monitor = pool.spec.monitoring.pod_monitor.as_ref();
                let times = monitor.and_then(|m| {
                    let (interval, timeout) = (m.interval.as_ref()?, m.scrape_timeout.as_ref()?);
                    Some((interval.time().ok()?.ms, timeout.time().ok()?.ms))
                });
                times.is_none_or(|(interval, timeout)| timeout <= interval)
            }),
        },
    ]
}

fn pool_name() -> Rule {
    let reserved = names::CANARY_POOL;
    Rule {
        at: "",
        cel: format!(
            "self.metadata.name.size() <= {POOL_NAME_CHARS} && self.metadata.name.matches('{}') && self.metadata.name != '{reserved}'",
            LABEL.pattern
        ),
        message: format!(
            "write a metadata.name of at most {POOL_NAME_CHARS} lower-case letters, digits and -, a letter or digit at both ends, other than {reserved}"
        ),
        holds: Box::new(move |pool, _| {
            let name = pool.metadata.name.as_deref().unwrap_or_default();
            name.len() <= POOL_NAME_CHARS && (LABEL.matches)(name) && name != reserved
        }),
    }
}

fn number(at: &'static str, range: RangeInclusive<u64>) -> Rule {
    let (least, most) = (*range.start(), *range.end());
    Rule {
        at,
        cel: format!("self >= {least} && self <= {most}"),
        message: format!("write a whole number from {least} to {most}"),
        holds: Box::new(move |_, number| number.as_u64().is_some_and(|n| range.contains(&n))),
    }
}

/// Those of these examples that a rule accepts, as a part of its message.
fn examples(all: &[&'static str], accepts: impl Fn(&str) -> bool) -> String {
    let accepted: Vec<_> = all.iter().copied().filter(|one| accepts(one)).collect();
    match accepted.as_slice() {
        [] => String::new(),
        [one] => format!(", such as {one}"),
        [rest @ .., last] => format!(", such as {} or {last}", rest.join(", ")),
    }
}

fn size(at: &'static str, range: RangeInclusive<u64>) -> Rule {
    let (least, most) = (ByteSize(*range.start()), ByteSize(*range.end()));
    let accepts = move |text: &str| {
        let bytes = text.parse::<ByteSize>();
        bytes.is_ok_and(|bytes| range.contains(&bytes.0))
    };
    let examples = examples(&["64Gi", "512Mi", "68719476736"], &accepts);
    Rule {
        at,
        cel: format!(
            "type(self) == int ? self >= {} && self <= {} : self.matches('^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$') && \
             quantity(self).compareTo(quantity('{least}')) >= 0 && quantity(self).compareTo(quantity('{most}')) <= 0",
            least.0, most.0
        ),
        message: format!("write a size from {least} to {most}{examples} (bytes)"),
        holds: Box::new(move |_, size| size.as_str().is_some_and(&accepts)),
    }
}

/// The bytes of a size that another rule has validated.
fn float(size: &str) -> String {
    format!("(type({size}) == int ? double({size}) : quantity({size}).asApproximateFloat())")
}

fn time(at: &'static str, range: RangeInclusive<u64>) -> Rule {
    let ends = [*range.start(), *range.end()];
    let [first, last] = ends.map(|ms| format!("duration('{ms}ms')"));
    let accepts = move |text: &str| {
        let time = Duration(text.to_string()).time();
        time.is_ok_and(|time| range.contains(&time.ms))
    };
    let examples = examples(&["250ms", "2s", "10m", "24h", "720h"], &accepts);
    // In hours, because Kubernetes durations have no days.
    let [least, most] = ends.map(|ms| match ms % HOUR_MS {
        0 => format!("{}h", ms / HOUR_MS),
        _ => config::Duration::from_ms(ms).to_string(),
    });
    Rule {
        at,
        cel: format!(
            "self != '' && self.matches('^([0-9]{{1,5}}h)?([0-9]{{1,5}}m)?([0-9]{{1,5}}s)?([0-9]{{1,5}}ms)?$') && \
             duration(self) >= {first} && duration(self) <= {last}"
        ),
        message: format!("write a time from {least} to {most}{examples}"),
        holds: Box::new(move |_, time| time.as_str().is_some_and(&accepts)),
    }
}

/// A text of a format.
fn text(at: &'static str, form: &'static Form) -> Rule {
    Rule {
        at,
        cel: format!("self.matches('{}')", form.pattern),
        message: format!("write {}", form.write),
        holds: Box::new(|_, text| text.as_str().is_some_and(form.matches)),
    }
}

/// A text of a format, or an empty one, which counts as absent.
pub(super) fn optional_text(at: &'static str, form: &'static Form) -> Rule {
    Rule {
        at,
        cel: format!("self == '' || self.matches('{}')", form.pattern),
        message: format!("write {}", form.write),
        holds: Box::new(|_, text| {
            let text = text.as_str();
            text.is_some_and(|text| text.is_empty() || (form.matches)(text))
        }),
    }
}

/// Exactly one of two fields.
fn one_of(at: &'static str, [a, b]: [&'static str; 2]) -> Rule {
    Rule {
        at,
        cel: format!("has(self.{a}) != has(self.{b})"),
        message: format!("write exactly one of {a} and {b}"),
        holds: Box::new(move |_, section| section.get(a).is_some() != section.get(b).is_some()),
    }
}

fn host_of<'a>(text: &'a str, schemes: &[&str]) -> Option<&'a str> {
    schemes.iter().find_map(|scheme| text.strip_prefix(scheme))
}

fn redis_url(text: &str) -> bool {
    let of_several = text.strip_suffix("?tls=true").unwrap_or(text);
    if let Some(hosts) = of_several.strip_prefix("redis-cluster://") {
        return authority(hosts);
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    if let Some(rest) = of_several.strip_prefix("redis-sentinel://") {
        let parts = rest.split_once('/');
        return parts.is_some_and(|(hosts, name)| {
            authority(hosts) && !name.is_empty() && name.bytes().all(plain)
        });
    }
    host_of(text, &["redis://", "rediss://"]).is_some_and(|rest| {
        let (host, database) = rest.split_once('/').unwrap_or((rest, "0"));
        authority(host)
            && !host.contains(',')
            && (1..=4).contains(&database.len())
            && digits(database)
    })
}

fn authority(text: &str) -> bool {
    !text.is_empty() && !text.contains(['/', ' ', '@', '?', '#'])
}

fn digits(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit())
}
