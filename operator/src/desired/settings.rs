//! Converts a pool's spec to the settings of injection, including the sidecar's config.

use super::files;
use super::placed::{Placed, placed};
use crate::api::{Disk, KVCachePool, Problem, Reason, check};
use crate::defaults::Defaults;
use crate::inject::{self, Settings};
use kube::ResourceExt;
use kvcachepool_protocol::config::{self, Config};
use serde_json::{Map, Value};

/// The settings that the pods of a pool get, or all violations of its spec.
pub fn settings(pool: &KVCachePool, defaults: &Defaults) -> Result<Settings, Vec<Problem>> {
    let broken = check(pool);
    let config = match config(pool) {
        Ok(config) if broken.is_empty() => config,
        Ok(_) => return Err(broken),
        Err(more) => {
            // A violation of a rule is not reported twice.
            let new = |p: &Problem| {
                p.reason == Reason::InvalidSettings || broken.iter().all(|b| b.field != p.field)
            };
            let more: Vec<_> = more.into_iter().filter(new).collect();
            return Err([broken, more].concat());
        }
    };
    let violations = defaults.policy.violations(pool);
    if !violations.is_empty() {
        return Err(violations);
    }
    let (injection, sidecar) = (&pool.spec.injection, &pool.spec.sidecar);
    let memory_max = injection.memory_max.as_ref();
    let memory_max = memory_max.and_then(|most| most.bytes().ok());
    // Pods can request more than the pool by an annotation.
    let memory_max = memory_max.into_iter().chain(defaults.policy.max_memory);
    Ok(Settings {
        pool: pool.name_any(),
        namespace: pool.namespace().unwrap_or_default(),
        generation: generation(pool),
        mode: injection.mode,
        image: nonempty(&sidecar.image).unwrap_or_else(|| defaults.image.clone()),
        image_pull_policy: Some(format!("{:?}", sidecar.image_pull_policy)),
        image_pull_secrets: image_pull_secrets(pool, defaults),
        container: nonempty(&injection.container),
        existing_connector: injection.existing_connector,
        memory_bytes: config.memory.size.0,
        memory_max_bytes: memory_max.map(|most| most.0).min(),
        config,
        disk: pool.spec.local.disk.as_ref().map(disk),
        claim: claim(pool).map(str::to_string),
        files: [files::of_redis(pool).files, files::of_s3(pool).files].concat(),
        own_identity: pool
            .spec
            .shared
            .s3
            .as_ref()
            .is_some_and(|s3| s3.auth.is_none()),
        resources: sidecar.resources.clone(),
        env: sidecar.env.clone(),
        gpu_access: sidecar.gpu_access,
    })
}

/// The pool's pull secrets, and those of all pools.
pub(super) fn image_pull_secrets(pool: &KVCachePool, defaults: &Defaults) -> Vec<String> {
    let own = pool.spec.sidecar.image_pull_secrets.iter();
    let mut secrets: Vec<String> = own.map(|secret| secret.name.clone()).collect();
    let new = |name: &&String| !secrets.contains(name);
    let more: Vec<String> = defaults
        .image_pull_secrets
        .iter()
        .filter(new)
        .cloned()
        .collect();
    secrets.extend(more);
    secrets
}

/// Name of the claim with the file system tier.
pub(super) fn claim(pool: &KVCachePool) -> Option<&str> {
    let folder = pool.spec.shared.file_system.as_ref()?;
    Some(&folder.persistent_volume_claim.claim_name)
}

fn disk(disk: &Disk) -> inject::Disk {
    match &disk.ephemeral {
        Some(volume) => inject::Disk::Ephemeral(volume.storage_class_name.clone()),
        None => inject::Disk::NodeDirectory,
    }
}

fn nonempty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_string())
}

fn generation(pool: &KVCachePool) -> i64 {
    pool.metadata.generation.unwrap_or_default()
}

/// Keys whose values are fixed by the layout of an injected pod.
const FIXED: [&str; 2] = ["socket", "admin.listen"];

/// The sidecar's config: the fields of the pool, and `spec.sidecar.settings`.
fn config(pool: &KVCachePool) -> Result<Config, Vec<Problem>> {
    let placed = placed(pool);
    let user_settings = leaves(&pool.spec.sidecar.settings);
    let mut problems: Vec<_> = user_settings
        .iter()
        .filter_map(|(key, _)| misplaced(key, &placed))
        .collect();
    // A file may name its keys by path, so sections need not be merged.
    let placed_values = placed
        .iter()
        .filter_map(|p| Some((p.key.to_string(), p.value.clone()?)));
    let file: Map<String, Value> = placed_values.chain(user_settings.iter().cloned()).collect();
    // JSON is valid YAML.
    let parsed = Config::parse(&Value::Object(file).to_string(), false);
    problems.extend(parsed.as_ref().err().into_iter().flat_map(|error| {
        let problems = error.problems.iter();
        problems.map(|wrong| {
            let path = path(wrong);
            let by_field = placed.iter().filter(|p| Some(p.key) == path);
            match by_field.filter_map(|p| p.field).next() {
                Some(field)
                    if !user_settings
                        .iter()
                        .any(|(key, _)| Some(key.as_str()) == path) =>
                {
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
        // This check comes last: unknown keys are allowed in a managed file.
        Ok((config, _)) if problems.is_empty() => Ok(Config {
            managed: true,
            ..config
        }),
        _ => Err(problems),
    }
}

/// The key of a config problem.
fn path(problem: &config::Problem) -> Option<&str> {
    match problem {
        config::Problem::BadValue { path, .. } => Some(path),
        config::Problem::Unknown(key) => Some(&key.path),
        config::Problem::NotASection { path, .. } => Some(path),
        config::Problem::NotYaml(_) | config::Problem::TooLong(_) => None,
    }
}

/// Keys by path with their values. Sections are one level deep.
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
        return Some(problem(format!("{key}: the value is fixed; omit the key")));
    }
    let place = placed.iter().find(|p| p.key == key)?;
    Some(problem(match place.field {
        Some(field) => format!("{key}: write it as {field}"),
        None => format!("{key}: the operator sets it; omit the key"),
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
    use crate::api::{ExistingConnector, GpuAccess, Mode};
    use crate::desired::tests::{defaults, pool};
    use crate::inject::Holder;
    use crate::names;
    use kvcachepool_protocol::config::{
        Admission, ByteSize, Codec, EvictionPolicy, HugePages, LogLevel, TransferMode, Verify,
        WritePolicy,
    };
    use kvcachepool_protocol::message::Save;
    use serde_json::json;

    fn of(spec: Value) -> Settings {
        settings(&pool(spec), &defaults()).unwrap()
    }

    fn refused(spec: Value) -> Vec<String> {
        let problems = settings(&pool(spec), &defaults()).unwrap_err();
        assert!(problems.iter().all(|p| p.reason == Reason::InvalidSettings));
        problems.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn the_smallest_pool_uses_the_defaults() {
        let mut expected = Settings::new("llama", "serving", &defaults().image, 64 << 30);
        expected.generation = 7;
        expected.image_pull_policy = Some("IfNotPresent".to_string());
        expected.config.memory.size = ByteSize(64 << 30);
        expected.config.pool.generation = 7;
        assert_eq!(of(json!({})), expected);
    }

    #[test]
    fn every_field_of_a_pool_is_applied() {
        let got = of(json!({
            "cache": {"chunkTokens": 128, "save": "PromptAndDecode", "skipLastTokens": 16, "minLoadTokens": 0, "loadTimeout": "1m30s"},
            "local": {
                "memory": {"perPod": "1Gi", "hugePages": "2Mi", "evictionPolicy": "LRU"},
                "disk": {"perPod": "3Gi", "ephemeral": {"storageClassName": "nvme"}},
            },
            "write": {"policy": "WriteBack", "admission": "Reused", "codec": "Lossless"},
            "shared": {"redis": {
                "external": {"urls": ["redis://a:1", "redis://b"], "auth": {"secretName": "r"}, "ca": {"name": "public"}, "clientCertificate": {"secretName": "client"}},
                "ttl": "1h",
            }, "fileSystem": {
                "persistentVolumeClaim": {"claimName": "kv-cache"}, "capacity": "20Ti", "evictAtPercent": 85,
                "evictToPercent": 60, "expireAfter": "240h",
            }, "s3": {
                "bucket": "kv-cache", "region": "eu-central-1", "endpoint": "https://s3.example.com", "prefix": "prod",
                "addressingStyle": "Path", "auth": {"secretName": "keys"},
                "ca": {"kind": "Secret", "name": "bundle", "key": "all.pem"}, "checksums": "WhenSupported",
                "maxConcurrency": 8, "capacity": "2Ti", "evictAtPercent": 95,
                "evictToPercent": 70, "expireAfter": "168h",
            }},
            "injection": {"mode": "Disabled", "container": "main", "existingConnector": "Compose", "memoryMax": "2Gi"},
            "sidecar": {
                "image": "mine:1", "imagePullPolicy": "Never", "imagePullSecrets": [{"name": "regcred"}],
                "resources": {"requests": {"cpu": "2"}}, "logLevel": "warn", "env": [{"name": "A", "value": "b"}],
                "gpuAccess": "VisibleDevices", "transfer": "CudaWindow",
                "settings": {"gpu": {"contextMemory": "1Gi"}, "limits": {"connections": 512}, "memory": {"verify": "Always", "verifyAge": "5m"}},
            },
        }));
        assert!(got.config.managed);
        assert_eq!(got.config.cache.chunk_tokens, 128);
        assert_eq!(got.config.cache.save, Save::PromptAndDecode);
        assert_eq!(got.config.cache.skip_last_tokens, 16);
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
        assert_eq!(got.config.write.codec, Codec::Lossless);
        let s3 = got.config.s3.clone();
        let expected = config::S3 {
            bucket: "kv-cache".to_string(),
            region: "eu-central-1".to_string(),
            endpoint: "https://s3.example.com".to_string(),
            prefix: "prod".to_string(),
            addressing_style: config::AddressingStyle::Path,
            accelerate: false,
            auth: Some("/etc/kvcachepool/s3".into()),
            ca: Some("/etc/kvcachepool/s3-ca.crt".into()),
            checksums: config::Checksums::WhenSupported,
            max_concurrency: 8,
            capacity: ByteSize(2 << 40),
            evict_at_percent: 95,
            evict_to_percent: 70,
            expire_after: config::Duration::from_ms(168 * 3_600_000),
            mode: config::TierMode::Normal,
        };
        assert_eq!(s3, expected);
        let fast = json!({"shared": {"s3": {"bucket": "kv-cache", "accelerate": true}}});
        assert!(of(fast).config.s3.accelerate);
        let expected = config::Redis {
            urls: vec!["redis://a:1".to_string(), "redis://b".to_string()],
            auth: Some("/etc/kvcachepool/redis".into()),
            ca: Some("/etc/kvcachepool/redis-ca.crt".into()),
            client_certificate: Some("/etc/kvcachepool/redis-client".into()),
            ttl: config::Duration::from_ms(3_600_000),
            mode: config::TierMode::Normal,
        };
        assert_eq!(got.config.redis, expected);
        let expected = config::FileSystem {
            path: Some(names::FILE_SYSTEM_PATH.into()),
            capacity: ByteSize(20 << 40),
            evict_at_percent: 85,
            evict_to_percent: 60,
            expire_after: config::Duration::from_ms(240 * 3_600_000),
            mode: config::TierMode::Normal,
        };
        assert_eq!(got.config.file_system, expected);
        assert_eq!(got.claim.as_deref(), Some("kv-cache"));
        let files = |f: &inject::Files| {
            let paths: Vec<_> = f
                .keys
                .iter()
                .map(|(key, path)| format!("{key}={path}"))
                .collect();
            (f.holder, f.name.clone(), paths.join(" "))
        };
        let from: Vec<_> = got.files.iter().map(files).collect();
        let of = |holder, name: &str, files: &str| (holder, name.to_string(), files.to_string());
        let keys = "AWS_ACCESS_KEY_ID=s3/AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY=s3/AWS_SECRET_ACCESS_KEY \
                    AWS_SESSION_TOKEN=s3/AWS_SESSION_TOKEN";
        let expected = [
            of(
                Holder::Secret,
                "r",
                "username=redis/username password=redis/password",
            ),
            of(Holder::ConfigMap, "public", "ca.crt=redis-ca.crt"),
            of(
                Holder::Secret,
                "client",
                "tls.crt=redis-client/tls.crt tls.key=redis-client/tls.key",
            ),
            of(Holder::Secret, "keys", keys),
            of(Holder::Secret, "bundle", "all.pem=s3-ca.crt"),
        ];
        assert_eq!(from, expected);
        assert!(!got.own_identity);
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
        assert_eq!(got.mode, Mode::Disabled);
        assert_eq!(got.existing_connector, ExistingConnector::Compose);
        assert_eq!(got.container.as_deref(), Some("main"));
        assert_eq!(
            (got.image.as_str(), got.image_pull_policy.as_deref()),
            ("mine:1", Some("Never"))
        );
        assert_eq!(got.image_pull_secrets, ["regcred"]);
        assert_eq!(got.env[0].name, "A");
        assert_eq!(got.resources.requests.unwrap()["cpu"].0, "2");
        assert_eq!(got.gpu_access, GpuAccess::VisibleDevices);
        assert_eq!(got.config.gpu.context_memory, ByteSize(1 << 30));
        assert_eq!(got.config.transfer.mode, TransferMode::CudaWindow);
    }

    #[test]
    fn sidecars_get_the_names_and_password_file_of_managed_servers() {
        let managed = json!({"managed": {"shards": 2, "memoryPerShard": "1Gi"}});
        let got = of(json!({"shared": {"redis": managed}}));
        let urls = ["0", "1"].map(|shard| {
            format!("redis://kvcachepool-llama-{shard}.kvcachepool-llama.serving.svc:6379")
        });
        assert_eq!(got.config.redis.urls, urls);
        assert_eq!(got.config.redis.auth, Some("/etc/kvcachepool/redis".into()));
        assert_eq!(got.files[0].name, "kvcachepool-llama-0a1b2c3d");
        assert_eq!(got.config.redis.ttl, config::Duration::from_ms(86_400_000));
    }

    #[test]
    fn a_bucket_without_keys_goes_by_the_pods_own_identity() {
        let got = of(json!({"shared": {"s3": {"bucket": "kv-cache"}}}));
        assert!(got.own_identity && got.files.is_empty());
        assert_eq!(got.config.s3.auth, None);
        assert_eq!(got.config.s3.region, "us-east-1");
        assert!(!of(json!({})).own_identity);
    }

    #[test]
    fn a_shared_file_system_has_no_limits_of_its_own() {
        let claim = json!({"persistentVolumeClaim": {"claimName": "kv-cache"}});
        let got = of(json!({"shared": {"fileSystem": claim}}));
        let expected = config::FileSystem {
            path: Some(names::FILE_SYSTEM_PATH.into()),
            ..config::FileSystem::default()
        };
        assert_eq!(got.config.file_system, expected);
        let none = of(json!({}));
        assert_eq!((none.claim, none.config.file_system.path), (None, None));
    }

    #[test]
    fn a_pool_without_a_disk_has_no_folder_for_one() {
        let got = of(json!({}));
        assert_eq!((got.disk, got.config.disk.path), (None, None));
        let got = of(json!({"local": {"disk": {"perPod": "1Gi", "emptyDir": {}}}}));
        assert_eq!(got.disk, Some(inject::Disk::NodeDirectory));
    }

    #[test]
    fn unusable_settings_are_refused_by_name() {
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
                "disk.path: the operator sets it; omit the key",
            ),
            (
                json!({"fileSystem": {"path": "/tmp"}}),
                "fileSystem.path: write it as spec.shared.fileSystem",
            ),
            (
                json!({"managed": false}),
                "managed: the operator sets it; omit the key",
            ),
            (
                json!({"pool": {"generation": 9}}),
                "pool.generation: the operator sets it; omit the key",
            ),
            (
                json!({"socket": "/tmp/a.sock"}),
                "socket: the value is fixed; omit the key",
            ),
            (
                json!({"admin": {"listen": "0.0.0.0:1"}}),
                "admin.listen: the value is fixed; omit the key",
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
            &pool(json!({"cache": {"chunkTokens": 0}, "sidecar": {"settings": settings}})),
            &defaults(),
        );
        let problems = problems.unwrap_err();
        let reasons: Vec<_> = problems.iter().map(|p| p.reason).collect();
        let [bad, wrong] = [Reason::InvalidSpec, Reason::InvalidSettings];
        assert_eq!(reasons, [bad, wrong, wrong, wrong], "{problems:?}");
    }

    #[test]
    fn empty_sections_of_settings_have_no_effect() {
        let got = of(json!({"sidecar": {"settings": {"limits": {}}}}));
        assert_eq!(got.config, of(json!({})).config);
    }

    #[test]
    fn every_key_of_the_sidecar_is_set_in_one_way() {
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
    fn a_pool_translated_from_lmcache_gives_the_config_translated_from_lmcache() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../sidecar/src/cli/lmcache/samples"
        );
        let files = std::fs::read_dir(folder).unwrap();
        let paths = files.map(|file| file.unwrap().path().display().to_string());
        let samples: Vec<_> = paths
            .filter_map(|path| path.strip_suffix(".pool.yaml").map(str::to_string))
            .collect();
        assert!(!samples.is_empty());
        for sample in samples {
            let read = |what: &str| std::fs::read_to_string(format!("{sample}{what}")).unwrap();
            let pool: KVCachePool = serde_yaml::from_str(&read(".pool.yaml")).unwrap();
            let got = settings(&pool, &defaults()).unwrap_or_else(|e| panic!("{sample}: {e:?}"));
            let (alone, _) = Config::parse(&read(".config.yaml"), false).unwrap();
            // These belong to a pod.
            let disk = config::Disk {
                path: got.config.disk.path.clone(),
                ..alone.disk.clone()
            };
            let expected = Config {
                managed: true,
                pool: got.config.pool.clone(),
                disk,
                ..alone
            };
            assert_eq!(got.config, expected, "{sample}");
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
        for access in ["None", "VisibleDevices", "ResourceClaim"] {
            let got = of(json!({"sidecar": {"gpuAccess": access}}));
            assert_eq!(json!(got.gpu_access), access);
        }
    }
}
