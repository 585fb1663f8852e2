//! Environment variables of the target container by which the engine's Python finds the connector. Nothing else of that container changes.

use super::engine::Engine;
use super::json;
use crate::names;
use serde_json::{Value, json};

/// Images that set PYTHONPATH with ENV. A pod does not show that value, and injection would replace it. Each entry is a suffix of the
/// repository's name and the value. A path that an image lacks is harmless.
const IMAGES: [(&str, &str); 2] = [
    // ENV PYTHONPATH of python/huggingface_server.Dockerfile in kserve/kserve
    (
        "kserve/huggingfaceserver",
        "/kserve-workspace/huggingfaceserver",
    ),
    // ENV PYTHONPATH of build/container/Dockerfile.kvcached-runtime in vllm-project/aibrix
    ("aibrix/kvcached-runtime", "/app"),
];

const PYTHONPATH: &str = "PYTHONPATH";
const PLUGINS: &str = "VLLM_PLUGINS";

/// Adds the shared folder to PYTHONPATH, and for vLLM the plugin's name to an existing VLLM_PLUGINS. `python_path` is the image's own
/// PYTHONPATH from the pod's annotation.
pub(super) fn complete(container: &mut Value, engine: Engine, python_path: Option<&str>) {
    let known = python_path.or_else(|| of_image(json::text(container, "image")?));
    let from_elsewhere = !json::list(container, "envFrom").is_empty();
    let variables = json::list_mut(container, "env");
    if !extend(variables, PYTHONPATH, ":", names::SHARED_PATH) {
        // Kubernetes expands this to a value from envFrom, and leaves it unchanged without one.
        let inherited = (known.is_none() || from_elsewhere).then_some("$(PYTHONPATH)");
        let parts: Vec<_> = known.into_iter().chain(inherited).collect();
        let value = format!("{}:{}", parts.join(":"), names::SHARED_PATH);
        variables.push(json!({"name": PYTHONPATH, "value": value}));
    }
    if engine != Engine::Vllm {
        return;
    }
    // If a name occurs several times, the last one counts.
    let plugins = variables
        .iter()
        .rfind(|variable| json::name(variable) == PLUGINS);
    if plugins.is_some_and(|given| !may_be_absent(given)) {
        extend(variables, PLUGINS, ",", "kvcachepool");
    }
}

/// Whether the variable is missing if an optional object is missing. Without VLLM_PLUGINS vLLM loads all plugins; a list with only this
/// plugin would disable all others.
fn may_be_absent(variable: &Value) -> bool {
    let sources = variable.get("valueFrom").and_then(Value::as_object);
    sources
        .into_iter()
        .flat_map(|sources| sources.values())
        .any(|source| source.get("optional") == Some(&Value::Bool(true)))
}

fn of_image(image: &str) -> Option<&'static str> {
    let repository = image.split('@').next().unwrap_or(image);
    // A colon after the last slash starts a tag; before it, it belongs to a registry's port.
    let start = repository.rfind('/').map_or(0, |slash| slash + 1);
    let end = repository[start..]
        .find(':')
        .map_or(repository.len(), |colon| start + colon);
    let repository = &repository[..end];
    IMAGES
        .iter()
        .find(|(name, _)| {
            repository
                .strip_suffix(name)
                .is_some_and(|before| before.is_empty() || before.ends_with('/'))
        })
        .map(|(_, path)| *path)
}

/// Appends `addition` to a variable that is a list. A variable with a source keeps it under another name, which is expanded. Returns false if
/// the variable does not exist.
fn extend(variables: &mut Vec<Value>, name: &str, separator: &str, addition: &str) -> bool {
    let base = format!("KVCACHEPOOL_BASE_{name}");
    // If a name occurs several times, the last one counts.
    let last = |list: &[Value], name: &str| list.iter().rposition(|one| json::name(one) == name);
    let expanded = || json!({"name": name, "value": format!("$({base}){separator}{addition}")});
    let Some(place) = last(variables, name) else {
        let Some(renamed) = last(variables, &base) else {
            return false;
        };
        variables.insert(renamed + 1, expanded());
        return true;
    };
    let variable = &mut variables[place];
    if variable
        .get("valueFrom")
        .is_some_and(|from| !from.is_null())
    {
        json::set_text(variable, "name", &base);
        variables.insert(place + 1, expanded());
        return true;
    }
    let value = json::text(variable, "value").unwrap_or_default();
    if !value
        .split(separator)
        .any(|part| part.trim_end_matches('/') == addition)
    {
        let value = match value {
            "" => addition.to_string(),
            _ => format!("{value}{separator}{addition}"),
        };
        json::set_text(variable, "value", &value);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables after one call. A second call must not change them.
    fn completed(mut container: Value, python_path: Option<&str>) -> Value {
        complete(&mut container, Engine::Vllm, python_path);
        let once = container.clone();
        complete(&mut container, Engine::Vllm, python_path);
        assert_eq!(container, once, "idempotent");
        container["env"].take()
    }

    #[test]
    fn a_literal_path_is_extended() {
        for (value, expected) in [
            ("/a", "/a:/kvcachepool"),
            ("/a:/b", "/a:/b:/kvcachepool"),
            ("", "/kvcachepool"),
            ("/kvcachepool", "/kvcachepool"),
            ("/kvcachepool/:/b", "/kvcachepool/:/b"),
            ("/kvcachepool2", "/kvcachepool2:/kvcachepool"),
        ] {
            let env = completed(
                json!({"env": [{"name": "PYTHONPATH", "value": value}]}),
                None,
            );
            assert_eq!(env, json!([{"name": "PYTHONPATH", "value": expected}]));
        }
        let env = completed(json!({"env": [{"name": "PYTHONPATH"}]}), None);
        assert_eq!(
            env,
            json!([{"name": "PYTHONPATH", "value": "/kvcachepool"}])
        );
    }

    #[test]
    fn a_path_with_a_source_keeps_its_source_and_position() {
        let source = json!({"configMapKeyRef": {"name": "c", "key": "k"}});
        let container = json!({"env": [
            {"name": "PYTHONPATH", "valueFrom": source},
            {"name": "LATER", "value": "$(PYTHONPATH)"},
        ]});
        let expected = json!([
            {"name": "KVCACHEPOOL_BASE_PYTHONPATH", "valueFrom": source},
            {"name": "PYTHONPATH", "value": "$(KVCACHEPOOL_BASE_PYTHONPATH):/kvcachepool"},
            {"name": "LATER", "value": "$(PYTHONPATH)"},
        ]);
        assert_eq!(completed(container, None), expected);
        // Another webhook removed the added values.
        let mut stripped = expected.clone();
        stripped.as_array_mut().unwrap().remove(1);
        assert_eq!(completed(json!({"env": stripped}), None), expected);
    }

    #[test]
    fn an_absent_path_comes_from_the_annotation_the_image_or_envfrom() {
        let path = |container: Value, annotation| {
            completed(container, annotation)[0]["value"]
                .as_str()
                .unwrap()
                .to_string()
        };
        assert_eq!(path(json!({}), None), "$(PYTHONPATH):/kvcachepool");
        assert_eq!(
            path(json!({"env": null}), None),
            "$(PYTHONPATH):/kvcachepool"
        );
        assert_eq!(path(json!({}), Some("/app")), "/app:/kvcachepool");
        let kserve = "/kserve-workspace/huggingfaceserver:/kvcachepool";
        for image in [
            "kserve/huggingfaceserver:v0.16.0-gpu",
            "registry:5000/mirror/kserve/huggingfaceserver@sha256:00",
            "kserve/huggingfaceserver",
        ] {
            assert_eq!(path(json!({"image": image}), None), kserve, "{image}");
            assert_eq!(path(json!({"image": image}), Some("/x")), "/x:/kvcachepool");
        }
        for image in [
            "notkserve/huggingfaceserver",
            "kserve/huggingfaceserver/x",
            "vllm/vllm-openai:v0.32.0",
        ] {
            assert_eq!(
                path(json!({"image": image}), None),
                "$(PYTHONPATH):/kvcachepool",
                "{image}"
            );
        }
        let both = json!({"image": "kserve/huggingfaceserver", "envFrom": [{"configMapRef": {"name": "c"}}]});
        assert_eq!(
            path(both, None),
            "/kserve-workspace/huggingfaceserver:$(PYTHONPATH):/kvcachepool"
        );
    }

    #[test]
    fn a_list_of_plugins_is_extended_but_not_created() {
        let env = completed(
            json!({"env": [{"name": "VLLM_PLUGINS", "value": "lora"}]}),
            None,
        );
        assert_eq!(
            env[0],
            json!({"name": "VLLM_PLUGINS", "value": "lora,kvcachepool"})
        );
        let env = completed(
            json!({"env": [{"name": "VLLM_PLUGINS", "valueFrom": {"x": 1}}]}),
            None,
        );
        assert_eq!(
            env[1],
            json!({"name": "VLLM_PLUGINS", "value": "$(KVCACHEPOOL_BASE_VLLM_PLUGINS),kvcachepool"})
        );
        assert_eq!(completed(json!({}), None).as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_list_of_plugins_that_may_be_absent_is_not_changed() {
        for kind in ["configMapKeyRef", "secretKeyRef"] {
            let list = |optional: bool| json!({"name": "VLLM_PLUGINS", "valueFrom": {kind: {"name": "c", "key": "k", "optional": optional}}});
            let env = completed(json!({"env": [list(true)]}), None);
            assert_eq!(env[0], list(true), "{kind}");
            assert_eq!(env.as_array().unwrap().len(), 2);
            let env = completed(json!({"env": [list(false)]}), None);
            assert_eq!(
                env[1]["value"],
                "$(KVCACHEPOOL_BASE_VLLM_PLUGINS),kvcachepool"
            );
        }
    }

    #[test]
    fn vllms_variables_are_not_set_for_sglang() {
        let mut container = json!({"env": [{"name": "VLLM_PLUGINS", "value": "lora"}]});
        complete(&mut container, Engine::Sglang, None);
        assert_eq!(
            container["env"],
            json!([
                {"name": "VLLM_PLUGINS", "value": "lora"},
                {"name": "PYTHONPATH", "value": "$(PYTHONPATH):/kvcachepool"},
            ])
        );
    }
}
