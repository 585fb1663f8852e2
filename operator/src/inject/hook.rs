//! The opt-in hook `args`: launch arguments make vLLM use the connector, instead of the plugin, and SGLang the storage backend.

use super::engine::{self, Engine};
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
    let program = json::list(container, "command")
        .first()
        .and_then(Value::as_str);
    let name = program.and_then(|program| program.rsplit('/').next());
    if matches!(name, Some("sh" | "bash" | "dash" | "ash" | "zsh")) {
        return refuse(&format!("a shell starts {engine}"));
    }
    if args.is_empty() {
        return refuse(
            "the container has no args, and added ones would replace those of its image",
        );
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
