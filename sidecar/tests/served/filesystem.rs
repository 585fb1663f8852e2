//! The file system tier of real sidecars: what one of them wrote, another one finds while both run.

use crate::harness::{Sidecar, binary, wait_for};
use crate::tiers::{flushed_after_the_last_vllm, flushed_before_the_end, writing_back};
use crate::vllm::{CHUNK_BYTES, Vllm, hashes};
use kvcachepool_protocol::message::CHUNK_READY;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// Number of the file system tier in answers to PROBE.
const FILESYSTEM: u8 = 5;
const TIER: &str = "filesystem";

fn with_folder(folder: &Path) -> String {
    let folder = folder.display();
    format!("memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\nfileSystem: {{path: {folder}}}\n")
}

fn start(folder: &Path) -> Sidecar {
    let sidecar = Sidecar::start(&with_folder(folder));
    sidecar.wait_populated();
    sidecar
}

/// Stores chunks and waits until the folder has them.
fn store(sidecar: &Sidecar, prompt: u64, count: u32) {
    sidecar.wait_tier(TIER, "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(prompt, count));
    let stored = "tier_write_chunks_total{result=\"stored\",tier=\"filesystem\"}";
    sidecar.wait_metric(stored, f64::from(count));
}

fn finds(sidecar: &Sidecar, prompt: u64, count: usize) {
    sidecar.wait_tier(TIER, "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.finds_below(&hashes(prompt, 6), count, FILESYSTEM);
}

#[test]
fn two_sidecars_with_one_folder_find_what_the_other_wrote() {
    let folder = TempDir::new().unwrap();
    let (one, other) = (start(folder.path()), start(folder.path()));
    store(&one, 1, 4);
    finds(&other, 1, 4);
    store(&other, 2, 3);
    finds(&one, 2, 3);
    wait_for("the bytes in the status", || {
        let used = one.tier(TIER)["used_bytes"].as_u64();
        (used >= Some(4 * CHUNK_BYTES)).then_some(())
    });
    drop((one, other));
    finds(&start(folder.path()), 1, 4);
}

#[test]
fn what_is_written_back_is_in_the_folder_when_the_last_vllm_ended() {
    let folder = TempDir::new().unwrap();
    let config = with_folder(folder.path());
    flushed_after_the_last_vllm(&writing_back(&config, TIER), TIER);
    finds(&start(folder.path()), 1, 4);
}

#[test]
fn a_sidecar_that_is_told_to_end_writes_to_the_folder_first_what_waits() {
    let folder = TempDir::new().unwrap();
    flushed_before_the_end(writing_back(&with_folder(folder.path()), TIER));
    finds(&start(folder.path()), 1, 4);
}

#[test]
fn a_folder_that_is_taken_away_turns_the_tier_off_until_it_is_back_and_memory_serves_on() {
    let shared = TempDir::new().unwrap();
    let (folder, away) = (shared.path().join("kv"), shared.path().join("away"));
    let sidecar = start(&folder);
    sidecar.wait_off(TIER, "Gone");
    std::fs::create_dir(&folder).unwrap();
    store(&sidecar, 1, 2);
    std::fs::rename(&folder, &away).unwrap();
    sidecar.wait_off(TIER, "Gone");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("s", &hashes(2, 2));
    vllm.check("s", &hashes(2, 2));
    std::fs::rename(&away, &folder).unwrap();
    sidecar.wait_tier(TIER, "ready");
    finds(&start(&folder), 1, 2);
}

#[test]
fn bytes_that_changed_in_the_folder_are_a_miss_and_the_object_goes() {
    let folder = TempDir::new().unwrap();
    store(&start(folder.path()), 1, 2);
    let objects = objects(folder.path());
    assert_eq!(objects.len(), 2);
    for object in &objects {
        let mut bytes = std::fs::read(object).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(object, bytes).unwrap();
    }
    let sidecar = start(folder.path());
    sidecar.wait_tier(TIER, "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    let (_, reply) = vllm.probe_below("r", &hashes(1, 2));
    let ready = |state: &u8| *state == CHUNK_READY;
    assert!(!reply.states.iter().any(ready), "{:?}", reply.states);
    assert!(
        self::objects(folder.path()).len() < 2,
        "what is corrupt is removed"
    );
    vllm.store("again", &hashes(1, 2));
    vllm.check("again", &hashes(1, 2));
}

/// Files with objects.
fn objects(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(objects(&path)),
            false if path.extension().is_some_and(|e| e == "kv") => found.push(path),
            false => {}
        }
    }
    found
}

fn tool(arguments: &[&str]) -> Output {
    Command::new(binary()).args(arguments).output().unwrap()
}

/// The last document that a tool prints.
fn document(arguments: &[&str]) -> Value {
    let output = tool(&[arguments, &["--output", "json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_else(|_| panic!("{output:?}"))
}

#[test]
fn tools_see_verify_and_remove_what_a_sidecar_wrote_beside_it() {
    let folder = TempDir::new().unwrap();
    let sidecar = start(folder.path());
    store(&sidecar, 1, 3);
    let url = format!("file://{}", folder.path().display());
    let seen = document(&["inspect", &url]);
    assert_eq!((&seen["tier"], &seen["objects"]), (&TIER.into(), &3.into()));
    assert_eq!(document(&["verify", &url])["ok"], 3);
    std::fs::write(folder.path().join("holiday.jpg"), "").unwrap();
    let other = "0123456789abcdef/fedcba9876543210";
    let gone = document(&["gc", &url, "--all-but-domain", other]);
    assert_eq!(gone["removed"], 3, "{gone}");
    assert!(objects(folder.path()).is_empty());
    store(&start(folder.path()), 2, 2);
    let config = sidecar.config().display().to_string();
    let checked = document(&["check", "--config", &config]);
    let ready = checked["tiers"].as_array().unwrap();
    assert_eq!(
        (&ready[0]["tier"], &ready[0]["ready"]),
        (&TIER.into(), &true.into())
    );
    let purged = document(&["purge", "--config", &config]);
    assert_eq!(
        (&purged["objects"], &purged["foreign"]),
        (&2.into(), &1.into()),
        "{purged}"
    );
    assert!(folder.path().join("holiday.jpg").exists());
}
