//! Which folders are taken, and what is said of those that are not.

use super::super::core::Step;
use super::rig::*;
use crate::{Cause, Tier};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

fn refused(rig: &Rig) -> (Cause, String) {
    let error = rig.refused();
    (error.cause, error.detail)
}

#[test]
fn a_folder_that_is_missing_no_folder_or_not_ours_is_named() {
    let rig = Rig::new(1 << 20);
    let (cause, detail) = refused(&rig);
    assert_eq!(cause, Cause::Gone);
    assert!(detail.contains("tier"), "{detail}");
    std::fs::write(rig.path(), "a file").unwrap();
    let (cause, detail) = refused(&rig);
    assert_eq!(cause, Cause::Config);
    assert!(detail.contains("is not a folder"), "{detail}");
    std::fs::remove_file(rig.path()).unwrap();
    std::fs::create_dir(rig.path()).unwrap();
    std::fs::write(rig.path().join("format"), "something else\n").unwrap();
    assert_eq!(refused(&rig).0, Cause::Config);
    std::fs::write(rig.path().join("format"), "kvcachepool-disk 2\n").unwrap();
    let (cause, detail) = refused(&rig);
    assert_eq!(cause, Cause::Config);
    assert!(detail.contains("of format 2"), "{detail}");
    let left: Vec<_> = std::fs::read_dir(rig.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing was made in it");
}

#[test]
fn a_second_open_in_one_process_is_refused_and_takes_nothing_away() {
    let rig = Rig::new(1 << 20);
    let disk = rig.open();
    for _ in 0..2 {
        let (cause, detail) = refused(&rig);
        assert_eq!(cause, Cause::InUse);
        assert!(detail.contains("another sidecar uses"), "{detail}");
    }
    disk.close();
    rig.open();
}

#[test]
fn foreign_files_are_left_alone_and_counted() {
    let rig = Rig::new(1 << 20);
    std::fs::create_dir_all(rig.path().join("lost+found")).unwrap();
    let files = ["notes.txt", "notes.new", "journal-1", "slots.new"].map(|n| rig.path().join(n));
    for file in &files {
        std::fs::write(file, "mine").unwrap();
    }
    for _ in 0..2 {
        let disk = rig.open();
        assert_eq!(
            disk.counts().foreign_files,
            4,
            "not that of the file system"
        );
        assert_eq!(block_on(disk.list(None, 1)).unwrap().foreign, 4);
        disk.close();
    }
    for file in files {
        assert_eq!(std::fs::read_to_string(file).unwrap(), "mine");
    }
    assert!(rig.path().join("lost+found").is_dir());
}

#[test]
fn a_link_under_a_name_of_ours_is_not_followed() {
    for name in ["format", "lock", "journal-0000000000000000"] {
        let rig = Rig::new(1 << 20);
        let elsewhere = rig.temp.path().join("elsewhere");
        std::fs::create_dir(rig.path()).unwrap();
        std::fs::write(&elsewhere, "kvcachepool-disk 1\n").unwrap();
        std::os::unix::fs::symlink(&elsewhere, rig.path().join(name)).unwrap();
        assert_eq!(refused(&rig).0, Cause::Io, "{name}");
        let there = std::fs::read_to_string(elsewhere).unwrap();
        assert_eq!(there, "kvcachepool-disk 1\n", "{name}");
    }
}

#[test]
fn no_container_is_made_in_a_file_that_is_there() {
    let rig = Rig::new(1 << 20);
    let disk = rig.open();
    // As the first container would be named.
    let file = rig.path().join("slots-00000000-00000002-00000002");
    std::fs::write(&file, [7; 4 * 4096]).unwrap();
    assert_eq!(rig.put(&disk, 1, &[3000]).unwrap_err().cause, Cause::Io);
    assert_eq!(std::fs::read(&file).unwrap(), [7; 4 * 4096]);
    until("it is on again", || block_on(disk.usage()).is_ok());
    rig.put(&disk, 1, &[3000]).unwrap();
    assert_eq!(all_whole(&disk, &rig.memory).len(), 1);
}

#[test]
fn of_two_containers_of_one_number_one_goes() {
    let rig = Rig::new(1 << 20);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    Rig::die(disk);
    let second = "slots-00000000-00000001-00000003";
    std::fs::write(rig.path().join(second), vec![0; 3 * 4096]).unwrap();
    let disk = rig.open();
    assert_eq!(disk.counts().lost_containers, 1);
    let names = std::fs::read_dir(rig.path()).unwrap();
    let names = names.map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|n| n.starts_with("slots-")).count(), 1);
    rig.put(&disk, 2, &[3000]).unwrap();
    all_whole(&disk, &rig.memory);
}

#[test]
fn a_folder_stays_this_process_s_while_the_tier_is_off() {
    let failing = Failing::default();
    let at = failing.clone();
    let mut rig = Rig::watched(1 << 20, move |step| at.step(step));
    rig.options.probe_every = Duration::from_secs(3600);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    let core = Arc::downgrade(&disk.live.now().unwrap());
    failing.set(Step::Read, Errno::IO);
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Io));
    assert_eq!(block_on(disk.usage()).unwrap_err().cause, Cause::Io);
    until("nobody is in it any more", || core.strong_count() == 0);
    assert_eq!(refused(&rig).0, Cause::InUse);
    disk.close();
    rig.open();
}

#[test]
fn what_was_never_finished_is_removed() {
    let rig = Rig::new(1 << 20);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    Rig::die(disk);
    let leftovers = [
        "probe",
        "format.new",
        "snapshot-0000000000000001.new",
        "journal-0000000000000001",
        "slots-00000063-00000002-00000009",
    ];
    for name in leftovers {
        std::fs::write(rig.path().join(name), "x").unwrap();
    }
    let disk = rig.open();
    assert!(leftovers.iter().all(|name| !rig.path().join(name).exists()));
    assert_eq!(all_whole(&disk, &rig.memory).len(), 1);
    assert_eq!(disk.counts().foreign_files, 0);
}

#[test]
fn a_garbled_snapshot_costs_its_garbled_records() {
    let rig = Rig::new(1 << 20);
    let disk = rig.open();
    for i in 0..5 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    disk.close();
    let snapshot = rig.path().join("snapshot-0000000000000001");
    let mut bytes = std::fs::read(&snapshot).unwrap();
    bytes[100] ^= 0xff;
    bytes.truncate(4 * 88 + 10);
    std::fs::write(&snapshot, bytes).unwrap();
    let disk = rig.open();
    assert_eq!(disk.counts().corrupt_records, 2);
    assert_eq!(all_whole(&disk, &rig.memory).len(), 3);
}
