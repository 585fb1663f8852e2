//! No put is answered for whose files the kernel did not sync: in a process of its own, a filter of system calls fails the sync of one
//! file, and no step of ours is asked.

use super::super::Disk;
use super::super::core::Step;
use super::Watch;
use super::processes::process;
use super::refused::{Of, refuse};
use super::rig::*;
use crate::testing::skipped;
use crate::{Cause, Stored, Tier};
use std::path::Path;

pub const CAPACITY: u64 = 16 << 20;

/// What is done that must not succeed.
#[derive(Clone, Copy)]
enum Act {
    /// A put of so many bytes.
    Put(u64),
    /// A snapshot, as a close writes one.
    Close,
}

/// Bytes of an object that lies in the container which is there, and of one that needs another.
const SAME: u64 = 3000;
const OTHER: u64 = 9000;

/// Here syncs of the folder fail from when the next journal has its name on.
const LATE: &str = "unsynced-late";

/// Tasks: what is not synced, by which call, and what is done then.
const TASKS: [(&str, libc::c_long, Act); 7] = [
    ("unsynced-slots", libc::SYS_fdatasync, Act::Put(SAME)),
    ("unsynced-journal", libc::SYS_fdatasync, Act::Put(SAME)),
    ("unsynced-folder", libc::SYS_fsync, Act::Put(OTHER)),
    ("unsynced-container", libc::SYS_fsync, Act::Put(OTHER)),
    ("unsynced-snapshot", libc::SYS_fsync, Act::Close),
    ("unsynced-names", libc::SYS_fsync, Act::Close),
    (LATE, libc::SYS_fsync, Act::Close),
];

#[test]
fn what_the_kernel_does_not_sync_is_not_answered_for() {
    for (task, ..) in TASKS {
        let rig = Rig::new(CAPACITY);
        rig.open().close();
        let printed = process("exec \"$@\"", task, &rig.path());
        if printed.contains("no filter") {
            return skipped("needs filters of system calls");
        }
        assert!(printed.contains("done"), "{task}: {printed}");
        let disk = rig.open();
        assert!(rig.has(&disk, 1));
        assert_eq!(
            all_whole(&disk, &rig.memory).len(),
            1 + usize::from(rig.has(&disk, 2))
        );
        // The record may be there where only its own sync failed.
        assert!(task == "unsynced-journal" || !rig.has(&disk, 2), "{task}");
    }
}

/// In the process of its own.
pub fn unsynced(task: &str, disk: Disk, folder: &Path) {
    let memory = Memory::new();
    let put = |disk: &Disk, i, length| {
        let object = object(i, &[length]);
        block_on(disk.put(memory.put(&object, i))).map_err(|e| e.cause)
    };
    assert_eq!(put(&disk, 1, SAME), Ok(Stored::New));
    let (_, call, act) = TASKS.into_iter().find(|(name, ..)| *name == task).unwrap();
    let of = match task {
        LATE => None,
        "unsynced-slots" => Some(Of::This(open_file(folder, "slots-"))),
        "unsynced-journal" => Some(Of::This(open_file(folder, "journal-"))),
        "unsynced-folder" | "unsynced-names" => Some(Of::This(the_folder(folder))),
        // The file is not there yet; the call is for new ones and the folder only.
        _ => Some(Of::AllBut(the_folder(folder))),
    };
    if of.is_some_and(|of| !fail(call, of)) {
        return println!("no filter");
    }
    match act {
        Act::Put(length) => assert_eq!(put(&disk, 2, length), Err(Cause::Io), "{task}"),
        Act::Close => {
            disk.close();
            let there = |name: &str| folder.join(name).exists();
            let next = ["snapshot-0000000000000001", "journal-0000000000000001"].map(there);
            match task {
                // It is synced before anything is made that goes with it,
                "unsynced-snapshot" => assert_eq!(next, [false, false]),
                // has its name when its journal has one,
                "unsynced-names" => assert!(!next[0]),
                // and the journal before goes when that is durable.
                _ => assert!(next == [true, true] && there("journal-0000000000000000")),
            }
        }
    }
}

/// What is watched in the process of its own.
pub fn watch(task: &str, folder: &Path) -> Watch {
    let folder = folder.to_owned();
    match task {
        LATE => Watch::new(move |step| {
            if step == Step::JournalMade && !fail(libc::SYS_fsync, Of::This(the_folder(&folder))) {
                println!("no filter");
            }
            Ok(())
        }),
        _ => Watch::default(),
    }
}

fn the_folder(folder: &Path) -> u32 {
    open_file(folder.parent().unwrap(), "tier")
}

/// A descriptor of this process, of a file of the folder.
pub fn open_file(folder: &Path, start: &str) -> u32 {
    let folder = folder.canonicalize().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let found = open.filter_map(|entry| {
        let entry = entry.unwrap();
        let file = std::fs::read_link(entry.path()).ok()?;
        let name = file.file_name()?.to_str()?;
        let ours = file.parent() == Some(&folder) && name.starts_with(start);
        ours.then(|| entry.file_name().to_str().unwrap().parse().unwrap())
    });
    found.last().unwrap()
}

/// From now on the call fails with EIO for these descriptors, in all threads. False: the machine does not let us.
fn fail(call: libc::c_long, of: Of) -> bool {
    refuse(call, 0, of, libc::EIO)
}
