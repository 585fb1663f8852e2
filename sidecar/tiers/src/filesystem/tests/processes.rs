//! The tier in a process of its own: this test binary again, told by an environment variable what to do, in surroundings that this one
//! must not have.

use super::{Rig, age, config_at, names, quiet};
use crate::census::{Shared, Turn};
use crate::filesystem::FileSystem;
use crate::filesystem::root::NEW;
use crate::testing::skipped;
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Removal, Stored, Tier, TierError, sweep_all};
use kvcachepool_protocol::config::ByteSize;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const TASK: &str = "KVCACHEPOOL_FILESYSTEM_TEST";
/// Objects of a writing task.
const OBJECTS: u64 = 60;

/// Runs a task on a folder; `script` calls it as "$@". Returns whether it succeeded, and what it printed.
fn process(script: &str, task: &str, folder: &Path) -> (bool, String) {
    let output = Command::new("sh")
        .args(["-ec", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "filesystem::tests::processes::body",
            "--nocapture",
        ])
        .env(TASK, format!("{task} {}", folder.display()))
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let failed = String::from_utf8_lossy(&output.stderr);
    (output.status.success(), printed + &failed)
}

/// The same with mounts of its own; `None` where the machine does not let us.
fn process_with_mounts(script: &str, task: &str, folder: &Path) -> Option<String> {
    let ours = Command::new("unshare").args(["--mount", "true"]).status();
    if !ours.is_ok_and(|status| status.success()) {
        skipped("needs mount namespaces");
        return None;
    }
    let script = format!("exec unshare --mount sh -ec '{script}' sh \"$@\"");
    let (success, printed) = process(&script, task, folder);
    assert!(success, "{printed}");
    Some(printed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let (task, folder) = task.split_once(' ').unwrap();
    let mut config = config_at(folder.as_ref());
    if task == "stuck" {
        config.capacity = ByteSize(STUCK * sample(0).object.total_bytes());
        (config.evict_at_percent, config.evict_to_percent) = (60, 50);
    }
    let opened = FileSystem::open(&config, quiet()).await;
    match (task, opened) {
        ("stuck", Ok(tier)) => stuck(&tier).await,
        ("open", opened) => println!("{}", opened.map_or_else(|e| e.cause.name(), |_| "opened")),
        ("fill", Ok(tier)) => fill(&tier, folder.as_ref()).await,
        ("write", Ok(tier)) => write(Arc::new(tier), false).await,
        ("die", Ok(tier)) => write(Arc::new(tier), true).await,
        (task, opened) => panic!("{task}: {opened:?}"),
    }
    println!("done");
}

fn sample(number: u64) -> Sample {
    Sample::new(1, number, &[200_000, 30_001])
}

/// Puts all objects, four at a time; `dies`: aborts while the last ones are being written.
async fn write(tier: Arc<FileSystem>, dies: bool) {
    let memory = Memory::new(64 << 20);
    let mut new = 0;
    for first in (0..OBJECTS).step_by(4) {
        let put = |number| {
            let (tier, put) = (tier.clone(), sample(number).put(&memory));
            tokio::spawn(async move { tier.put(put).await })
        };
        let puts: Vec<_> = (first..first + 4).map(put).collect();
        if dies && first + 4 == OBJECTS {
            std::process::abort();
        }
        for put in puts {
            new += u64::from(put.await.unwrap().unwrap() == Stored::New);
        }
    }
    println!("wrote {new} objects");
}

/// Reads all objects, which must be whole; returns their number.
async fn whole(tier: &FileSystem) -> usize {
    let memory = Memory::new(64 << 20);
    let mut count = 0;
    for number in 0..OBJECTS {
        let sample = sample(number);
        let get = sample.get_all(&memory);
        match tier.get(get.clone()).await {
            Ok(_) => assert!(sample.lies_in(&get.places), "{number}"),
            Err(e) => {
                assert_eq!(e.cause, Cause::Missing, "{e}");
                continue;
            }
        }
        count += 1;
    }
    count
}

#[tokio::test]
async fn two_processes_that_write_the_same_objects_write_each_once() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let (success, printed) = process("\"$@\" & \"$@\" & wait", "write", &rig.path());
    assert!(success && printed.matches("done").count() == 2, "{printed}");
    let wrote = printed
        .lines()
        .filter_map(|line| line.strip_prefix("wrote "));
    let wrote = wrote.map(|line| line.split(' ').next().unwrap().parse::<u64>().unwrap());
    assert_eq!(wrote.sum::<u64>(), OBJECTS, "{printed}");
    assert_eq!(whole(&tier).await, OBJECTS as usize);
    assert_eq!(names(&rig.path()).len() as u64, 1 + OBJECTS);
}

#[tokio::test]
async fn a_process_that_dies_leaves_whole_objects_and_unfinished_files() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let (success, printed) = process("ulimit -c 0; exec \"$@\"", "die", &rig.path());
    assert!(!success, "{printed}");
    let count = whole(&tier).await;
    assert!(count as u64 >= OBJECTS - 4, "{count}");
    let unfinished = |name: &&String| name.contains(NEW);
    let left = names(&rig.path());
    let others = left.iter().filter(|name| !unfinished(name)).count();
    assert_eq!(others, 1 + count, "{left:?}");
    // The next writer is not disturbed.
    let (success, printed) = process("exec \"$@\"", "write", &rig.path());
    assert!(success, "{printed}");
    assert_eq!(whole(&tier).await, OBJECTS as usize);
}

#[tokio::test]
async fn a_read_only_file_system_is_named() {
    let rig = Rig::new();
    drop(rig.open().await);
    let script = r#"d=${KVCACHEPOOL_FILESYSTEM_TEST#* }
        mount --bind "$d" "$d"; mount -o remount,bind,ro "$d"
        exec "$@""#;
    if let Some(printed) = process_with_mounts(script, "open", &rig.path()) {
        assert!(printed.contains("ReadOnly"), "{printed}");
    }
}

#[tokio::test]
async fn a_full_file_system_is_named_and_never_breaks_an_object() {
    let rig = Rig::new();
    std::fs::create_dir(rig.path()).unwrap();
    let script = r#"mount -t tmpfs -o size=4m none "${KVCACHEPOOL_FILESYSTEM_TEST#* }"; exec "$@""#;
    if let Some(printed) = process_with_mounts(script, "fill", &rig.path()) {
        assert!(printed.contains("done"), "{printed}");
    }
}

async fn fill(tier: &FileSystem, folder: &Path) {
    let memory = Memory::new(64 << 20);
    let put =
        async |number| -> Result<Stored, TierError> { tier.put(sample(number).put(&memory)).await };
    let mut stored = 0;
    let full = loop {
        match put(stored).await {
            Ok(Stored::New) => stored += 1,
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(full.cause, Cause::Full, "{full}");
    assert!(full.detail.contains("free space"), "{full}");
    assert!((10..20).contains(&stored), "{stored}");
    assert_eq!(names(folder).len() as u64, 1 + stored, "no part is left");
    assert_eq!(whole(tier).await as u64, stored);
    // a sidecar that starts on a full file system reads, and lists it to make room
    let filler = folder.join("filler");
    std::fs::write(&filler, vec![0; 4 << 20]).unwrap_err();
    let other = FileSystem::open(&config_at(folder), quiet()).await;
    let other = other.unwrap();
    assert_eq!(whole(&other).await as u64, stored);
    assert_eq!(other.live.folder.turn(Duration::ZERO), Ok(Turn::Mine));
    std::fs::remove_file(&filler).unwrap();
    let gone = [sample(0).name(), sample(1).name()];
    assert_eq!(tier.remove(Removal::Named(&gone)).await, Ok(2));
    assert_eq!(put(stored).await, Ok(Stored::New));
    assert_eq!(whole(tier).await as u64, stored - 1);
}

/// Objects that a task finds of which one cannot be removed.
const STUCK: u64 = 6;
const DAY: Duration = Duration::from_secs(24 * 3_600);

#[tokio::test]
async fn a_file_and_a_folder_that_cannot_be_used_hold_up_nothing_else() {
    let rig = Rig::new();
    let tier = rig.open().await;
    let other = Sample::new(2, 0, &[200_000]);
    let samples: Vec<_> = (0..STUCK).map(sample).collect();
    for (hours, sample) in (1..).zip(samples.iter().rev().chain([&other])) {
        rig.put(&tier, sample).await;
        age(&rig.file(sample), Duration::from_secs(hours * 3_600));
    }
    let unfinished = [0, 1].map(|number| {
        let name = format!("{NEW}1-{number}");
        let file = rig.file(&samples[number]).with_file_name(name);
        std::fs::write(&file, "torn").unwrap();
        age(&file, 2 * DAY);
        file
    });
    drop(tier);
    // A mount on it keeps a file from being removed. Root without these capabilities needs the permissions of a folder.
    let model = rig.path().join(other.name().model);
    let busy = [&rig.file(&samples[0]), &unfinished[0]].map(|file| file.display().to_string());
    let script = format!(
        r#"for f in "{}" "{}"; do mount --bind "$f" "$f"; done; chmod 000 "{}"
        exec setpriv --bounding-set=-dac_override,-dac_read_search "$@""#,
        busy[0],
        busy[1],
        model.display()
    );
    let Some(printed) = process_with_mounts(&script, "stuck", &rig.path()) else {
        return;
    };
    assert!(printed.contains("done"), "{printed}");
    std::fs::set_permissions(&model, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    assert!(rig.file(&other).exists(), "the folder was not looked into");
    let there = samples.iter().map(|sample| rig.file(sample).exists());
    let only_first: Vec<_> = (0..STUCK).map(|number| number == 0).collect();
    assert_eq!(Vec::from_iter(there), only_first);
    assert_eq!(unfinished.map(|file| file.exists()), [true, false]);
}

async fn stuck(tier: &FileSystem) {
    let left = async || {
        let names = (0..STUCK).map(|number| sample(number).name());
        let mut left = Vec::new();
        for (number, name) in (0..).zip(names) {
            if tier.lookup(&[name]).await.unwrap()[0] {
                left.push(number);
            }
        }
        left
    };
    tier.live.pass().await.unwrap();
    assert_eq!(left().await, [0, 4, 5], "the oldest but one that stays");
    assert_eq!(tier.live.census.refused(), 1);
    assert_eq!(tier.live.folder.tidy(DAY), Ok(1));
    let all: &dyn Tier = tier;
    let error = sweep_all(all, |_| true).await.unwrap_err();
    assert_eq!(error.cause, Cause::Io, "{error}");
    assert_eq!(error.object, Some(sample(0).name().s3("")));
    assert_eq!(left().await, [0]);
}
