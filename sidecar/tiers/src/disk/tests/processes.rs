//! The tier in a process of its own: this test binary again, told by an environment variable what to do, in surroundings that this one
//! must not have.

use super::super::{Disk, Options};
use super::rig::*;
use super::syncs::{self, unsynced};
use crate::testing::skipped;
use crate::{Cause, Removal, Stored, Tier, TierError};
use std::path::Path;
use std::process::Command;

const TASK: &str = "KVCACHEPOOL_DISK_TEST";
const CAPACITY: u64 = 64 << 30;

/// Runs a task on a folder; `script` calls it as "$@". Returns what it printed.
pub fn process(script: &str, task: &str, folder: &Path) -> String {
    let output = Command::new("sh")
        .args(["-ec", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "disk::tests::processes::body", "--nocapture"])
        .env(TASK, format!("{task} {}", folder.display()))
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{failed}");
    printed
}

/// The same with mounts of its own; `None` where the machine does not let us.
fn process_with_mounts(script: &str, task: &str, folder: &Path) -> Option<String> {
    let ours = Command::new("unshare").args(["--mount", "true"]).status();
    if !ours.is_ok_and(|status| status.success()) {
        skipped("needs mount namespaces");
        return None;
    }
    let script = format!("exec unshare --mount sh -ec '{script}' sh \"$@\"");
    Some(process(&script, task, folder))
}

#[test]
fn body() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let (task, folder) = task.split_once(' ').unwrap();
    let capacity = match task.starts_with("unsynced-") {
        true => syncs::CAPACITY,
        false => CAPACITY,
    };
    let options = Options {
        watch: syncs::watch(task, folder.as_ref()),
        ..Options::default()
    };
    let opened = Disk::open(folder.as_ref(), capacity, options);
    match (task, opened) {
        ("open", opened) => println!("{}", opened.map_or_else(|e| e.cause.name(), |_| "opened")),
        ("fill", Ok(disk)) => fill(&disk, folder.as_ref()),
        ("small-files", Ok(disk)) => small_files(&disk),
        ("no-names", Ok(disk)) => no_names(disk, folder.as_ref()),
        (task, Ok(disk)) if task.starts_with("unsynced-") => {
            unsynced(task, disk, folder.as_ref());
        }
        (task, opened) => panic!("{task}: {opened:?}"),
    }
    println!("done");
}

#[test]
fn two_processes_on_one_folder_are_refused_until_the_first_ends() {
    let rig = Rig::new(CAPACITY);
    let disk = rig.open();
    let printed = || process("exec \"$@\"", "open", &rig.path());
    let refused = printed();
    assert!(refused.contains("InUse"), "{refused}");
    disk.close();
    until("it is opened", || printed().contains("opened"));
    // That one died without a close.
    rig.open();
}

#[test]
fn a_read_only_file_system_is_named_whether_it_holds_a_tier_or_not() {
    let rig = Rig::new(CAPACITY);
    rig.open().close();
    for folder in [rig.path(), rig.temp.path().to_owned()] {
        let script = r#"d=${KVCACHEPOOL_DISK_TEST#* }
            mount --bind "$d" "$d"; mount -o remount,bind,ro "$d"
            exec "$@""#;
        let Some(printed) = process_with_mounts(script, "open", &folder) else {
            return;
        };
        assert!(printed.contains("ReadOnly"), "{printed}");
    }
}

#[test]
fn a_file_system_smaller_than_the_capacity_is_used_and_never_breaks_an_object() {
    let rig = Rig::new(CAPACITY);
    std::fs::create_dir(rig.path()).unwrap();
    let script = r#"mount -t tmpfs -o size=4m none "${KVCACHEPOOL_DISK_TEST#* }"; exec "$@""#;
    if let Some(printed) = process_with_mounts(script, "fill", &rig.path()) {
        assert!(printed.contains("done"), "{printed}");
    }
}

/// What a put said: there, or no room.
fn put(memory: &Memory, disk: &Disk, i: u32, length: u64) -> Result<Stored, Cause> {
    let object = object(i, &[length]);
    let stored: Result<_, TierError> = block_on(disk.put(memory.put(&object, i)));
    stored.map_err(|e| e.cause)
}

fn fill(disk: &Disk, folder: &Path) {
    let memory = Memory::new();
    for i in 0..60 {
        assert_eq!(put(&memory, disk, i, 200_000), Ok(Stored::New), "{i}");
    }
    let held = block_on(disk.usage()).unwrap();
    assert!(held.objects >= 5 && held.bytes < 4 << 20, "{held:?}");
    // Another class gets room on the full file system, too.
    for i in 100..120 {
        assert_eq!(put(&memory, disk, i, 50_000), Ok(Stored::New), "{i}");
    }
    assert!(all_whole(disk, &memory).len() >= 5);
    // Somebody else takes all that is left.
    let other = folder.join("other");
    assert!(
        std::fs::write(&other, vec![1; 4 << 20]).is_err(),
        "it is full now"
    );
    for i in 200..260 {
        let stored = put(&memory, disk, i, 50_000);
        assert!(
            matches!(stored, Ok(Stored::New) | Err(Cause::Full)),
            "{stored:?}"
        );
        block_on(disk.remove(Removal::Named(&[object(i - 3, &[1]).name()]))).unwrap();
    }
    assert_eq!(disk.off(), None);
    all_whole(disk, &memory);
    std::fs::remove_file(other).unwrap();
    for i in 300..340 {
        assert_eq!(put(&memory, disk, i, 200_000), Ok(Stored::New), "{i}");
    }
    all_whole(disk, &memory);
}

#[test]
fn a_file_system_without_room_for_one_more_file_is_opened_and_keeps_what_it_can() {
    let rig = Rig::new(CAPACITY);
    std::fs::create_dir(rig.path()).unwrap();
    let script =
        r#"mount -t tmpfs -o size=64m,nr_inodes=40 none "${KVCACHEPOOL_DISK_TEST#* }"; exec "$@""#;
    if let Some(printed) = process_with_mounts(script, "no-names", &rig.path()) {
        assert!(printed.contains("done"), "{printed}");
    }
}

fn no_names(disk: Disk, folder: &Path) {
    let memory = Memory::new();
    // A container each.
    for (i, length) in [(1, 3000), (2, 9000), (3, 20_000)] {
        assert_eq!(put(&memory, &disk, i, length), Ok(Stored::New));
    }
    disk.close();
    std::fs::remove_file(folder.join("journal-0000000000000001")).unwrap();
    let more = |n| std::fs::write(folder.join(format!("other-{n}")), "");
    assert!((0..100).any(|n| more(n).is_err()), "it is full now");
    let disk = Disk::open(folder, CAPACITY, Options::default()).unwrap();
    // One went for the journal, and one for the file that shows that it can be written.
    assert_eq!(all_whole(&disk, &memory), [object(3, &[1]).name()]);
    assert_eq!(put(&memory, &disk, 4, 20_000), Ok(Stored::New));
    assert_eq!(all_whole(&disk, &memory).len(), 2);
}

#[test]
fn a_limit_of_the_size_of_files_makes_containers_smaller() {
    let rig = Rig::new(CAPACITY);
    std::fs::create_dir(rig.path()).unwrap();
    // In 512 bytes: the arena of the test is less, a container would be more.
    let script = "trap '' XFSZ; ulimit -f 81920; exec \"$@\"";
    let printed = process(script, "small-files", &rig.path());
    assert!(printed.contains("done"), "{printed}");
    let lost = rig.open().counts().lost_containers;
    assert_eq!(lost, 0, "what could not be made left nothing");
}

fn small_files(disk: &Disk) {
    let memory = Memory::new();
    // No container of one slot would be small enough.
    let large = object(9, &[15 << 20; 3]);
    let stored = block_on(disk.put(memory.put(&large, 9)));
    assert_eq!(stored.map_err(|e| e.cause), Err(Cause::Full));
    for i in 0..3 {
        assert_eq!(put(&memory, disk, i, 50_000), Ok(Stored::New));
    }
    assert_eq!(disk.off(), None);
    assert_eq!(all_whole(disk, &memory).len(), 3);
}
