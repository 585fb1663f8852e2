//! Access to raw pod JSON. An absent or null list is an empty one.

use serde_json::{Map, Value};

pub(super) fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value
        .get(key)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

pub(super) fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str()
}

/// The name of a container, volume or variable.
pub(super) fn name(value: &Value) -> &str {
    text(value, "name").unwrap_or_default()
}

/// The index of the element with this name.
pub(super) fn position(list: &[Value], wanted: &str) -> Option<usize> {
    list.iter().position(|one| name(one) == wanted)
}

pub(super) fn annotation<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    pod.get("metadata")?.get("annotations")?.get(key)?.as_str()
}

pub(super) fn label<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    pod.get("metadata")?.get("labels")?.get(key)?.as_str()
}

/// Init containers and ordinary containers.
pub(super) fn all_containers(spec: &Value) -> impl Iterator<Item = &Value> {
    list(spec, "initContainers")
        .iter()
        .chain(list(spec, "containers"))
}

/// `value` as an object. Any other type is replaced by an empty object.
pub(super) fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("made an object above"),
    }
}

/// The entry of an object. A new entry is null.
pub(super) fn entry<'a>(value: &'a mut Value, key: &str) -> &'a mut Value {
    object(value).entry(key).or_insert(Value::Null)
}

/// The list under `key`, which is created if it is missing.
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

pub(super) fn set_text(value: &mut Value, key: &str, text: &str) {
    object(value).insert(key.to_string(), Value::from(text));
}
