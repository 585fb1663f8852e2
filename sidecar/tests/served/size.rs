//! `size` prints what the tiers guide shows, and reports bad input with the exit code 1.

use crate::harness::binary;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

const GUIDE: &str = include_str!("../../../docs/guides/tiers.md");

fn size(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.current_dir(folder).arg("size").args(arguments);
    command.output().unwrap()
}

/// A folder with the `config.json` of an 8B model with GQA.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = json!({
        "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    });
    std::fs::write(folder.path().join("config.json"), model.to_string()).unwrap();
    folder
}

#[test]
fn the_output_is_that_of_the_guide() {
    let prefix = "kvcachepool-sidecar size ";
    let line = GUIDE
        .lines()
        .find_map(|line| line.strip_prefix(prefix))
        .unwrap();
    let arguments: Vec<&str> = line.split(' ').collect();
    let printed = size(folder().path(), &arguments);
    assert!(printed.status.success(), "{printed:?}");
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(GUIDE.contains(&format!("```\n{text}```\n")), "{text}");
}

#[test]
fn json_has_the_tiers_of_a_config() {
    let folder = folder();
    std::fs::write(
        folder.path().join("config.v1.yaml"),
        "memory: {size: 8Gi}\n",
    )
    .unwrap();
    let printed = size(
        folder.path(),
        &[
            "config.json",
            "--config",
            "config.v1.yaml",
            "--tp",
            "4",
            "-o",
            "json",
        ],
    );
    let report: Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_eq!(report["rank_token_bytes"], 32 << 10);
    assert_eq!(report["groups"][0]["spec"], "FullAttentionSpec");
    assert_eq!(report["tiers"].as_array().unwrap().len(), 1);
    assert_eq!(report["tiers"][0]["size_bytes"], 8u64 << 30);
}

#[test]
fn bad_input_is_named() {
    let folder = folder();
    std::fs::write(folder.path().join("empty.json"), "{}").unwrap();
    for (arguments, code, expected) in [
        (&["none.json"][..], 1, "error: none.json: "),
        (
            &["empty.json"],
            1,
            "error: MissingField: the config of the model lacks model_type",
        ),
        (&["config.json", "--config", "none.yaml"], 1, "error: "),
        (
            &["config.json", "--memory", "1Ki"],
            2,
            "error: invalid value '1Ki' for '--memory <SIZE>'",
        ),
        (
            &["config.json", "--disk", "much"],
            2,
            "error: invalid value 'much' for '--disk <SIZE>'",
        ),
        (
            &["config.json", "--tp", "0"],
            2,
            "error: invalid value '0' for '--tp <T>'",
        ),
    ] {
        let printed = size(folder.path(), arguments);
        assert_eq!(printed.status.code(), Some(code), "{printed:?}");
        let said = String::from_utf8_lossy(&printed.stderr).into_owned();
        assert!(said.starts_with(expected), "{said}");
    }
}
