//! Which engine a container starts, and how an SGLang uses the sidecar: by launch arguments, because it loads no plugin.

use super::launch::Launch;
use super::{Reason, Refusal, Shortfall, ShortfallDetail};
use serde_json::json;
use std::fmt;

/// Module of the backend in the connector package.
const MODULE: &str = "kvcachepool.sglang";
const CACHE_FLAG: &str = "enable-hierarchical-cache";
const BACKEND_FLAG: &str = "hicache-storage-backend";
const CONFIG_FLAG: &str = "hicache-storage-backend-extra-config";

/// An engine that injection knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Engine {
    /// Also every program that is not known: a wrapper of vLLM.
    Vllm,
    Sglang,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
        })
    }
}

impl Engine {
    /// The engine of a container with these words of command and arguments. A program counts more than the name of an image.
    pub(super) fn of<'a>(words: impl Iterator<Item = &'a str>, image: &str) -> Self {
        let mut before = "";
        for word in words {
            match word {
                "dynamo.vllm" => return Self::Vllm,
                "sglang.launch_server" | "dynamo.sglang" => return Self::Sglang,
                _ => {}
            }
            if program(word) == "vllm" || word.starts_with("vllm.entrypoints.") {
                return Self::Vllm;
            }
            if program(before) == "sglang" && word == "serve" {
                return Self::Sglang;
            }
            before = word;
        }
        // The repository, without registry, tag and digest.
        let repository = image.split('@').next().unwrap_or(image);
        let name = program(repository);
        match name.split(':').next() {
            Some("sglang") => Self::Sglang,
            _ => Self::Vllm,
        }
    }
}

/// The last part of a path.
pub(super) fn program(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Refuses an SGLang that has another cache below its own.
pub(super) fn sglang(launch: &Launch<'_>) -> Result<(), Refusal> {
    let refuse = |sign: String| {
        Err(Refusal::new(
            Reason::OtherCachePresent,
            format!("SGLang is started with {sign}; remove that argument"),
        ))
    };
    if launch.has_flag("enable-lmcache") {
        return refuse("--enable-lmcache".to_string());
    }
    let mut backends = launch.flag(BACKEND_FLAG).into_iter();
    if let Some(other) = backends.find(|name| *name != "dynamic" && !is_unknown(name)) {
        return refuse(format!("--{BACKEND_FLAG} {other}"));
    }
    if launch.has_flag(CONFIG_FLAG) && launch.mentions("module_path") && !launch.mentions(MODULE) {
        return refuse(format!("--{CONFIG_FLAG} of another module than {MODULE}"));
    }
    Ok(())
}

/// Whether a value is known only when the container runs.
fn is_unknown(value: &str) -> bool {
    value.is_empty() || value.contains('$')
}

/// The argument with which SGLang has no hierarchical cache, if it has one. It refuses to start with both.
pub(super) fn excludes_cache(launch: &Launch<'_>) -> Option<&'static str> {
    let decodes = launch.flag("disaggregation-mode").contains(&"decode")
        && !launch.has_flag("disaggregation-decode-enable-radix-cache");
    match () {
        () if launch.has_flag("disable-radix-cache") => Some("--disable-radix-cache"),
        () if launch.has_flag("enable-unified-cache-external-linker") => {
            Some("--enable-unified-cache-external-linker")
        }
        () if decodes => {
            Some("--disaggregation-mode decode without --disaggregation-decode-enable-radix-cache")
        }
        () => None,
    }
}

/// Whether the extra config is written out and names no backend of ours.
pub(super) fn foreign_config(launch: &Launch<'_>) -> bool {
    let values = launch.flag(CONFIG_FLAG);
    // A file, or a value that is known only when the container runs.
    let hidden = |value: &&str| value.starts_with('@') || value.contains('$');
    !values.is_empty()
        && !values.iter().any(hidden)
        && launch.mentions("{\"")
        && !launch.mentions(MODULE)
}

/// The arguments without which SGLang does not use the sidecar and that its launch lacks: each a flag and its value, if it has one.
pub(super) fn missing(launch: &Launch<'_>) -> Vec<Vec<String>> {
    let absent = |flag: &str| !launch.has_flag(flag);
    let mut missing = Vec::new();
    if absent(CACHE_FLAG) {
        missing.push(vec![format!("--{CACHE_FLAG}")]);
    }
    if absent(BACKEND_FLAG) {
        missing.push(vec![format!("--{BACKEND_FLAG}"), "dynamic".to_string()]);
    }
    if absent(CONFIG_FLAG) {
        let config = json!({
            "backend_name": "kvcachepool",
            "module_path": MODULE,
            "class_name": "KVCachePoolStorage",
            "interface_v1": 1,
        });
        missing.push(vec![format!("--{CONFIG_FLAG}"), config.to_string()]);
    }
    missing
}

/// The shortfall of an SGLang whose launch lacks arguments. `None` if the pod does not show its arguments, which then come from the image
/// or from a file.
pub(super) fn shortfall(launch: &Launch<'_>, container: &str) -> Option<ShortfallDetail> {
    if launch.engine() != Engine::Sglang || !launch.is_visible() || launch.has_flag("config") {
        return None;
    }
    let detail = |message| {
        Some(ShortfallDetail {
            reason: Shortfall::SglangArgumentsMissing,
            message,
        })
    };
    if let Some(argument) = excludes_cache(launch) {
        return detail(format!(
            "container {container} starts SGLang with {argument}: it has no hierarchical cache and does not use the sidecar"
        ));
    }
    if foreign_config(launch) {
        return detail(format!(
            "container {container} starts SGLang with a --{CONFIG_FLAG} that does not name {MODULE}; add backend_name, module_path and class_name to it"
        ));
    }
    let missing = missing(launch);
    if missing.is_empty() {
        return None;
    }
    let quoted = |word: String| match word.starts_with('{') {
        true => format!("'{word}'"),
        false => word,
    };
    let listed: Vec<String> = missing.into_iter().flatten().map(quoted).collect();
    let message = format!(
        "container {container} starts SGLang without arguments by which it uses the sidecar; add {}",
        listed.join(" ")
    );
    detail(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn engine(container: Value) -> Engine {
        Launch::of(&container).engine()
    }

    #[test]
    fn the_engine_is_known_by_its_program_before_its_image() {
        for container in [
            json!({"command": ["python3", "-m", "sglang.launch_server"]}),
            json!({"command": ["sh", "-c", "exec python -m sglang.launch_server --model-path m"]}),
            json!({"args": ["/opt/venv/bin/sglang", "serve", "--model-path", "m"]}),
            json!({"args": ["python3", "-m", "dynamo.sglang"]}),
            json!({"image": "lmsysorg/sglang:v0.5.23-cu129", "args": ["--model-path", "m"]}),
            json!({"image": "registry:5000/mirror/lmsysorg/sglang@sha256:00"}),
            json!({"image": "sglang"}),
        ] {
            assert_eq!(engine(container.clone()), Engine::Sglang, "{container}");
        }
        for container in [
            json!({"args": ["--model", "m"]}),
            json!({"image": "lmsysorg/sglang:v0.5.23", "command": ["vllm", "serve", "m"]}),
            json!({"image": "lmsysorg/sglang", "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"]}),
            json!({"image": "lmsysorg/sglang", "args": ["python3", "-m", "dynamo.vllm"]}),
            json!({"image": "sglang/vllm-openai:1"}),
            json!({"image": "lmsysorg/sglang-router:1"}),
            json!({"image": "vllm/vllm-openai", "args": ["--served-model-name", "sglang", "--port", "1"]}),
            json!({"env": [{"name": "NOTE", "value": "python -m sglang.launch_server"}]}),
            json!({}),
        ] {
            assert_eq!(engine(container.clone()), Engine::Vllm, "{container}");
        }
    }
}
