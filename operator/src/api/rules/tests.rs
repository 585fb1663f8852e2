//! Both sides of every rule: the CEL that the API server evaluates and the function that `check` calls give the same verdict.

use super::{check, rules};
use crate::api::{KVCachePool, Reason, crd};
use kube::core::cel::cel::{
    Context, Program, Value,
    extractors::This,
    objects::{Key, Map},
};
use kube::core::cel::{KubeCelExt, apply_defaults};
use serde_json::{Value as Json, json};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

const SIZE: &str = "write a size from 64Mi to 16Ti, such as 64Gi, 512Mi or 65536 (bytes)";
const LEAST_MEMORY: u64 = 64 << 20;
const MOST_MEMORY: u64 = 16 << 40;

/// The smallest pool, with every section that rules are about.
fn pool() -> Json {
    json!({
        "apiVersion": "kvcachepool.io/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": "llama", "namespace": "serving"},
        "spec": {"local": {"memory": {"perPod": "64Gi"}}},
    })
}

fn full() -> Json {
    let mut pool = pool();
    pool["spec"]["local"]["disk"] =
        json!({"perPod": "500Gi", "ephemeral": {"storageClassName": "nvme"}});
    pool["spec"]["shared"] = json!({
        "redis": {"external": {
            "url": "rediss://cache.example.com:6379",
            "auth": {"secretName": "redis"},
            "ca": {"name": "bundle"},
        }},
        "s3": {
            "bucket": "kv-cache", "endpoint": "https://s3.example.com", "prefix": "prod/llama", "capacity": "2Ti", "expireAfter": "168h",
            "auth": {"secretName": "s3"}, "ca": {"name": "bundle"},
        },
    });
    pool["spec"]["injection"] = json!({"container": "vllm", "memoryMax": "256Gi"});
    pool
}

fn managed() -> Json {
    let mut pool = full();
    pool["spec"]["shared"]["redis"] =
        json!({"managed": {"memoryPerShard": "16Gi", "priorityClassName": "cache"}});
    pool
}

fn set(mut pool: Json, path: &str, value: Json) -> Json {
    let mut at = &mut pool;
    for name in path.split('.') {
        at = &mut at[name];
    }
    *at = value;
    pool
}

fn schema() -> Json {
    let crd = serde_json::to_value(crd()).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

fn broken_for_operator(pool: &Json) -> BTreeSet<(String, String)> {
    let pool: KVCachePool = serde_json::from_value(pool.clone()).unwrap();
    let invalid = |p: &super::Problem| p.reason == Reason::InvalidSpec;
    let problems = check(&pool).into_iter().filter(invalid);
    problems.map(|p| (p.field, p.message)).collect()
}

fn broken_for_server(schema: &Json, pool: &Json) -> BTreeSet<(String, String)> {
    let pool = apply_defaults(schema, pool);
    let broken = rules().iter().filter(|rule| {
        let of_a_change = rule.cel.contains("oldSelf");
        let here = rule.at.split('.').filter(|name| !name.is_empty());
        let here = here.into_iter().try_fold(&pool, |at, name| at.get(name));
        !of_a_change && here.is_some_and(|here| !evaluate(&rule.cel, here, None))
    });
    broken
        .map(|rule| (rule.at.to_string(), rule.message.clone()))
        .collect()
}

fn evaluate(rule: &str, here: &Json, before: Option<&Json>) -> bool {
    let mut context = Context::default().with_all();
    // The evaluator lacks `type`, which the API server has.
    context.add_function("type", |This(value): This<Value>| {
        Arc::new(value.type_of().to_string())
    });
    context.add_variable_from_value("int", "int".to_string());
    context.add_variable_from_value("self", cel_value(here));
    if let Some(before) = before {
        context.add_variable_from_value("oldSelf", cel_value(before));
    }
    let program = Program::compile(rule).unwrap_or_else(|e| panic!("{rule}: {e}"));
    match program.execute(&context) {
        Ok(Value::Bool(holds)) => holds,
        other => panic!("{rule} of {here}: {other:?}"),
    }
}

fn cel_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::Null,
        Json::Bool(b) => Value::Bool(*b),
        Json::Number(n) => n.as_i64().map_or(Value::Float(f64::NAN), Value::Int),
        Json::String(s) => Value::String(Arc::new(s.clone())),
        Json::Array(items) => Value::List(Arc::new(items.iter().map(cel_value).collect())),
        Json::Object(fields) => {
            let pairs = fields
                .iter()
                .map(|(k, v)| (Key::String(Arc::new(k.clone())), cel_value(v)));
            Value::Map(Map {
                map: Arc::new(pairs.collect::<HashMap<_, _>>()),
            })
        }
    }
}

/// Pool, field, values that it takes, values that it does not take, what is said then.
type Case = (
    fn() -> Json,
    &'static str,
    Vec<Json>,
    Vec<Json>,
    &'static str,
);

fn cases() -> Vec<Case> {
    let name = "write the name of an object: lower-case letters, digits, - and ., a letter or digit at both ends";
    let http =
        "write a scheme and a host, such as https://s3.example.com or http://minio.storage:9000";
    vec![
        (
            pool,
            "metadata.name",
            vec![json!("a"), json!("llama-70b"), json!("a".repeat(40))],
            vec![
                json!("a".repeat(41)),
                json!("a.b"),
                json!("kvcachepool-canary"),
            ],
            "write a metadata.name of at most 40 lower-case letters, digits and -, a letter or digit at both ends, other than kvcachepool-canary",
        ),
        (
            pool,
            "spec.cache.chunkTokens",
            vec![json!(1), json!(65_536)],
            vec![json!(0), json!(-1), json!(65_537), json!(i64::MAX)],
            "write a whole number from 1 to 65536",
        ),
        (
            pool,
            "spec.cache.minLoadTokens",
            vec![json!(0), json!(1_000_000_000)],
            vec![json!(-1), json!(1_000_000_001)],
            "write a whole number from 0 to 1000000000",
        ),
        (
            pool,
            "spec.cache.loadTimeout",
            vec![json!("1ms"), json!("1h"), json!("59m60s"), json!("00060m")],
            vec![
                json!(""),
                json!("0s"),
                json!("1h1ms"),
                json!("61m"),
                json!("1d"),
                json!("2"),
                json!("-1s"),
                json!("1.5s"),
                json!("1s1m"),
                json!("1s1s"),
                json!("000001s"),
                json!(" 1s"),
                json!("1s "),
                json!("s"),
                json!("99999h99999m99999s99999ms"),
                json!("1S"),
            ],
            "write a time from 1ms to 1h, such as 250ms, 2s, 10m or 24h",
        ),
        (
            pool,
            "spec.local.memory.perPod",
            vec![
                json!("64Mi"),
                json!("16Ti"),
                json!("1G"),
                json!("100000k"),
                json!("0064Gi"),
                json!(LEAST_MEMORY),
                json!(MOST_MEMORY),
                json!(LEAST_MEMORY.to_string()),
                json!("17592186044416"),
            ],
            vec![
                json!(""),
                json!("lots"),
                json!("63Mi"),
                json!("17Ti"),
                json!("1.5Gi"),
                json!("-1Gi"),
                json!("64 Gi"),
                json!("64gi"),
                json!("64GiB"),
                json!("1e9"),
                json!("1Pi"),
                json!("64Mi "),
                json!(0),
                json!(-1),
                json!(LEAST_MEMORY - 1),
                json!(MOST_MEMORY + 1),
                json!("67108863"),
                json!("17592186044417"),
                json!("99999999999999999Ti"),
            ],
            SIZE,
        ),
        (
            full,
            "spec.local.disk.perPod",
            vec![json!("1Gi"), json!("1024Ti")],
            vec![json!("1023Mi"), json!("1025Ti"), json!("much")],
            "write a size from 1Gi to 1024Ti, such as 64Gi, 512Mi or 65536 (bytes)",
        ),
        (
            full,
            "spec.local.disk.ephemeral.storageClassName",
            vec![json!("nvme"), json!("a.b-c")],
            vec![json!(""), json!("Nvme"), json!("-a"), json!("a-")],
            name,
        ),
        (
            managed,
            "spec.shared.redis.managed.shards",
            vec![json!(1), json!(256)],
            vec![json!(0), json!(257)],
            "write a whole number from 1 to 256",
        ),
        (
            managed,
            "spec.shared.redis.managed.memoryPerShard",
            vec![json!("64Mi")],
            vec![json!("1Mi")],
            SIZE,
        ),
        (
            managed,
            "spec.shared.redis.managed.priorityClassName",
            vec![json!(""), json!("cache")],
            vec![json!("Cache")],
            name,
        ),
        (
            full,
            "spec.shared.redis.external.url",
            vec![
                json!("redis://a"),
                json!("rediss://a:6379/0"),
                json!("redis://[::1]:6379"),
                json!("redis://a/1234"),
            ],
            vec![
                json!(""),
                json!("a:6379"),
                json!("http://a"),
                json!("redis://"),
                json!("redis://u:p@a"),
                json!("redis://a/b"),
                json!("redis://a/"),
                json!("redis://a/12345"),
                json!("redis://a/0/1"),
                json!("redis://a?b"),
            ],
            "write redis:// or rediss:// and a host, such as rediss://cache.example.com:6379; user and password stand in the Secret of auth",
        ),
        (
            full,
            "spec.shared.redis.external.auth.secretName",
            vec![json!("a")],
            vec![json!(""), json!("A")],
            name,
        ),
        (
            full,
            "spec.shared.redis.external.ca.name",
            vec![json!("a")],
            vec![json!(""), json!("A")],
            name,
        ),
        (
            full,
            "spec.shared.redis.ttl",
            vec![json!("1s"), json!("8760h")],
            vec![json!("999ms"), json!("8761h"), json!("forever")],
            "write a time from 1s to 8760h, such as 250ms, 2s, 10m or 24h",
        ),
        (
            full,
            "spec.shared.s3.bucket",
            vec![json!("abc"), json!("A_b.c-d"), json!("a".repeat(255))],
            vec![
                json!(""),
                json!("ab"),
                json!("-abc"),
                json!("s3://abc"),
                json!("a b c"),
            ],
            "write the name of a bucket: 3 to 255 letters, digits, -, . and _, a letter or digit at both ends",
        ),
        (
            full,
            "spec.shared.s3.endpoint",
            vec![json!(""), json!("http://a:9000"), json!("https://a/")],
            vec![
                json!("a"),
                json!("https://"),
                json!("https:///"),
                json!("https://a/b"),
                json!("https://u@a"),
                json!("https://a//"),
                json!("ftp://a"),
            ],
            http,
        ),
        (
            full,
            "spec.shared.s3.prefix",
            vec![json!(""), json!("a"), json!("a/b=c/d_e.f")],
            vec![
                json!("/a"),
                json!("a/"),
                json!("a//b"),
                json!("a b"),
                json!("é"),
            ],
            "write names joined by /, without one at the ends, of letters, digits, -, ., _ and =",
        ),
        (
            full,
            "spec.shared.s3.auth.secretName",
            vec![json!("a")],
            vec![json!("")],
            name,
        ),
        (
            full,
            "spec.shared.s3.ca.name",
            vec![json!("a")],
            vec![json!("")],
            name,
        ),
        (
            full,
            "spec.shared.s3.maxConcurrency",
            vec![json!(1), json!(1_024)],
            vec![json!(0), json!(1_025)],
            "write a whole number from 1 to 1024",
        ),
        (
            full,
            "spec.shared.s3.capacity",
            vec![json!("1Gi"), json!("1048576Ti")],
            vec![json!("1Mi"), json!("1048577Ti")],
            "write a size from 1Gi to 1048576Ti, such as 64Gi, 512Mi or 65536 (bytes)",
        ),
        (
            full,
            "spec.shared.s3.expireAfter",
            vec![json!("1h"), json!("8760h")],
            vec![json!("59m"), json!("8761h")],
            "write a time from 1h to 8760h, such as 250ms, 2s, 10m or 24h",
        ),
        (
            full,
            "spec.injection.container",
            vec![json!(""), json!("vllm-0")],
            vec![json!("vllm.0"), json!("VLLM"), json!("-")],
            "write the name of a container: lower-case letters, digits and -, a letter or digit at both ends",
        ),
        (
            full,
            "spec.injection.memoryMax",
            vec![json!("64Gi"), json!("16Ti")],
            vec![json!("17Ti")],
            SIZE,
        ),
    ]
}

#[test]
fn values_at_their_limits_are_taken_by_both_sides() {
    let schema = schema();
    for (pool, at, good, _, _) in cases() {
        for value in good {
            let pool = set(pool(), at, value.clone());
            assert_eq!(broken_for_operator(&pool), BTreeSet::new(), "{at}: {value}");
            assert_eq!(
                broken_for_server(&schema, &pool),
                BTreeSet::new(),
                "{at}: {value}"
            );
        }
    }
}

#[test]
fn values_past_their_limits_are_refused_by_both_sides_with_the_same_message() {
    let schema = schema();
    let mut refused = BTreeSet::new();
    for (pool, at, _, bad, message) in cases() {
        for value in bad {
            let pool = set(pool(), at, value.clone());
            let at = if at == "metadata.name" { "" } else { at };
            let expected = (at.to_string(), message.to_string());
            let [operator, server] = [
                broken_for_operator(&pool),
                broken_for_server(&schema, &pool),
            ];
            assert!(operator.contains(&expected), "{at}: {value}: {operator:?}");
            assert!(server.contains(&expected), "{at}: {value}: {server:?}");
            refused.insert(expected);
        }
    }
    let untested: Vec<_> = rules()
        .iter()
        .map(|rule| (rule.at.to_string(), rule.message.clone()))
        .filter(|rule| !refused.contains(rule) && !TOGETHER.contains(&rule.0.as_str()))
        .collect();
    assert_eq!(untested, []);
}

/// Rules that speak of several fields, and fields that bound one another; the tests below are theirs.
const TOGETHER: [&str; 6] = [
    "spec.local.disk",
    "spec.shared.s3.evictAtPercent",
    "spec.shared.s3.evictToPercent",
    "spec.shared.redis",
    "spec.shared.s3",
    "spec",
];

fn refused(pool: &Json, at: &str, message: &str) {
    let expected = BTreeSet::from([(at.to_string(), message.to_string())]);
    assert_eq!(broken_for_operator(pool), expected, "{pool}");
    assert_eq!(broken_for_server(&schema(), pool), expected, "{pool}");
}

#[test]
fn a_union_takes_exactly_one_of_its_fields() {
    let disk = "write exactly one of emptyDir and ephemeral";
    for empty in [
        json!({"perPod": "1Gi"}),
        json!({"perPod": "1Gi", "emptyDir": {}, "ephemeral": {"storageClassName": "a"}}),
    ] {
        refused(
            &set(full(), "spec.local.disk", empty),
            "spec.local.disk",
            disk,
        );
    }
    let redis = "write exactly one of managed and external";
    for empty in [
        json!({}),
        json!({"managed": {"memoryPerShard": "1Gi"}, "external": {"url": "redis://a"}}),
    ] {
        refused(
            &set(full(), "spec.shared.redis", empty),
            "spec.shared.redis",
            redis,
        );
    }
}

#[test]
fn values_that_depend_on_each_other_are_compared() {
    let order = "write an evictToPercent below evictAtPercent";
    refused(
        &set(full(), "spec.shared.s3.evictToPercent", json!(90)),
        "spec.shared.s3",
        order,
    );
    let most = "write an injection.memoryMax that is at least local.memory.perPod";
    for less in [
        json!("63Gi"),
        json!((64u64 << 30) - 1),
        json!("68719476735"),
    ] {
        refused(&set(full(), "spec.injection.memoryMax", less), "spec", most);
    }
    let percent = "write a whole number from 1 to 100";
    for (field, value) in [("evictAtPercent", 101), ("evictToPercent", 0)] {
        let at = format!("spec.shared.s3.{field}");
        refused(&set(full(), &at, json!(value)), &at, percent);
    }
}

#[test]
fn managed_and_external_redis_are_not_exchanged_in_one_step() {
    let rule = rules()
        .iter()
        .find(|rule| rule.cel.contains("oldSelf"))
        .unwrap();
    assert_eq!(rule.at, "spec.shared.redis");
    assert!(rule.message.contains("remove spec.shared.redis, apply"));
    let [external, managed] =
        [full(), managed()].map(|pool| pool["spec"]["shared"]["redis"].clone());
    assert!(evaluate(&rule.cel, &external, Some(&external)));
    assert!(evaluate(&rule.cel, &managed, Some(&managed)));
    assert!(!evaluate(&rule.cel, &managed, Some(&external)));
    assert!(!evaluate(&rule.cel, &external, Some(&managed)));
}

#[test]
fn fields_of_later_versions_are_named_and_break_no_rule() {
    let later = [
        (
            "spec.local.disk",
            json!({"perPod": "1Gi", "emptyDir": {}}),
            "remove the field",
        ),
        (
            "spec.shared.redis",
            json!({"external": {"url": "redis://a"}}),
            "remove the field",
        ),
        (
            "spec.shared.s3",
            json!({"bucket": "abc"}),
            "remove the field",
        ),
        (
            "spec.write.policy",
            json!("WriteBack"),
            "write WriteThrough",
        ),
        ("spec.write.admission", json!("Reused"), "write All"),
        ("spec.write.codec", json!("FP8"), "write None"),
        ("spec.sidecar.transfer", json!("CudaWindow"), "write Auto"),
        (
            "spec.sidecar.gpuAccess",
            json!("VisibleDevices"),
            "write None",
        ),
        ("spec.deletionPolicy", json!("Delete"), "write Retain"),
    ];
    for (at, value, instead) in later {
        let pool = set(pool(), at, value);
        assert_eq!(broken_for_server(&schema(), &pool), BTreeSet::new());
        let problems = check(&serde_json::from_value(pool).unwrap());
        let [problem] = problems.as_slice() else {
            panic!("{at}: {problems:?}")
        };
        assert_eq!(
            (problem.reason, problem.field.as_str()),
            (Reason::NotYetSupported, at)
        );
        assert!(problem.message.ends_with(instead), "{problem}");
    }
}

#[test]
fn the_smallest_pool_is_accepted() {
    let pool: KVCachePool = serde_json::from_value(pool()).unwrap();
    assert_eq!(check(&pool), []);
}
