//! The HTTP side and the tools that use it.

use crate::harness::{Sidecar, binary, signal_to, wait_for};
use crate::vllm::{Vllm, hashes};
use kvcachepool_metrics::{PREFIX, VERBATIM, snake_case};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::Report;
use kvcachepool_sidecar::admin::metrics::all;
use std::collections::BTreeMap;
use std::process::Command;

#[test]
fn config_and_objects_need_the_token_and_a_rotated_one_works_at_once() {
    let sidecar = Sidecar::small();
    let (code, text) = sidecar.get("/v1/config", Some("x"));
    assert_eq!(code, 403);
    assert!(text.contains("NoToken"), "{text}");
    std::fs::write(sidecar.token_file(), "first\n").unwrap();
    assert_eq!(sidecar.get("/v1/config", Some("x")).0, 403);
    let (code, text) = sidecar.get("/v1/config", Some("first"));
    assert_eq!(code, 200);
    assert!(text.contains("chunkTokens: 256") && !text.contains("first\n"));
    std::fs::write(sidecar.token_file(), "second\n").unwrap();
    assert_eq!(sidecar.get("/v1/objects?key=00", Some("first")).0, 403);
    assert_eq!(sidecar.get("/v1/objects?key=xyz", Some("second")).0, 400);
    assert_eq!(sidecar.get("/nothing", None).0, 404);
    sidecar.wait_metric(
        "admin_requests_total{path=\"/v1/config\",status=\"403\"}",
        2.0,
    );
}

#[test]
fn a_variable_whose_object_is_missing_is_named_and_costs_nothing() {
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    sidecar.run_by(
        "export KVCACHEPOOL_ENV_REFERENCES='Secret/here/k=A\nConfigMap/absent/k=KVCP_ABSENT' A= && exec \"$@\"",
    );
    sidecar.wait_populated();
    let status = sidecar.status();
    assert_eq!(status["state"], "degraded");
    assert_eq!(status["reasons"][0]["code"], "EnvMissing");
    let message = status["reasons"][0]["message"].as_str().unwrap();
    assert!(
        message.starts_with("KVCP_ABSENT: ConfigMap absent has no key k. Create"),
        "{message}"
    );
    sidecar.wait_metric("degraded{reason=\"env_missing\"}", 1.0);
}

#[test]
fn an_admin_port_that_was_busy_is_opened_once_it_is_free_without_a_restart() {
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let busy = std::net::TcpListener::bind(sidecar.address()).unwrap();
    sidecar.run();
    sidecar.wait_socket();
    let output = Command::new(binary())
        .args(["status", "--json", "--socket"])
        .arg(sidecar.socket())
        .output()
        .unwrap();
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["state"], "degraded");
    assert_eq!(status["reasons"][0]["code"], "NoAdminPort");
    let engine = sidecar.engine();
    drop(busy);
    sidecar.wait_populated();
    wait_for("the end of the reason", || {
        (sidecar.status()["state"] == "ready").then_some(())
    });
    assert_eq!(sidecar.engine(), engine);
    assert_eq!(sidecar.metric("engine_starts_total"), 1.0);
    // The next engine gets the port as any other.
    signal_to(engine, rustix::process::Signal::KILL);
    sidecar.wait_metric("engine_starts_total", 2.0);
    wait_for("an engine without reasons", || {
        (sidecar.status()["state"] == "ready").then_some(())
    });
}

/// The labels of a sample. No value has a quote.
fn labels(sample: &str) -> impl Iterator<Item = (&str, &str)> {
    let between = sample
        .split_once('{')
        .unwrap()
        .1
        .rsplit_once('}')
        .unwrap()
        .0;
    let labels = between
        .split("\",")
        .map(|label| label.trim_end_matches('"'));
    labels.filter_map(|label| label.split_once("=\""))
}

#[test]
fn every_exported_metric_is_in_the_table_with_its_type_and_has_snake_case_labels() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    let report = Report {
        requested_tokens: 1,
        miss_tokens: BTreeMap::from([("NotRegistered".to_owned(), 1)]),
        events: BTreeMap::from([("grant_refused/NoRoom".to_owned(), 1)]),
        ..Report::default()
    };
    vllm.scheduler.send(Op::Report, &report, &[]);
    sidecar.wait_metric("miss_tokens_total{reason=\"not_registered\"}", 1.0);
    let (_, text) = sidecar.get("/metrics", None);
    let types: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .collect();
    assert!(types.len() > 20);
    for line in types {
        let (name, kind) = line.split_once(' ').unwrap();
        let Some(name) = name.strip_prefix(PREFIX) else {
            // The library's metrics of the process.
            assert!(name.starts_with("process_"), "{name}");
            continue;
        };
        let metric = all().find(|m| m.name == name).unwrap();
        assert_eq!(metric.kind.name(), kind, "{name}");
    }
    for line in text.lines().filter(|line| line.contains('{')) {
        for (label, value) in labels(line) {
            let casing = VERBATIM.contains(&label) || snake_case(value) == value;
            assert!(casing || label == "le", "{line}");
        }
    }
}

#[test]
fn status_prints_a_table_or_json_over_http_and_over_the_socket() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    let run = |args: &[&str]| {
        let output = Command::new(binary())
            .arg("status")
            .args(args)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let url = sidecar.url();
    let socket = sidecar.socket();
    for from in [
        ["--url", url.as_str()],
        ["--socket", socket.to_str().unwrap()],
    ] {
        let table = run(&from);
        assert!(
            table.contains("2 chunks") && table.contains("scheduler"),
            "{table}"
        );
        for format in ["--json", "-ojson"] {
            let json = run(&[from[0], from[1], format]);
            let status: serde_json::Value = serde_json::from_str(&json).unwrap();
            assert_eq!(status["memory"]["chunks"], 2);
            assert_eq!(status["state"], "ready");
        }
    }
}

#[test]
fn shells_complete_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let mut command = Command::new(binary());
        let output = command.args(["completions", shell]).output().unwrap();
        assert!(output.status.success());
        let script = String::from_utf8(output.stdout).unwrap();
        for name in ["export-connector", "doctor", "older-than"] {
            assert!(script.contains(name), "{shell}: {name}");
        }
    }
}

#[test]
fn the_exported_connector_is_whole_and_exporting_again_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let export = || {
        let output = Command::new(binary())
            .arg("export-connector")
            .arg(folder.path())
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    export();
    let info = folder.path().join(format!(
        "kvcachepool-{}.dist-info",
        env!("CARGO_PKG_VERSION")
    ));
    let entry_points = std::fs::read_to_string(info.join("entry_points.txt")).unwrap();
    assert!(
        entry_points.contains("[vllm.general_plugins]\nkvcachepool = kvcachepool.plugin:register")
    );
    assert!(info.join("METADATA").exists());
    assert!(folder.path().join("kvcachepool/__init__.py").exists());
    assert!(!folder.path().join("kvcachepool/__pycache__").exists());
    let settings = std::fs::read_to_string(folder.path().join("settings.json")).unwrap();
    assert!(settings.contains("\"existingConnector\":\"Refuse\""));
    let stamp = || {
        std::fs::metadata(folder.path().join("kvcachepool"))
            .unwrap()
            .modified()
            .unwrap()
    };
    let before = stamp();
    export();
    assert_eq!(stamp(), before);
    // The entry points of an older version would register the plugin twice.
    std::fs::create_dir(folder.path().join("kvcachepool-0.0.1.dist-info")).unwrap();
    export();
    assert!(!folder.path().join("kvcachepool-0.0.1.dist-info").exists());
}
