//! Capacity, eviction, classes that share a folder.

use super::super::Disk;
use super::super::core::Step;
use super::rig::*;
use crate::{Cause, Stored, Tier};
use proptest::prelude::*;
use rustix::io::Errno;
use std::path::Path;

/// Bytes of all container files, as the file system sees them.
fn container_bytes(folder: &Path) -> u64 {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("slots-"))
        .map(|entry| entry.metadata().unwrap().len())
        .sum()
}

fn objects(disk: &Disk) -> u64 {
    block_on(disk.usage()).unwrap().objects
}

#[test]
fn the_least_recently_used_go_when_the_high_watermark_is_passed() {
    // 20 slots; 95 % are 19, 90 % are 18.
    let rig = Rig::new(20 * 8192);
    let disk = rig.open();
    for i in 0..19 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    rig.settle(&disk);
    assert_eq!(objects(&disk), 19);
    rig.get(&disk, &object(0, &[3000])).unwrap();
    rig.put(&disk, 1, &[3000]).unwrap();
    rig.put(&disk, 100, &[3000]).unwrap();
    rig.settle(&disk);
    assert_eq!(objects(&disk), 18);
    let gone: Vec<u32> = (0..19).filter(|i| !rig.has(&disk, *i)).collect();
    assert_eq!(gone, [2, 3], "a get, and a put of what is there, are uses");
    assert_eq!(disk.counts().evicted, 2);
}

#[test]
fn a_class_takes_room_from_another_that_is_colder() {
    let rig = Rig::new(64 * 8192);
    let disk = rig.open();
    for i in 0..57 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    for i in 100..140 {
        assert_eq!(rig.put(&disk, i, &[20_000]), Ok(Stored::New));
        assert!(container_bytes(&rig.path()) <= rig.capacity);
        assert_eq!(rig.get(&disk, &object(i, &[20_000])), Ok(()));
    }
    let small = (0..57).filter(|i| rig.has(&disk, *i)).count();
    assert!(small < 10, "{small} of another class are left");
    // And back.
    for i in 200..260 {
        assert_eq!(rig.put(&disk, i, &[3000]), Ok(Stored::New));
    }
    assert!(objects(&disk) >= 50);
    all_whole(&disk, &rig.memory);
}

#[test]
fn an_object_that_fills_the_capacity_fits_and_a_larger_one_is_refused() {
    let rig = Rig::new(40_960);
    let disk = rig.open();
    rig.put(&disk, 1, &[100]).unwrap();
    assert_eq!(
        rig.put(&disk, 2, &[36_864 + 1]).unwrap_err().cause,
        Cause::Full
    );
    assert!(rig.has(&disk, 1), "nothing goes for what can never fit");
    rig.put(&disk, 3, &[36_864]).unwrap();
    assert!(!rig.has(&disk, 1));
    rig.settle(&disk);
    assert_eq!(rig.get(&disk, &object(3, &[36_864])), Ok(()));
}

#[test]
fn an_object_that_is_read_is_neither_evicted_nor_its_slot_used() {
    let (rig, gate) = Rig::gated(4 * 8192, Step::ReadSections);
    let disk = rig.open();
    rig.put(&disk, 0, &[3000]).unwrap();
    gate.close();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| rig.get(&disk, &object(0, &[3000])));
        gate.wait_for(1);
        for i in 1..20 {
            rig.put(&disk, i, &[3000]).unwrap();
        }
        rig.settle(&disk);
        assert!(rig.has(&disk, 0), "read, so not evicted");
        assert_eq!(rig.remove(&disk, 0), 1);
        for i in 20..40 {
            rig.put(&disk, i, &[3000]).unwrap();
        }
        gate.open();
        // Removed, but its bytes are as they were.
        assert_eq!(read.join().unwrap(), Ok(()));
    });
    rig.settle(&disk);
    assert!(!rig.has(&disk, 0));
    // With its reader gone, the slot is used again.
    for i in 40..43 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    assert_eq!(objects(&disk), 3);
    all_whole(&disk, &rig.memory);
}

#[test]
fn a_put_is_full_where_all_is_being_read() {
    let (mut rig, gate) = Rig::gated(2 * 8192, Step::ReadSections);
    rig.options.high_percent = 100;
    let disk = rig.open();
    gate.close();
    std::thread::scope(|scope| {
        let (disk, rig) = (&disk, &rig);
        let mut readers = Vec::new();
        for i in 0..2 {
            rig.put(disk, i, &[3000]).unwrap();
            readers.push(scope.spawn(move || rig.get(disk, &object(i, &[3000]))));
        }
        gate.wait_for(2);
        for lengths in [[3000], [100]] {
            assert_eq!(rig.put(disk, 7, &lengths).unwrap_err().cause, Cause::Full);
        }
        assert_eq!(rig.put(disk, 7, &[6000]).unwrap_err().cause, Cause::Full);
        assert_eq!(disk.off(), None, "full is no fault");
        gate.open();
        for reader in readers {
            assert_eq!(reader.join().unwrap(), Ok(()));
        }
    });
    assert_eq!(rig.put(&disk, 7, &[3000]), Ok(Stored::New));
}

#[test]
fn a_file_system_fuller_than_the_capacity_costs_objects_and_breaks_none() {
    let failing = Failing::default();
    let at = failing.clone();
    let rig = Rig::watched(1 << 20, move |step| at.step(step));
    let disk = rig.open();
    failing.set(Step::Make, Errno::NOSPC);
    assert_eq!(rig.put(&disk, 0, &[3000]).unwrap_err().cause, Cause::Full);
    failing.clear();
    for i in 0..10 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    let before = container_bytes(&rig.path());
    failing.set(Step::Make, Errno::NOSPC);
    for i in 10..40 {
        assert_eq!(rig.put(&disk, i, &[3000]), Ok(Stored::New));
    }
    assert_eq!(container_bytes(&rig.path()), before);
    failing.set(Step::Write, Errno::NOSPC);
    assert_eq!(rig.put(&disk, 50, &[3000]).unwrap_err().cause, Cause::Full);
    failing.clear();
    assert_eq!(disk.off(), None);
    assert!(!rig.has(&disk, 50) && rig.has(&disk, 39));
    all_whole(&disk, &rig.memory);
}

#[test]
fn the_slot_of_a_put_that_failed_is_free_again() {
    let failing = Failing::default();
    let at = failing.clone();
    let mut rig = Rig::watched(4 * 8192, move |step| at.step(step));
    rig.options.high_percent = 100;
    let disk = rig.open();
    failing.set(Step::Write, Errno::NOSPC);
    for i in 0..20 {
        assert_eq!(rig.put(&disk, i, &[3000]).unwrap_err().cause, Cause::Full);
    }
    failing.clear();
    for i in 0..4 {
        assert_eq!(rig.put(&disk, i, &[3000]), Ok(Stored::New));
    }
    assert_eq!(objects(&disk), 4);
}

#[test]
fn a_journal_without_room_takes_that_of_the_coldest_container() {
    let failing = Failing::default();
    let at = failing.clone();
    let rig = Rig::watched(1 << 20, move |step| at.step(step));
    let disk = rig.open();
    for i in 0..4 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    rig.put(&disk, 9, &[50_000]).unwrap();
    let before = container_bytes(&rig.path());
    failing.set(Step::Reserve, Errno::NOSPC);
    assert_eq!(rig.remove(&disk, 9), 1);
    failing.clear();
    assert!(container_bytes(&rig.path()) < before);
    assert_eq!((disk.off(), rig.has(&disk, 0)), (None, false));
    Rig::die(disk);
    let disk = rig.open();
    assert!(all_whole(&disk, &rig.memory).is_empty());
}

#[test]
fn a_smaller_capacity_is_kept_from_the_next_open_on() {
    let mut rig = Rig::new(1 << 20);
    let disk = rig.open();
    for i in 0..60 {
        rig.put(&disk, i, &[12_000]).unwrap();
    }
    disk.close();
    rig.capacity = 200_000;
    let disk = rig.open();
    assert!(container_bytes(&rig.path()) <= 200_000);
    assert!(rig.has(&disk, 59) && !rig.has(&disk, 0));
    for i in 100..110 {
        rig.put(&disk, i, &[12_000]).unwrap();
        assert!(container_bytes(&rig.path()) <= 200_000);
    }
    all_whole(&disk, &rig.memory);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn the_capacity_is_never_exceeded_and_counts_add_up(
        capacity in 30_000u64..400_000,
        acts in proptest::collection::vec((0u8..4, 0u32..30, 1u64..60_000), 1..60),
    ) {
        let rig = Rig::new(capacity);
        let disk = rig.open();
        for (what, i, length) in acts {
            if what == 0 {
                rig.remove(&disk, i);
            } else {
                match rig.put(&disk, i, &[length]) {
                    Ok(_) => {}
                    Err(e) => {
                        prop_assert_eq!(e.cause, Cause::Full);
                        // Slots are some 1/16 larger than objects.
                        prop_assert!(4096 + length + length / 15 + 4096 > capacity, "{}", e);
                    }
                }
            }
            prop_assert!(container_bytes(&rig.path()) <= capacity);
        }
        rig.settle(&disk);
        let usage = block_on(disk.usage()).unwrap();
        prop_assert!(usage.bytes <= container_bytes(&rig.path()));
        prop_assert_eq!(all_whole(&disk, &rig.memory).len() as u64, usage.objects);
        prop_assert_eq!(disk.off(), None);
        Rig::die(disk);
        let disk = rig.open();
        prop_assert_eq!(block_on(disk.usage()).unwrap(), usage);
    }
}
