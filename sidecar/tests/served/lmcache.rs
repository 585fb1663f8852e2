//! `config --from-lmcache` as users run it: files, variables, output and exit codes.

use crate::harness::binary;
use kvcachepool_protocol::config::{ByteSize, Config};
use std::process::{Command, Output};

fn translate(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(binary());
    command.env_clear().envs(variables.iter().copied());
    command.args(["config", "--from-lmcache"]).args(arguments);
    command.output().unwrap()
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_file_becomes_a_pool_and_a_line_per_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lmcache.yaml");
    std::fs::write(
        &path,
        "chunk_size: 128\nuse_layerwise: true\nlocal_cpu: true\nmax_local_cpu_size: 4\n",
    )
    .unwrap();
    let file = path.to_str().unwrap();
    let got = translate(&[file, "--name", "llama", "--workers", "2"], &[]);
    let (pool, report) = texts(&got);
    assert!(got.status.success(), "{report}");
    for line in [
        "kind: KVCachePool",
        "name: llama",
        "chunkTokens: 128",
        "perPod: 8Gi",
    ] {
        assert!(pool.contains(line), "{pool}");
    }
    for line in [
        "use_layerwise       not supported",
        "local_cpu           automatic",
        "note: The cache starts cold",
    ] {
        assert!(report.contains(line), "{report}");
    }
    let (json, _) = texts(&translate(&[file, "--output", "json"], &[]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["keys"][1]["outcome"], "not supported");
    assert_eq!(json["pool"]["metadata"]["name"], "default");
}

#[test]
fn variables_alone_become_a_config_of_a_sidecar() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lmcache.yaml");
    std::fs::write(&path, "max_local_cpu_size: 1\n").unwrap();
    let memory = |variables: &[(&str, &str)]| {
        let (config, report) = texts(&translate(&["--sidecar"], variables));
        let (config, _) = Config::parse(&config, false).unwrap_or_else(|e| panic!("{e}: {report}"));
        config.memory.size
    };
    assert_eq!(
        memory(&[("LMCACHE_MAX_LOCAL_CPU_SIZE", "3")]),
        ByteSize(3 << 30)
    );
    let file = ("LMCACHE_CONFIG_FILE", path.to_str().unwrap());
    assert_eq!(memory(&[file]), ByteSize(1 << 30));
    assert_eq!(
        memory(&[file, ("LMCACHE_MAX_LOCAL_CPU_SIZE", "2")]),
        ByteSize(2 << 30)
    );
}

#[test]
fn a_wrong_file_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lmcache.yaml");
    std::fs::write(&path, "chunk_sise: 128\nlocal_cpu: 3\n").unwrap();
    let cases = [
        (
            path.as_path(),
            [
                "UnknownKey: chunk_sise: did you mean chunk_size?",
                "WrongType: local_cpu: ",
            ],
        ),
        (folder.path(), ["cannot be translated", "Unreadable: "]),
    ];
    for (file, named) in cases {
        let got = translate(&[file.to_str().unwrap()], &[]);
        let (pool, report) = texts(&got);
        assert_eq!((got.status.code(), pool.as_str()), (Some(1), ""));
        assert!(named.iter().all(|name| report.contains(name)), "{report}");
    }
    let got = translate(&[], &[]);
    assert_eq!(got.status.code(), Some(1));
    assert!(texts(&got).1.contains("NothingToTranslate: "));
    let mut alone = Command::new(binary());
    let got = alone
        .args(["config", "--defaults", "--sidecar"])
        .output()
        .unwrap();
    assert_eq!(got.status.code(), Some(2), "it belongs to --from-lmcache");
}
