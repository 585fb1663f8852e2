//! Objects go in and come back.

use super::super::core::Step;
use super::rig::*;
use super::syncs::open_file;
use crate::testing::suite::{LATER, sealed_again};
use crate::{Cause, Get, Place, Put, Stored, Tier, Usage};
use kvcachepool_protocol::object::{Object, Section};
use parking_lot::Mutex;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;

const SHAPES: [&[u64]; 6] = [
    &[1],
    &[4096],
    &[4095, 4097],
    &[8192, 100, 40_960, 12_288],
    &[2_500_000],
    &[1, 2, 3, 4, 5, 6, 7, 8],
];

#[test]
fn objects_come_back_as_they_were_directly_and_buffered_aligned_and_not() {
    for (direct, shift) in [(true, 0), (true, 8), (false, 0), (false, 8)] {
        let mut rig = Rig::new(64 << 20);
        rig.options.direct = direct;
        rig.memory.shift = shift;
        let disk = rig.open();
        for (i, lengths) in (0..).zip(SHAPES) {
            assert_eq!(rig.put(&disk, i, lengths), Ok(Stored::New));
            assert_eq!(rig.put(&disk, i, lengths), Ok(Stored::Already));
        }
        let wanted = direct && takes_direct(rig.temp.path());
        assert_eq!((disk.is_direct(), is_open_directly(&rig)), (wanted, wanted));
        for (i, lengths) in (0..).zip(SHAPES) {
            assert_eq!(rig.get(&disk, &object(i, lengths)), Ok(()), "{lengths:?}");
        }
        for clean in [true, false] {
            let disk = rig.open_again(&disk, clean);
            for (i, lengths) in (0..).zip(SHAPES) {
                assert_eq!(rig.get(&disk, &object(i, lengths)), Ok(()), "{lengths:?}");
            }
        }
    }
}

#[test]
fn any_choice_of_sections_is_read_whatever_their_head_is_taken_for() {
    let rig = Rig::new(16 << 20);
    let disk = rig.open();
    // Of the first two, choices leave as much as heads are long; with the third not all go in place.
    let shapes: [&[u64]; 3] = [
        &[4096, 4096, 4096, 4096],
        &[8192, 4096, 4096, 1 << 20],
        &[4096, 5000, 8192, 4096],
    ];
    for (i, lengths) in (0..).zip(shapes) {
        rig.put(&disk, i, lengths).unwrap();
        let object = object(i, lengths);
        for (choice, reversed) in (1u32..16).flat_map(|c| [(c, false), (c, true)]) {
            let chosen = |at: usize| choice >> at & 1 == 1;
            let (mut get, mut part) = (rig.memory.get(&object), object.clone());
            get.places.retain(|place| chosen(at(&object, place)));
            part.sections = (0..)
                .zip(part.sections)
                .filter(|(at, _)| chosen(*at))
                .map(|(_, s)| s)
                .collect();
            let places = get.places.clone();
            if reversed {
                get.places.reverse();
            }
            let found = block_on(disk.get(get)).unwrap();
            assert_eq!(found, object);
            assert!(whole(&part, &places), "{lengths:?} {choice:b} {reversed}");
        }
    }
}

/// Which section of the object goes there.
fn at(object: &Object, place: &Place) -> usize {
    let is = |s: &Section| (s.group, s.shard) == (place.group, place.shard);
    object.sections.iter().position(is).unwrap()
}

/// Does a file of the folder take direct I/O? Whatever the tier makes of that.
fn takes_direct(folder: &std::path::Path) -> bool {
    #[repr(align(4096))]
    struct Block([u8; 4096]);
    let mut options = std::fs::File::options();
    options
        .write(true)
        .create(true)
        .custom_flags(libc::O_DIRECT);
    let file = options.open(folder.join("direct"));
    file.and_then(|file| file.write_all_at(&Block([1; 4096]).0, 0))
        .is_ok()
}

/// Does the kernel move the bytes of a container directly?
fn is_open_directly(rig: &Rig) -> bool {
    let fd = open_file(&rig.path(), "slots-");
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap();
    let mut lines = info.lines();
    let flags = lines.find_map(|line| line.strip_prefix("flags:")).unwrap();
    i32::from_str_radix(flags.trim(), 8).unwrap() & libc::O_DIRECT != 0
}

impl Rig {
    /// Another tier on a copy of the folder, as it is or after a close.
    fn open_again(&self, _: &super::super::Disk, clean: bool) -> super::super::Disk {
        let copy = self.temp.path().join(format!("copy-{clean}"));
        copy_folder(&self.path(), &copy);
        let disk = self.open_at(&copy);
        if !clean {
            return disk;
        }
        disk.close();
        let names: Vec<String> = std::fs::read_dir(&copy)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert!(
            names.iter().any(|n| n.starts_with("snapshot-")),
            "{names:?}"
        );
        self.open_at(&copy)
    }
}

pub fn copy_folder(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn some_sections_are_read_and_others_left() {
    let rig = Rig::new(16 << 20);
    let disk = rig.open();
    let object = object(1, &[5000, 4096, 9000]);
    rig.put(&disk, 1, &[5000, 4096, 9000]).unwrap();
    let get = rig.memory.get(&object);
    // Out of order, too.
    let places: Vec<Place> = [2, 0].iter().map(|n| get.places[*n].clone()).collect();
    let name = object.name();
    block_on(disk.get(Get { name, places })).unwrap();
    let read = |n: usize| {
        let mut bytes = vec![0; get.places[n].span.length as usize];
        get.places[n].span.read(0, &mut bytes);
        bytes
    };
    assert_eq!(read(0), bytes_of(1, 0, 5000));
    assert_eq!(read(1), [0xee; 4096]);
    assert_eq!(read(2), bytes_of(1, 2, 9000));
}

#[test]
fn lookup_head_remove_usage_and_list_tell_the_same() {
    let rig = Rig::new(16 << 20);
    let disk = rig.open();
    for i in 0..10 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    assert_eq!(rig.remove(&disk, 3), 1);
    assert_eq!(rig.remove(&disk, 3), 0);
    assert!(!rig.has(&disk, 3) && rig.has(&disk, 4));
    let missing = block_on(disk.head(&object(3, &[3000]).name()));
    assert_eq!(missing.unwrap_err().cause, Cause::Missing);
    let there = block_on(disk.head(&object(4, &[3000]).name()));
    assert_eq!(there, Ok(object(4, &[3000])));
    let usage = block_on(disk.usage()).unwrap();
    let expected = Usage {
        objects: 9,
        bytes: 9 * 8192,
        capacity_bytes: 16 << 20,
    };
    assert_eq!(usage, expected);
    let (mut names, mut from, mut pages) = (Vec::new(), None::<String>, 0);
    loop {
        let page = block_on(disk.list(from.as_deref(), 4)).unwrap();
        assert!(page.objects.len() <= 4);
        assert!(page.objects.iter().all(|o| o.bytes == 4096 + 3000));
        names.extend(page.objects.iter().map(|o| o.name.s3("")));
        pages += 1;
        match page.next {
            Some(next) => from = Some(next),
            None => break,
        }
    }
    let mut expected: Vec<String> = (0..10)
        .filter(|i| *i != 3)
        .map(|i| object(i, &[1]).name().s3(""))
        .collect();
    expected.sort();
    assert_eq!((names, pages), (expected, 3));
    let bad = block_on(disk.list(Some("nowhere"), 4));
    assert_eq!(bad.unwrap_err().cause, Cause::Shape);
}

#[test]
fn a_place_or_span_of_another_length_is_refused() {
    let rig = Rig::new(16 << 20);
    let disk = rig.open();
    let object = object(1, &[3000]);
    rig.put(&disk, 1, &[3000]).unwrap();
    let place = |group, length| Place {
        group,
        shard: 0,
        span: rig.memory.span(length),
    };
    for place in [place(0, 2999), place(0, 3001), place(7, 3000)] {
        let name = object.name();
        let get = Get {
            name,
            places: vec![place],
        };
        assert_eq!(block_on(disk.get(get)).unwrap_err().cause, Cause::Shape);
    }
    let mut other = super::rig::object(2, &[3000]);
    for spans in [vec![], vec![rig.memory.span(2999)]] {
        let put = Put {
            object: other.clone(),
            spans,
        };
        assert_eq!(block_on(disk.put(put)).unwrap_err().cause, Cause::Shape);
    }
    other.sections = Vec::<Section>::new();
    let put = Put {
        object: other,
        spans: Vec::new(),
    };
    assert_eq!(block_on(disk.put(put)).unwrap_err().cause, Cause::Shape);
    assert!(!rig.has(&disk, 2));
    assert_eq!(rig.get(&disk, &object), Ok(()));
}

/// Overwrites bytes of the only container.
fn overwrite(rig: &Rig, at: u64, bytes: &[u8]) {
    let container = std::fs::read_dir(rig.path())
        .unwrap()
        .map(|e| e.unwrap())
        .find(|e| e.file_name().to_string_lossy().starts_with("slots-"))
        .unwrap();
    let file = std::fs::File::options().write(true).open(container.path());
    file.unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn a_corrupt_head_is_an_error_once_and_then_a_miss() {
    for at in [0, 3, 100, 512, 600, 4095] {
        let rig = Rig::new(16 << 20);
        let disk = rig.open();
        rig.put(&disk, 1, &[3000]).unwrap();
        rig.put(&disk, 2, &[3000]).unwrap();
        overwrite(&rig, at, &[0x5a; 3]);
        let object = object(1, &[3000]);
        assert_eq!(rig.get(&disk, &object), Err(Cause::Corrupt), "byte {at}");
        assert_eq!(rig.get(&disk, &object), Err(Cause::Missing));
        assert_eq!(disk.counts().corrupt_objects, 1);
        assert_eq!(rig.get(&disk, &super::rig::object(2, &[3000])), Ok(()));
        assert_eq!(
            rig.put(&disk, 1, &[3000]),
            Ok(Stored::New),
            "it may come again"
        );
        assert_eq!(rig.get(&disk, &object), Ok(()));
        Rig::die(disk);
        assert_eq!(rig.get(&rig.open(), &object), Ok(()));
    }
}

#[test]
fn an_object_of_another_version_is_foreign_and_stays_for_who_can_read_it() {
    let rig = Rig::new(16 << 20);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    let object = object(1, &[3000]);
    let mut head = object.encode().unwrap();
    // The version stands behind the mark of eight bytes.
    head[8] += 1;
    overwrite(&rig, 0, &head);
    for _ in 0..2 {
        assert_eq!(rig.get(&disk, &object), Err(Cause::Foreign));
    }
    assert_eq!(disk.counts().corrupt_objects, 0);
    Rig::die(disk);
    head[8] -= 1;
    overwrite(&rig, 0, &head);
    assert_eq!(rig.get(&rig.open(), &object), Ok(()));
}

#[test]
fn what_only_a_later_build_knows_is_foreign_and_stays_for_who_can_read_it() {
    for (what, change) in LATER {
        let rig = Rig::new(16 << 20);
        let disk = rig.open();
        rig.put(&disk, 1, &[3000]).unwrap();
        let object = object(1, &[3000]);
        let head = object.encode().unwrap();
        let mut later = head.clone();
        sealed_again(&mut later, change);
        overwrite(&rig, 0, &later);
        for _ in 0..2 {
            let error = block_on(disk.get(rig.memory.get(&object))).unwrap_err();
            assert_eq!(error.cause, Cause::Foreign, "{error}");
            assert_eq!(error.detail, what);
            assert_eq!(block_on(disk.head(&object.name())), Err(error));
        }
        assert_eq!(rig.put(&disk, 1, &[3000]), Ok(Stored::Already), "{what}");
        assert_eq!(disk.counts().corrupt_objects, 0);
        Rig::die(disk);
        let disk = rig.open();
        assert!(rig.has(&disk, 1), "{what}");
        overwrite(&rig, 0, &head);
        assert_eq!(rig.get(&disk, &object), Ok(()));
    }
}

#[test]
fn another_object_in_the_slot_is_foreign_and_taken_out() {
    let rig = Rig::new(16 << 20);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    overwrite(&rig, 0, &object(2, &[3000]).encode().unwrap());
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Foreign));
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Missing));
}

#[test]
fn a_head_that_is_not_as_long_as_its_record_says_is_corrupt() {
    // Within the slot, and into that of another.
    for length in [2999, 4000, 9000] {
        let rig = Rig::new(16 << 20);
        let disk = rig.open();
        rig.put(&disk, 1, &[3000]).unwrap();
        rig.put(&disk, 2, &[3000]).unwrap();
        let longer = object(1, &[length]);
        overwrite(&rig, 0, &longer.encode().unwrap());
        let get = rig.memory.get(&longer);
        let error = block_on(disk.get(get)).unwrap_err();
        assert_eq!(error.cause, Cause::Corrupt, "{length}");
        assert!(!rig.has(&disk, 1) && rig.has(&disk, 2));
    }
}

#[test]
fn an_object_that_was_put_anew_stays_when_its_old_place_turns_out_corrupt() {
    let (rig, gate) = Rig::gated(16 << 20, Step::Read);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    gate.close();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| rig.get(&disk, &object(1, &[3000])));
        gate.wait_for(1);
        rig.remove(&disk, 1);
        rig.put(&disk, 1, &[3000]).unwrap();
        overwrite(&rig, 0, &[0x5a; 512]);
        gate.open();
        assert_eq!(read.join().unwrap(), Err(Cause::Corrupt));
    });
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Ok(()));
}

#[test]
fn a_put_is_synced_then_recorded_then_synced_then_seen() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let steps = log.clone();
    let rig = Rig::watched(16 << 20, move |step| {
        steps.lock().push(step);
        Ok(())
    });
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    use Step::*;
    let expected = [
        Make,
        Write,
        Written,
        SyncData,
        Reserve,
        Append,
        SyncJournal,
        Durable,
    ];
    assert_eq!(*log.lock(), expected);
    log.lock().clear();
    rig.remove(&disk, 1);
    assert_eq!(*log.lock(), [Reserve, Append, SyncJournal, Durable]);
}

#[test]
fn an_object_is_not_seen_before_its_record_is_durable() {
    let (rig, gate) = Rig::gated(16 << 20, Step::Durable);
    let disk = rig.open();
    gate.close();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| rig.put(&disk, 1, &[3000]));
        gate.wait_for(1);
        assert!(!rig.has(&disk, 1));
        gate.open();
        assert_eq!(put.join().unwrap(), Ok(Stored::New));
    });
    assert!(rig.has(&disk, 1));
}

#[test]
fn puts_that_come_together_share_a_sync() {
    let (gate, syncs) = (Gate::at(Step::SyncData), Arc::new(Mutex::new((0, 0, 0))));
    let (at, counted) = (gate.clone(), syncs.clone());
    let rig = Rig::watched(16 << 20, move |step| {
        at.pass(step);
        let mut counted = counted.lock();
        counted.0 += usize::from(step == Step::SyncJournal);
        counted.1 += usize::from(step == Step::Written);
        counted.2 += usize::from(step == Step::SyncData);
        Ok(())
    });
    let disk = rig.open();
    // Room for both sizes.
    rig.put(&disk, 100, &[3000]).unwrap();
    rig.put(&disk, 101, &[9000]).unwrap();
    *syncs.lock() = (0, 0, 0);
    gate.close();
    std::thread::scope(|scope| {
        let (disk, rig) = (&disk, &rig);
        let first = scope.spawn(move || rig.put(disk, 0, &[3000]));
        gate.wait_for(1);
        let others: Vec<_> = (1..9)
            .map(|i| scope.spawn(move || rig.put(disk, i, &[[3000, 9000][i as usize % 2]])))
            .collect();
        until("all are written", || syncs.lock().1 == 9);
        until("all wait for the sync", || disk.waiting() == 8);
        gate.open();
        for put in std::iter::once(first).chain(others) {
            assert_eq!(put.join().unwrap(), Ok(Stored::New));
        }
    });
    let syncs = syncs.lock();
    assert_eq!(syncs.0, 2, "of the journal");
    assert_eq!(syncs.2, 1 + 2, "of each container that was written");
}

#[test]
fn one_of_two_that_put_the_same_writes_and_the_other_waits_for_it() {
    let (rig, gate) = Rig::gated(16 << 20, Step::Written);
    let disk = rig.open();
    gate.close();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| rig.put(&disk, 1, &[3000]));
        gate.wait_for(1);
        let second = scope.spawn(|| rig.put(&disk, 1, &[3000]));
        rig.settle(&disk);
        gate.open();
        let mut both = [first.join().unwrap(), second.join().unwrap()].map(Result::unwrap);
        both.sort_by_key(|stored| *stored == Stored::Already);
        assert_eq!(both, [Stored::New, Stored::Already]);
    });
    assert_eq!(block_on(disk.usage()).unwrap().objects, 1);
}
