//! Reading and writing raw pod JSON: an absent or null list is an empty one.

use serde_json::{Map, Value};

/// The list under `key`.
pub(super) fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value
        .get(key)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// The text under `key`.
pub(super) fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str()
}

/// The name of a container, volume or variable.
pub(super) fn name(value: &Value) -> &str {
    text(value, "name").unwrap_or_default()
}

/// Where the element of this name stands.
pub(super) fn position(list: &[Value], wanted: &str) -> Option<usize> {
    list.iter().position(|one| name(one) == wanted)
}

/// An annotation of the pod.
pub(super) fn annotation<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    pod.get("metadata")?.get("annotations")?.get(key)?.as_str()
}

/// A label of the pod.
pub(super) fn label<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    pod.get("metadata")?.get("labels")?.get(key)?.as_str()
}

/// Init and ordinary containers.
pub(super) fn all_containers(spec: &Value) -> impl Iterator<Item = &Value> {
    list(spec, "initContainers")
        .iter()
        .chain(list(spec, "containers"))
}

/// `value` as an object; what is none becomes an empty one.
pub(super) fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("made an object above"),
    }
}

/// The entry of an object, null where it is new.
pub(super) fn entry<'a>(value: &'a mut Value, key: &str) -> &'a mut Value {
    object(value).entry(key).or_insert(Value::Null)
}

/// The list under `key`, made where it is missing.
pub(super) fn list_mut<'a>(value: &'a mut Value, key: &str) -> &'a mut Vec<Value> {
    let value = entry(value, key);
    if !value.is_array() {
        *value = Value::Array(Vec::new());
    }
    match value {
        Value::Array(list) => list,
        _ => unreachable!("made a list above"),
    }
}

/// Sets the text under `key`.
pub(super) fn set_text(value: &mut Value, key: &str, text: &str) {
    object(value).insert(key.to_string(), Value::from(text));
}
