//! Requirements of the API server on the schema, and compatibility of the types with older and newer objects.

use super::{crd, rules};
use crate::api::rules::of_key as rule_of;
use crate::api::{KVCachePool, check};
use kube::core::DeserializeGuard;
use kube::core::ObjectList;
use kube::core::cel::{ScopeContext, analyze_rule, compile_schema};
use kvcachepool_protocol::config::{Values, pool_keys};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The size of the annotation in which `kubectl apply` keeps the object, with some reserve.
const MOST_BYTES: usize = 200_000;

fn schema() -> Value {
    let crd = serde_json::to_value(crd()).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// Every node of a schema with its path.
fn nodes(path: &str, node: &Value, found: &mut Vec<(String, Value)>) {
    found.push((path.to_string(), node.clone()));
    for (name, field) in node["properties"].as_object().into_iter().flatten() {
        nodes(&format!("{path}.{name}"), field, found);
    }
    for inner in ["items", "additionalProperties"] {
        if node[inner].is_object() {
            nodes(&format!("{path}[]"), &node[inner], found);
        }
    }
}

fn all() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for part in ["spec", "status"] {
        nodes(part, &schema()["properties"][part], &mut found);
    }
    assert!(found.len() > 100);
    found
}

#[test]
fn every_string_list_and_map_has_a_limit() {
    for (path, node) in all() {
        let bound = match node["type"].as_str() {
            Some("string") if node["enum"].is_null() && node["format"] != "date-time" => {
                "maxLength"
            }
            Some("array") => "maxItems",
            Some("object") if node["additionalProperties"].is_object() => "maxProperties",
            _ if node["x-kubernetes-int-or-string"] == true => "maxLength",
            _ => continue,
        };
        assert!(node[bound].is_u64(), "{path} has no {bound}");
    }
}

/// Before 1.34 an amount counts as long as a request may be, with a tenth of a unit for each byte and a quarter for each character of a
/// pattern. A rule may cost 10 million units; 7 million leave the rest of a rule its share.
#[test]
fn patterns_of_amounts_are_not_too_expensive_for_kubernetes_1_33() {
    let text = 3.0 * f64::from(1 << 20) * 0.1;
    let mut found = 0;
    for rule in rules() {
        let path = format!("/properties/{}", rule.at.replace('.', "/properties/"));
        let root = schema();
        let node = root.pointer(&path).unwrap_or(&Value::Null);
        let amount = &node["additionalProperties"]["x-kubernetes-int-or-string"];
        if amount != true {
            continue;
        }
        let turns = match rule.cel.contains("self.all(") {
            true => node["maxProperties"].as_f64().unwrap(),
            false => 1.0,
        };
        for part in rule.cel.split("].matches('").skip(1) {
            let (pattern, _) = part.split_once("')").unwrap();
            let cost = turns * text * pattern.len() as f64 * 0.25;
            assert!(cost < 7e6, "{}: {cost}: {}", rule.at, rule.cel);
            found += 1;
        }
    }
    assert_eq!(
        found, 7,
        "three requests, three limits, and those with a domain"
    );
}

#[test]
fn numbers_have_formats_that_every_api_server_supports() {
    for (path, node) in all() {
        let format = node["format"].as_str().unwrap_or("int64");
        assert!(
            ["int32", "int64", "date-time"].contains(&format),
            "{path}: {format}"
        );
        assert!(node["nullable"].is_null(), "{path}");
    }
}

#[test]
fn every_field_has_a_description() {
    let root = schema();
    for part in ["spec", "status"] {
        let mut own = vec![(part.to_string(), root["properties"][part].clone())];
        while let Some((path, node)) = own.pop() {
            let fields = node["properties"].as_object().cloned().unwrap_or_default();
            // Kubernetes types have no descriptions.
            if fields.values().all(|field| field["description"].is_null()) {
                continue;
            }
            for (name, field) in fields {
                let at = format!("{path}.{name}");
                assert!(field["description"].is_string(), "{at}");
                own.push((at, field));
            }
        }
    }
}

/// Default, range and names of a field are those of the key that it sets.
#[test]
fn a_field_that_sets_a_key_of_the_sidecar_has_no_values_of_its_own() {
    let mut schema = schema();
    let mut own = Vec::new();
    for set in pool_keys() {
        let path = format!("/properties/{}", set.field.replace('.', "/properties/"));
        let node = schema.pointer_mut(&path).unwrap().as_object_mut().unwrap();
        for free in [
            "description",
            "format",
            "maxLength",
            "type",
            "x-kubernetes-int-or-string",
        ] {
            node.remove(free);
        }
        let default = node.remove("default").map(|value| match value {
            Value::String(text) => text,
            value => value.to_string(),
        });
        if default.is_some_and(|default| set.required || default != set.default) {
            own.push(format!("default of {}", set.field));
        }
        let names = match set.values {
            Values::Choice(names) => Some(json!(names)),
            _ => None,
        };
        if node.remove("enum") != names {
            own.push(format!("enum of {}", set.field));
        }
        let rule = rule_of(set).map(|rule| json!([{"rule": rule.cel, "message": rule.message}]));
        if node.remove("x-kubernetes-validations") != rule {
            own.push(format!("rule of {}", set.field));
        }
        own.extend(node.keys().map(|key| format!("{key} of {}", set.field)));
    }
    assert_eq!(own, [""; 0]);
}

#[test]
fn every_rule_is_in_the_schema_and_within_the_cost_limit() {
    for rule in rules() {
        let mut node = &schema();
        for name in rule.at.split('.').filter(|name| !name.is_empty()) {
            node = &node["properties"][name];
        }
        let there = node["x-kubernetes-validations"].as_array().unwrap();
        let this = json!({"rule": rule.cel, "message": rule.message});
        assert!(there.contains(&this), "{}", rule.at);
        let warnings = analyze_rule(
            &rule.cel,
            &compile_schema(node),
            ScopeContext::CrdValidation,
        );
        // `int` names a type, the others are elements of lists and maps.
        let known = ["int", "s", "v", "o", "is", "k"].map(|name| format!("variable '{name}' "));
        let warnings: Vec<_> = warnings
            .iter()
            .filter(|w| !known.iter().any(|known| w.message.starts_with(known)))
            .collect();
        assert!(warnings.is_empty(), "{}: {warnings:?}", rule.at);
    }
}

#[test]
fn conditions_are_merged_by_type_and_spec_lists_are_atomic() {
    let conditions = &schema()["properties"]["status"]["properties"]["conditions"];
    assert_eq!(conditions["x-kubernetes-list-type"], "map");
    assert_eq!(conditions["x-kubernetes-list-map-keys"], json!(["type"]));
}

#[test]
fn the_definition_fits_into_an_annotation() {
    let bytes = serde_json::to_string(&crd()).unwrap().len();
    assert!(bytes < MOST_BYTES, "{bytes} bytes");
}

#[test]
fn the_table_of_pools_has_its_columns() {
    let crd = crd();
    let columns = crd.spec.versions[0]
        .additional_printer_columns
        .iter()
        .flatten();
    let names: Vec<_> = columns
        .filter(|c| c.priority.is_none())
        .map(|c| c.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "Ready", "Pods", "Attached", "Hit-Rate", "Memory", "Redis", "S3", "Age"
        ]
    );
    assert_eq!(crd.spec.names.short_names.unwrap(), ["kvpool"]);
}

fn stored(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": name}, "spec": spec})
}

#[test]
fn a_malformed_stored_object_does_not_hide_others() {
    let list = json!({
        "apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePoolList", "metadata": {},
        "items": [
            stored("good", json!({"local": {"memory": {"perPod": "1Gi"}}})),
            stored("old", json!({"local": {"memory": {"perPod": "plenty"}}, "cache": {"loadTimeout": "soon", "chunkTokens": -1}})),
            stored("newer", json!({"local": {"memory": {"perPod": "1Gi", "evictionPolicy": "ARC"}}})),
            stored("broken", json!("text")),
        ],
    });
    let list: ObjectList<DeserializeGuard<KVCachePool>> = serde_json::from_value(list).unwrap();
    let problems: Vec<_> = list
        .items
        .iter()
        .map(|item| {
            item.0
                .as_ref()
                .map(|pool| check(pool).len())
                .map_err(|e| e.metadata.name.clone())
        })
        .collect();
    let [newer, broken] = ["newer", "broken"].map(|name| Err(Some(name.to_string())));
    assert_eq!(problems, [Ok(0), Ok(3), newer, broken]);
}

fn choice(names: &'static [&'static str]) -> impl Strategy<Value = Value> {
    prop::sample::select(names).prop_map(Value::from)
}

prop_compose! {
    fn specs()(
        tokens in any::<i64>(), save in choice(&["Prompt", "PromptAndDecode", "None"]), timeout in ".{0,28}",
        size in ".{0,20}", number in any::<i64>(), pages in choice(&["None", "2Mi", "1Gi"]),
        disk in prop::option::of(any::<bool>()), shards in any::<i64>(), url in ".{0,40}", prefix in ".{0,40}",
        mode in choice(&["Enabled", "Disabled"]), max in prop::option::of(".{0,20}"),
        labels in prop::collection::btree_map("[a-z]{1,8}", ".{0,8}", 0..4), codec in choice(&["None", "FP8", "CacheGen"]),
    ) -> Value {
        let mut spec = json!({
            "cache": {"chunkTokens": tokens, "save": save, "skipLastTokens": number, "minLoadTokens": number, "loadTimeout": timeout},
            "local": {"memory": {"perPod": size, "hugePages": pages, "evictionPolicy": "LFU"}},
            "write": {"policy": "WriteBack", "admission": "Reused", "codec": codec},
            "injection": {"mode": mode, "container": prefix, "existingConnector": "Compose", "onMissed": "Evict"},
            "sidecar": {
                "image": url, "imagePullPolicy": "Always", "imagePullSecrets": [{"name": "a"}], "transfer": "Engine",
                "resources": {"limits": {"cpu": "1"}}, "gpuAccess": "ResourceClaim", "logLevel": "trace",
                "env": [{"name": "A", "value": timeout}], "settings": {"limits": {"events": number}}, "updateStrategy": {"type": "InPlace"},
            },
            "monitoring": {"podMonitor": {"labels": labels, "interval": timeout, "relabelings": [{"action": url}]}},
            "deletionPolicy": "Delete",
            "shared": {
                "redis": {"managed": {"shards": shards, "memoryPerShard": size, "tolerations": [{"key": "gpu"}], "metadata": {"labels": labels}}, "external": {"url": url}, "ttl": timeout},
                "fileSystem": {"persistentVolumeClaim": {"claimName": url}, "capacity": number, "evictToPercent": shards, "expireAfter": timeout},
                "s3": {"bucket": prefix, "prefix": prefix, "capacity": number, "evictAtPercent": shards, "checksums": "WhenSupported"},
            },
        });
        if let Some(empty) = disk {
            spec["local"]["disk"] = match empty {
                true => json!({"perPod": number, "emptyDir": {}}),
                false => json!({"perPod": number, "ephemeral": {"storageClassName": url}}),
            };
        }
        if let Some(max) = max {
            spec["injection"]["memoryMax"] = max.into();
        }
        spec
    }
}

proptest! {
    #[test]
    fn a_spec_is_written_as_it_was_read(spec in specs()) {
        let first: KVCachePool = serde_json::from_value(stored("a", spec)).unwrap();
        let text = serde_json::to_string(&first).unwrap();
        let second: KVCachePool = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(&first, &second);
        prop_assert_eq!(check(&first), check(&second));
    }
}
