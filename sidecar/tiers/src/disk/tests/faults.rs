//! A folder that fails turns the tier off, and one that is well again turns it on.

use super::super::core::Step;
use super::super::live::Answer;
use super::rig::*;
use crate::{Cause, Removal, Stored, Tier};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

fn failing(capacity: u64) -> (Rig, Failing) {
    let failing = Failing::default();
    let at = failing.clone();
    (Rig::watched(capacity, move |step| at.step(step)), failing)
}

#[test]
fn an_error_at_any_step_of_a_put_fails_it_and_it_is_not_seen() {
    use Step::*;
    let errors = [
        (Errno::IO, Cause::Io),
        (Errno::ROFS, Cause::ReadOnly),
        (Errno::ACCESS, Cause::Denied),
    ];
    for step in [Make, Write, Written, SyncData, Reserve, Append, SyncJournal] {
        for (errno, cause) in errors {
            let (rig, failing) = failing(1 << 20);
            let disk = rig.open();
            // Of another class, so that a container is needed.
            rig.put(&disk, 0, &[3000]).unwrap();
            failing.set(step, errno);
            let error = rig.put(&disk, 1, &[9000]).unwrap_err();
            assert_eq!(error.cause, cause, "{errno} at {step:?}: {error}");
            assert_eq!(disk.off().unwrap().cause, cause);
            failing.clear();
            // The next use finds it well; what was there is there.
            until("it is on again", || {
                block_on(disk.lookup(&[object(0, &[1]).name()])) == Ok(vec![true])
            });
            assert_eq!(disk.off(), None);
            let there = rig.has(&disk, 1);
            assert!(
                !there || step == SyncJournal,
                "seen after {errno} at {step:?}"
            );
            rig.put(&disk, 1, &[9000]).unwrap();
            assert_eq!(all_whole(&disk, &rig.memory).len(), 2);
            Rig::die(disk);
            assert_eq!(all_whole(&rig.open(), &rig.memory).len(), 2);
        }
    }
}

#[test]
fn while_it_is_off_every_operation_says_why_and_touches_nothing() {
    let (steps, failing) = (Arc::new(AtomicUsize::new(0)), Failing::default());
    let (count, at) = (steps.clone(), failing.clone());
    let mut rig = Rig::watched(1 << 20, move |step| {
        count.fetch_add(1, SeqCst);
        at.step(step)
    });
    rig.options.probe_every = Duration::from_secs(3600);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    failing.set(Step::Read, Errno::IO);
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Io));
    failing.clear();
    std::fs::rename(rig.path(), rig.path().with_extension("away")).unwrap();
    let before = steps.load(SeqCst);
    let names = [object(1, &[3000]).name()];
    for _ in 0..3 {
        let causes = [
            block_on(disk.lookup(&names)).unwrap_err().cause,
            block_on(disk.head(&names[0])).unwrap_err().cause,
            rig.get(&disk, &object(1, &[3000])).unwrap_err(),
            rig.put(&disk, 2, &[3000]).unwrap_err().cause,
            block_on(disk.remove(Removal::Named(&names)))
                .unwrap_err()
                .cause,
            block_on(disk.usage()).unwrap_err().cause,
            block_on(disk.list(None, 9)).unwrap_err().cause,
        ];
        assert_eq!(causes, [Cause::Io; 7]);
    }
    assert_eq!(steps.load(SeqCst), before);
    let shown = format!("{disk:?}");
    assert!(shown.contains("off: Io"), "{shown}");
}

#[test]
fn one_operation_tries_a_folder_that_failed_and_the_others_are_refused_meanwhile() {
    let (mut rig, failing) = failing(1 << 20);
    rig.options.probe_every = Duration::from_secs(2);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    failing.set(Step::Read, Errno::IO);
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Io));
    until("it is due", || matches!(disk.live.core(), Answer::Probe));
    assert!(matches!(disk.live.core(), Answer::Off(e) if e.cause == Cause::Io));
}

#[test]
fn an_object_that_cannot_be_read_is_given_up_and_the_others_stay() {
    let (rig, failing) = failing(1 << 20);
    let disk = rig.open();
    for i in 0..3 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    failing.set(Step::ReadSections, Errno::IO);
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Io));
    failing.clear();
    until("it is on again", || block_on(disk.usage()).is_ok());
    assert_eq!([0, 1, 2].map(|i| rig.has(&disk, i)), [true, false, true]);
    assert_eq!(rig.put(&disk, 1, &[3000]), Ok(Stored::New));
}

#[test]
fn threads_of_earlier_openings_are_let_go() {
    let (rig, failing) = failing(1 << 20);
    let disk = rig.open();
    for round in 0..8 {
        rig.put(&disk, round, &[3000]).unwrap();
        failing.set(Step::ReadSections, Errno::IO);
        assert_eq!(rig.get(&disk, &object(round, &[3000])), Err(Cause::Io));
        failing.clear();
        until("it is on again", || block_on(disk.usage()).is_ok());
    }
    let threads = disk.live.threads();
    assert!(threads <= 3, "{threads}");
}

#[test]
fn a_slot_that_could_not_be_read_is_not_used_again() {
    let (rig, failing) = failing(1 << 20);
    let disk = rig.open();
    let mut bad = Vec::new();
    for round in 0..3 {
        rig.put(&disk, round, &[3000]).unwrap();
        let at = rig.place(&disk, round);
        assert!(!bad.contains(&at), "{at:?} after {bad:?}");
        bad.push(at);
        failing.set(Step::ReadSections, Errno::IO);
        assert_eq!(rig.get(&disk, &object(round, &[3000])), Err(Cause::Io));
        failing.clear();
        until("it is on again", || block_on(disk.usage()).is_ok());
        assert!(!rig.has(&disk, round));
    }
    rig.settle(&disk);
    Rig::die(disk);
    let disk = rig.open();
    rig.put(&disk, 9, &[3000]).unwrap();
    assert!(
        bad.contains(&rig.place(&disk, 9)),
        "a new process tries anew"
    );
}

#[test]
fn a_slot_that_could_not_be_written_is_not_used_again_but_where_nothing_could_be() {
    let (rig, failing) = failing(1 << 20);
    let disk = rig.open();
    rig.put(&disk, 0, &[3000]).unwrap();
    let next = || {
        rig.put(&disk, 1, &[3000]).unwrap();
        let place = rig.place(&disk, 1);
        rig.remove(&disk, 1);
        rig.settle(&disk);
        place
    };
    let place = next();
    for (errno, again) in [(Errno::ROFS, true), (Errno::IO, false)] {
        failing.set(Step::Written, errno);
        rig.put(&disk, 1, &[3000]).unwrap_err();
        failing.clear();
        until("it is on again", || block_on(disk.usage()).is_ok());
        assert_eq!(next() == place, again, "after {errno}");
    }
}

#[test]
fn it_stays_off_while_a_thread_is_in_it() {
    let (gate, failing) = (Gate::at(Step::Write), Failing::default());
    let (pass, at) = (gate.clone(), failing.clone());
    let rig = Rig::watched(1 << 20, move |step| {
        pass.pass(step);
        at.step(step)
    });
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    gate.close();
    std::thread::scope(|scope| {
        let hangs = scope.spawn(|| rig.put(&disk, 2, &[3000]));
        gate.wait_for(1);
        failing.set(Step::Read, Errno::IO);
        assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Io));
        failing.clear();
        for _ in 0..3 {
            assert_eq!(block_on(disk.usage()).unwrap_err().cause, Cause::Io);
        }
        gate.open();
        assert_eq!(hangs.join().unwrap().unwrap_err().cause, Cause::Io);
    });
    until("it is on again", || block_on(disk.usage()).is_ok());
    rig.put(&disk, 2, &[3000]).unwrap();
}

#[test]
fn a_folder_that_is_removed_is_gone_and_one_that_comes_back_is_an_empty_tier() {
    let rig = Rig::new(1 << 20);
    for read_first in [true, false] {
        let disk = rig.open();
        rig.put(&disk, 1, &[3000]).unwrap();
        std::fs::remove_dir_all(rig.path()).unwrap();
        let cause = if read_first {
            rig.get(&disk, &object(1, &[3000])).unwrap_err()
        } else {
            rig.put(&disk, 2, &[3000]).unwrap_err().cause
        };
        assert_eq!(cause, Cause::Gone);
        assert_eq!(disk.off().unwrap().cause, Cause::Gone);
        assert_eq!(block_on(disk.usage()).unwrap_err().cause, Cause::Gone);
        std::fs::create_dir(rig.path()).unwrap();
        until("it is on again", || block_on(disk.usage()).is_ok());
        assert_eq!(block_on(disk.usage()).unwrap().objects, 0);
        rig.put(&disk, 2, &[3000]).unwrap();
        assert_eq!(rig.get(&disk, &object(2, &[3000])), Ok(()));
        let second = rig.refused();
        assert_eq!(second.cause, Cause::InUse, "the new folder is locked too");
        disk.close();
        std::fs::remove_dir_all(rig.path()).unwrap();
    }
}

#[test]
fn a_folder_that_takes_the_place_of_ours_is_not_taken_for_it() {
    let rig = Rig::new(1 << 20);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    std::fs::rename(rig.path(), rig.path().with_extension("old")).unwrap();
    std::fs::create_dir(rig.path()).unwrap();
    assert_eq!(rig.put(&disk, 2, &[3000]).unwrap_err().cause, Cause::Gone);
    until("it is on again", || block_on(disk.usage()).is_ok());
    assert!(!rig.has(&disk, 1));
}

#[test]
fn a_journal_that_somebody_removed_is_noticed_before_anything_is_answered() {
    let rig = Rig::new(1 << 20);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    std::fs::remove_file(rig.path().join("journal-0000000000000000")).unwrap();
    assert_eq!(rig.put(&disk, 2, &[3000]).unwrap_err().cause, Cause::Gone);
    until("it is on again", || block_on(disk.usage()).is_ok());
    assert_eq!(block_on(disk.usage()).unwrap().objects, 0);
    assert_eq!(rig.put(&disk, 2, &[3000]), Ok(Stored::New));
    Rig::die(disk);
    assert_eq!(all_whole(&rig.open(), &rig.memory).len(), 1);
}

#[test]
fn a_container_that_somebody_removed_costs_its_objects_only() {
    for reopened in [true, false] {
        let rig = Rig::new(1 << 20);
        let mut disk = rig.open();
        rig.put(&disk, 1, &[3000]).unwrap();
        rig.put(&disk, 2, &[9000]).unwrap();
        if reopened {
            Rig::die(disk);
            disk = rig.open();
        }
        let small = std::fs::read_dir(rig.path()).unwrap().map(|e| e.unwrap());
        let mut small = small.filter(|e| e.file_name().to_string_lossy().contains("-00000002-"));
        std::fs::remove_file(small.next().unwrap().path()).unwrap();
        assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Missing));
        assert_eq!(disk.off(), None);
        assert_eq!(disk.counts().lost_containers, 1);
        assert_eq!(rig.get(&disk, &object(2, &[9000])), Ok(()));
        assert_eq!(rig.put(&disk, 1, &[3000]), Ok(Stored::New));
        Rig::die(disk);
        assert_eq!(all_whole(&rig.open(), &rig.memory).len(), 2);
    }
}

#[test]
fn a_put_into_a_container_that_is_lost_meanwhile_fails_and_can_be_done_again() {
    let (rig, gate) = Rig::gated(1 << 20, Step::Append);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    gate.close();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| rig.put(&disk, 2, &[3000]));
        gate.wait_for(1);
        let names = std::fs::read_dir(rig.path())
            .unwrap()
            .map(|e| e.unwrap().path());
        let container = names
            .into_iter()
            .find(|p| p.to_string_lossy().contains("/slots-"));
        std::fs::remove_file(container.unwrap()).unwrap();
        assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Missing));
        gate.open();
        assert_eq!(put.join().unwrap().unwrap_err().cause, Cause::Gone);
    });
    assert_eq!((disk.off(), rig.has(&disk, 2)), (None, false));
    assert_eq!(rig.put(&disk, 2, &[3000]), Ok(Stored::New));
    assert_eq!(rig.get(&disk, &object(2, &[3000])), Ok(()));
}

#[test]
fn a_snapshot_that_finds_no_room_is_tried_again_later() {
    let failing = Failing::default();
    let at = failing.clone();
    let mut rig = Rig::watched(1 << 20, move |step| at.step(step));
    rig.options.journal_records_min = 2;
    let disk = rig.open();
    failing.set(Step::SnapshotWritten, Errno::NOSPC);
    for i in 0..20 {
        rig.put(&disk, i % 4, &[3000]).unwrap();
        rig.remove(&disk, i % 4);
    }
    assert_eq!(disk.off(), None);
    failing.clear();
    for i in 0..60 {
        rig.put(&disk, i % 4, &[3000]).unwrap();
        rig.remove(&disk, i % 4);
    }
    rig.settle(&disk);
    let names: Vec<String> = std::fs::read_dir(rig.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(
        names.iter().any(|n| n.starts_with("snapshot-")),
        "{names:?}"
    );
    assert!(!names.iter().any(|n| n.ends_with(".new")), "{names:?}");
}

#[test]
fn what_is_put_after_a_snapshot_got_its_name_is_there_whatever_failed_then() {
    for errno in [Errno::NOSPC, Errno::MFILE, Errno::IO] {
        let (mut rig, failing) = failing(1 << 20);
        rig.options.journal_records_min = 2;
        let disk = rig.open();
        failing.set(Step::SnapshotNamed, errno);
        let failed = AtomicUsize::new(0);
        let done = |done: bool| {
            failed.fetch_add(usize::from(!done), SeqCst);
            done
        };
        for i in 0..6 {
            until("it is put", || done(rig.put(&disk, i, &[3000]).is_ok()));
            // More records than objects.
            for _ in 0..3 {
                until("another is put", || {
                    done(rig.put(&disk, 100, &[3000]).is_ok())
                });
                let name = [object(100, &[1]).name()];
                until("and removed", || {
                    done(block_on(disk.remove(Removal::Named(&name))).is_ok())
                });
            }
        }
        assert!(
            failed.into_inner() > 0,
            "{errno}: the folder is opened again"
        );
        Rig::die(disk);
        failing.clear();
        let disk = rig.open();
        assert!((0..6).all(|i| rig.has(&disk, i)), "{errno}");
        all_whole(&disk, &rig.memory);
    }
}

#[test]
fn a_snapshot_that_found_no_room_or_no_file_turns_nothing_off_and_is_not_tried_at_every_record() {
    for (step, errno) in [
        (Step::SnapshotWritten, Errno::NOSPC),
        (Step::JournalMade, Errno::NOSPC),
        (Step::JournalMade, Errno::MFILE),
    ] {
        let tries = Arc::new(AtomicUsize::new(0));
        let count = tries.clone();
        let mut rig = Rig::watched(1 << 20, move |at| {
            if at != step {
                return Ok(());
            }
            count.fetch_add(1, SeqCst);
            Err(errno.into())
        });
        rig.options.journal_records_min = 2;
        let disk = rig.open();
        for _ in 0..40 {
            assert_eq!(rig.put(&disk, 1, &[3000]), Ok(Stored::New));
            assert_eq!(rig.remove(&disk, 1), 1);
        }
        rig.settle(&disk);
        assert_eq!(disk.off(), None, "{errno} at {step:?}");
        // Of 80 records: each try waits for twice as many.
        let tries = tries.load(SeqCst);
        assert!(
            (1..=6).contains(&tries),
            "{tries} tries, {errno} at {step:?}"
        );
        assert!(!rig.path().join("snapshot-0000000000000001.new").exists());
    }
}
