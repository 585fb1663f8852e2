//! Which folders are taken, and what is said of those that are not.

use super::rig::*;
use crate::tiers::{Cause, Tier};

fn refused(rig: &Rig) -> (Cause, String) {
    let error = rig.open_at(&rig.path()).unwrap_err();
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
    assert!(detail.contains("is no folder"), "{detail}");
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
    std::fs::write(rig.path().join("notes.txt"), "mine").unwrap();
    for _ in 0..2 {
        let disk = rig.open();
        assert_eq!(disk.counts().foreign_files, 2);
        assert_eq!(block_on(disk.list(None, 1)).unwrap().foreign, 2);
        disk.close();
    }
    let notes = std::fs::read_to_string(rig.path().join("notes.txt"));
    assert_eq!(notes.unwrap(), "mine");
    assert!(rig.path().join("lost+found").is_dir());
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
