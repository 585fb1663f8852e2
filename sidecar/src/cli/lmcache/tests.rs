use super::keys::{self, Key, Outcome, Row};
use super::read::{Problem, Read};
use super::report;
use super::table::SECTIONS;
use super::translation::{Options, Translation, field};
use kvcachepool_protocol::config::Config;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

const SAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cli/lmcache/samples");
const GUIDE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/guides/migrate-from-lmcache.md"
);
const BEGIN: &str =
    "<!-- tables: LMCache's keys, UPDATE_DOCS=1 cargo test -p kvcachepool-sidecar lmcache -->\n";
const END: &str = "<!-- end -->";

fn options() -> Options {
    Options {
        name: None,
        workers: 2,
        pods_per_node: 4,
    }
}

fn translate(text: &str, variables: &[(&str, &str)]) -> Result<Translation, Vec<Problem>> {
    let variables = variables.iter();
    let variables: Vec<_> = variables
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let text = (!text.is_empty()).then_some(text);
    Translation::new(&Read::new(text, &variables)?, options())
}

fn problems(text: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let problems = translate(text, variables).err().unwrap_or_default();
    problems.iter().map(Problem::to_string).collect()
}

/// The value of a pool's field.
fn field_of(text: &str, path: &str) -> serde_json::Value {
    let pool = translate(text, &[]).unwrap().pool();
    pool.pointer(&format!("/spec/{}", path.replace('.', "/")))
        .cloned()
        .unwrap_or_default()
}

fn same_or_write(path: &Path, wanted: &str) {
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path, wanted).unwrap();
    }
    let found = fs::read_to_string(path).unwrap_or_default();
    assert_eq!(
        found,
        wanted,
        "{}: run it with UPDATE_DOCS=1",
        path.display()
    );
}

/// The table of all keys, as Markdown.
fn markdown() -> String {
    let name = |key: &Key| match key.renamed {
        Some(newer) => format!("`{}` (older than `{newer}`)", key.name),
        None => format!("`{}`", key.name),
    };
    let row = |row: &Row| {
        let keys: Vec<_> = row.keys.iter().map(name).collect();
        let (outcome, detail) = match &row.outcome {
            Outcome::Translated { to, note, .. } => {
                let fields = to
                    .iter()
                    .map(|key| format!("`{}`", field(key).trim_start_matches("spec.")));
                let fields: Vec<_> = fields.collect();
                let fields = if fields.is_empty() {
                    "by value".to_owned()
                } else {
                    fields.join(", ")
                };
                (fields, *note)
            }
            Outcome::Automatic(why) => ("automatic".to_owned(), *why),
            Outcome::NotSupported(why) => ("not supported".to_owned(), *why),
        };
        format!("| {} | {outcome} | {detail} |\n", keys.join(", "))
    };
    let section = |(title, rows): &(&str, &[Row])| {
        let head =
            format!("\n#### {title}\n\n| LMCache | KVCachePool | what it means |\n|---|---|---|\n");
        head + &rows.iter().map(row).collect::<String>()
    };
    SECTIONS.iter().map(section).collect()
}

#[test]
fn samples_of_every_generation_are_translated() {
    for name in [
        "process-2024",
        "process-2025",
        "process-0.5",
        "engine",
        "engine-s3",
    ] {
        let file = |what: &str| Path::new(SAMPLES).join(format!("{name}{what}"));
        let translation = translate(&fs::read_to_string(file(".yaml")).unwrap(), &[]).unwrap();
        let config = report::yaml(&translation.config()).unwrap();
        let (parsed, _) = Config::parse(&config, false).unwrap();
        assert_ne!(parsed, Config::default());
        same_or_write(
            &file(".pool.yaml"),
            &report::yaml(&translation.pool()).unwrap(),
        );
        same_or_write(&file(".config.yaml"), &config);
        same_or_write(&file(".report.txt"), &report::text(&translation));
    }
}

#[test]
fn the_guide_has_the_table_and_the_example() {
    let page = fs::read_to_string(GUIDE).unwrap();
    let (head, rest) = page.split_once(BEGIN).unwrap();
    let (_, tail) = rest.split_once(END).unwrap();
    let wanted = format!("{head}{BEGIN}{}\n{END}{tail}", markdown());
    same_or_write(Path::new(GUIDE), &wanted);
    for sample in ["engine.yaml", "engine.pool.yaml"] {
        let text = fs::read_to_string(Path::new(SAMPLES).join(sample)).unwrap();
        assert!(page.contains(&format!("```yaml\n{text}```")), "{sample}");
    }
}

#[test]
fn the_table_names_each_key_once_and_only_settings_that_exist() {
    let mut names = HashSet::new();
    for row in keys::rows() {
        for key in row.keys {
            assert!(names.insert(key.name), "{} is listed twice", key.name);
            if let Some(newer) = key.renamed {
                assert!(keys::find(newer).is_some(), "{newer}");
            }
        }
        let text = match &row.outcome {
            Outcome::Translated { to, note, .. } => {
                for key in *to {
                    assert!(field(key).starts_with("spec."), "{key}");
                }
                note
            }
            Outcome::Automatic(why) | Outcome::NotSupported(why) => {
                assert!(why.ends_with('.'), "{why}");
                why
            }
        };
        assert!(!text.contains(['|', '\n']), "{text}");
    }
}

#[test]
fn unusable_input_is_refused_by_name() {
    let kind = "kind: LMCacheEngine\nspec: {l1: {sizeGB: 8}}\n";
    let cases = [
        (
            "- 1\n",
            "NotAMapping: document: found a list; write keys with values",
        ),
        ("a: b: c\n", "NotYaml: "),
        ("a: 1\na: 2\n", "NotYaml: "),
        (
            "chunk_sise: 256\n",
            "UnknownKey: chunk_sise: did you mean chunk_size?",
        ),
        (
            "priority: 1\n",
            "UnknownKey: priority: LMCache has no such key; remove it",
        ),
        (
            "extra_config: {s3_regoin: x}\n",
            "UnknownKey: extra_config.s3_regoin: did you mean extra_config.s3_region?",
        ),
        (
            "extra_config: 5\n",
            "NotAMapping: extra_config: found a number; write keys with values",
        ),
        (
            "chunk_size: many\n",
            "WrongType: chunk_size: found a text; write a whole number",
        ),
        (
            "chunk_size: 2.5\n",
            "WrongType: chunk_size: found a number; write a whole number",
        ),
        (
            "chunk_size: [256]\n",
            "WrongType: chunk_size: found a list; write a whole number",
        ),
        (
            "chunk_size: 0\n",
            "BadValue: chunk_size: write a value that makes spec.cache.chunkTokens one from 1 to 65536; this one makes it 0",
        ),
        ("chunk_size: -1\n", "BadValue: chunk_size: "),
        (
            "local_cpu: maybe\n",
            "WrongType: local_cpu: found a text; write true or false",
        ),
        (
            "remote_url: {a: 1}\n",
            "WrongType: remote_url: found a section; write a text",
        ),
        (
            "remote_url: redis.cache.svc\n",
            "BadValue: remote_url: write an address such as redis://host:6379 or s3://bucket",
        ),
        (
            "remote_url: redis://\n",
            "BadValue: remote_url: write a host and a port behind the scheme",
        ),
        (
            "remote_url: redis://a:99999\n",
            "BadValue: remote_url: write a host and a port",
        ),
        (
            "remote_url: redis://a,b\n",
            "BadValue: remote_url: write a host and a port",
        ),
        (
            "remote_url: redis://a/x\n",
            "BadValue: remote_url: write the number of a database",
        ),
        (
            "remote_url: s3://bucket/prefix\n",
            "BadValue: remote_url: write s3://bucket or s3://bucket.host:port, without a path",
        ),
        (
            "remote_url: s3://Bucket\n",
            "BadValue: remote_url: write the name of a bucket",
        ),
        (
            "max_local_cpu_size: 0.01\n",
            "BadValue: max_local_cpu_size: write a value that makes spec.local.memory.perPod one from 64Mi to 16Ti; this one makes it 20Mi",
        ),
        (
            "max_local_cpu_size: .nan\n",
            "WrongType: max_local_cpu_size: found a number; write a number",
        ),
        (
            "max_local_cpu_size: .inf\n",
            "BadValue: max_local_cpu_size: ",
        ),
        (
            "cache_policy: random\n",
            "BadValue: cache_policy: write LRU, ",
        ),
        (
            "local_disk: data\nmax_local_disk_size: 9\n",
            "BadValue: local_disk: write an absolute path",
        ),
        (
            "nixl_role: sender\npd_role: sender\n",
            "MixedGenerations: nixl_role and pd_role: no version of LMCache reads both; keep the keys of one",
        ),
        (
            "local_device: cpu\nlocal_cpu: true\n",
            "MixedGenerations: local_device and local_cpu: ",
        ),
        (
            &format!("{kind}chunk_size: 256\n"),
            "MixedGenerations: chunk_size and kind: LMCacheEngine: ",
        ),
        (
            &format!("{kind}chunks: 256\n"),
            "UnknownKey: chunks: LMCache has no such key; remove it",
        ),
        (
            "kind: LMCacheCoordinator\nspec: {}\n",
            "WrongKind: found the kind LMCacheCoordinator; ",
        ),
        (
            "kind: LMCacheEngine\nspec: {server: {}}\n",
            "MissingKey: spec.l1.sizeGB: ",
        ),
        (
            "kind: LMCacheEngine\nspec: [1]\n",
            "NotAMapping: spec: found a list; ",
        ),
        (
            "kind: LMCacheEngine\nspec: {l1: {sizeGb: 8}}\n",
            "UnknownKey: spec.l1.sizeGb: did you mean spec.l1.sizeGB?",
        ),
        (
            "kind: LMCacheEngine\nmetadata: {name: a.b}\nspec: {l1: {sizeGB: 8}}\n",
            "BadValue: name of the pool: write --name with at most 40 ",
        ),
        (
            "kind: LMCacheEngine\nspec: {l1: {sizeGB: 8}, l2Backend: {raw: {type: s3, config: {s3_region: a}}}}\n",
            "MissingKey: the address of the bucket, ",
        ),
        (
            "kind: LMCacheEngine\nspec: {l1: {sizeGB: 8}, l2Backend: {resp: {authSecretRef: {name: a}}}}\n",
            "MissingKey: the address of Redis, ",
        ),
    ];
    for (text, message) in cases {
        let found = problems(text, &[]);
        assert!(
            found.iter().any(|p| p.starts_with(message)),
            "{text}: {found:?}"
        );
    }
    assert_eq!(
        problems("chunk_sise: 1\nlocal_cpu: 7\n", &[]).len(),
        2,
        "all problems are reported at once"
    );
    assert_eq!(
        problems("", &[]),
        ["NothingToTranslate: no file is given, and no variable LMCACHE_* is set"]
    );
}

#[test]
fn variables_replace_keys_of_the_file() {
    let got = translate(
        "chunk_size: 256\nextra_config: {use_odirect: true}\n",
        &[
            ("LMCACHE_CHUNK_SIZE", "'512'"),
            ("LMCACHE_SAVE_DECODE_CACHE", "1"),
            ("LMCACHE_BLEND_THRESHOLDS", "0.1, 0.2"),
            ("LMCACHE_EXTRA_CONFIG", "{\"tag_keys\": [\"user\"]}"),
            ("LMCACHE_LOG_LEVEL", "WARNING"),
            ("LMCACHE_EC_CHUNK_SIZE", "9"),
            ("LMCACHE_SERVER_SERVICE_HOST", "10.0.0.1"),
            ("LMCACHE_SERVER_PORT_65432_TCP_ADDR", "10.0.0.1"),
            ("LMCACHE_CONFIG_FILE", "/etc/lmcache.yaml"),
            ("PATH", "/bin"),
        ],
    )
    .unwrap();
    let spec = &got.pool()["spec"];
    assert_eq!(spec["cache"]["chunkTokens"], 512);
    assert_eq!(spec["cache"]["save"], "PromptAndDecode");
    assert_eq!(spec["sidecar"]["logLevel"], "warn");
    let keys: Vec<_> = got.lines.iter().map(|line| line.key.as_str()).collect();
    assert!(keys.contains(&"LMCACHE_CHUNK_SIZE") && !keys.contains(&"chunk_size"));
    assert!(keys.contains(&"extra_config.tag_keys") && !keys.contains(&"extra_config.use_odirect"));

    for (variable, message) in [
        (
            ("LMCACHE_CHUNK_SISE", "1"),
            "UnknownKey: LMCACHE_CHUNK_SISE: did you mean LMCACHE_CHUNK_SIZE?",
        ),
        (
            ("LMCACHE_LOG_LEVLE", "1"),
            "UnknownKey: LMCACHE_LOG_LEVLE: did you mean LMCACHE_LOG_LEVEL?",
        ),
        (
            ("LMCACHE_CHUNK_SIZE", "a"),
            "WrongType: LMCACHE_CHUNK_SIZE: found a text; write a whole number",
        ),
        (
            ("LMCACHE_EXTRA_CONFIG", "{"),
            "WrongType: LMCACHE_EXTRA_CONFIG: found a text; write a JSON object",
        ),
    ] {
        assert_eq!(problems("", &[variable]), [message]);
    }
}

#[test]
fn a_variable_that_stops_all_stores_wins_over_what_is_stored() {
    for (skip, expected) in [("1", "None"), ("false", "None"), ("", "PromptAndDecode")] {
        let variables = [("LMCACHE_FORCE_SKIP_SAVE", skip)];
        let got = translate("save_decode_cache: true", &variables).unwrap();
        assert_eq!(got.pool()["spec"]["cache"]["save"], expected, "{skip}");
    }
}

#[test]
fn passwords_are_never_printed() {
    let secret = "s3cr3t";
    let engine = |kind: &str, config: &str| {
        format!(
            "kind: LMCacheEngine\nspec: {{l1: {{sizeGB: 8}}, l2Backend: {{raw: {{type: {kind}, config: {config}}}}}}}\n"
        )
    };
    let texts = [
        format!("remote_url: redis://user:{secret}@a:1\n"),
        format!("remote_url: redis://:{secret}@x@a:1/3?db=2&password={secret}\n"),
        format!("remote_url: redis-sentinel://u:{secret}@a:1,b:2\n"),
        format!("remote_url: redis-cluster://u:{secret}@a:1,b:2\n"),
        format!("remote_url: unix://u:{secret}@/run/redis.sock\n"),
        format!("remote_url: lm://{secret}@a:1\n"),
        format!(
            "remote_url: resp://a:1\nextra_config: {{username: {secret}, password: {secret}}}\n"
        ),
        format!("remote_url: redis://a:1?username=u&password={secret}\n"),
        format!("remote_url: valkey://a:1\nextra_config: {{valkey_password: {secret}}}\n"),
        format!(
            "remote_url: s3://bucket\nextra_config: {{aws_access_key_id: {secret}, aws_secret_access_key: {secret}}}\n"
        ),
        format!("extra_config: {{azure_account_key: {secret}}}\n"),
        engine(
            "s3",
            &format!("{{s3_endpoint: kv-cache.host, aws_secret_access_key: {secret}}}"),
        ),
        engine(
            "valkey",
            &format!("{{startup_nodes: [{{host: a, port: 1}}], password: {secret}}}"),
        ),
        engine("azure", &format!("{{key: {secret}}}")),
    ];
    for text in texts {
        let got = translate(&text, &[]).unwrap();
        let printed = [
            report::text(&got),
            report::json(&got).unwrap(),
            report::yaml(&got.pool()).unwrap(),
            report::yaml(&got.config()).unwrap(),
        ];
        assert!(
            !printed.concat().contains(secret),
            "{text}{}",
            printed.concat()
        );
        Config::parse(&printed[3], false).unwrap();
    }
    for text in [
        format!("remote_url: redis://u:{secret}@\n"),
        format!("remote_url: redis://a:1/0?password=x@{secret}\n"),
        format!("remote_url: redis://:x/{secret}@a:1\n"),
        format!("remote_url: redis-sentinel://u:p@a:1,u:p@{secret}:2\n"),
        format!("extra_config: {{password: !!int {secret}}}\n"),
        format!("remote_url: s3://{secret}/x\n"),
        format!("extra_config: {{password: [{secret}]}}\n"),
    ] {
        let found = problems(&text, &[]);
        assert!(
            !found.is_empty() && !found.concat().contains(secret),
            "{found:?}"
        );
    }
    let number = "123456789012345678901234567890";
    let found = problems(&format!("extra_config: {{password: {number}}}\n"), &[]);
    assert!(found[0].starts_with("NotYaml: ") && !found[0].contains(number));
    let auth = field_of(
        "remote_url: redis://a:1?password=x",
        "shared.redis.external.auth.secretName",
    );
    assert_eq!(auth, "default-redis");
}

#[test]
fn a_codec_changes_only_what_lmcache_encodes() {
    let codec = |text: &str| field_of(text, "write.codec");
    let remote = "remote_serde: cachegen\nremote_url: redis://a\n";
    assert_eq!(codec(remote), "CacheGen");
    let disk = "local_disk: /d\nmax_local_disk_size: 10\n";
    assert!(codec(&format!("{remote}{disk}")).is_null());
    assert!(codec(&format!("remote_serde: cachegen\n{disk}")).is_null());
    assert_eq!(
        codec(&format!(
            "remote_serde: naive\nremote_url: redis://a\n{disk}"
        )),
        "None"
    );
}

#[test]
fn addresses_are_those_of_a_pool() {
    let url = |text: &str| field_of(text, "shared.redis.external.url");
    for (text, wanted) in [
        ("remote_url: redis://a", "redis://a"),
        ("remote_url: rediss://u:p@[::1]:7/2", "rediss://[::1]:7/2"),
        ("remote_url: redis://a:1?db=3", "redis://a:1/3"),
        ("remote_url: resp://a:1", "redis://a:1"),
        (
            "remote_url: redis-sentinel://a:1,b:2",
            "redis-sentinel://a:1,b:2/redismaster",
        ),
        (
            "remote_url: redis-cluster://a:1,b:2",
            "redis-cluster://a:1,b:2",
        ),
        (
            "remote_url: valkey://a:1\nextra_config: {tls_enable: true, valkey_database: 4}",
            "rediss://a:1/4",
        ),
        (
            "remote_url: valkey://a:1\nextra_config: {tls_enable: true, valkey_mode: cluster}",
            "redis-cluster://a:1?tls=true",
        ),
    ] {
        assert_eq!(url(text), wanted);
    }
    let named = translate(
        "remote_url: redis-sentinel://a:1",
        &[("REDIS_SERVICE_NAME", "kv")],
    );
    let named = named.unwrap().pool();
    assert_eq!(
        named["spec"]["shared"]["redis"]["external"]["url"],
        "redis-sentinel://a:1/kv"
    );

    let raw = |kind: &str, config: &str| {
        format!(
            "kind: LMCacheEngine\nspec: {{l1: {{sizeGB: 8}}, l2Backend: {{raw: {{type: {kind}, config: {{{config}}}}}}}}}"
        )
    };
    for (config, wanted) in [
        (
            "startup_nodes: [{host: a, port: 1}], database_id: 2, ttl_seconds: 5400",
            "redis://a:1/2",
        ),
        (
            "startup_nodes: 'a:1,b:2', cluster_mode: true, tls_enable: true",
            "redis-cluster://a:1,b:2?tls=true",
        ),
    ] {
        assert_eq!(url(&raw("valkey", config)), wanted);
    }
    let ttl = raw("valkey", "startup_nodes: [{host: a}], ttl_seconds: 5400");
    assert_eq!(field_of(&ttl, "shared.redis.ttl"), "1h30m");
    assert_eq!(
        url(&raw("resp", "host: 'fd00::1', port: 7")),
        "redis://[fd00::1]:7"
    );
    for wrong in [
        raw("resp", "host: 'u:pw@h'"),
        "remote_url: redis://a\nextra_config: {}\n".replace("redis://a", "redis://h]:6379"),
        "kind: LMCacheEngine\nspec: {l1: {sizeGB: 8}, l2Backend: {resp: {host: g}, raw: {type: resp, config: {host: h}}}}".to_owned(),
    ] {
        let found = problems(&wrong, &[]);
        assert!(found[0].starts_with("BadValue: "), "{wrong}: {found:?}");
    }
    assert_eq!(field_of("remote_url: redis://a", "shared.redis.ttl"), "24h");

    let s3 = |text: &str| {
        ["bucket", "endpoint", "prefix"].map(|key| {
            let value = field_of(text, &format!("shared.s3.{key}"));
            value.as_str().unwrap_or_default().to_owned()
        })
    };
    for (place, wanted) in [
        ("bucket", ["bucket", "", "kvcachepool"]),
        (
            "bucket.s3.us-west-2.amazonaws.com",
            ["bucket", "", "kvcachepool"],
        ),
        ("a.b.s3.amazonaws.com", ["a.b", "", "kvcachepool"]),
        (
            "b--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com",
            ["b--use1-az4--x-s3", "", "kvcachepool"],
        ),
        (
            "bucket.cwlota.com",
            ["bucket", "https://cwlota.com", "kvcachepool"],
        ),
        (
            "bucket.minio:9000",
            ["bucket", "https://minio:9000", "kvcachepool"],
        ),
    ] {
        assert_eq!(s3(&format!("remote_url: s3://{place}")), wanted);
    }
    let path = raw(
        "s3",
        "s3_endpoint: 'minio:9000', s3_bucket: kv-cache, s3_addressing_style: path, disable_tls: true",
    );
    assert_eq!(s3(&path), ["kv-cache", "http://minio:9000", "kvcachepool"]);
    assert_eq!(field_of(&path, "shared.s3.addressingStyle"), "Path");
}

#[test]
fn sizes_are_those_of_a_pod() {
    let memory = |text: &str| field_of(text, "local.memory.perPod");
    assert_eq!(memory("max_local_cpu_size: 2.5"), "5Gi", "of two workers");
    assert_eq!(memory("chunk_size: 256"), "10Gi", "LMCache's default");
    assert_eq!(memory("max_local_cpu_size: '3'"), "6Gi");
    let first = "max_local_cpu_size: 1\nextra_config: {save_only_first_rank: true, first_rank_max_local_cpu_size: 9}";
    assert_eq!(memory(first), "10Gi");
    let of_mla = "max_local_cpu_size: 1\nextra_config: {first_rank_max_local_cpu_size: 9}";
    let got = translate(of_mla, &[]).unwrap();
    assert_eq!(got.pool()["spec"]["local"]["memory"]["perPod"], "10Gi");
    assert!(
        got.notes
            .iter()
            .any(|note| note.contains("models with MLA"))
    );
    let off = of_mla.replace("{", "{save_only_first_rank: false, ");
    assert_eq!(memory(&off), "2Gi");
    assert_eq!(
        memory("kind: LMCacheEngine\nspec: {l1: {sizeGB: 10}}"),
        "2560Mi",
        "of four pods"
    );

    let disk = "local_disk: /a/,/b/\nmax_local_disk_size: 3";
    assert_eq!(field_of(disk, "local.disk.perPod"), "6Gi");
    assert_eq!(field_of(disk, "local.disk.emptyDir"), serde_json::json!({}));
    let config = translate(disk, &[]).unwrap().config();
    assert_eq!(config["disk"]["path"], "/a/kvcachepool");
    for none in [
        "local_disk: /a",
        "max_local_disk_size: 3",
        "local_disk: ''\nmax_local_disk_size: 3",
    ] {
        assert!(field_of(none, "local.disk").is_null(), "{none}");
    }
    let fs = "kind: LMCacheEngine\nspec: {l1: {sizeGB: 10}, l2Backend: {raw: {type: fs_native, config: {base_path: /d, max_capacity_gb: 40}}}}";
    assert_eq!(field_of(fs, "local.disk.perPod"), "10Gi");
    assert!(field_of(&fs.replace("/d", "''"), "local.disk").is_null());
}

#[test]
fn what_is_off_needs_no_counterpart() {
    let got = translate(
        "enable_blending: false\nenable_pd: true\npd_role: null\ntransfer_channel: nixl\n",
        &[],
    )
    .unwrap();
    let outcomes: Vec<_> = got.lines.iter().map(|line| line.outcome).collect();
    assert_eq!(
        outcomes,
        [
            "automatic",
            "not supported",
            "automatic",
            "not supported",
            "translated"
        ]
    );
}
