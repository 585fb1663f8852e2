//! The opt-in hook `args`: launch arguments make vLLM use the connector, instead of the plugin, and SGLang the storage backend.

use super::engine::{self, Engine, program};
use super::launch::Launch;
use super::{Reason, Refusal, json};
use crate::names;
use serde_json::{Value, json};

const FLAG: &str = "--kv-transfer-config";

/// Whether the pod requests it.
pub(super) fn by_args(pod: &Value) -> Result<bool, Refusal> {
    match json::annotation(pod, names::HOOK) {
        None | Some("plugin") => Ok(false),
        Some("args") => Ok(true),
        Some(other) => Err(Refusal::new(
            Reason::AnnotationInvalid,
            format!(
                "annotation {}: {other:?}; write args, or remove the annotation to use the plugin",
                names::HOOK
            ),
        )),
    }
}

/// Adds the arguments to plain args.
pub(super) fn add(container: &mut Value) -> Result<(), Refusal> {
    let launch = Launch::of(container);
    let engine = launch.engine();
    let added = match engine {
        Engine::Vllm => vllm(&launch),
        Engine::Sglang => engine::missing(&launch).into_iter().flatten().collect(),
    };
    if added.is_empty() {
        return Ok(());
    }
    let args = json::list(container, "args");
    let refuse = |why: &str| {
        Err(Refusal::new(
            Reason::HookUnsupported,
            format!(
                "annotation {} is args, but {why}; remove the annotation",
                names::HOOK
            ),
        ))
    };
    let command = json::list(container, "command");
    // A shell passes what follows its script to the script.
    let mut words = command.iter().chain(args).filter_map(Value::as_str);
    if words.any(|word| matches!(program(word), "sh" | "bash" | "dash" | "ash" | "zsh")) {
        return refuse(&format!("a shell starts {engine}"));
    }
    if args.is_empty() {
        return refuse(
            "the container has no args, and added ones would replace those of its image",
        );
    }
    if engine == Engine::Sglang {
        if let Some(argument) = engine::excludes_cache(&launch) {
            return refuse(&format!(
                "SGLang is started with {argument}, with which it has no hierarchical cache"
            ));
        }
        if launch.has_flag("config") {
            return refuse("SGLang reads arguments from --config, which added ones would override");
        }
        if engine::foreign_config(&launch) {
            return refuse("SGLang has another extra config for its storage backend");
        }
    }
    if engine == Engine::Vllm && launch.connectors().is_some() {
        return refuse("vLLM is started with another connector");
    }
    let added = added.into_iter().map(Value::from);
    json::list_mut(container, "args").extend(added);
    Ok(())
}

/// The argument of vLLM, unless it has it already.
fn vllm(launch: &Launch<'_>) -> Vec<String> {
    const CONNECTOR: &str = "KVCachePoolConnector";
    if launch
        .connectors()
        .is_some_and(|names| names.contains(CONNECTOR))
    {
        return Vec::new();
    }
    let config = json!({
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "kvcachepool.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    });
    vec![FLAG.to_string(), config.to_string()]
}
