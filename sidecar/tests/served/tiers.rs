//! The tiers below memory, as a vLLM sees them: what was stored once is found after everything else is gone, and never wrong.

use crate::child::Process;
use crate::client::Connection;
use crate::harness::{Sidecar, wait_for};
use crate::pod::{flush, in_namespace};
use crate::vllm::{CHUNK_BYTES, Vllm, content, hashes, hello, incarnation};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{Admin, CHUNK_READY, HelloReply, Role};
use rustix::process::Signal;
use std::path::Path;
use tempfile::TempDir;

/// Number of the disk tier in answers to PROBE.
pub const DISK: u8 = 2;

fn with_disk(folder: &Path) -> String {
    format!(
        "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\ndisk: {{path: {}, size: 256Mi}}\n",
        folder.display()
    )
}

fn start(folder: &Path) -> Sidecar {
    let sidecar = Sidecar::start(&with_disk(folder));
    sidecar.wait_populated();
    sidecar
}

/// Stores chunks and waits until the disk has them.
fn stored_on(folder: &Path, prompt: u64, count: u32) {
    let sidecar = start(folder);
    sidecar.wait_tier("disk", "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(prompt, count));
    wait_for("the chunks to be on disk", || {
        (sidecar.tier("disk")["used_bytes"].as_u64() >= Some(u64::from(count) * CHUNK_BYTES))
            .then_some(())
    });
}

#[test]
fn what_is_not_the_caches_in_the_folder_is_named_in_status_metric_and_log() {
    let disk = TempDir::new().unwrap();
    std::fs::write(disk.path().join("holiday.jpg"), "").unwrap();
    let sidecar = start(disk.path());
    sidecar.wait_tier("disk", "ready");
    let event = "tier_events_total{event=\"ForeignFile\",tier=\"disk\"}";
    sidecar.wait_metric(event, 1.0);
    let tier = sidecar.tier("disk");
    let message = tier["message"].as_str().unwrap();
    assert!(message.contains("ForeignFile: 1"), "{message}");
    assert!(sidecar.log().contains("ForeignFile"));
    assert!(disk.path().join("holiday.jpg").exists());
}

#[test]
fn what_was_stored_is_found_on_disk_by_another_sidecar_and_another_vllm() {
    let disk = TempDir::new().unwrap();
    stored_on(disk.path(), 1, 4);
    let sidecar = start(disk.path());
    sidecar.wait_tier("disk", "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.finds_below(&hashes(1, 6), 4, DISK);
}

/// One whose disk is written to late: a sixteenth of its memory may wait.
fn writing_back(folder: &Path) -> Sidecar {
    let config = with_disk(folder) + "write: {policy: WriteBack}\n";
    let sidecar = Sidecar::start(&config.replace("64Mi", "256Mi"));
    sidecar.wait_populated();
    sidecar.wait_tier("disk", "ready");
    sidecar
}

#[test]
fn what_is_written_back_waits_for_a_flush() {
    let disk = TempDir::new().unwrap();
    let sidecar = writing_back(disk.path());
    let mut vllm = Vllm::attach(&sidecar.socket());
    let wanted = hashes(1, 3);
    vllm.store("r", &wanted);
    vllm.check("r", &wanted);
    let waiting = "tier_waiting_bytes{tier=\"disk\"}";
    assert_eq!(sidecar.metric(waiting), (3 * CHUNK_BYTES) as f64);
    let text = flush(&sidecar.socket()).0;
    assert_eq!(text, "flush begun: 3 chunks to disk\n");
    let stored = "tier_operations_total{operation=\"put\",result=\"Ok\",tier=\"disk\"}";
    sidecar.wait_metric(stored, 3.0);
    sidecar.wait_metric(
        "tier_write_chunks_total{result=\"stored\",tier=\"disk\"}",
        3.0,
    );
    assert_eq!(
        flush(&sidecar.socket()).0,
        "flush begun: 0 chunks to disk\n"
    );
}

#[test]
fn what_is_written_back_goes_out_when_the_last_vllm_ended() {
    let disk = TempDir::new().unwrap();
    let sidecar = writing_back(disk.path());
    let mut keeper = Process::start("store", &sidecar.socket());
    let waiting = "tier_waiting_bytes{tier=\"disk\"}";
    sidecar.wait_metric(waiting, (4 * CHUNK_BYTES) as f64);
    keeper.kill();
    sidecar.wait_metric(
        "tier_write_chunks_total{result=\"stored\",tier=\"disk\"}",
        4.0,
    );
}

#[test]
fn a_sidecar_without_a_vllm_that_is_told_to_end_writes_first_what_waits() {
    let disk = TempDir::new().unwrap();
    let mut sidecar = writing_back(disk.path());
    Process::start("store", &sidecar.socket()).kill();
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.wait_exit(), Some(0));
    let other = start(disk.path());
    other.wait_tier("disk", "ready");
    Vllm::attach(&other.socket()).finds_below(&hashes(1, 4), 4, DISK);
}

#[test]
fn bytes_that_changed_on_disk_are_a_miss_and_are_asked_for_once() {
    let disk = TempDir::new().unwrap();
    stored_on(disk.path(), 1, 1);
    let hash = hashes(1, 1);
    let bytes = content(&hash[0]);
    let mut broken = 0;
    for entry in std::fs::read_dir(disk.path()).unwrap() {
        let path = entry.unwrap().path();
        let mut file = std::fs::read(&path).unwrap();
        let found = file.windows(64).position(|w| w == &bytes[..64]);
        if let Some(at) = found {
            file[at + 5] ^= 1;
            std::fs::write(&path, file).unwrap();
            broken += 1;
        }
    }
    assert_eq!(broken, 1, "the chunk's bytes lie in one file");
    let sidecar = start(disk.path());
    sidecar.wait_tier("disk", "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    for request in ["first", "second"] {
        let (_, reply) = vllm.probe_below(request, &hash);
        assert!(
            reply.states.iter().all(|s| *s != CHUNK_READY),
            "{:?}",
            reply.states
        );
        vllm.release(request);
    }
    let log = std::fs::read_to_string(sidecar.folder().join("log")).unwrap();
    let told = log.lines().filter(|line| line.contains("Corrupt")).count();
    assert_eq!(told, 1, "{log}");
}

/// Clears all; returns how many chunks memory forgot.
pub fn clear(sidecar: &Sidecar) -> u64 {
    std::fs::write(sidecar.token_file(), "secret\n").unwrap();
    let mut admin = Connection::open(&sidecar.socket());
    let greeting = hello(Role::Admin, 1, &incarnation());
    let _: HelloReply = admin.ask(Op::Hello, &greeting).read();
    let clear = Admin {
        op: "clear".into(),
        keys: Vec::new(),
        ttl_s: 0,
        token: "secret".into(),
    };
    let cleared: serde_json::Value = admin.ask(Op::Admin, &clear).read();
    cleared["count"].as_u64().unwrap()
}

#[test]
fn a_clear_removes_what_memory_and_disk_hold() {
    let disk = TempDir::new().unwrap();
    stored_on(disk.path(), 1, 3);
    let sidecar = start(disk.path());
    sidecar.wait_tier("disk", "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.finds_below(&hashes(1, 3), 3, DISK);
    vllm.release("warm");
    assert_eq!(clear(&sidecar), 3);
    sidecar.wait_metric("tier_cleared_objects_total{tier=\"disk\"}", 3.0);
    sidecar.wait_tier("disk", "ready");
    let (_, reply) = vllm.probe_below("again", &hashes(1, 3));
    assert!(
        reply.states.iter().all(|s| *s != CHUNK_READY),
        "{:?}",
        reply.states
    );
    vllm.store("anew", &hashes(1, 3));
    vllm.check("anew", &hashes(1, 3));
}

#[test]
fn a_folder_that_is_taken_away_turns_the_tier_off_until_it_is_back_and_memory_serves_on() {
    let disk = TempDir::new().unwrap();
    let (folder, away) = (disk.path().join("tier"), disk.path().join("away"));
    std::fs::create_dir(&folder).unwrap();
    let sidecar = start(&folder);
    sidecar.wait_tier("disk", "ready");
    std::fs::rename(&folder, &away).unwrap();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    let tier = sidecar.wait_tier("disk", "off");
    assert!(tier["reason"].as_str().unwrap().contains("Gone"), "{tier}");
    vllm.check("r", &hashes(1, 2));
    std::fs::rename(&away, &folder).unwrap();
    sidecar.wait_tier("disk", "ready");
}

#[test]
fn a_folder_that_another_sidecar_has_or_that_is_not_there_is_named_and_memory_serves_on() {
    let disk = TempDir::new().unwrap();
    let first = start(disk.path());
    first.wait_tier("disk", "ready");
    let missing = disk.path().join("not-made");
    for (folder, reason) in [(disk.path(), "InUse"), (missing.as_path(), "Gone")] {
        let second = start(folder);
        let tier = wait_for("the reason", || {
            let tier = second.tier("disk");
            tier["reason"]
                .as_str()
                .unwrap()
                .contains(reason)
                .then_some(tier)
        });
        assert_eq!(tier["state"], "off");
        let mut vllm = Vllm::attach(&second.socket());
        vllm.store("r", &hashes(2, 2));
        vllm.check("r", &hashes(2, 2));
    }
}

#[test]
fn a_folder_that_is_read_only_is_named_and_memory_serves_on() {
    if in_namespace("true").is_none() {
        return;
    }
    let disk = TempDir::new().unwrap();
    let mut sidecar = Sidecar::prepare(&with_disk(disk.path()));
    let folder = disk.path().display();
    sidecar.run_by(&format!(
        r#"exec unshare --mount sh -ec '
            mount --bind {folder} {folder}
            mount -o remount,bind,ro {folder}
            exec "$@"
        ' sh "$@""#
    ));
    sidecar.wait_socket();
    sidecar.wait_populated();
    let tier = sidecar.wait_tier("disk", "off");
    assert_eq!(tier["reason"], "ReadOnly", "{tier}");
    let message = tier["message"].as_str().unwrap();
    assert!(message.contains("mount it writable"), "{message}");
    sidecar.wait_metric("tier_down{reason=\"ReadOnly\",tier=\"disk\"}", 1.0);
    assert!(sidecar.log().contains("reason=\"ReadOnly\""));
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    vllm.check("r", &hashes(1, 2));
}
