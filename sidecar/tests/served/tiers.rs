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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use tempfile::TempDir;

/// Number of the disk tier in answers to PROBE.
pub const DISK: u8 = 2;

/// What a config has for a disk tier.
pub fn disk_at(folder: &Path) -> String {
    format!("disk: {{path: {}, size: 256Mi}}\n", folder.display())
}

fn with_disk(folder: &Path) -> String {
    "memory: {size: 64Mi}\ncache: {minLoadTokens: 0}\n".to_owned() + &disk_at(folder)
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

/// A folder with two chunks of prompt 1.
pub fn filled() -> TempDir {
    let disk = TempDir::new().unwrap();
    stored_on(disk.path(), 1, 2);
    disk
}

/// A sidecar that has such a folder serves from it, and from memory.
pub fn disk_and_memory_serve(sidecar: &Sidecar) {
    sidecar.wait_tier("disk", "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.finds_below(&hashes(1, 2), 2, DISK);
    vllm.store("r", &hashes(2, 2));
    vllm.check("r", &hashes(2, 2));
}

#[test]
fn what_is_not_the_caches_in_the_folder_is_named_in_status_metric_and_log() {
    let disk = TempDir::new().unwrap();
    std::fs::write(disk.path().join("holiday.jpg"), "").unwrap();
    let sidecar = start(disk.path());
    sidecar.wait_tier("disk", "ready");
    let event = "tier_events_total{event=\"foreign_file\",tier=\"disk\"}";
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

/// One whose tier is written to late: a sixteenth of its memory may wait.
pub fn writing_back(config: &str, tier: &str) -> Sidecar {
    let config = format!("{config}write: {{policy: WriteBack}}\n");
    let sidecar = Sidecar::start(&config.replace("64Mi", "256Mi"));
    sidecar.wait_populated();
    sidecar.wait_tier(tier, "ready");
    sidecar
}

/// Four chunks of prompt 1 wait until the last vLLM ended, and go to the tier then.
pub fn flushed_after_the_last_vllm(sidecar: &Sidecar, tier: &str) {
    let mut keeper = Process::start("store", &sidecar.socket());
    let waiting = format!("tier_waiting_bytes{{tier=\"{tier}\"}}");
    sidecar.wait_metric(&waiting, (4 * CHUNK_BYTES) as f64);
    let stored = format!("tier_write_chunks_total{{result=\"stored\",tier=\"{tier}\"}}");
    assert_eq!(sidecar.metric(&stored), 0.0);
    keeper.kill();
    sidecar.wait_metric(&stored, 4.0);
}

/// Four chunks of prompt 1 wait when the sidecar, which has no vLLM any more, is told to end: it does with nothing lost.
pub fn flushed_before_the_end(mut sidecar: Sidecar) {
    Process::start("store", &sidecar.socket()).kill();
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.wait_exit(), Some(0));
    assert!(!sidecar.log().contains("lost with the memory"));
}

#[test]
fn what_is_written_back_waits_for_a_flush() {
    let disk = TempDir::new().unwrap();
    let sidecar = writing_back(&with_disk(disk.path()), "disk");
    let mut vllm = Vllm::attach(&sidecar.socket());
    let wanted = hashes(1, 3);
    vllm.store("r", &wanted);
    vllm.check("r", &wanted);
    let waiting = "tier_waiting_bytes{tier=\"disk\"}";
    assert_eq!(sidecar.metric(waiting), (3 * CHUNK_BYTES) as f64);
    let text = flush(&sidecar.socket()).0;
    assert_eq!(text, "flush started: 3 chunks to disk\n");
    let stored = "tier_operations_total{operation=\"put\",result=\"ok\",tier=\"disk\"}";
    sidecar.wait_metric(stored, 3.0);
    sidecar.wait_metric(
        "tier_write_chunks_total{result=\"stored\",tier=\"disk\"}",
        3.0,
    );
    assert_eq!(
        flush(&sidecar.socket()).0,
        "flush started: 0 chunks to disk\n"
    );
}

#[test]
fn what_is_written_back_goes_out_when_the_last_vllm_ended() {
    let disk = TempDir::new().unwrap();
    flushed_after_the_last_vllm(&writing_back(&with_disk(disk.path()), "disk"), "disk");
}

#[test]
fn a_sidecar_without_a_vllm_that_is_told_to_end_writes_first_what_waits() {
    let disk = TempDir::new().unwrap();
    flushed_before_the_end(writing_back(&with_disk(disk.path()), "disk"));
    let other = start(disk.path());
    other.wait_tier("disk", "ready");
    Vllm::attach(&other.socket()).finds_below(&hashes(1, 4), 4, DISK);
}

#[test]
fn what_is_lost_at_the_end_with_a_tier_that_is_down_is_named_by_tier_chunks_and_bytes() {
    let disk = TempDir::new().unwrap();
    let folder = disk.path().join("tier");
    std::fs::create_dir(&folder).unwrap();
    let mut sidecar = start(&folder);
    sidecar.wait_tier("disk", "ready");
    std::fs::rename(&folder, disk.path().join("away")).unwrap();
    let mut keeper = Process::start("store", &sidecar.socket());
    sidecar.wait_off("disk", "Gone");
    keeper.kill();
    wait_for("word of the vLLM's end", || {
        let attached = |role| sidecar.metric(&format!("sessions{{role=\"{role}\"}}"));
        (attached("scheduler") + attached("worker") == 0.0).then_some(())
    });
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.wait_exit(), Some(0));
    let lost = format!(
        "chunks lost with the memory: not written to the tier tier=\"disk\" chunks=4 bytes={}",
        4 * CHUNK_BYTES
    );
    let log = sidecar.log();
    let warns = |line: &str| line.contains("WARN") && line.ends_with(&lost);
    assert!(log.lines().any(warns), "{log}");
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

/// Prompts that the disk has, two chunks each.
pub const ON_DISK: std::ops::RangeInclusive<u64> = 1..=12;
/// A prompt that a farther tier alone has, of four chunks.
pub const FAR: u64 = 100;

/// Ends a loop, also where a test fails before.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// While somebody asks for what a farther tier alone has, and is told of misses, another one loads prompt after prompt from the disk, and
/// does what there is to do beside.
pub fn disk_serves_beside_misses(sidecar: &Sidecar, beside: impl FnOnce(&mut Vllm)) {
    let (ended, misses) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _end = End(&ended);
        scope.spawn(|| {
            let mut vllm = Vllm::attach(&sidecar.socket());
            while !ended.load(Relaxed) {
                let (_, reply) = vllm.probe_below("far", &hashes(FAR, 4));
                let states = &reply.states;
                assert!(!states.contains(&CHUNK_READY), "{states:?}");
                vllm.release("far");
                misses.fetch_add(1, Relaxed);
            }
        });
        let mut vllm = Vllm::attach(&sidecar.socket());
        wait_for("the first miss", || {
            (misses.load(Relaxed) > 0).then_some(())
        });
        for prompt in ON_DISK {
            vllm.finds_below(&hashes(prompt, 2), 2, DISK);
            vllm.release("warm");
        }
        beside(&mut vllm);
    });
    assert_eq!(sidecar.tier("disk")["state"], "ready");
}

/// Waits until the farther tier gives what it alone has.
pub fn wait_far(sidecar: &Sidecar, tier: &str) {
    let mut vllm = Vllm::attach(&sidecar.socket());
    wait_for("the tier to be used again", || {
        let (_, reply) = vllm.probe_below("again", &hashes(FAR, 4));
        vllm.release("again");
        let ready = reply.states.iter().all(|s| *s == CHUNK_READY);
        ready.then_some(())
    });
    sidecar.wait_tier(tier, "ready");
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
    sidecar.wait_off("disk", "Gone");
    vllm.check("r", &hashes(1, 2));
    std::fs::rename(&away, &folder).unwrap();
    sidecar.wait_tier("disk", "ready");
    let down = "tier_down{reason=\"gone\",tier=\"disk\"}";
    assert_eq!(sidecar.metric(down), 0.0);
}

#[test]
fn a_folder_that_another_sidecar_has_or_that_is_not_there_is_named_and_memory_serves_on() {
    let disk = TempDir::new().unwrap();
    let first = start(disk.path());
    first.wait_tier("disk", "ready");
    let missing = disk.path().join("not-made");
    for (folder, reason) in [(disk.path(), "InUse"), (missing.as_path(), "Gone")] {
        let second = start(folder);
        second.wait_off("disk", reason);
        let mut vllm = Vllm::attach(&second.socket());
        vllm.store("r", &hashes(2, 2));
        vllm.check("r", &hashes(2, 2));
    }
    // Whose folder it is goes on.
    let mut vllm = Vllm::attach(&first.socket());
    vllm.store("r", &hashes(3, 2));
    let stored = "tier_write_chunks_total{result=\"stored\",tier=\"disk\"}";
    first.wait_metric(stored, 2.0);
    assert_eq!(first.tier("disk")["state"], "ready");
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
    let tier = sidecar.wait_off("disk", "ReadOnly");
    let message = tier["message"].as_str().unwrap();
    assert!(message.contains("mount it read-write"), "{message}");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    vllm.check("r", &hashes(1, 2));
}
