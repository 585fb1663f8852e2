//! How a container starts its engine, as far as it can be parsed: command, arguments, shell strings inside them, and variables that hold
//! arguments. Nothing is executed or expanded.

use super::engine::{Engine, program};
use super::json;
use serde_json::Value;
use std::collections::BTreeSet;

/// vLLM's own offloading connector, and the module of this project's tier for it.
pub(super) const OFFLOADING: &str = "OffloadingConnector";
const TIER_MODULE: &str = "kvcachepool.vllm_tier";

/// The texts of a container that may contain flags.
pub(super) struct Launch<'a> {
    texts: Vec<&'a str>,
    /// Values of variables that hold only the connector's config.
    configs: Vec<&'a str>,
    engine: Engine,
    visible: bool,
}

impl<'a> Launch<'a> {
    pub(super) fn of(container: &'a Value) -> Self {
        let mut texts: Vec<&str> = ["command", "args"]
            .iter()
            .flat_map(|key| json::list(container, key))
            .filter_map(Value::as_str)
            .collect();
        let words = texts.iter().flat_map(|&text| words(text));
        let engine = Engine::of(words, json::text(container, "image").unwrap_or_default());
        let visible = !texts.is_empty();
        let mut configs = Vec::new();
        for variable in json::list(container, "env") {
            let Some(value) = json::text(variable, "value") else {
                continue;
            };
            texts.push(value);
            if json::name(variable).ends_with("KV_TRANSFER_CONFIG") && !value.is_empty() {
                configs.push(value);
            }
        }
        Self {
            texts,
            configs,
            engine,
            visible,
        }
    }

    /// The engine that it starts.
    pub(super) fn engine(&self) -> Engine {
        self.engine
    }

    /// Whether the container has a command or arguments of its own.
    pub(super) fn is_visible(&self) -> bool {
        self.visible
    }

    /// Whether the launch contains a text anywhere.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.texts.iter().any(|one| one.contains(text))
    }

    /// Words without the quotes of shells and JSON.
    pub(super) fn words(&self) -> impl Iterator<Item = &'a str> {
        self.texts.iter().flat_map(|&text| words(text))
    }

    /// All values of a flag: `--a-b x`, `--a-b=x`, `--a_b x` and `--a-b.c x`. Empty for a flag without a value.
    pub(super) fn flag(&self, name: &str) -> Vec<&'a str> {
        let mut values = Vec::new();
        let mut words = self.words().peekable();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix('-') else {
                continue;
            };
            let flag = flag.strip_prefix('-').unwrap_or(flag);
            let end = flag.find(['=', '.']).unwrap_or(flag.len());
            let same = |a: u8, b: u8| a == b || (a == b'_' && b == b'-');
            let found =
                end == name.len() && flag.bytes().zip(name.bytes()).all(|(a, b)| same(a, b));
            if found {
                values.push(match flag[end..].split_once('=') {
                    Some((_, value)) => value,
                    None => words.peek().copied().unwrap_or_default(),
                });
            }
        }
        values
    }

    pub(super) fn has_flag(&self, name: &str) -> bool {
        !self.flag(name).is_empty()
    }

    /// The names of all configured connectors. `None` if no connector is configured.
    pub(super) fn connectors(&self) -> Option<BTreeSet<String>> {
        let flagged = self.has_flag("kv-transfer-config");
        if !flagged && self.configs.is_empty() {
            return None;
        }
        let texts = if flagged { &self.texts } else { &self.configs };
        let mut names = connector_names(&texts.join("\n"));
        names.remove("MultiConnector");
        Some(names)
    }

    /// The option by which the engine's Python ignores variables of the environment. The engine is a module or a script of Python; other
    /// programs that Python runs beside it do not count.
    pub(super) fn isolating_option(&self) -> Option<&'a str> {
        let mut words = self.words().peekable();
        while let Some(word) = words.next() {
            if !program(word).starts_with("python") {
                continue;
            }
            let mut isolating = None;
            while let Some(option) = words.next_if(|word| word.starts_with('-')) {
                let letters = option.trim_start_matches('-');
                // The module or the argument of these options follows, in the same word or in the next one.
                let end = letters.find(['m', 'c', 'W', 'X']);
                let plain = &letters[..end.unwrap_or(letters.len())];
                if !option.starts_with("--") && plain.contains(['I', 'E']) {
                    isolating = Some(option);
                }
                match letters[plain.len()..].chars().next() {
                    Some('m' | 'c') => break,
                    Some(_) if plain.len() + 1 == letters.len() => _ = words.next(),
                    _ => {}
                }
            }
            let started = words.peek().copied().unwrap_or_default();
            let engine = ["vllm", "sglang", "dynamo"].iter().any(|engine| {
                let rest = program(started).strip_prefix(engine);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            });
            if engine && isolating.is_some() {
                return isolating;
            }
        }
        None
    }

    /// Whether vLLM's own offloading connector has this project's tier.
    pub(super) fn has_own_tier(&self) -> bool {
        let found = self.connectors();
        found.is_some_and(|names| names.contains(OFFLOADING))
            && self.words().any(|word| word == TIER_MODULE)
    }

    /// The connectors in Dynamo's own flag.
    pub(super) fn dynamo_connectors(&self) -> Vec<&'a str> {
        if !self.words().any(|word| word == "dynamo.vllm") {
            return Vec::new();
        }
        self.words()
            .skip_while(|word| *word != "--connector")
            .skip(1)
            .take_while(|word| !word.starts_with('-'))
            .chain(self.words().filter_map(|w| w.strip_prefix("--connector=")))
            .filter(|name| *name != "none" && *name != "null")
            .collect()
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let apart = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '\\' | ';' | '`');
    text.split(apart).filter(|word| !word.is_empty())
}

/// Values of all `kv_connector` keys: in JSON, in JSON inside a shell string, and as dotted flags.
fn connector_names(text: &str) -> BTreeSet<String> {
    const KEY: &str = "kv_connector";
    let identifier = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    text.match_indices(KEY)
        .filter_map(|(at, _)| {
            let rest = &text[at + KEY.len()..];
            if rest.starts_with(identifier) {
                return None; // a longer key, such as kv_connector_module_path
            }
            let between = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '\\' | ':' | '=');
            let value = rest.trim_start_matches(between);
            let end = value.find(|c| !identifier(c)).unwrap_or(value.len());
            (end > 0).then(|| value[..end].to_string())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn connectors(container: Value) -> Option<Vec<String>> {
        Some(Launch::of(&container).connectors()?.into_iter().collect())
    }

    #[test]
    fn connectors_are_found_in_every_way_to_give_them() {
        let nixl = Some(vec!["NixlConnector".to_string()]);
        let config = r#"{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_connector_module_path":"x.y"}"#;
        let escaped = config.replace('"', "\\\"");
        for container in [
            json!({"args": ["--kv-transfer-config", config]}),
            json!({"args": [format!("--kv-transfer-config={config}")]}),
            json!({"args": ["--kv_transfer_config", config]}),
            json!({"command": ["vllm", "serve", "m", "--kv-transfer-config", config]}),
            json!({"command": ["sh", "-c", format!("vllm serve m --kv-transfer-config '{config}'")]}),
            json!({"args": [format!("exec vllm serve m --kv-transfer-config \"{escaped}\"")]}),
            json!({"args": ["--kv-transfer-config.kv_connector", "NixlConnector"]}),
            json!({"args": ["--kv-transfer-config.kv_connector=NixlConnector"]}),
            json!({"env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": format!("--kv-transfer-config '{config}'")}]}),
            json!({"env": [{"name": "SM_VLLM_KV_TRANSFER_CONFIG", "value": config}]}),
        ] {
            assert_eq!(connectors(container.clone()), nixl, "{container}");
        }
        let multi = r#"{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors":
            [{"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}]}}"#;
        assert_eq!(
            connectors(json!({"args": ["--kv-transfer-config", multi]})),
            Some(vec!["NixlConnector".into(), "OffloadingConnector".into()])
        );
        let unknown = json!({"args": ["--kv-transfer-config", "$(KV_CONFIG)"]});
        assert_eq!(connectors(unknown), Some(vec![]));
        assert_eq!(
            connectors(json!({"args": ["--model", "kv_connector: x"]})),
            None
        );
        assert_eq!(connectors(json!({"args": 3, "command": [1, null]})), None);
    }

    #[test]
    fn flags_have_values_in_every_form() {
        let container = json!({"command": ["sh", "-c", "x --nnodes=2; y --node_rank 1"], "args": ["--headless"]});
        let launch = Launch::of(&container);
        assert_eq!(launch.flag("nnodes"), ["2"]);
        assert_eq!(launch.flag("node-rank"), ["1"]);
        assert_eq!(launch.flag("headless"), [""]);
        assert!(launch.flag("nn").is_empty());
        let dynamo = json!({"args": ["python3", "-m", "dynamo.vllm", "--connector", "kvbm", "nixl", "--model", "m"]});
        assert_eq!(Launch::of(&dynamo).dynamo_connectors(), ["kvbm", "nixl"]);
    }

    #[test]
    fn only_options_of_the_engines_python_isolate_it() {
        let of = |command: &str| {
            let words: Vec<&str> = command.split(' ').collect();
            let container = json!({"command": words});
            let launch = Launch::of(&container);
            launch.isolating_option().map(str::to_owned)
        };
        for (command, option) in [
            ("python -I -m vllm.entrypoints.openai.api_server", "-I"),
            (
                "/usr/bin/python3.12 -u -E -m vllm.entrypoints.openai.api_server",
                "-E",
            ),
            ("python3 -sE /opt/venv/bin/vllm serve m", "-sE"),
            ("python3 -Im sglang.launch_server", "-Im"),
            ("python3 -W ignore -I -m dynamo.vllm", "-I"),
            (
                "sh -c exec python3 -X dev -I -m vllm.entrypoints.openai.api_server",
                "-I",
            ),
        ] {
            assert_eq!(of(command).as_deref(), Some(option), "{command}");
        }
        for command in [
            "python3 -m vllm.entrypoints.openai.api_server --model I",
            "python3 -u -W Ignore -m vllm.entrypoints.openai.api_server",
            "sh -c python3 -I prepare.py; vllm serve m",
            "vllm serve m -E",
            "python3 -m vllm.entrypoints.openai.api_server -I",
            "python3",
        ] {
            assert_eq!(of(command), None, "{command}");
        }
    }
}
