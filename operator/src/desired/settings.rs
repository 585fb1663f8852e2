//! From a pool's spec to what injection needs, the sidecar's config among it.

use crate::api::{
    Disk, Duration, ExistingConnector, ImagePullPolicy, KVCachePool, Mode, Problem, Quantity,
    Reason, check,
};
use crate::defaults::Defaults;
use crate::inject::{self, Settings};
use crate::names;
use kube::ResourceExt;
use kvcachepool_protocol::config::{self, Config};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// What injection gives the pods of a pool, or all that is wrong with the pool.
pub fn settings(pool: &KVCachePool, defaults: &Defaults) -> Result<Settings, Vec<Problem>> {
    let broken = check(pool);
    let config = match config(pool) {
        Ok(config) if broken.is_empty() => config,
        Ok(_) => return Err(broken),
        Err(more) => {
            // What a rule has named already is not named again.
            let new = |p: &Problem| {
                p.reason == Reason::InvalidSettings || broken.iter().all(|b| b.field != p.field)
            };
            let more: Vec<_> = more.into_iter().filter(new).collect();
            return Err([broken, more].concat());
        }
    };
    let (injection, sidecar) = (&pool.spec.injection, &pool.spec.sidecar);
    let memory_max = injection.memory_max.as_ref();
    let secrets = sidecar.image_pull_secrets.iter();
    Ok(Settings {
        pool: pool.name_any(),
        namespace: pool.namespace().unwrap_or_default(),
        generation: generation(pool),
        mode: match injection.mode {
            Mode::Enabled => inject::Mode::Enabled,
            Mode::Disabled => inject::Mode::Disabled,
        },
        image: said(&sidecar.image).unwrap_or_else(|| defaults.image.clone()),
        image_pull_policy: Some(policy(sidecar.image_pull_policy).to_string()),
        image_pull_secrets: secrets.map(|secret| secret.name.clone()).collect(),
        container: said(&injection.container),
        existing_connector: match injection.existing_connector {
            ExistingConnector::Refuse => inject::ExistingConnector::Refuse,
            ExistingConnector::Compose => inject::ExistingConnector::Compose,
        },
        memory_bytes: config.memory.size.0,
        memory_max_bytes: memory_max.and_then(|most| Some(most.bytes().ok()?.0)),
        config,
        disk: pool.spec.local.disk.as_ref().map(disk),
        resources: sidecar.resources.clone(),
        env: sidecar.env.clone(),
    })
}

fn disk(disk: &Disk) -> inject::Disk {
    match &disk.ephemeral {
        Some(volume) => inject::Disk::Ephemeral(volume.storage_class_name.clone()),
        None => inject::Disk::NodeDirectory,
    }
}

fn said(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_string())
}

fn generation(pool: &KVCachePool) -> i64 {
    pool.metadata.generation.unwrap_or_default()
}

fn policy(policy: ImagePullPolicy) -> &'static str {
    match policy {
        ImagePullPolicy::IfNotPresent => "IfNotPresent",
        ImagePullPolicy::Always => "Always",
        ImagePullPolicy::Never => "Never",
    }
}

/// A key of the sidecar's config that has its own place in a pool.
struct Placed {
    key: &'static str,
    /// Where it stands in a pool; `None` where the operator alone knows it.
    field: Option<&'static str>,
    value: Value,
}

fn placed(pool: &KVCachePool) -> Vec<Placed> {
    let (cache, memory) = (&pool.spec.cache, &pool.spec.local.memory);
    let disk = pool.spec.local.disk.as_ref();
    let write = &pool.spec.write;
    let own = |key, value| Placed {
        key,
        field: None,
        value,
    };
    let field = |key, field, value| Placed {
        key,
        field: Some(field),
        value,
    };
    vec![
        own("managed", json!(false)),
        own("pool.name", json!(pool.name_any())),
        own(
            "pool.namespace",
            json!(pool.namespace().unwrap_or_default()),
        ),
        own("pool.generation", json!(generation(pool))),
        field(
            "cache.chunkTokens",
            "spec.cache.chunkTokens",
            json!(cache.chunk_tokens),
        ),
        field("cache.save", "spec.cache.save", named(cache.save)),
        field(
            "cache.minLoadTokens",
            "spec.cache.minLoadTokens",
            json!(cache.min_load_tokens),
        ),
        field(
            "cache.loadTimeout",
            "spec.cache.loadTimeout",
            text(&cache.load_timeout),
        ),
        field(
            "memory.size",
            "spec.local.memory.perPod",
            size(&memory.per_pod),
        ),
        field(
            "memory.hugePages",
            "spec.local.memory.hugePages",
            named(memory.huge_pages),
        ),
        field(
            "memory.evictionPolicy",
            "spec.local.memory.evictionPolicy",
            named(memory.eviction_policy),
        ),
        own("disk.path", json!(disk.map_or("", |_| names::DISK_PATH))),
        field(
            "disk.size",
            "spec.local.disk.perPod",
            disk.map_or(json!(Config::default().disk.size.to_string()), |disk| {
                size(&disk.per_pod)
            }),
        ),
        field("write.policy", "spec.write.policy", named(write.policy)),
        field(
            "write.admission",
            "spec.write.admission",
            named(write.admission),
        ),
        field(
            "log.level",
            "spec.sidecar.logLevel",
            named(pool.spec.sidecar.log_level),
        ),
    ]
}

/// Keys whose values the layout of an injected pod fixes.
const FIXED: [&str; 2] = ["socket", "admin.listen"];

fn named(choice: impl Serialize) -> Value {
    json!(choice)
}

fn text(time: &Duration) -> Value {
    json!(time)
}

fn size(size: &Quantity) -> Value {
    json!(size)
}

/// The sidecar's config: its defaults, the fields of the pool, and over them `spec.sidecar.settings`.
fn config(pool: &KVCachePool) -> Result<Config, Vec<Problem>> {
    let placed = placed(pool);
    let asked = leaves(&pool.spec.sidecar.settings);
    let mut problems: Vec<_> = asked
        .iter()
        .filter_map(|(key, _)| misplaced(key, &placed))
        .collect();
    // A file may name its keys by path, which spares a merge of sections.
    let mut file: Map<String, Value> = Config::default()
        .entries()
        .into_iter()
        .map(|(key, value)| (key.to_string(), Value::String(value)))
        .collect();
    file.extend(placed.iter().map(|p| (p.key.to_string(), p.value.clone())));
    file.extend(asked.iter().cloned());
    // JSON is YAML.
    let parsed = Config::parse(&Value::Object(file).to_string(), false);
    problems.extend(parsed.as_ref().err().into_iter().flat_map(|error| {
        let problems = error.problems.iter();
        problems.map(|wrong| {
            let path = path(wrong);
            let by_field = placed.iter().filter(|p| Some(p.key) == path);
            match by_field.filter_map(|p| p.field).next() {
                Some(field) if !asked.iter().any(|(key, _)| Some(key.as_str()) == path) => {
                    Problem {
                        reason: Reason::InvalidSpec,
                        field: field.to_string(),
                        message: wrong.to_string(),
                    }
                }
                _ => problem(wrong.to_string()),
            }
        })
    }));
    match parsed {
        // Only now: a file that is managed may have unknown keys.
        Ok((config, _)) if problems.is_empty() => Ok(Config {
            managed: true,
            ..config
        }),
        _ => Err(problems),
    }
}

/// Which key a problem of a config speaks of.
fn path(problem: &config::Problem) -> Option<&str> {
    match problem {
        config::Problem::BadValue { path, .. } => Some(path),
        config::Problem::Unknown(key) => Some(&key.path),
        config::Problem::NotASection { path, .. } => Some(path),
        config::Problem::NotYaml(_) | config::Problem::TooLong(_) => None,
    }
}

/// Keys by path with their values; a section is one level deep.
fn leaves(settings: &Map<String, Value>) -> Vec<(String, Value)> {
    let mut leaves = Vec::new();
    for (name, value) in settings {
        match value {
            Value::Object(section) => {
                let inner = section.iter();
                leaves.extend(inner.map(|(key, value)| (format!("{name}.{key}"), value.clone())));
            }
            Value::Null => {}
            value => leaves.push((name.clone(), value.clone())),
        }
    }
    leaves
}

fn misplaced(key: &str, placed: &[Placed]) -> Option<Problem> {
    if FIXED.contains(&key) {
        return Some(problem(format!(
            "{key}: every pod of a pool has the same; leave it out"
        )));
    }
    let place = placed.iter().find(|p| p.key == key)?;
    Some(problem(match place.field {
        Some(field) => format!("{key}: write it as {field}"),
        None => format!("{key}: the operator sets it; leave it out"),
    }))
}

fn problem(message: String) -> Problem {
    Problem {
        reason: Reason::InvalidSettings,
        field: "spec.sidecar.settings".to_string(),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::{defaults, pool};
    use kvcachepool_protocol::config::{
        Admission, ByteSize, EvictionPolicy, HugePages, LogLevel, Verify, WritePolicy,
    };
    use kvcachepool_protocol::message::Save;

    fn of(spec: Value) -> Settings {
        settings(&pool(spec), &defaults()).unwrap()
    }

    fn refused(spec: Value) -> Vec<String> {
        let problems = settings(&pool(spec), &defaults()).unwrap_err();
        assert!(problems.iter().all(|p| p.reason == Reason::InvalidSettings));
        problems.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn the_smallest_pool_takes_everything_else_from_the_defaults() {
        let mut expected = Settings::new("llama", "serving", &defaults().image, 64 << 30);
        expected.generation = 7;
        expected.image_pull_policy = Some("IfNotPresent".to_string());
        expected.config.memory.size = ByteSize(64 << 30);
        expected.config.pool.generation = 7;
        assert_eq!(of(json!({})), expected);
    }

    #[test]
    fn every_field_of_a_pool_reaches_its_place() {
        let got = of(json!({
            "cache": {"chunkTokens": 128, "save": "PromptAndDecode", "minLoadTokens": 0, "loadTimeout": "1m30s"},
            "local": {
                "memory": {"perPod": "1Gi", "hugePages": "2Mi", "evictionPolicy": "LRU"},
                "disk": {"perPod": "3Gi", "ephemeral": {"storageClassName": "nvme"}},
            },
            "write": {"policy": "WriteBack", "admission": "Reused"},
            "injection": {"mode": "Disabled", "container": "main", "existingConnector": "Compose", "memoryMax": "2Gi"},
            "sidecar": {
                "image": "mine:1", "imagePullPolicy": "Never", "imagePullSecrets": [{"name": "regcred"}],
                "resources": {"requests": {"cpu": "2"}}, "logLevel": "warn", "env": [{"name": "A", "value": "b"}],
                "settings": {"limits": {"connections": 512}, "memory": {"verify": "Always", "verifyAge": "5m"}},
            },
        }));
        assert!(got.config.managed);
        assert_eq!(got.config.cache.chunk_tokens, 128);
        assert_eq!(got.config.cache.save, Save::PromptAndDecode);
        assert_eq!(got.config.cache.min_load_tokens, 0);
        assert_eq!(
            got.config.cache.load_timeout,
            config::Duration::from_ms(90_000)
        );
        assert_eq!(got.config.memory.size, ByteSize(1 << 30));
        assert_eq!(got.config.memory.huge_pages, HugePages::Size2Mi);
        assert_eq!(got.config.memory.eviction_policy, EvictionPolicy::Lru);
        assert_eq!(
            (got.config.write.policy, got.config.write.admission),
            (WritePolicy::WriteBack, Admission::Reused)
        );
        assert_eq!(got.config.disk.size, ByteSize(3 << 30));
        assert_eq!(
            got.config.disk.path.as_deref(),
            Some(names::DISK_PATH.as_ref())
        );
        assert_eq!(got.disk, Some(inject::Disk::Ephemeral("nvme".to_string())));
        assert_eq!(got.config.memory.verify, Verify::Always);
        assert_eq!(
            got.config.memory.verify_age,
            config::Duration::from_ms(300_000)
        );
        assert_eq!(got.config.limits.connections, 512);
        assert_eq!(got.config.log.level, LogLevel::Warn);
        assert_eq!(
            (got.memory_bytes, got.memory_max_bytes),
            (1 << 30, Some(2 << 30))
        );
        assert_eq!(got.mode, inject::Mode::Disabled);
        assert_eq!(got.existing_connector, inject::ExistingConnector::Compose);
        assert_eq!(got.container.as_deref(), Some("main"));
        assert_eq!(
            (got.image.as_str(), got.image_pull_policy.as_deref()),
            ("mine:1", Some("Never"))
        );
        assert_eq!(got.image_pull_secrets, ["regcred"]);
        assert_eq!(got.env[0].name, "A");
        assert_eq!(got.resources.requests.unwrap()["cpu"].0, "2");
    }

    #[test]
    fn a_pool_without_a_disk_has_no_folder_for_one() {
        let got = of(json!({}));
        assert_eq!((got.disk, got.config.disk.path), (None, None));
        let got = of(json!({"local": {"disk": {"perPod": "1Gi", "emptyDir": {}}}}));
        assert_eq!(got.disk, Some(inject::Disk::NodeDirectory));
    }

    #[test]
    fn settings_that_cannot_be_used_are_refused_by_name() {
        let cases = [
            (
                json!({"memory": {"verifyAeg": "1m"}}),
                "memory.verifyAeg: unknown key; did you mean memory.verifyAge?",
            ),
            (
                json!({"nothing": 1}),
                "nothing: unknown key; `kvcachepool-sidecar config --defaults` lists all keys",
            ),
            (
                json!({"limits": {"connections": 1}}),
                "limits.connections: found 1; write a value from 4 to 65536",
            ),
            (
                json!({"limits": {"requests": "many"}}),
                "limits.requests: found \"many\"; write a whole number from 1 to 1000000",
            ),
            (
                json!({"limits": {"requests": [1]}}),
                "limits.requests: found a list; write a whole number from 1 to 1000000",
            ),
            (
                json!({"memory": {"size": "1Gi"}}),
                "memory.size: write it as spec.local.memory.perPod",
            ),
            (
                json!({"cache": {"chunkTokens": 1}}),
                "cache.chunkTokens: write it as spec.cache.chunkTokens",
            ),
            (
                json!({"log": {"level": "debug"}}),
                "log.level: write it as spec.sidecar.logLevel",
            ),
            (
                json!({"disk": {"size": "1Gi"}}),
                "disk.size: write it as spec.local.disk.perPod",
            ),
            (
                json!({"disk": {"path": "/tmp"}}),
                "disk.path: the operator sets it; leave it out",
            ),
            (
                json!({"managed": false}),
                "managed: the operator sets it; leave it out",
            ),
            (
                json!({"pool": {"generation": 9}}),
                "pool.generation: the operator sets it; leave it out",
            ),
            (
                json!({"socket": "/tmp/a.sock"}),
                "socket: every pod of a pool has the same; leave it out",
            ),
            (
                json!({"admin": {"listen": "0.0.0.0:1"}}),
                "admin.listen: every pod of a pool has the same; leave it out",
            ),
        ];
        for (settings, message) in cases {
            let got = refused(json!({"sidecar": {"settings": settings}}));
            assert_eq!(got, [format!("spec.sidecar.settings: {message}")]);
        }
    }

    #[test]
    fn all_problems_are_named_at_once() {
        let settings =
            json!({"limits": {"connections": 1, "sesions": 8}, "memory": {"size": "1Gi"}});
        let problems = super::settings(
            &pool(
                json!({"cache": {"chunkTokens": 0}, "sidecar": {"settings": settings}, "deletionPolicy": "Delete"}),
            ),
            &defaults(),
        );
        let problems = problems.unwrap_err();
        let reasons: Vec<_> = problems.iter().map(|p| p.reason).collect();
        let [bad, later, wrong] = [
            Reason::InvalidSpec,
            Reason::NotYetSupported,
            Reason::InvalidSettings,
        ];
        assert_eq!(reasons, [bad, later, wrong, wrong, wrong], "{problems:?}");
    }

    #[test]
    fn empty_sections_of_settings_say_nothing() {
        let got = of(json!({"sidecar": {"settings": {"limits": {}}}}));
        assert_eq!(got.config, of(json!({})).config);
    }

    #[test]
    fn every_key_of_the_sidecar_has_one_place() {
        let placed = placed(&pool(json!({})));
        for (key, value) in Config::default().entries() {
            let settings = leaves(&Map::from_iter([(key.to_string(), json!(value))]));
            let elsewhere = FIXED.contains(&key) || placed.iter().any(|p| p.key == key);
            assert_eq!(
                misplaced(&settings[0].0, &placed).is_some(),
                elsewhere,
                "{key}"
            );
            if !elsewhere {
                of(json!({"sidecar": {"settings": {key: value}}}));
            }
        }
    }

    #[test]
    fn names_of_a_pool_are_names_of_the_config() {
        for level in ["error", "warn", "info", "debug", "trace"] {
            of(json!({"sidecar": {"logLevel": level}}));
        }
        for policy in ["S3FIFO", "LRU", "LFU", "FIFO"] {
            of(json!({"local": {"memory": {"evictionPolicy": policy}}}));
        }
        for policy in ["WriteThrough", "WriteBack", "None"] {
            of(json!({"write": {"policy": policy}}));
        }
        for admission in ["All", "Reused"] {
            of(json!({"write": {"admission": admission}}));
        }
        for pages in ["None", "2Mi", "1Gi"] {
            of(json!({"local": {"memory": {"hugePages": pages}}}));
        }
        let unset = crate::api::LogLevel::default();
        assert_eq!(named(unset), json!(LogLevel::default().to_string()));
    }
}
