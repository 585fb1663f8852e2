//! The schema of the resource: limits of every text, list and map, and the rules at their places.

use super::{KVCachePool, rules};
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
    ValidationRule,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResourceExt;
use kvcachepool_protocol::config::{self, Choice, pool_keys};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value};

/// Longest text within an embedded Kubernetes type.
const EMBEDDED_CHARS: u32 = 4096;
/// Maximum entries of a list or map within an embedded Kubernetes type.
const EMBEDDED_ITEMS: u32 = 64;
/// Maximum requests, and limits, of the sidecar's container.
const CONTAINER_RESOURCES: u32 = 6;
/// Longest name of an object.
const OBJECT_NAME_CHARS: u32 = 253;
/// Longest name of a container, and longest value of a label.
const LABEL_CHARS: u32 = 63;
/// Maximum labels, and annotations, of managed servers.
const POD_KEYS: u32 = 16;
/// Longest message of a condition.
const MESSAGE_CHARS: u32 = 32_768;
/// Longest reason or type of a condition.
const REASON_CHARS: u32 = 1_024;
/// Maximum conditions of a pool. The operator uses five.
const CONDITIONS: u32 = 16;

/// The CustomResourceDefinition, including the rules.
pub fn crd() -> CustomResourceDefinition {
    let mut crd = KVCachePool::crd();
    for version in &mut crd.spec.versions {
        let schema = version.schema.as_mut();
        if let Some(root) = schema.and_then(|s| s.open_api_v3_schema.as_mut()) {
            tidy(root);
            for rule in rules() {
                if let Some(node) = node(root, rule.at) {
                    node.x_kubernetes_validations
                        .get_or_insert_default()
                        .push(ValidationRule {
                            rule: rule.cel.clone(),
                            message: Some(rule.message.clone()),
                            ..Default::default()
                        });
                }
            }
        }
    }
    crd
}

/// The node of a schema at a path such as `spec.cache.chunkTokens`; the root for an empty path.
fn node<'a>(root: &'a mut JSONSchemaProps, path: &str) -> Option<&'a mut JSONSchemaProps> {
    path.split('.')
        .filter(|name| !name.is_empty())
        .try_fold(root, |node, name| node.properties.as_mut()?.get_mut(name))
}

/// The value at a path such as `spec.cache.chunkTokens`, like a rule's `self` in the API server.
pub fn at<'a>(pool: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.')
        .filter(|name| !name.is_empty())
        .try_fold(pool, |value, name| value.get(name))
}

/// Removes parts of a derived schema that are a disadvantage in the API server.
///
/// Removes `nullable`: without it `null` counts as absent, so that a template may leave a field empty. Also removes the formats of unsigned
/// numbers, which newer API servers warn about.
fn tidy(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    if schema
        .format
        .as_ref()
        .is_some_and(|f| f.starts_with("uint"))
    {
        schema.format = None;
    }
    for child in schema.properties.iter_mut().flatten() {
        tidy(child.1);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        tidy(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        tidy(values);
    }
}

/// Whether a section equals its default and can be omitted.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The default of a field that sets this key of the sidecar's config.
pub(super) fn default_of(key: &str) -> &'static str {
    let set = pool_keys().iter().find(|set| set.key == key);
    set.map_or("", |set| set.default.as_str())
}

/// The names of an enum of the sidecar's config.
pub(super) fn choice<T: Choice + Default>(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": T::default().pool_names()})
}

fn text(most: u32) -> Schema {
    json_schema!({"type": "string", "maxLength": most})
}

pub(super) fn object_name(_: &mut SchemaGenerator) -> Schema {
    text(OBJECT_NAME_CHARS)
}

pub(super) fn label_name(_: &mut SchemaGenerator) -> Schema {
    text(LABEL_CHARS)
}

/// A short text: a region, a version, a reason.
pub(super) fn short(_: &mut SchemaGenerator) -> Schema {
    text(128)
}

/// A message of the operator.
pub(super) fn message(_: &mut SchemaGenerator) -> Schema {
    text(1024)
}

pub(super) fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time", "maxLength": 64})
}

pub(super) fn bucket(_: &mut SchemaGenerator) -> Schema {
    text(255)
}

/// S3 keys have at most 1,024 bytes. What follows the prefix needs half.
pub(super) fn prefix(_: &mut SchemaGenerator) -> Schema {
    text(512)
}

pub(super) fn image(_: &mut SchemaGenerator) -> Schema {
    text(512)
}

pub(super) fn url(_: &mut SchemaGenerator) -> Schema {
    text(config::URL_BYTES as u32)
}

pub(super) fn urls(generate: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "minItems": 1, "maxItems": config::SERVERS, "items": url(generate)})
}

pub(super) fn labels(_: &mut SchemaGenerator) -> Schema {
    texts(EMBEDDED_ITEMS, LABEL_CHARS)
}

pub(super) fn pod_labels(_: &mut SchemaGenerator) -> Schema {
    texts(POD_KEYS, LABEL_CHARS)
}

pub(super) fn pod_annotations(_: &mut SchemaGenerator) -> Schema {
    texts(POD_KEYS, EMBEDDED_CHARS)
}

fn texts(items: u32, chars: u32) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": items,
        "additionalProperties": {"type": "string", "maxLength": chars},
    })
}

/// A list of objects that another operator validates.
pub(super) fn objects(_: &mut SchemaGenerator) -> Schema {
    let object = json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    json_schema!({"type": "array", "maxItems": EMBEDDED_ITEMS, "items": object})
}

/// Keys of the sidecar's config. The sidecar validates them.
pub(super) fn settings(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": EMBEDDED_ITEMS,
        "x-kubernetes-preserve-unknown-fields": true,
    })
}

/// A list of conditions with unique types.
pub(super) fn conditions(generate: &mut SchemaGenerator) -> Schema {
    let mut condition = generate.subschema_for::<Condition>().to_value();
    bound(&mut condition);
    for (field, most) in [("message", MESSAGE_CHARS), ("reason", REASON_CHARS)] {
        condition["properties"][field]["maxLength"] = most.into();
    }
    json_schema!({
        "type": "array",
        "maxItems": CONDITIONS,
        "items": condition,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    })
}

/// The schema of a Kubernetes type without descriptions, with limits for every text, list and map.
pub(super) fn bounded<T: JsonSchema>(generate: &mut SchemaGenerator) -> Schema {
    let mut schema = generate.subschema_for::<T>().to_value();
    bound(&mut schema);
    Schema::try_from(schema).unwrap_or_default()
}

/// The resources of a container whose amounts the rules check, which limits their number.
pub(super) fn resources(generate: &mut SchemaGenerator) -> Schema {
    let mut schema = bounded::<ResourceRequirements>(generate).to_value();
    for amounts in ["requests", "limits"] {
        schema["properties"][amounts]["maxProperties"] = CONTAINER_RESOURCES.into();
    }
    Schema::try_from(schema).unwrap_or_default()
}

fn bound(schema: &mut Value) {
    let Value::Object(node) = schema else { return };
    node.remove("description");
    let unbounded = |node: &Map<String, Value>, bound: &str| !node.contains_key(bound);
    let kind = node.get("type").and_then(Value::as_str).unwrap_or_default();
    let limit = match kind {
        "string" if !node.contains_key("enum") => Some(("maxLength", EMBEDDED_CHARS)),
        "array" => Some(("maxItems", EMBEDDED_ITEMS)),
        "object" if node.contains_key("additionalProperties") => {
            Some(("maxProperties", EMBEDDED_ITEMS))
        }
        _ if node.contains_key("x-kubernetes-int-or-string") => Some(("maxLength", EMBEDDED_CHARS)),
        _ => None,
    };
    if let Some((bound, most)) = limit.filter(|(b, _)| unbounded(node, b)) {
        node.insert(bound.to_string(), most.into());
    }
    for inner in ["items", "additionalProperties"] {
        if let Some(inner) = node.get_mut(inner) {
            bound(inner);
        }
    }
    if let Some(Value::Object(properties)) = node.get_mut("properties") {
        properties.values_mut().for_each(bound);
    }
}

#[cfg(test)]
mod tests;
