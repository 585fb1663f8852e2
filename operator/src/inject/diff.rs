//! The JSON patch between two pods. Lists whose elements have names are compared by name, so that a moved container is one `remove` and one
//! `add`, and its neighbours are not part of the patch.

use super::json;
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation};
use serde_json::Value;
use std::collections::HashSet;

/// The patch from `before` to `after`; empty if they are equal.
pub(super) fn diff(before: &Value, after: &Value) -> Patch {
    let mut operations = Vec::new();
    compare(before, after, &PointerBuf::new(), &mut operations);
    Patch(operations)
}

fn compare(before: &Value, after: &Value, path: &PointerBuf, out: &mut Vec<PatchOperation>) {
    match (before, after) {
        (Value::Object(old), Value::Object(new)) => {
            for key in old.keys().filter(|key| !new.contains_key(*key)) {
                out.push(remove(below(path, key)));
            }
            for (key, value) in new {
                let path = below(path, key);
                match old.get(key) {
                    Some(old) => compare(old, value, &path, out),
                    None => out.push(add(path, value)),
                }
            }
        }
        (Value::Array(old), Value::Array(new)) if old == new => {}
        (Value::Array(old), Value::Array(new)) => match (names(old), names(new)) {
            (Some(_), Some(fresh)) => by_name(old, new, &fresh, path, out),
            _ => by_place(old, new, path, out),
        },
        _ if before == after => {}
        _ => out.push(PatchOperation::Replace(ReplaceOperation {
            path: path.clone(),
            value: after.clone(),
        })),
    }
}

fn by_place(old: &[Value], new: &[Value], path: &PointerBuf, out: &mut Vec<PatchOperation>) {
    for place in (new.len()..old.len()).rev() {
        out.push(remove(below_place(path, place)));
    }
    for (place, value) in new.iter().enumerate() {
        let path = below_place(path, place);
        match old.get(place) {
            Some(old) => compare(old, value, &path, out),
            None => out.push(add(path, value)),
        }
    }
}

fn by_name(
    old: &[Value],
    new: &[Value],
    fresh: &HashSet<&str>,
    path: &PointerBuf,
    out: &mut Vec<PatchOperation>,
) {
    // Names that are in the list at this point of the patch, in order, after those that are already in place.
    let mut waiting: Vec<&Value> = old.iter().rev().collect();
    let mut remaining: HashSet<&str> = old.iter().map(json::name).collect();
    for (place, value) in new.iter().enumerate() {
        let name = json::name(value);
        let path_here = below_place(path, place);
        while let Some(next) = waiting.last() {
            let blocks = !fresh.contains(json::name(next))
                || (json::name(next) != name && remaining.contains(name));
            if !blocks {
                break;
            }
            out.push(remove(path_here.clone()));
            remaining.remove(json::name(next));
            waiting.pop();
        }
        match waiting.last() {
            Some(next) if json::name(next) == name => {
                compare(next, value, &path_here, out);
                remaining.remove(name);
                waiting.pop();
            }
            _ => out.push(add(path_here, value)),
        }
    }
    for _ in waiting {
        out.push(remove(below_place(path, new.len())));
    }
}

/// The names of a list's elements, if each has a unique one.
fn names(list: &[Value]) -> Option<HashSet<&str>> {
    let mut names = HashSet::with_capacity(list.len());
    list.iter()
        .all(|one| json::text(one, "name").is_some_and(|name| names.insert(name)))
        .then_some(names)
}

fn below(path: &PointerBuf, key: &str) -> PointerBuf {
    let mut path = path.clone();
    path.push_back(key);
    path
}

fn below_place(path: &PointerBuf, place: usize) -> PointerBuf {
    let mut path = path.clone();
    path.push_back(place);
    path
}

fn add(path: PointerBuf, value: &Value) -> PatchOperation {
    PatchOperation::Add(AddOperation {
        path,
        value: value.clone(),
    })
}

fn remove(path: PointerBuf) -> PatchOperation {
    PatchOperation::Remove(RemoveOperation { path })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn patched(before: &Value, after: &Value) -> Patch {
        let patch = diff(before, after);
        let mut result = before.clone();
        json_patch::patch(&mut result, &patch).unwrap();
        assert_eq!(&result, after);
        patch
    }

    #[test]
    fn a_moved_named_element_is_one_remove_and_one_add() {
        let one = |name: &str| json!({"name": name, "image": "i"});
        let before = json!([one("sidecar"), one("a"), one("b/~")]);
        let after = json!([one("a"), one("b/~"), one("sidecar")]);
        assert_eq!(
            json!(patched(&before, &after)),
            json!([{"op": "remove", "path": "/0"}, {"op": "add", "path": "/2", "value": one("sidecar")}])
        );
    }

    #[test]
    fn keys_are_escaped_and_equal_values_give_nothing() {
        let before = json!({"a": {"kvcachepool.io/pool": 1}});
        assert!(patched(&before, &before).0.is_empty());
        let patch = patched(&before, &json!({"a": {"kvcachepool.io/pool": 2}}));
        assert_eq!(
            json!(patch),
            json!([{"op": "replace", "path": "/a/kvcachepool.io~1pool", "value": 2}])
        );
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (0..4u8).prop_map(Value::from),
            "[a/~]{0,2}".prop_map(Value::from),
        ];
        let named = prop::collection::vec(("[a-d]", 0..3u8), 0..5).prop_map(|list| {
            let one = |(name, x): &(String, u8)| json!({"name": name, "x": x});
            Value::from(list.iter().map(one).collect::<Vec<_>>())
        });
        prop_oneof![leaf, named].prop_recursive(3, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map("[a-c/~]{1,2}", inner, 0..4).prop_map(Value::from_iter),
            ]
        })
    }

    proptest! {
        #[test]
        fn applying_the_patch_gives_the_second_value(before in values(), after in values()) {
            patched(&before, &after);
        }
    }
}
