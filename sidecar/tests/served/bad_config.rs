//! Configs that cannot be used are a reported state, not an exit; a changed file is taken in or reported.

use crate::cgroup::Cgroup;
use crate::harness::{Sidecar, binary, signal_to, wait_for};
use crate::vllm::{Vllm, hashes};
use kvcachepool_memory::lockfile::LockFile;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::Signal;
use std::os::unix::net::UnixStream;
use std::process::Command;

#[test]
fn an_unknown_key_is_reported_and_mended_without_a_new_container() {
    let mut sidecar = Sidecar::prepare("memory: {szie: 64Mi}\n");
    sidecar.run();
    wait_for("the named reason", || {
        sidecar
            .reasons()
            .contains(&"ConfigInvalid".to_owned())
            .then_some(())
    });
    assert_eq!(sidecar.get("/healthz", None).0, 200);
    let (code, text) = sidecar.get("/readyz", None);
    assert_eq!(code, 503);
    assert!(
        text.contains("memory.szie") && text.contains("memory.size"),
        "{text}"
    );
    assert_eq!(sidecar.metric("degraded{reason=\"config_invalid\"}"), 1.0);

    sidecar.configure("memory: {size: 64Mi}\n");
    sidecar.wait_socket();
    sidecar.wait_populated();
    Vllm::attach(&sidecar.socket()).store("r", &hashes(1, 1));
}

#[test]
fn an_endpoint_that_is_no_url_is_reported_and_mended_without_a_new_container() {
    let s3 = |endpoint: &str| {
        format!("memory: {{size: 64Mi}}\ns3: {{bucket: kv-bucket, endpoint: \"{endpoint}\"}}\n")
    };
    let mut sidecar = Sidecar::prepare(&s3("minio:9000"));
    sidecar.run();
    wait_reason(&sidecar, "ConfigInvalid");
    let text = sidecar.get("/readyz", None).1;
    assert!(text.contains("s3.endpoint"), "{text}");
    assert_eq!(sidecar.metric("degraded{reason=\"config_invalid\"}"), 1.0);
    assert!(sidecar.log().contains("s3.endpoint"), "{}", sidecar.log());

    sidecar.configure(&s3("http://127.0.0.1:1"));
    sidecar.wait_socket();
    sidecar.wait_populated();
    Vllm::attach(&sidecar.socket()).store("r", &hashes(1, 1));
    // While it serves, such a config is left out, and the one before it goes on.
    sidecar.configure(&s3("minio:9000"));
    sidecar.wait_metric("config_reloads_total{result=\"invalid\"}", 1.0);
    wait_reason(&sidecar, "ConfigInvalid");
    Vllm::attach(&sidecar.socket()).store("r", &hashes(2, 1));
}

#[test]
fn an_unknown_key_of_a_managed_config_is_a_warning_with_a_metric() {
    let sidecar = Sidecar::start("managed: true\nmemory: {size: 64Mi}\nfuture: {thing: 1}\n");
    assert_eq!(sidecar.metric("config_unknown_keys{key=\"future\"}"), 1.0);
}

#[test]
fn an_arena_larger_than_the_memory_is_refused_by_name_and_everything_else_serves() {
    let sidecar = Sidecar::start("memory: {size: 8Ti}\n");
    wait_for("the named reason", || {
        sidecar
            .reasons()
            .iter()
            .any(|r| r.contains("ArenaExceedsMemoryLimit"))
            .then_some(())
    });
    let text = sidecar.get("/readyz", None).1;
    assert!(text.contains("memory.size"), "{text}");
    assert_eq!(sidecar.get("/healthz", None).0, 200);
}

#[test]
fn an_arena_larger_than_the_containers_limit_is_refused_before_a_page_is_touched() {
    let Some(cgroup) = Cgroup::with_limit(256 << 20) else {
        return;
    };
    let mut sidecar = Sidecar::prepare("memory: {size: 256Mi}\n");
    sidecar.run_below(&cgroup.procs());
    sidecar.wait_socket();
    wait_for("the named reason", || {
        let reasons = sidecar.reasons();
        reasons
            .contains(&"ArenaExceedsMemoryLimit".to_owned())
            .then_some(())
    });
    let text = sidecar.get("/readyz", None).1;
    assert!(
        text.contains("memory.limit_in_bytes") || text.contains("memory.max"),
        "{text}"
    );
    drop(sidecar);

    let mut fits = Sidecar::prepare("memory: {size: 128Mi}\n");
    fits.run_below(&cgroup.procs());
    fits.wait_socket();
    fits.wait_populated();
    Vllm::attach(&fits.socket()).store("r", &hashes(1, 4));
    assert_eq!(fits.metric("engine_starts_total"), 1.0, "no OOM kill");
}

#[test]
fn without_huge_pages_on_the_node_base_pages_serve_and_the_reason_is_named() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free = meminfo
        .lines()
        .find_map(|l| l.strip_prefix("HugePages_Free:"))
        .map_or(0, |n| n.trim().parse::<u64>().unwrap());
    if free > 0 {
        eprintln!("skipped: this machine has huge pages");
        return;
    }
    let sidecar = Sidecar::start("memory: {size: 64Mi, hugePages: 2Mi}\n");
    sidecar.wait_populated();
    assert!(
        sidecar
            .reasons()
            .contains(&"HugePagesUnavailable".to_owned())
    );
    Vllm::attach(&sidecar.socket()).store("r", &hashes(1, 1));
}

#[test]
fn a_changed_file_is_applied_or_waits_for_a_restart_or_is_left_out() {
    let sidecar = Sidecar::small();
    sidecar.configure("memory: {size: 64Mi, evictionPolicy: LRU}\ncache: {minLoadTokens: 1024}\n");
    sidecar.wait_metric("config_reloads_total{result=\"applied\"}", 1.0);
    assert_eq!(
        sidecar.metric("config_restart_needed{key=\"memory.evictionPolicy\"}"),
        1.0
    );
    assert_eq!(
        sidecar.status()["restart_needed"][0],
        "memory.evictionPolicy"
    );
    let mut vllm = Vllm::silent(&sidecar.socket());
    let reply: kvcachepool_protocol::message::HelloReply = vllm
        .hello(kvcachepool_protocol::message::Role::Worker)
        .read();
    assert_eq!(reply.settings.min_load_tokens, 1024);

    sidecar.configure("memory: {size: none}\n");
    sidecar.signal(Signal::HUP);
    sidecar.wait_metric("config_reloads_total{result=\"invalid\"}", 1.0);
    assert!(
        sidecar.status()["config_error"]
            .as_str()
            .unwrap()
            .contains("memory.size")
    );
    assert_eq!(sidecar.metric("engine_starts_total"), 1.0);
}

/// The config without the key `socket`, which stands in front of it.
fn with_socket(sidecar: &Sidecar, socket: &str) -> String {
    let text = std::fs::read_to_string(sidecar.config()).unwrap();
    let (_, rest) = text.split_once('\n').unwrap();
    format!("socket: {socket}\n{rest}")
}

#[test]
fn another_socket_waits_for_the_container_and_not_for_the_engine() {
    let mut sidecar = Sidecar::small();
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("sidecar.sock");
    sidecar.write_config(&with_socket(&sidecar, other.to_str().unwrap()));
    sidecar.wait_metric("config_restart_needed{key=\"socket\"}", 1.0);
    signal_to(sidecar.engine(), Signal::KILL);
    sidecar.wait_metric("engine_starts_total", 2.0);
    wait_for("the key that waits", || {
        (sidecar.status()["restart_needed"][0] == "socket").then_some(())
    });
    assert_eq!(sidecar.metric("config_restart_needed{key=\"socket\"}"), 1.0);
    sidecar.wait_socket();
    Vllm::attach(&sidecar.socket()).store("r", &hashes(1, 1));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

    sidecar.kill_all();
    sidecar.run();
    wait_for("the other socket", || UnixStream::connect(&other).ok());
    wait_for("a status in which nothing waits", || {
        let status = sidecar.status();
        status["restart_needed"]
            .as_array()?
            .is_empty()
            .then_some(())
    });
}

#[test]
fn a_config_that_does_not_say_where_is_reported_and_mended_without_a_new_container() {
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let good = std::fs::read_to_string(sidecar.config()).unwrap();
    sidecar.write_config(&with_socket(&sidecar, "{}"));
    sidecar.run();
    wait_reason(&sidecar, "ConfigInvalid");
    sidecar.write_config(&good);
    sidecar.wait_socket();
    sidecar.wait_populated();
    assert_eq!(sidecar.status()["state"], "ready");
}

fn wait_reason(sidecar: &Sidecar, reason: &str) {
    wait_for(reason, || {
        sidecar.reasons().iter().any(|r| r == reason).then_some(())
    });
}

#[test]
fn without_a_lock_of_its_own_nothing_is_served_until_there_is_one() {
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let path = sidecar.socket().with_file_name("sidecar.lock");
    std::fs::create_dir(&path).unwrap();
    sidecar.run();
    wait_reason(&sidecar, "LockFileUnusable");
    let (code, text) = sidecar.get("/readyz", None);
    assert_eq!(code, 503);
    assert!(text.contains("sidecar.lock"), "{text}");
    assert_eq!(sidecar.get("/healthz", None).0, 200);

    // Another sidecar is quicker.
    let quicker = path.with_extension("quicker");
    let lock = LockFile::open(&quicker).unwrap();
    assert!(lock.claim_sidecar().unwrap());
    // In one step: our sidecar must not find the place empty.
    renameat_with(CWD, &quicker, CWD, &path, RenameFlags::EXCHANGE).unwrap();
    wait_reason(&sidecar, "SocketTaken");
    assert!(!sidecar.socket().exists());

    drop(lock);
    sidecar.wait_socket();
    sidecar.wait_populated();
    assert_eq!(sidecar.status()["state"], "ready");
    Vllm::attach(&sidecar.socket()).store("r", &hashes(1, 1));
}

#[test]
fn a_live_socket_is_refused_and_a_dead_one_taken_over() {
    let mut sidecar = Sidecar::small();
    let second = Command::new(binary())
        .args(["run", "--config"])
        .arg(sidecar.config())
        .output()
        .unwrap();
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(text.contains("SocketTaken"), "{text}");
    Vllm::attach(&sidecar.socket()).store("r", &hashes(1, 1));

    sidecar.kill_all();
    assert!(sidecar.socket().exists(), "a dead socket lies there");
    sidecar.run();
    sidecar.wait_socket();
}

#[test]
fn check_names_every_problem_and_the_printed_defaults_pass_it() {
    let sidecar = Sidecar::prepare("memory: {szie: 1, size: much}\n");
    let check = |path: &std::path::Path| {
        Command::new(binary())
            .args(["config", "--check"])
            .arg(path)
            .output()
            .unwrap()
    };
    let bad = check(&sidecar.config());
    assert_eq!(bad.status.code(), Some(1));
    let text = String::from_utf8_lossy(&bad.stderr).into_owned();
    assert!(
        text.contains("memory.szie") && text.contains("much"),
        "{text}"
    );
    let defaults = Command::new(binary())
        .args(["config", "--defaults"])
        .output()
        .unwrap();
    sidecar.write_config(&String::from_utf8(defaults.stdout).unwrap());
    assert!(check(&sidecar.config()).status.success());
}
