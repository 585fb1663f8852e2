//! What a pod asks of the binary: its init container, its preStop hook, another user's rights, its end.

use crate::child::Process;
use crate::harness::{Sidecar, binary, signal_to, wait_for};
use crate::testing::skipped;
use crate::vllm::{Vllm, hashes};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Runs `init` and returns its line of JSON; it always ends well.
fn init(folder: &Path, args: &[&str]) -> serde_json::Value {
    let output = Command::new(binary())
        .args(["init", "--folder"])
        .arg(folder)
        .args(args)
        .output()
        .unwrap();
    line_of(&output)
}

fn line_of(output: &Output) -> serde_json::Value {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn init_writes_the_connector_and_waits_for_the_socket() {
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let folder = sidecar.folder().to_owned();
    std::fs::create_dir(folder.join("kvcachepool-0.0.1.dist-info")).unwrap();
    let waiting = std::thread::spawn(move || {
        init(
            &folder,
            &["--existing-connector", "compose", "--wait", "20s"],
        )
    });
    let settings = sidecar.folder().join("settings.json");
    wait_for("the settings", || settings.exists().then_some(()));
    assert!(!waiting.is_finished(), "no sidecar runs yet");
    sidecar.run();
    let line = waiting.join().unwrap();
    assert_eq!(line["level"], "INFO");
    assert_eq!(line["replaced"], "0.0.1");
    assert!(sidecar.folder().join("kvcachepool/plugin.py").exists());
    assert!(
        std::fs::read_to_string(settings)
            .unwrap()
            .contains("Compose")
    );
}

#[test]
fn init_waits_no_longer_than_told_and_says_what_is_missing_where_kubernetes_shows_it() {
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("termination-log");
    std::fs::write(&told, "").unwrap();
    let began = Instant::now();
    let line = init(
        folder.path(),
        &[
            "--wait",
            "50ms",
            "--termination-log",
            told.to_str().unwrap(),
        ],
    );
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(
        (&line["level"], &line["reason"]),
        (&"WARN".into(), &"SocketNotOpen".into())
    );
    assert!(folder.path().join("kvcachepool/plugin.py").exists());
    assert!(
        std::fs::read_to_string(told)
            .unwrap()
            .starts_with("SocketNotOpen: ")
    );
}

/// Runs a script as root of a mount namespace of its own; `None` where the machine does not let us.
pub fn in_namespace(script: &str) -> Option<Output> {
    let ours = Command::new("unshare").args(["--mount", "true"]).status();
    if !ours.is_ok_and(|status| status.success()) {
        skipped("needs mount namespaces");
        return None;
    }
    let run = Command::new("unshare")
        .args(["--mount", "sh", "-ec", script, "sh", binary()])
        .output();
    Some(run.unwrap())
}

#[test]
fn init_into_a_full_folder_keeps_the_connector_that_lies_there_and_leaves_nothing_else() {
    let script = r#"mount -t tmpfs -o size=64k none /mnt
        mkdir /mnt/kvcachepool-0.0.1.dist-info
        "$1" init --folder /mnt --wait 0ms
        ls -A /mnt >&1"#;
    let Some(output) = in_namespace(script) else {
        return;
    };
    let line = line_of(&output);
    assert_eq!(line["reason"], "FolderFull", "{line}");
    assert_eq!(line["connector"], "0.0.1");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "kvcachepool-0.0.1.dist-info\n"
    );
}

#[test]
fn init_into_a_read_only_folder_is_named() {
    let Some(output) =
        in_namespace(r#"mount -t tmpfs -o ro none /mnt; "$1" init --folder /mnt --wait 0ms"#)
    else {
        return;
    };
    assert_eq!(line_of(&output)["reason"], "FolderNotWritable");
}

pub fn flush(socket: &Path) -> (String, Duration) {
    let began = Instant::now();
    let output = Command::new(binary())
        .args(["flush", "--socket"])
        .arg(socket)
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = [output.stdout, output.stderr].concat();
    (String::from_utf8(text).unwrap(), began.elapsed())
}

#[test]
fn flush_says_what_it_does_and_never_fails_nor_waits() {
    let sidecar = Sidecar::small();
    assert!(flush(&sidecar.socket()).0.contains("nothing to flush"));
    // Nobody answers, though the socket is there.
    let engine = sidecar.engine();
    signal_to(engine, Signal::STOP);
    let (text, took) = flush(&sidecar.socket());
    signal_to(engine, Signal::CONT);
    assert!(
        text.starts_with("warning: no flush started") && text.contains("no answer"),
        "{text}"
    );
    assert!(took < Duration::from_secs(5), "{took:?}");
    let text = flush(&sidecar.folder().join("none.sock")).0;
    assert!(text.starts_with("warning: no flush started"), "{text}");
}

#[test]
fn another_user_on_a_read_only_system_needs_the_shared_folder_alone() {
    if in_namespace("true").is_none() {
        return;
    }
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let folder = sidecar.folder().to_owned();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o1777)).unwrap();
    let folder = folder.display();
    // The binary is opened beforehand: the other user may not reach where it lies.
    sidecar.run_by(&format!(
        r#"exec unshare --mount sh -ec '
            mount --bind {folder} {folder}
            mount -o remount,bind,ro /
            exec 9<"$1"; shift
            exec setpriv --reuid 65532 --regid 65532 --clear-groups --bounding-set=-all --no-new-privs /proc/self/fd/9 "$@"
        ' sh "$@""#
    ));
    sidecar.wait_socket();
    sidecar.wait_populated();
    let uid = std::fs::read_to_string(format!("/proc/{}/status", sidecar.engine())).unwrap();
    assert!(uid.contains("Uid:\t65532\t65532"), "{uid}");
    let mode = std::fs::metadata(sidecar.socket())
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o666, "vLLM runs as yet another user");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    vllm.check("r", &hashes(1, 2));
    assert_eq!(sidecar.status()["state"], "ready");
}

#[test]
fn sigterm_under_a_vllm_ends_at_once_and_the_next_container_has_the_memory_again() {
    let mut sidecar = Sidecar::small();
    let mut keeper = Process::start("store", &sidecar.socket());
    for _ in 0..4 {
        let began = Instant::now();
        sidecar.signal(Signal::TERM);
        assert_eq!(sidecar.wait_exit(), Some(0));
        assert!(
            began.elapsed() < Duration::from_secs(1),
            "an upgrade must be short"
        );
        sidecar.run();
        keeper.reattach();
    }
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.check("r", &hashes(1, 4));
    assert_eq!(
        sidecar.metric("boots_without_health"),
        0.0,
        "ends on request do not count"
    );
}
