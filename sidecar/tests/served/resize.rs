//! The arena gets another size while vLLM uses it.

use crate::cgroup::Cgroup;
use crate::harness::{Sidecar, binary, signal_to, wait_for};
use crate::vllm::{Vllm, hashes};
use kvcachepool_memory::limit::machine_bytes;
use kvcachepool_protocol::config::{ByteSize, Config};
use kvcachepool_protocol::table::{Header, ROW_BYTES};
use rustix::fs::fstat;
use rustix::process::Signal;
use std::mem::offset_of;
use std::process::Command;

const MI: u64 = 1 << 20;

fn capacity(sidecar: &Sidecar) -> u64 {
    sidecar.status()["memory"]["capacity_bytes"]
        .as_u64()
        .unwrap()
}

fn wait_capacity(sidecar: &Sidecar, bytes: u64) {
    wait_for(&format!("an arena of {bytes} bytes"), || {
        let memory = &sidecar.status()["memory"];
        let all = memory["populated_bytes"] == bytes && memory["resize_waits"] == "";
        (all && memory["capacity_bytes"] == bytes).then_some(())
    });
}

/// Bytes of the arena's file that have pages.
fn allocated(vllm: &Vllm) -> u64 {
    let arena = &vllm.memory.as_ref().unwrap().arena;
    fstat(arena).unwrap().st_blocks as u64 * 512
}

#[test]
fn another_size_is_taken_in_while_vllm_uses_the_memory() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 4));
    sidecar.configure("memory: {size: 192Mi}\n");
    wait_capacity(&sidecar, 192 * MI);
    assert_eq!(allocated(&vllm), 192 * MI);
    vllm.check("r", &hashes(1, 4));
    // More than fitted before.
    let many = hashes(2, 700);
    for part in many.chunks(100) {
        vllm.store("r", part);
    }
    assert_eq!(vllm.ready("r", &many), many.len());
    assert!(sidecar.status()["memory"]["used_bytes"].as_u64() > Some(64 * MI));

    sidecar.configure("memory: {size: 64Mi}\n");
    wait_capacity(&sidecar, 64 * MI);
    assert_eq!(allocated(&vllm), 64 * MI);
    let left = vllm.ready("r", &many);
    assert!(left > 0 && left < many.len(), "{left}");
    vllm.check("r", &many[..left]);
    vllm.store("r", &hashes(3, 4));
    assert_eq!(sidecar.metric("engine_starts_total"), 1.0);
    assert_eq!(sidecar.status()["restart_needed"], serde_json::json!([]));
    assert_eq!(sidecar.metric("memory_capacity_bytes"), (64 * MI) as f64);

    // The next engine process takes the memory over in its present size.
    sidecar.configure("memory: {size: 128Mi}\n");
    wait_capacity(&sidecar, 128 * MI);
    vllm.store("r", &hashes(4, 4));
    signal_to(sidecar.engine(), Signal::KILL);
    sidecar.wait_metric("engine_starts_total", 2.0);
    vllm.reconnect();
    wait_capacity(&sidecar, 128 * MI);
    vllm.check("r", &hashes(4, 4));
}

#[test]
fn it_grows_when_the_containers_limit_is_raised() {
    let config = |mi: u64| {
        let mut config = Config::default();
        config.memory.size = ByteSize(mi * MI);
        config
    };
    let Some(cgroup) = Cgroup::with_limit(config(64).container_memory_bytes() + 8 * MI) else {
        return;
    };
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    sidecar.run_below(&cgroup.procs());
    sidecar.wait_populated();
    let vllm = Vllm::attach(&sidecar.socket());
    sidecar.configure("memory: {size: 128Mi}\n");
    wait_for("the reason", || {
        let waits = sidecar.status()["memory"]["resize_waits"].clone();
        waits
            .as_str()?
            .contains("raise the container's memory limit")
            .then_some(())
    });
    assert_eq!((capacity(&sidecar), allocated(&vllm)), (64 * MI, 64 * MI));
    assert_eq!(sidecar.status()["state"], "ready", "it serves as before");
    assert_eq!(sidecar.status()["memory"]["target_bytes"], 128 * MI);
    assert_eq!(sidecar.metric("memory_target_bytes"), (128 * MI) as f64);
    let table = Command::new(binary())
        .args(["status", "--socket"])
        .arg(sidecar.socket())
        .output()
        .unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    let line = table.lines().find(|line| line.starts_with("resize"));
    assert!(line.unwrap().contains("to 128Mi waits: "), "{table}");
    cgroup.set_limit(config(128).container_memory_bytes() + 8 * MI);
    wait_capacity(&sidecar, 128 * MI);
    assert_eq!(allocated(&vllm), 128 * MI);
}

#[test]
fn an_end_that_a_connector_wrote_into_the_table_does_not_cost_the_next_engine_its_memory() {
    let mut config = Config::default();
    config.memory.size = ByteSize(64 * MI);
    let Some(cgroup) = Cgroup::with_limit(config.container_memory_bytes() + 8 * MI) else {
        return;
    };
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    sidecar.run_below(&cgroup.procs());
    sidecar.wait_populated();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 4));
    let table = &vllm.memory.as_ref().unwrap().table;
    let everything = (machine_bytes() / ROW_BYTES) as u32 & !1023;
    let word = offset_of!(Header, capacity_rows) as u64;
    rustix::io::pwrite(table, &everything.to_ne_bytes(), word).unwrap();
    signal_to(sidecar.engine(), Signal::KILL);
    sidecar.wait_metric("engine_starts_total", 2.0);
    vllm.reconnect();
    wait_capacity(&sidecar, 64 * MI);
    vllm.check("r", &hashes(1, 4));
    assert_eq!(allocated(&vllm), 64 * MI);
}

#[test]
fn a_size_beyond_the_machines_memory_waits_for_a_restart() {
    let sidecar = Sidecar::small();
    sidecar.configure("memory: {size: 16Ti}\n");
    sidecar.wait_metric("config_restart_needed{key=\"memory.size\"}", 1.0);
    assert_eq!(
        sidecar.status()["restart_needed"],
        serde_json::json!(["memory.size"])
    );
    assert_eq!(capacity(&sidecar), 64 * MI);
    sidecar.configure("memory: {size: 128Mi}\n");
    wait_capacity(&sidecar, 128 * MI);
    assert_eq!(sidecar.status()["restart_needed"], serde_json::json!([]));
}
