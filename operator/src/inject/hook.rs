//! The opt-in hook `args`: the connector is configured by a launch argument instead of the plugin.

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

/// Adds the argument to vLLM's plain args.
pub(super) fn add(container: &mut Value) -> Result<(), Refusal> {
    let args = json::list(container, "args");
    let is_hook = |one: &Value| {
        one.as_str()
            .is_some_and(|arg| arg.contains("KVCachePoolConnector"))
    };
    if args.iter().any(is_hook) {
        return Ok(());
    }
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
        return refuse("a shell starts vLLM");
    }
    if args.is_empty() {
        return refuse(
            "the container has no args, and added ones would replace those of its image",
        );
    }
    let flag = |one: &Value| {
        one.as_str()
            .is_some_and(|arg| arg.replace('_', "-").starts_with(FLAG))
    };
    if args.iter().any(flag) {
        return refuse("its args name another connector");
    }
    let config = json!({
        "kv_connector": "KVCachePoolConnector",
        "kv_connector_module_path": "kvcachepool.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    });
    json::list_mut(container, "args").extend([FLAG.into(), config.to_string().into()]);
    Ok(())
}
