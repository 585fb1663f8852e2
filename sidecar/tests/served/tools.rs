//! `check` and `purge` over real servers, by the config that a sidecar has.

use crate::harness::{Sidecar, binary};
use crate::redis::Redis;
use crate::testing::s3_server::Server;
use crate::vllm::{Vllm, hashes};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn config(redis: &Redis, server: &Server, prefix: &str) -> String {
    let config = server.config();
    let (bucket, endpoint, auth) = (config.bucket, config.endpoint, server.auth());
    let (socket, auth) = (redis.socket(), auth.display());
    format!(
        "memory: {{size: 64Mi}}\nredis: {{urls: [\"redis+unix://{}\"]}}\n\
         s3: {{bucket: {bucket}, endpoint: \"{endpoint}\", auth: {auth}, prefix: {prefix}}}\n",
        socket.display()
    )
}

fn tool(command: &str, config: &Path, more: &[&str]) -> Output {
    let mut tool = Command::new(binary());
    tool.arg(command).arg("--config").arg(config).args(more);
    tool.output().unwrap()
}

fn rows(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{output:?}")))
        .collect()
}

#[test]
fn without_a_config_there_is_nothing_to_check_or_purge() {
    for args in [&["check"][..], &["purge"], &["purge", "--dry-run"]] {
        let mut tool = Command::new(binary());
        tool.args(args).env_remove("KVCACHEPOOL_CONFIG");
        let output = tool.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("give --config FILE"), "{said}");
    }
}

/// Files below a folder, but for the one by which sidecars tell each other what they counted.
fn files(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path());
    let others = entries.filter(|path| !path.ends_with(".kvcachepool-counted"));
    others
        .map(|path| if path.is_dir() { files(&path) } else { 1 })
        .sum()
}

#[test]
fn check_names_what_each_tier_lacks_and_leaves_nothing() {
    let (mut redis, server) = (Redis::start(), Server::start());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.v1.yaml");
    std::fs::write(&path, config(&redis, &server, "a")).unwrap();
    let look = || {
        let output = tool("check", &path, &["--output", "json"]);
        let report = rows(&output).pop().unwrap();
        assert_eq!(report["ready"], output.status.success(), "{output:?}");
        let tiers = report["tiers"].as_array().unwrap().clone();
        let text = |tier: &Value, key: &str| tier[key].as_str().unwrap().to_owned();
        let tier = |tier: &Value| (text(tier, "reason"), text(tier, "message"));
        (tier(&tiers[0]), tier(&tiers[1]))
    };
    let none = || (String::new(), String::new());
    assert_eq!(look(), (none(), none()));
    for right in ["set", "mset", "watch", "persist"] {
        redis.ask(&format!("ACL SETUSER default -{right}"));
        let (lacks, _) = look();
        assert!(lacks.0 == "Denied" && lacks.1.contains(right), "{lacks:?}");
        redis.ask(&format!("ACL SETUSER default +{right}"));
    }
    assert_eq!(redis.keys(), 0);
    assert_eq!(files(&server.data()), 0, "nothing lies in the bucket");
    server.write_auth("kvcachepool-test", "another");
    redis.kill();
    let (down, denied) = look();
    assert_eq!((&*down.0, &*denied.0), ("Unreachable", "Unauthenticated"));
    assert!(denied.1.contains("kv-bucket"), "{denied:?}");
    let text = tool("check", &path, &[]);
    let shown = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        !text.status.success() && shown.contains("s3      Unavailable   s3://kv-bucket/a at http"),
        "{shown}"
    );
    assert!(!shown.contains("another"), "{shown}");
}

#[test]
fn purge_takes_a_pools_objects_and_no_others() {
    let (redis, server) = (Redis::start(), Server::start());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.v1.yaml");
    for (prefix, chunks) in [("a/b", 3), ("a", 5)] {
        let text = config(&redis, &server, prefix);
        std::fs::write(&path, &text).unwrap();
        let sidecar = Sidecar::start(&text);
        sidecar.wait_populated();
        sidecar.wait_tier("redis", "ready");
        sidecar.wait_tier("s3", "ready");
        let mut vllm = Vllm::attach(&sidecar.socket());
        vllm.store("r", &hashes(u64::from(chunks), chunks));
        for tier in ["redis", "s3"] {
            let written = format!("tier_write_chunks_total{{result=\"stored\",tier=\"{tier}\"}}");
            sidecar.wait_metric(&written, f64::from(chunks));
        }
    }
    let other = server.data().join("a/notes.txt");
    std::fs::write(&other, "somebody else's").unwrap();
    let purge = |more: &[&str]| {
        let output = tool("purge", &path, &[more, &["--output", "json"]].concat());
        assert!(output.status.success(), "{output:?}");
        let rows = rows(&output);
        rows.iter()
            .map(|row| {
                (
                    row["objects"].as_u64().unwrap(),
                    row["foreign"].as_u64().unwrap(),
                )
            })
            .collect::<Vec<_>>()
    };
    let dry = purge(&["--dry-run"]);
    assert_eq!((dry[0], dry[1].0), ((8, 0), 5));
    // What the other pool has under `a/b`, and a text.
    assert!(dry[1].1 >= 4, "{dry:?}");
    assert_eq!(purge(&[]), dry);
    assert_eq!(purge(&[]), [(0, 0), (0, dry[1].1)]);
    // The marks of what the other pool has in the bucket.
    assert_eq!(redis.keys(), 3);
    assert_eq!(files(&server.data()), 4);
    assert!(other.exists());
}
