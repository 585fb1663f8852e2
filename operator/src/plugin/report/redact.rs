//! Removes secrets from what a report contains. Pure. In doubt a value is removed.

use serde_json::Value;

/// What stands for a removed value.
pub const REDACTED: &str = "<redacted>";
/// Variables that say how vLLM finds the connector.
const VARIABLES: [&str; 3] = ["PYTHONPATH", "VLLM_PLUGINS", "KVCACHEPOOL_SOCKET"];
/// The object as it was applied, which repeats its spec as text.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Words of a name whose value is a secret.
const SECRET_WORDS: [&str; 11] = [
    "apikey",
    "authorization",
    "bearer",
    "credential",
    "credentials",
    "key",
    "passphrase",
    "passwd",
    "password",
    "secret",
    "token",
];

/// Removes secrets from an object of the API server.
pub fn object(value: &mut Value) {
    if value["kind"] == "Secret" {
        for key in ["data", "stringData"] {
            if let Some(values) = value.get_mut(key).and_then(Value::as_object_mut) {
                values.values_mut().for_each(|v| *v = REDACTED.into());
            }
        }
    }
    walk(value);
}

fn walk(value: &mut Value) {
    match value {
        Value::String(s) => *s = text(s),
        Value::Array(all) => all.iter_mut().for_each(walk),
        Value::Object(fields) => {
            fields.remove("managedFields");
            for (name, value) in fields.iter_mut() {
                match (&**name, &mut *value) {
                    ("annotations", Value::Object(all)) => {
                        all.remove(LAST_APPLIED);
                        for (key, value) in all.iter_mut() {
                            match is_own(key) {
                                true => walk(value),
                                false => *value = REDACTED.into(),
                            }
                        }
                    }
                    ("env", Value::Array(all)) => all.iter_mut().for_each(variable),
                    ("httpHeaders", Value::Array(all)) => {
                        for header in all {
                            header["value"] = REDACTED.into();
                        }
                    }
                    ("command" | "args", Value::Array(all)) => arguments(all),
                    (name, Value::String(s)) if is_secret(name) => *s = REDACTED.to_owned(),
                    _ => walk(value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Whether an annotation belongs to kvcachepool or to Kubernetes itself.
fn is_own(key: &str) -> bool {
    let domain = key.split('/').next().unwrap_or_default();
    let of = |owner: &str| domain == owner || domain.ends_with(&format!(".{owner}"));
    of("kvcachepool.io") || of("kubernetes.io") || of("k8s.io")
}

/// Keeps the name of a variable and the reference to its value.
fn variable(variable: &mut Value) {
    let known = VARIABLES.iter().any(|name| variable["name"] == *name);
    match variable.get_mut("value") {
        Some(value) if known => walk(value),
        Some(value) => *value = REDACTED.into(),
        None => {}
    }
}

/// Whether a value with this name is a secret: `HF_TOKEN`, `--api-key`, `redisPassword`, but not `max-num-batched-tokens`.
fn is_secret(name: &str) -> bool {
    let mut words = vec![String::new()];
    let mut lower = false;
    for c in name.chars() {
        // A capital letter after a small one begins a word.
        if !c.is_alphanumeric() || (c.is_uppercase() && lower) {
            words.push(String::new());
        }
        lower = c.is_lowercase();
        if c.is_alphanumeric()
            && let Some(word) = words.last_mut()
        {
            word.extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    // The key of a map, of a toleration or of a chunk is no secret.
    let key_alone = words == ["key"];
    let last = words.last();
    !key_alone && last.is_some_and(|word| SECRET_WORDS.contains(&&**word))
}

/// Removes secrets from the arguments of a program or of a shell.
fn arguments(all: &mut [Value]) {
    let mut words = Words::default();
    for value in all {
        let Value::String(argument) = value else {
            continue;
        };
        match serde_json::from_str::<Value>(argument) {
            Ok(mut json @ Value::Object(_)) if !words.removing() => {
                walk(&mut json);
                *argument = json.to_string();
            }
            _ => {
                *argument = text(&words.line(argument));
                words.end_of_argument();
            }
        }
    }
}

/// Whether the next word is a secret.
#[derive(Debug, Default, PartialEq, Eq)]
enum Next {
    #[default]
    Keep,
    /// The next word is the value of a secret.
    Value,
    /// A value in quotes continues until this quote.
    Until(char),
}

/// Goes through the words of a command line.
#[derive(Debug, Default)]
struct Words(Next);

impl Words {
    fn removing(&self) -> bool {
        self.0 != Next::Keep
    }

    /// A quote ends with its argument.
    fn end_of_argument(&mut self) {
        if let Next::Until(_) = self.0 {
            self.0 = Next::Keep;
        }
    }

    fn line(&mut self, line: &str) -> String {
        line.split_inclusive(char::is_whitespace)
            .map(|piece| {
                let word = piece.trim_end();
                let space = &piece[word.len()..];
                match word.is_empty() {
                    true => piece.to_owned(),
                    false => self.word(word) + space,
                }
            })
            .collect()
    }

    fn word(&mut self, word: &str) -> String {
        match self.0 {
            Next::Until(quote) => {
                if word.contains(quote) {
                    self.0 = Next::Keep;
                }
                return REDACTED.to_owned();
            }
            Next::Value => {
                let scheme = word.trim_matches(['"', '\'']).to_ascii_lowercase();
                // The scheme of an Authorization header stands before the secret.
                if !matches!(&*scheme, "bearer" | "basic") {
                    self.0 = quoted(word);
                }
                return REDACTED.to_owned();
            }
            Next::Keep => {}
        }
        let bare = word.trim_matches(['"', '\'', '{', '}', ',']);
        if let Some((name, value)) = word.split_once('=')
            && is_secret(name.trim_matches(['"', '\'']))
        {
            self.0 = quoted(value);
            return format!("{name}={REDACTED}");
        }
        let flag = bare
            .strip_suffix(':')
            .or(bare.starts_with('-').then_some(bare));
        if flag.is_some_and(is_secret) || bare.eq_ignore_ascii_case("bearer") {
            self.0 = Next::Value;
        }
        word.to_owned()
    }
}

/// What follows a value: the rest of it, if it begins with a quote and does not end with it.
fn quoted(value: &str) -> Next {
    let Some(quote @ ('"' | '\'')) = value.chars().next() else {
        return Next::Keep;
    };
    match value[1..].contains(quote) {
        true => Next::Keep,
        false => Next::Until(quote),
    }
}

/// Removes user names and passwords from URLs in a text.
pub fn text(from: &str) -> String {
    let mut out = String::with_capacity(from.len());
    let mut rest = from;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        out.push_str(before);
        let ends = |c: char| {
            c.is_whitespace() || matches!(c, '/' | '"' | '\'' | '<' | '>' | '?' | '#' | '`')
        };
        let host = &after[..after.find(ends).unwrap_or(after.len())];
        rest = after;
        if let Some((user, _)) = host.rsplit_once('@') {
            out.push_str(REDACTED);
            rest = &after[user.len()..];
        }
    }
    out.push_str(rest);
    out
}

/// Removes credentials from the lines of a log.
pub fn log(from: &str) -> String {
    let line = |line: &str| text(&Words::default().line(line));
    from.split_inclusive('\n').map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn no_planted_secret_of_a_pod_remains() {
        let env = json!([
            {"name": "HF_TOKEN", "value": "s3cr3t-env"},
            {"name": "FROM", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "a"}}},
            {"name": "PYTHONPATH", "value": "/kvcachepool"},
        ]);
        let shell = "export API_TOKEN='s3cr3t one s3cr3t'; curl -H \"Authorization: Bearer s3cr3t\" x --password \"s3cr3t s3cr3t\" && exec vllm serve --api-key s3cr3t --max-num-batched-tokens 8192 --tokenizer t";
        let mut pod = json!({
            "kind": "Pod",
            "metadata": {
                "managedFields": [{"f": "s3cr3t"}],
                "annotations": {
                    LAST_APPLIED: "s3cr3t", "vault.example/agent": "s3cr3t", "kvcachepool.io/config": "urls: [redis://u:s3cr3t@h:1]",
                },
            },
            "spec": {
                "initContainers": [{"env": env}],
                "containers": [{
                    "env": env, "command": ["sh", "-c", shell],
                    "args": [
                        "--api-key", "s3cr3t", "--hf-token=s3cr3t", "--model=m", "--kv-transfer-config",
                        "{\"kv_connector\":\"X\",\"password\":\"s3cr3t\"}", "--api-key", "{\"s3cr3t\":1}", "--port", "1",
                    ],
                    "livenessProbe": {"httpGet": {"httpHeaders": [{"name": "Authorization", "value": "s3cr3t"}]}},
                    "lifecycle": {"preStop": {"exec": {"command": ["curl", "https://me:s3cr3t@h/x"]}}},
                }],
            },
        });
        object(&mut pod);
        let text = pod.to_string();
        assert!(!text.contains("s3cr3t"), "{text}");
        for kept in [
            "HF_TOKEN",
            "\"secretKeyRef\":{\"key\":\"a\",\"name\":\"keys\"}",
            "\"/kvcachepool\"",
            "--max-num-batched-tokens 8192",
            "--tokenizer t",
            "--model=m",
            "kv_connector",
            "redis://<redacted>@h:1",
            "https://<redacted>@h/x",
            "vault.example/agent",
            "exec vllm serve",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        assert_eq!(pod["spec"]["containers"][0]["args"][9], "1");
    }

    #[test]
    fn a_pool_keeps_the_names_of_its_secrets_and_loses_values() {
        let mut pool = json!({"spec": {
            "sidecar": {"env": [{"name": "AWS_SECRET_ACCESS_KEY", "value": "s3cr3t"}]},
            "shared": {"s3": {"bucket": "kv", "auth": {"secretName": "keys"}}, "redis": {"external": {"url": "redis://a:s3cr3t@h"}}},
        }});
        object(&mut pool);
        let text = pool.to_string();
        assert!(!text.contains("s3cr3t"), "{text}");
        assert!(
            text.contains("\"secretName\":\"keys\"") && text.contains("redis://<redacted>@h"),
            "{text}"
        );
    }

    #[test]
    fn the_values_of_a_secret_go_even_though_secrets_are_not_read() {
        let mut secret =
            json!({"kind": "Secret", "data": {"password": "czNjcjN0", "tls.crt": "x"}});
        object(&mut secret);
        assert_eq!(
            secret["data"],
            json!({"password": REDACTED, "tls.crt": REDACTED})
        );
    }

    #[test]
    fn names_of_secrets_are_told_from_other_names() {
        for name in [
            "--api-key",
            "HF_TOKEN",
            "redisPassword",
            "x.secret",
            "credentials",
            "AWS_SECRET_ACCESS_KEY",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in [
            "--max-num-batched-tokens",
            "tokenizer",
            "secretName",
            "hit_tokens",
            "keys",
            "key",
            "",
            "--",
        ] {
            assert!(!is_secret(name), "{name}");
        }
    }

    #[test]
    fn a_log_loses_credentials_and_nothing_else() {
        let line = "INFO tier=redis url=rediss://u:p%40@cache:6379/0 hit_tokens=7 password=hunter2\nINFO a@b see https://docs.example/x@y\n";
        let expected = "INFO tier=redis url=rediss://<redacted>@cache:6379/0 hit_tokens=7 password=<redacted>\nINFO a@b see https://docs.example/x@y\n";
        assert_eq!(log(line), expected);
        assert_eq!(
            text("s3://kv redis://a@b@c:1 x://"),
            "s3://kv redis://<redacted>@c:1 x://"
        );
    }
}
