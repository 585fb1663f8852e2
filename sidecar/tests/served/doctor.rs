//! `doctor` as a node's owner runs it: table and JSON, with and without a config, on nodes that lack something.
#![allow(unsafe_code)]

use crate::cgroup::Cgroup;
use crate::harness::binary;
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Runs what a shell makes of `$@`, the command line of the doctor.
fn doctor_by(script: &str, change: impl FnOnce(&mut Command), args: &[&str]) -> Output {
    let mut command = Command::new("sh");
    let command = command.args(["-c", script, "sh", binary(), "doctor"]);
    command.args(args).env_remove("KVCACHEPOOL_CONFIG");
    change(command);
    let began = Instant::now();
    let output = command.output().unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "took {took:?}");
    output
}

fn doctor(args: &[&str]) -> Output {
    doctor_by("exec \"$@\"", |_| {}, args)
}

fn report(output: &Output) -> Value {
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(report["serves"], output.status.success(), "{report:#}");
    report
}

/// The one of a list that has this name.
fn named<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    list.as_array().unwrap().iter().find(|x| x["name"] == name)
}

fn config(folder: &Path, more: &str) -> String {
    let path = folder.join("config.v1.yaml");
    let socket = folder.join("sidecar.sock");
    std::fs::write(&path, format!("socket: {}\n{more}", socket.display())).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_doctor_prints_a_table_and_leaves_standard_error_alone() {
    let output = doctor(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    for line in [
        "host\n",
        "\nfacilities\n  Memfd            yes: ",
        "\nGPU\n",
        "\ntransfer\n  Engine           ",
        "\n  CudaWindow       ",
        "\nbytes a second\n",
        "\n  CopyOneThread    ",
        "\nwhy is this node slow\n",
        "\na sidecar can serve here\n",
    ] {
        assert!(text.contains(line), "{line:?} is not in {text}");
    }
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

#[test]
fn a_doctor_tries_the_folders_of_a_config_and_leaves_nothing_there() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let more = format!(
        "memory: {{size: 64Mi}}\ndisk: {{path: {}, size: 1Gi}}\n",
        disk.display()
    );
    let output = doctor(&["--json", "--config", &config(folder.path(), &more)]);
    let report = report(&output);
    assert!(output.status.success(), "{report:#}");
    assert_eq!(report["wanted"]["arena_bytes"], 64 << 20);
    let locks = named(&report["facilities"], "recordLocks").unwrap();
    let detail = locks["detail"].as_str().unwrap();
    assert!(
        detail.contains(folder.path().to_str().unwrap()),
        "{report:#}"
    );
    assert!(named(&report["facilities"], "directIo").is_some());
    for speed in report["speeds"].as_array().unwrap() {
        // A loaded machine may leave some of it no time.
        let measured = speed["bytes_per_second"].is_u64();
        assert_eq!(measured, speed["reason"] == "", "{speed:#}");
    }
    assert_eq!(report["speeds"].as_array().unwrap().len(), 7);
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn a_disk_folder_that_is_missing_degrades_and_a_runtime_folder_that_is_missing_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("none");
    let more = format!(
        "memory: {{size: 64Mi}}\ndisk: {{path: {}, size: 1Gi}}\n",
        disk.display()
    );
    let path = config(folder.path(), &more);
    let output = doctor(&["--json", "--config", &path]);
    let first = report(&output);
    let found = named(&first["findings"], "DiskFolderUnusable").unwrap();
    assert_eq!(found["weight"], "degrades");
    assert!(output.status.success(), "{first:#}");

    let text = "socket: /nonexistent/kvcp/sidecar.sock\nmemory: {size: 64Mi}\n";
    std::fs::write(&path, text).unwrap();
    let output = doctor(&["--json", "--config", &path]);
    let second = report(&output);
    let found = named(&second["findings"], "RuntimeFolderUnusable").unwrap();
    assert_eq!(found["weight"], "blocks");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn an_arena_that_does_not_fit_blocks_and_a_config_that_is_wrong_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = config(folder.path(), "memory: {size: 16Ti}\n");
    let output = doctor(&["--json", "--config", &path]);
    let found = report(&output);
    assert!(
        named(&found["findings"], "ArenaExceedsMemoryLimit").is_some(),
        "{found:#}"
    );
    let path = config(folder.path(), "memory: {size: many}\n");
    let output = doctor(&["--config", &path]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.starts_with("error: "), "{said}");
}

#[test]
fn a_tight_limit_of_locked_memory_is_found() {
    // Root's right to lock all the same goes with the program that is started.
    let without_right = |command: &mut Command| {
        const CAP_IPC_LOCK: libc::c_ulong = 14;
        // SAFETY: one system call between fork and exec, with plain numbers.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
                Ok(())
            });
        }
    };
    let script = "ulimit -l 64 && exec \"$@\"";
    let output = doctor_by(script, without_right, &["--json"]);
    let report = report(&output);
    let found = named(&report["findings"], "PageLockLimited").unwrap();
    assert_eq!(found["weight"], "note", "{report:#}");
    let message = found["message"].as_str().unwrap();
    assert!(message.contains("RLIMIT_MEMLOCK 64Ki"), "{message}");
    assert!(output.status.success());
}

/// Has the kernel refuse these system calls with EPERM, as a seccomp profile does.
fn refuse(command: &mut Command, calls: [libc::c_long; 2]) {
    let line = |code: u32, jt, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf: 0,
        k,
    };
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let mut filter = [
        line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        line(equals, 2, calls[0] as u32),
        line(equals, 1, calls[1] as u32),
        line(libc::BPF_RET, 0, libc::SECCOMP_RET_ALLOW),
        line(
            libc::BPF_RET,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
    ];
    let install = move || {
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: two system calls between fork and exec; the program is alive during the second, which copies it.
        let rc = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program)
        };
        match rc {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: `install` allocates nothing and takes no locks.
    unsafe { command.pre_exec(install) };
}

#[test]
fn a_memfd_that_seccomp_refuses_blocks() {
    let calls = [libc::SYS_memfd_create, libc::SYS_io_uring_setup];
    let output = doctor_by("exec \"$@\"", |command| refuse(command, calls), &["--json"]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(1));
    let first = &report["findings"][0];
    assert_eq!(
        (&first["name"], &first["weight"]),
        (&"MemfdRefused".into(), &"blocks".into())
    );
    for (name, reason) in [("memfd", "EPERM"), ("ioUring", "SeccompDenied")] {
        let facility = named(&report["facilities"], name).unwrap();
        assert_eq!(facility["reason"], reason, "{facility:#}");
    }
    assert_eq!(report["transfer_modes"][0]["state"], "Unavailable");
}

#[test]
fn in_a_container_that_is_nearly_full_no_memory_is_taken() {
    let Some(cgroup) = Cgroup::with_limit(32 << 20) else {
        return;
    };
    let script = format!("echo $$ > {} && exec \"$@\"", cgroup.procs().display());
    let report = report(&doctor_by(&script, |_| {}, &["--json"]));
    assert_eq!(report["host"]["memory_limit_bytes"], 32 << 20);
    assert!(named(&report["findings"], "NoRoom").is_some(), "{report:#}");
    let copy = named(&report["speeds"], "copyOneThread").unwrap();
    assert_eq!(copy["reason"], "NoRoom");
}

#[test]
fn in_a_container_that_is_nearly_full_no_context_is_made() {
    let Some(cgroup) = Cgroup::with_limit(32 << 20) else {
        return;
    };
    let folder = fake_driver();
    let contexts = folder.path().join("contexts");
    let set = |command: &mut Command| {
        command.env("LD_LIBRARY_PATH", folder.path());
        command.env("FAKE_CONTEXTS", &contexts);
    };
    let script = format!("echo $$ > {} && exec \"$@\"", cgroup.procs().display());
    let report = report(&doctor_by(&script, set, &["--json", "--measure"]));
    assert!(named(&report["findings"], "NoRoom").is_some(), "{report:#}");
    assert_eq!(measured(&report, "pinnedToDevice"), Err("NoRoom"));
    let passed = named(&report["facilities"], "windowByFd").unwrap();
    assert_eq!(passed["reason"], "NoRoom", "{passed:#}");
    assert!(!contexts.exists(), "{report:#}");
}

/// A folder with a driver of made-up devices, for `LD_LIBRARY_PATH`.
pub fn fake_driver() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/gpu/tests/fake_driver.c");
    let library = folder.path().join("libcuda.so.1");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source)
        .output()
        .unwrap();
    assert!(built.status.success(), "{built:?}");
    std::fs::copy(&library, folder.path().join("libnvidia-ml.so.1")).unwrap();
    folder
}

/// The same with kernels.
fn fake_driver_with_kernels() -> tempfile::TempDir {
    let folder = fake_driver();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/tests");
    let object = folder.path().join("driver.o");
    let cc = ["-c", "-fPIC", "-o"];
    let built = Command::new("cc")
        .args(cc)
        .args([&object, &sources.join("fake_driver.c")])
        .output()
        .unwrap();
    assert!(built.status.success(), "{built:?}");
    let built = Command::new("g++")
        .args(["-std=c++17", "-fno-strict-aliasing", "-Wno-unknown-pragmas"])
        .args(["-shared", "-fPIC", "-o"])
        .arg(folder.path().join("libcuda.so.1"))
        .args([&sources.join("fake_kernels.cpp"), &object])
        .output()
        .expect("install it: apt-get install g++");
    assert!(built.status.success(), "{built:?}");
    folder
}

/// The report of a doctor over such a driver, which is told these things.
fn over_driver(folder: &Path, told: &[(&str, &str)], args: &[&str]) -> Value {
    let set = |command: &mut Command| {
        command.env("LD_LIBRARY_PATH", folder);
        command.envs(told.iter().copied());
    };
    report(&doctor_by(
        "exec \"$@\"",
        set,
        &[&["--json"], args].concat(),
    ))
}

#[test]
fn what_a_driver_answers_comes_through() {
    let folder = fake_driver();
    let report = over_driver(folder.path(), &[], &[]);
    let gpu = &report["gpu"];
    assert!(gpu["reason"].is_null(), "{gpu:#}");
    assert_eq!(
        (&gpu["driver"], &gpu["cuda"]),
        (&"550.1.2".into(), &"12.4".into())
    );
    // NVML knows the first alone.
    let link = |free: Option<u64>| {
        let best =
            serde_json::json!({"generation": 5, "generation_max": 5, "width": 16, "width_max": 16});
        free.map(|_| best)
    };
    let device = |name, uuid: &str, gib: u64, free, mode, limits: &[&str]| {
        serde_json::json!({
            "name": name, "uuid": uuid, "memory_total_bytes": gib << 30, "memory_free_bytes": free,
            "compute_capability": "9.1", "compute_mode": mode, "link": link(free), "numa_node": null, "limits": limits,
        })
    };
    let (free, unknown) = (Some(8u64 << 30), None);
    let expected = [
        device(
            "Fake H100",
            "GPU-11111111-1111-1111-1111-111111111100",
            64,
            free,
            "Default",
            &["DriverTooOld"],
        ),
        device(
            "Fake H100 MIG 1g.10gb",
            "MIG-11111111-1111-1111-1111-111111111101",
            128,
            unknown,
            "Default",
            &["MigEnabled", "DriverTooOld"],
        ),
        device(
            "Fake H200",
            "GPU-11111111-1111-1111-1111-111111111102",
            192,
            unknown,
            "ExclusiveProcess",
            &["ExclusiveProcess", "FreeMemoryUnknown", "DriverTooOld"],
        ),
    ];
    assert_eq!(gpu["devices"], serde_json::json!(expected));
    let modes = &report["transfer_modes"];
    let (engine, window) = (&modes[0], &modes[1]);
    assert_eq!(
        (&engine["name"], &engine["state"]),
        (&"Engine".into(), &"NotTried".into())
    );
    assert_eq!(engine["reasons"], serde_json::json!(["DriverTooOld"]));
    let reasons = serde_json::json!(["ExclusiveProcess", "FreeMemoryUnknown", "MigEnabled"]);
    assert_eq!(
        (&window["state"], &window["reasons"]),
        (&"NotTried".into(), &reasons)
    );
}

#[test]
fn a_driver_that_refuses_or_hangs_has_a_name_and_holds_up_nothing() {
    let folder = fake_driver();
    for (init, reason, engine, window) in [
        ("100", "NoDevice", "Works", "Works"),
        ("802", "SystemNotReady", "Unavailable", "Unavailable"),
        ("803", "DriverMismatch", "NotTried", "Unavailable"),
        ("999", "DriverUnusable", "NotTried", "Unavailable"),
        ("hang", "TimedOut", "NotTried", "Unavailable"),
    ] {
        let report = over_driver(folder.path(), &[("FAKE_INIT", init)], &[]);
        assert_eq!(report["gpu"]["reason"], reason, "{report:#}");
        assert_eq!(report["serves"], true);
        let broken = engine != "Works";
        let found = named(&report["findings"], reason);
        assert_eq!(found.is_some(), broken, "{report:#}");
        for (mode, state) in [engine, window].into_iter().enumerate() {
            let mode = &report["transfer_modes"][mode];
            assert_eq!(mode["state"], state, "{mode:#}");
            assert_eq!(mode["reasons"], serde_json::json!([reason]));
        }
    }
}

#[test]
fn a_device_says_why_no_window_in_its_memory_would_be_made() {
    let folder = fake_driver();
    let first = |told: &[(&str, &str)]| {
        let report = over_driver(folder.path(), told, &[]);
        let limits = report["gpu"]["devices"][0]["limits"].clone();
        (limits, report)
    };
    // A context, a window of 128 MiB, and what is left to vLLM.
    for (free, limits) in [
        ("1023", vec!["OutOfMemory", "DriverTooOld"]),
        ("1024", vec!["DriverTooOld"]),
    ] {
        let (found, report) = first(&[("FAKE_FREE", free)]);
        assert_eq!(found, serde_json::json!(limits), "{report:#}");
    }
    let (found, mismatched) = first(&[("FAKE_NVML", "18")]);
    let unknown = serde_json::json!(["FreeMemoryUnknown", "DriverTooOld"]);
    assert_eq!(found, unknown, "{mismatched:#}");
    let finding = named(&mismatched["findings"], "NoManagementLibrary").unwrap();
    let message = finding["message"].as_str().unwrap();
    assert!(message.contains("DriverMismatch"), "{message}");

    std::fs::remove_file(folder.path().join("libnvidia-ml.so.1")).unwrap();
    let (found, missing) = first(&[]);
    assert_eq!(found, unknown, "{missing:#}");
    let why = missing["gpu"]["no_management"].as_str().unwrap();
    assert!(why.contains("libnvidia-ml.so.1"), "{why}");
    let window = &missing["transfer_modes"][1];
    assert_eq!(window["state"], "Unavailable", "{window:#}");
}

#[test]
fn a_link_that_lost_lanes_is_found() {
    let folder = fake_driver();
    let report = over_driver(folder.path(), &[("FAKE_LINK", "1 8")], &[]);
    let found = named(&report["findings"], "LinkNarrow").unwrap();
    assert_eq!(found["message"], "Fake H100 has 8 of 16 PCIe lanes");
    // Nothing was copied: an idle device lowers the generation.
    assert!(named(&report["findings"], "LinkGenerationLow").is_none());
}

const COPIES: [&str; 4] = [
    "pinnedToDevice",
    "pinnedFromDevice",
    "pinnedBothWays",
    "windowRoundTrip",
];
const DECODING: [&str; 2] = ["decodeIdle", "decodeBeside"];

/// What was measured of this name, or why it was not: one of both.
fn measured<'a>(report: &'a Value, name: &str) -> Result<u64, &'a str> {
    let speed = named(&report["speeds"], name).unwrap();
    let reason = speed["reason"].as_str().unwrap();
    match speed["bytes_per_second"].as_u64() {
        Some(bytes) => {
            assert!(bytes > 0 && reason.is_empty(), "{speed}");
            Ok(bytes)
        }
        None => {
            assert!(!reason.is_empty(), "{speed}");
            Err(reason)
        }
    }
}

#[test]
fn a_gpu_is_measured_only_when_asked_and_says_why_it_was_not() {
    let folder = fake_driver();
    let report = over_driver(folder.path(), &[], &[]);
    for name in COPIES.iter().chain(&DECODING) {
        assert!(named(&report["speeds"], name).is_none(), "{name}");
    }
    let no_context = [("FAKE_NO_CONTEXT", "1")];
    let report = over_driver(folder.path(), &no_context, &["--measure"]);
    for name in COPIES {
        let reason = measured(&report, name).unwrap_err();
        assert!(reason.contains("cuDevicePrimaryCtxRetain"), "{reason}");
    }
    assert!(named(&report["speeds"], "decodeIdle").is_none());
    let engine = report["transfer_modes"][0]["detail"].as_str().unwrap();
    assert!(
        engine.contains("could not be measured here: DriverFailed"),
        "{engine}"
    );
    let help = doctor(&["--help"]);
    let help = String::from_utf8_lossy(&help.stdout);
    let warning = "Do not use it beside a vLLM that serves requests";
    assert!(help.contains(warning), "{help}");
}

/// The mode of windows after one was passed to a second process, and why none reached it: by descriptor and by IPC handle. None: on a
/// loaded machine copies may take all the time.
fn passed(folder: &Path, told: &[(&str, &str)]) -> Option<(Value, [String; 2])> {
    let report = over_driver(folder, told, &["--measure"]);
    let reasons = ["windowByFd", "windowByHandle"].map(|name| {
        let found = named(&report["facilities"], name).unwrap();
        let reason = found["reason"].as_str().unwrap();
        assert_eq!(found["works"], reason.is_empty(), "{found:#}");
        assert!(!found["detail"].as_str().unwrap().is_empty(), "{found:#}");
        reason.to_owned()
    });
    let late = measured(&report, "windowRoundTrip") == Err("TimedOut");
    (!late).then(|| (report["transfer_modes"][1].clone(), reasons))
}

#[test]
fn a_window_works_when_a_second_process_has_used_one() {
    let folder = fake_driver_with_kernels();
    let report = over_driver(folder.path(), &[], &[]);
    assert!(named(&report["facilities"], "windowByFd").is_none());
    let contexts = folder.path().join("contexts");
    // What the second process prints is none of the report.
    let told = [
        ("FAKE_CONTEXTS", contexts.to_str().unwrap()),
        ("FAKE_TALKS", "1"),
    ];
    let Some((window, reasons)) = passed(folder.path(), &told) else {
        return;
    };
    assert_eq!(reasons[0], "");
    assert_eq!(window["state"], "Works", "{window:#}");
    let said = window["detail"].as_str().unwrap();
    assert!(said.contains("used it, passed by descriptor"), "{said}");
    // The doctor's own twice, and that of each second process.
    let made = std::fs::read_to_string(&contexts).unwrap();
    assert_eq!(made.matches('+').count(), 4, "{made}");
}

#[test]
fn a_window_that_reaches_no_second_process_says_why() {
    let folder = fake_driver_with_kernels();
    for (told, reason) in [
        (("FAKE_NO_FD", "1"), "NoDescriptor"),
        // Room for one context, and none for a second one.
        (("FAKE_FREE", "1400"), "OutOfMemory"),
        (("FAKE_APART", "1"), "PatternMismatch"),
        (("FAKE_MAP_FAILS", "1"), "NotMapped"),
        (("FAKE_MAP_FAILS", "2"), "OutOfMemory"),
        (("FAKE_NO_CONTEXT", "1"), "DriverFailed"),
    ] {
        if let Some((_, found)) = passed(folder.path(), &[told]) {
            assert_eq!(found[0], reason, "{told:?}");
        }
    }
}

#[test]
fn what_decoding_notices_of_copies_is_measured_when_asked() {
    let folder = fake_driver_with_kernels();
    // Kernels that are emulated thread by thread would take minutes. On a loaded machine copies may take all the time, too.
    let told = [("FAKE_REST", "1"), ("FAKE_LINK", "4 16")];
    let report = over_driver(folder.path(), &told, &["--measure-decode"]);
    let all: Vec<&str> = COPIES.into_iter().chain(DECODING).collect();
    let is_late = |report: &Value| {
        all.iter()
            .all(|name| measured(report, name) == Err("TimedOut"))
    };
    let late = is_late(&report);
    for name in &all {
        assert!(late || measured(&report, name).is_ok(), "{report:#}");
    }
    let low = named(&report["findings"], "LinkGenerationLow");
    assert_eq!(low.is_some(), !late, "{report:#}");
    let window = report["transfer_modes"][1]["detail"].as_str().unwrap();
    assert!(late || window.contains("there and back"), "{window}");

    let old = [("FAKE_PTX", "7.0")];
    let report = over_driver(folder.path(), &old, &["--measure-decode"]);
    let late = is_late(&report);
    for name in DECODING {
        let reason = measured(&report, name).unwrap_err();
        assert!(late || reason.starts_with("PtxTooNew: "), "{reason}");
    }
    for name in COPIES {
        assert!(late || measured(&report, name).is_ok(), "{report:#}");
    }
}
