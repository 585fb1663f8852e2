//! Both sides of every rule: the CEL that the API server evaluates and the function that `check` calls give the same verdict.

use super::{check, rules};
use crate::api::{KVCachePool, Reason, crd};
use kube::core::cel::cel::{
    Context, Program, Value,
    extractors::This,
    objects::{Key, Map},
};
use kube::core::cel::{KubeCelExt, apply_defaults};
use serde::Deserialize;
use serde_json::{Value as Json, json};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock};

/// Test cases that are also used with a real API server.
#[derive(Deserialize)]
struct Table {
    specs: HashMap<String, Json>,
    cases: Vec<Case>,
}

/// Values of one field of one of the specs: accepted ones, and ones that violate exactly one rule.
#[derive(Deserialize)]
struct Case {
    spec: String,
    field: String,
    rule: String,
    message: String,
    good: Vec<Json>,
    bad: Vec<Json>,
}

fn table() -> Table {
    serde_json::from_str(include_str!("../../../tests/rules.json")).unwrap()
}

impl Table {
    fn pool(&self, spec: &str) -> Json {
        json!({
            "apiVersion": "kvcachepool.io/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": "llama", "namespace": "serving"},
            "spec": self.specs[spec],
        })
    }

    fn judged(&self, case: &Case, value: &Json) -> [Broken; 2] {
        let pool = set(self.pool(&case.spec), &case.field, value.clone());
        [broken_for_operator(&pool), broken_for_server(&pool)]
    }
}

/// Violated rules, by path and message.
type Broken = BTreeSet<(String, String)>;

fn set(mut pool: Json, path: &str, value: Json) -> Json {
    let mut at = &mut pool;
    for name in path.split('.') {
        at = &mut at[name];
    }
    *at = value;
    pool
}

static SCHEMA: LazyLock<Json> = LazyLock::new(|| {
    let crd = serde_json::to_value(crd()).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
});

fn broken_for_operator(pool: &Json) -> Broken {
    let pool: KVCachePool = serde_json::from_value(pool.clone()).unwrap();
    let invalid = |p: &super::Problem| p.reason == Reason::InvalidSpec;
    let problems = check(&pool).into_iter().filter(invalid);
    problems.map(|p| (p.field, p.message)).collect()
}

fn broken_for_server(pool: &Json) -> Broken {
    let pool = apply_defaults(&SCHEMA, pool);
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
    // The CEL evaluator lacks `type`, which the API server has.
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

#[test]
fn values_at_their_limits_are_accepted_by_both_sides() {
    let table = table();
    for case in &table.cases {
        for value in &case.good {
            let none = || BTreeSet::new();
            assert_eq!(
                table.judged(case, value),
                [none(), none()],
                "{}: {value}",
                case.field
            );
        }
    }
}

#[test]
fn values_past_their_limits_are_rejected_by_both_sides_with_the_same_message() {
    let table = table();
    let mut refused = BTreeSet::new();
    for case in &table.cases {
        for value in &case.bad {
            let expected = || BTreeSet::from([(case.rule.clone(), case.message.clone())]);
            assert_eq!(
                table.judged(case, value),
                [expected(), expected()],
                "{}: {value}",
                case.field
            );
            refused.extend(expected());
        }
    }
    let of_a_state = rules().iter().filter(|rule| !rule.cel.contains("oldSelf"));
    let untested: Vec<_> = of_a_state
        .map(|rule| (rule.at.to_string(), rule.message.clone()))
        .filter(|rule| !refused.contains(rule))
        .collect();
    assert_eq!(untested, []);
}

#[test]
fn every_example_in_a_message_is_accepted_by_both_sides() {
    let pool: KVCachePool = serde_json::from_value(table().pool("smallest")).unwrap();
    let mut tried = 0;
    // Of fields that are one text.
    for rule in rules().iter().filter(|r| r.cel.contains("self.matches(")) {
        let examples = rule.message.split_once("such as ").map_or("", |(_, e)| e);
        let examples = examples.trim_end_matches(" (bytes)").split(", ");
        let examples = examples.flat_map(|e| e.split(" or "));
        // The others explain an example.
        for example in examples.filter(|e| !e.is_empty() && !e.contains(' ')) {
            let example = json!(example);
            let both = [
                (rule.holds)(&pool, &example),
                evaluate(&rule.cel, &example, None),
            ];
            assert_eq!(both, [true, true], "{}: {}", rule.at, rule.message);
            tried += 1;
        }
    }
    assert!(tried > 30, "{tried}");
}

#[test]
fn managed_and_external_redis_cannot_be_swapped_in_one_step() {
    let rule = rules()
        .iter()
        .find(|rule| rule.cel.contains("oldSelf"))
        .unwrap();
    assert_eq!(rule.at, "spec.shared.redis");
    assert!(rule.message.contains("remove spec.shared.redis, apply"));
    let table = table();
    let [external, managed] =
        ["full", "managed"].map(|spec| table.specs[spec]["shared"]["redis"].clone());
    assert!(evaluate(&rule.cel, &external, Some(&external)));
    assert!(evaluate(&rule.cel, &managed, Some(&managed)));
    assert!(!evaluate(&rule.cel, &managed, Some(&external)));
    assert!(!evaluate(&rule.cel, &external, Some(&managed)));
}

#[test]
fn the_mode_of_managed_servers_cannot_be_changed() {
    let of_managed = |rule: &&super::Rule| rule.at == "spec.shared.redis.managed";
    let mut rules = rules().iter().filter(of_managed);
    let rule = rules.find(|rule| rule.cel.contains("oldSelf")).unwrap();
    let [standalone, cluster] =
        ["Standalone", "Cluster"].map(|mode| json!({"mode": mode, "shards": 3}));
    assert!(evaluate(&rule.cel, &cluster, Some(&cluster)));
    assert!(!evaluate(&rule.cel, &cluster, Some(&standalone)));
    assert!(!evaluate(&rule.cel, &standalone, Some(&cluster)));
}

#[test]
fn volumes_of_managed_servers_cannot_be_changed() {
    let of_change = |rule: &&super::Rule| {
        rule.cel.contains("oldSelf") && rule.message.starts_with("persistence ")
    };
    let rule = rules().iter().find(of_change).unwrap();
    let of = |size: &str, class: &str, interval: &str| json!({"persistence": {"size": size, "storageClassName": class, "snapshotInterval": interval}});
    let without = json!({});
    let before = of("40Gi", "", "");
    for (after, holds) in [
        (&before, true),
        (&of("40Gi", "", "2h"), true),
        (&of("80Gi", "", ""), false),
        (&of("40Gi", "nvme", ""), false),
        (&without, false),
    ] {
        assert_eq!(evaluate(&rule.cel, after, Some(&before)), holds, "{after}");
    }
    assert!(evaluate(&rule.cel, &without, Some(&without)));
    assert!(!evaluate(&rule.cel, &before, Some(&without)));
}

#[test]
fn the_smallest_pool_is_accepted() {
    let pool: KVCachePool = serde_json::from_value(table().pool("smallest")).unwrap();
    assert_eq!(check(&pool), []);
}
