//! The table of rules.

use super::{Rule, sidecar};
use crate::api::{AddressingStyle, Duration, KVCachePoolSpec, S3, Size};
use crate::names;
use kvcachepool_protocol::config::{self, ByteSize};
use std::ops::RangeInclusive;

const MI: u64 = 1 << 20;
const GI: u64 = 1 << 30;
const TI: u64 = 1 << 40;
const SECOND_MS: u64 = 1_000;
const HOUR_MS: u64 = 3_600 * SECOND_MS;
const YEAR_MS: u64 = 8_760 * HOUR_MS;
/// Longest name of a pool. Names of its objects add a prefix, a suffix and what Kubernetes appends.
const POOL_NAME_CHARS: usize = 40;

/// The name of an object: a DNS subdomain.
pub(super) const NAME: Form = Form {
    pattern: "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
    write: "write the name of an object: lower-case letters, digits, - and ., a letter or digit at both ends",
    matches: |text| name(text, b"-."),
};
/// The name of a container: a DNS label.
const LABEL: Form = Form {
    pattern: "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    write: "write the name of a container: lower-case letters, digits and -, a letter or digit at both ends",
    matches: |text| name(text, b"-"),
};
/// The name of a bucket.
const BUCKET: Form = Form {
    pattern: "^[a-z0-9][-a-z0-9.]{1,61}[a-z0-9]$",
    write: "write the name of a bucket: 3 to 63 lower-case letters, digits, - and ., a letter or digit at both ends",
    matches: |text| (3..=63).contains(&text.len()) && name(text, b"-."),
};
/// The name of a region.
const REGION: Form = Form {
    pattern: "^[-_a-zA-Z0-9]{1,64}$",
    write: "write a region such as us-east-1",
    matches: |text| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        (1..=64).contains(&text.len()) && text.bytes().all(plain)
    },
};
/// The address of an HTTP service.
const HTTP_URL: Form = Form {
    pattern: r"^https?://[-a-zA-Z0-9._:\\[\\]]{1,300}$",
    write: "write a scheme and a host, such as https://s3.example.com or http://minio.storage:9000",
    matches: |text| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:[]".contains(&b);
        host_of(text, &["http://", "https://"])
            .is_some_and(|host| (1..=300).contains(&host.len()) && host.bytes().all(plain))
    },
};
/// The address of a Redis.
const REDIS_URL: Form = Form {
    pattern: "^(rediss?://[^/ @?#,]+(/[0-9]{1,4})?|(redis-cluster://[^/ @?#]+|redis-sentinel://[^/ @?#]+/[-a-zA-Z0-9._]+)([?]tls=true)?)$",
    write: "write redis:// or rediss:// and a host, such as rediss://cache.example.com:6379, redis-cluster://host,host or redis-sentinel://host,host/name, \
            the latter two with ?tls=true appended for TLS; user and password belong into the Secret of auth",
    matches: redis_url,
};
/// A prefix of object names.
const PREFIX: Form = Form {
    pattern: "^[-a-zA-Z0-9._=]*[-a-zA-Z0-9_=][-a-zA-Z0-9._=]*(/[-a-zA-Z0-9._=]*[-a-zA-Z0-9_=][-a-zA-Z0-9._=]*)*$",
    write: "write names joined by /, without one at the ends, of letters, digits, -, ., _ and =, none of dots alone",
    matches: |text| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._=".contains(&b);
        text.split('/')
            .all(|part| part.bytes().all(plain) && part.bytes().any(|b| b != b'.'))
    },
};

/// The range that the sidecar accepts for this key of its config.
fn range(key: &str) -> RangeInclusive<u64> {
    config::range(key).unwrap_or(0..=0)
}

/// The same for a number of the API.
fn whole(key: &str) -> RangeInclusive<i64> {
    let range = range(key);
    range.start().cast_signed()..=range.end().cast_signed()
}

pub(super) fn rules() -> Vec<Rule> {
    let mut rules = vec![pool_name()];
    rules.extend(cache());
    rules.extend(local());
    rules.extend(redis());
    rules.extend(s3());
    rules.extend(pods());
    rules.extend(sidecar::rules());
    rules
}

fn cache() -> Vec<Rule> {
    vec![
        number("spec.cache.chunkTokens", whole("cache.chunkTokens"), |s| {
            Some(s.cache.chunk_tokens)
        }),
        number(
            "spec.cache.minLoadTokens",
            whole("cache.minLoadTokens"),
            |s| Some(s.cache.min_load_tokens),
        ),
        time("spec.cache.loadTimeout", range("cache.loadTimeout"), |s| {
            Some(&s.cache.load_timeout)
        }),
    ]
}

fn local() -> Vec<Rule> {
    vec![
        size("spec.local.memory.perPod", range("memory.size"), |s| {
            Some(&s.local.memory.per_pod)
        }),
        one_of("spec.local.disk", ["emptyDir", "ephemeral"], |s| {
            let disk = s.local.disk.as_ref()?;
            Some([disk.empty_dir.is_some(), disk.ephemeral.is_some()])
        }),
        size("spec.local.disk.perPod", GI..=16 * TI, |s| {
            Some(&s.local.disk.as_ref()?.per_pod)
        }),
        text("spec.local.disk.ephemeral.storageClassName", NAME, |s| {
            Some(
                &s.local
                    .disk
                    .as_ref()?
                    .ephemeral
                    .as_ref()?
                    .storage_class_name,
            )
        }),
    ]
}

fn redis() -> Vec<Rule> {
    const AT: &str = "spec.shared.redis";
    vec![
        one_of(AT, ["managed", "external"], |s| {
            let redis = s.shared.redis.as_ref()?;
            Some([redis.managed.is_some(), redis.external.is_some()])
        }),
        Rule {
            at: AT,
            cel: "has(self.managed) == has(oldSelf.managed)".to_string(),
            message: "managed and external cannot be exchanged in one step, because the objects in the old servers are lost: \
                      remove spec.shared.redis, apply, then add it again"
                .to_string(),
            // Applies to changes only, and a stored object does not show one.
            holds: Box::new(|_| true),
        },
        number("spec.shared.redis.managed.shards", 1..=256, |s| {
            Some(s.shared.redis.as_ref()?.managed.as_ref()?.shards)
        }),
        size(
            "spec.shared.redis.managed.memoryPerShard",
            64 * MI..=16 * TI,
            |s| Some(&s.shared.redis.as_ref()?.managed.as_ref()?.memory_per_shard),
        ),
        optional_text(
            "spec.shared.redis.managed.priorityClassName",
            NAME,
            |s| Some(&s.shared.redis.as_ref()?.managed.as_ref()?.priority_class_name),
        ),
        one_of("spec.shared.redis.external", ["url", "urls"], |s| {
            let external = s.shared.redis.as_ref()?.external.as_ref()?;
            Some([external.url.is_some(), !external.urls.is_empty()])
        }),
        text("spec.shared.redis.external.url", REDIS_URL, |s| {
            s.shared.redis.as_ref()?.external.as_ref()?.url.as_ref()
        }),
        Rule {
            at: "spec.shared.redis.external.urls",
            cel: format!("self.all(v, v.matches('{}'))", REDIS_URL.pattern),
            message: REDIS_URL.write.to_string(),
            holds: Box::new(|pool| {
                let redis = pool.spec.shared.redis.as_ref();
                let urls = redis.and_then(|redis| Some(&redis.external.as_ref()?.urls));
                urls.into_iter().flatten().all(|url| redis_url(url))
            }),
        },
        text("spec.shared.redis.external.auth.secretName", NAME, |s| {
            let external = s.shared.redis.as_ref()?.external.as_ref()?;
            Some(&external.auth.as_ref()?.secret_name)
        }),
        text("spec.shared.redis.external.ca.name", NAME, |s| {
            let external = s.shared.redis.as_ref()?.external.as_ref()?;
            Some(&external.ca.as_ref()?.name)
        }),
        time("spec.shared.redis.ttl", SECOND_MS..=YEAR_MS, |s| {
            Some(&s.shared.redis.as_ref()?.ttl)
        }),
    ]
}

fn s3() -> Vec<Rule> {
    vec![
        text("spec.shared.s3.bucket", BUCKET, |s| {
            Some(&s.shared.s3.as_ref()?.bucket)
        }),
        optional_text("spec.shared.s3.region", REGION, |s| {
            Some(&s.shared.s3.as_ref()?.region)
        }),
        optional_text("spec.shared.s3.endpoint", HTTP_URL, |s| {
            Some(&s.shared.s3.as_ref()?.endpoint)
        }),
        optional_text("spec.shared.s3.prefix", PREFIX, |s| {
            Some(&s.shared.s3.as_ref()?.prefix)
        }),
        text("spec.shared.s3.auth.secretName", NAME, |s| {
            Some(&s.shared.s3.as_ref()?.auth.as_ref()?.secret_name)
        }),
        text("spec.shared.s3.ca.name", NAME, |s| {
            Some(&s.shared.s3.as_ref()?.ca.as_ref()?.name)
        }),
        number("spec.shared.s3.maxConcurrency", whole("s3.maxConcurrency"), |s| {
            Some(s.shared.s3.as_ref()?.max_concurrency)
        }),
        size("spec.shared.s3.capacity", GI..=1024 * TI, |s| {
            s.shared.s3.as_ref()?.capacity.as_ref()
        }),
        number("spec.shared.s3.evictAtPercent", whole("s3.evictAtPercent"), |s| {
            Some(s.shared.s3.as_ref()?.evict_at_percent)
        }),
        number("spec.shared.s3.evictToPercent", whole("s3.evictToPercent"), |s| {
            Some(s.shared.s3.as_ref()?.evict_to_percent)
        }),
        Rule {
            at: "spec.shared.s3",
            cel: "self.evictToPercent < self.evictAtPercent".to_string(),
            message: "write an evictToPercent below evictAtPercent".to_string(),
            holds: Box::new(|pool| {
                let s3 = pool.spec.shared.s3.as_ref();
                s3.is_none_or(|s3| s3.evict_to_percent < s3.evict_at_percent)
            }),
        },
        Rule {
            at: "spec.shared.s3",
            cel: "!has(self.accelerate) || !self.accelerate || \
                  (!has(self.endpoint) || self.endpoint == '') && self.addressingStyle != 'Path' && !self.bucket.matches('[.]|--x-s3$')"
                .to_string(),
            message: "write accelerate: true for buckets of AWS alone: without an endpoint, with an addressingStyle other than Path, \
                      and neither a dot nor a zone in the bucket's name"
                .to_string(),
            holds: Box::new(|pool| {
                let s3 = pool.spec.shared.s3.as_ref();
                s3.is_none_or(|s3| !s3.accelerate || can_be_accelerated(s3))
            }),
        },
        time("spec.shared.s3.expireAfter", HOUR_MS..=YEAR_MS, |s| {
            s.shared.s3.as_ref()?.expire_after.as_ref()
        }),
    ]
}

/// The Transfer Acceleration endpoint requires the bucket's name in the host, and does not support directory buckets.
fn can_be_accelerated(s3: &S3) -> bool {
    let in_host = s3.addressing_style != AddressingStyle::Path && !s3.bucket.contains('.');
    s3.endpoint.is_empty() && in_host && !s3.bucket.ends_with("--x-s3")
}

fn pods() -> Vec<Rule> {
    vec![
        optional_text("spec.injection.container", LABEL, |s| {
            Some(&s.injection.container)
        }),
        size("spec.injection.memoryMax", 64 * MI..=16 * TI, |s| {
            s.injection.memory_max.as_ref()
        }),
        Rule {
            at: "spec",
            cel: format!(
                "!has(self.injection.memoryMax) || {} >= {}",
                float("self.injection.memoryMax"),
                float("self.local.memory.perPod")
            ),
            message: "write an injection.memoryMax that is at least local.memory.perPod"
                .to_string(),
            holds: Box::new(|pool| {
                let bytes = |size: &Size| size.bytes().ok();
                let least = bytes(&pool.spec.local.memory.per_pod);
                let most = pool.spec.injection.memory_max.as_ref();
                most.is_none_or(|most| bytes(most) >= least)
            }),
        },
    ]
}

/// A format of text.
pub(super) struct Form {
    pub(super) pattern: &'static str,
    pub(super) write: &'static str,
    pub(super) matches: fn(&str) -> bool,
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
        holds: Box::new(move |pool| {
            let name = pool.metadata.name.as_deref().unwrap_or_default();
            name.len() <= POOL_NAME_CHARS && (LABEL.matches)(name) && name != reserved
        }),
    }
}

fn number(
    at: &'static str,
    range: RangeInclusive<i64>,
    get: fn(&KVCachePoolSpec) -> Option<i64>,
) -> Rule {
    let (least, most) = (*range.start(), *range.end());
    Rule {
        at,
        cel: format!("self >= {least} && self <= {most}"),
        message: format!("write a whole number from {least} to {most}"),
        holds: Box::new(move |pool| get(&pool.spec).is_none_or(|n| range.contains(&n))),
    }
}

fn size(
    at: &'static str,
    range: RangeInclusive<u64>,
    get: fn(&KVCachePoolSpec) -> Option<&Size>,
) -> Rule {
    let (least, most) = (ByteSize(*range.start()), ByteSize(*range.end()));
    Rule {
        at,
        cel: format!(
            "type(self) == int ? self >= {} && self <= {} : self.matches('^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$') && \
             quantity(self).compareTo(quantity('{least}')) >= 0 && quantity(self).compareTo(quantity('{most}')) <= 0",
            least.0, most.0
        ),
        message: format!(
            "write a size from {least} to {most}, such as 64Gi, 512Mi or 65536 (bytes)"
        ),
        holds: Box::new(move |pool| {
            let bytes = get(&pool.spec).map(Size::bytes);
            bytes.is_none_or(|b| b.is_ok_and(|b| range.contains(&b.0)))
        }),
    }
}

/// The bytes of a size that another rule has validated.
fn float(size: &str) -> String {
    format!("(type({size}) == int ? double({size}) : quantity({size}).asApproximateFloat())")
}

fn time(
    at: &'static str,
    range: RangeInclusive<u64>,
    get: fn(&KVCachePoolSpec) -> Option<&Duration>,
) -> Rule {
    let ends = [*range.start(), *range.end()];
    let [first, last] = ends.map(|ms| format!("duration('{ms}ms')"));
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
        message: format!("write a time from {least} to {most}, such as 250ms, 2s, 10m or 24h"),
        holds: Box::new(move |pool| {
            let time = get(&pool.spec).map(Duration::time);
            time.is_none_or(|t| t.is_ok_and(|t| range.contains(&t.ms)))
        }),
    }
}

/// A text of a format.
fn text(at: &'static str, form: Form, get: fn(&KVCachePoolSpec) -> Option<&String>) -> Rule {
    Rule {
        at,
        cel: format!("self.matches('{}')", form.pattern),
        message: form.write.to_string(),
        holds: Box::new(move |pool| get(&pool.spec).is_none_or(|text| (form.matches)(text))),
    }
}

/// A text of a format, or an empty one, which counts as absent.
pub(super) fn optional_text(
    at: &'static str,
    form: Form,
    get: fn(&KVCachePoolSpec) -> Option<&String>,
) -> Rule {
    Rule {
        at,
        cel: format!("self == '' || self.matches('{}')", form.pattern),
        message: form.write.to_string(),
        holds: Box::new(move |pool| {
            get(&pool.spec).is_none_or(|text| text.is_empty() || (form.matches)(text))
        }),
    }
}

/// Exactly one of two fields.
fn one_of(
    at: &'static str,
    [a, b]: [&str; 2],
    get: fn(&KVCachePoolSpec) -> Option<[bool; 2]>,
) -> Rule {
    Rule {
        at,
        cel: format!("has(self.{a}) != has(self.{b})"),
        message: format!("write exactly one of {a} and {b}"),
        holds: Box::new(move |pool| get(&pool.spec).is_none_or(|[a, b]| a != b)),
    }
}

fn name(text: &str, inner: &[u8]) -> bool {
    let end = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(|b| end(*b))
        && bytes.last().is_some_and(|b| end(*b))
        && bytes.iter().all(|b| end(*b) || inner.contains(b))
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
