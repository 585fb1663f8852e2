//! Merges the wanted content into existing content. Between two calls the API server fills in defaults and other webhooks add to the
//! containers; both are kept.

use super::json;
use serde_json::Value;

/// Sets everything in `wanted` in `onto`. Other content of `onto` is kept.
pub(super) fn overlay(onto: &mut Value, wanted: &Value) {
    match (onto, wanted) {
        (Value::Object(onto), Value::Object(wanted)) => {
            // A variable has one source, and so has a volume.
            for (one, other) in [
                ("value", "valueFrom"),
                ("valueFrom", "value"),
                ("emptyDir", "ephemeral"),
                ("ephemeral", "emptyDir"),
            ] {
                if wanted.contains_key(one) && !wanted.contains_key(other) {
                    onto.remove(other);
                }
            }
            for (key, value) in wanted {
                match onto.get_mut(key) {
                    Some(existing) => match list_key(key) {
                        Some(list_key) => overlay_list(existing, value, list_key),
                        None => overlay(existing, value),
                    },
                    None => {
                        onto.insert(key.clone(), value.clone());
                    }
                }
            }
        }
        (Value::Array(onto), Value::Array(wanted))
            if onto.len() == wanted.len() && wanted.iter().all(Value::is_object) =>
        {
            for (onto, wanted) in onto.iter_mut().zip(wanted) {
                overlay(onto, wanted);
            }
        }
        (onto, wanted) if onto == wanted => {}
        (onto, wanted) => *onto = wanted.clone(),
    }
}

/// The key that identifies elements of a list, for lists that others extend.
fn list_key(key: &str) -> Option<&'static str> {
    match key {
        "env" => Some("name"),
        "volumeMounts" => Some("mountPath"),
        "ports" => Some("containerPort"),
        _ => None,
    }
}

fn overlay_list(onto: &mut Value, wanted: &Value, key: &str) {
    let (Value::Array(onto), Value::Array(wanted)) = (&mut *onto, wanted) else {
        *onto = wanted.clone();
        return;
    };
    for value in wanted {
        match onto.iter_mut().find(|one| one.get(key) == value.get(key)) {
            Some(existing) => overlay(existing, value),
            None => onto.push(value.clone()),
        }
    }
}

/// Merges `wanted` into the element with its name, or appends it.
pub(super) fn overlay_named(list: &mut Vec<Value>, wanted: Value) {
    match json::position(list, json::name(&wanted)) {
        Some(place) => overlay(&mut list[place], &wanted),
        None => list.push(wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn defaults_and_foreign_additions_are_kept_and_own_fields_restored() {
        let wanted = json!({
            "name": "k", "restartPolicy": "Always", "command": ["a", "b"],
            "env": [{"name": "X", "value": "1"}],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "securityContext": {"capabilities": {"drop": ["ALL"]}},
        });
        let mut existing = json!({
            "name": "k", "command": ["a"], "terminationMessagePath": "/dev/termination-log",
            "env": [{"name": "AWS_ROLE_ARN", "value": "r"}, {"name": "X", "valueFrom": {}}],
            "volumeMounts": [{"name": "aws", "mountPath": "/aws"}],
            "securityContext": {"capabilities": {"drop": ["NET_RAW", "ALL"]}, "procMount": "Default"},
        });
        overlay(&mut existing, &wanted);
        assert_eq!(
            existing,
            json!({
                "name": "k", "restartPolicy": "Always", "command": ["a", "b"],
                "terminationMessagePath": "/dev/termination-log",
                "env": [{"name": "AWS_ROLE_ARN", "value": "r"}, {"name": "X", "value": "1"}],
                "volumeMounts": [{"name": "aws", "mountPath": "/aws"}, {"name": "v", "mountPath": "/v"}],
                "securityContext": {"capabilities": {"drop": ["ALL"]}, "procMount": "Default"},
            })
        );
        let once = existing.clone();
        overlay(&mut existing, &wanted);
        assert_eq!(existing, once);
    }
}
