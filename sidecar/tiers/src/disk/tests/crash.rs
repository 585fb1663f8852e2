//! A process that dies at any moment leaves whole objects only, and all that it had answered for.

use super::super::Options;
use super::super::core::Step;
use super::super::name::NameKey;
use super::super::record::{RECORD_BYTES, Record, What};
use super::super::space::At;
use super::objects::copy_folder;
use super::rig::*;
use crate::Tier;
use kvcachepool_protocol::key::{ChunkKey, LayoutId, ModelId};
use kvcachepool_protocol::object::{Fidelity, ObjectName};
use parking_lot::Mutex;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

#[derive(Debug, Clone)]
enum Act {
    Put(u32, u64),
    Remove(u32),
    Get(u32),
}

fn act(sizes: u64) -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0u32..12, 1u64..=sizes).prop_map(|(i, n)| Act::Put(i, n * 5000 + u64::from(i))),
        1 => (0u32..12).prop_map(Act::Remove),
        1 => (0u32..12).prop_map(Act::Get),
    ]
}

/// Copies of a folder, made at every step of what is done in it.
#[derive(Debug, Default)]
struct Images {
    on: bool,
    /// Each with what had been answered for by then.
    made: Vec<(PathBuf, String, BTreeSet<u32>)>,
    answered: BTreeSet<u32>,
}

fn imaged(capacity: u64, journal_records_min: u64) -> (Rig, Arc<Mutex<Images>>) {
    let images = Arc::new(Mutex::new(Images::default()));
    let folder = Arc::new(Mutex::new(PathBuf::new()));
    let (at, made, count) = (folder.clone(), images.clone(), AtomicUsize::new(0));
    let mut rig = Rig::watched(capacity, move |step| {
        let mut images = made.lock();
        if images.on {
            let from = at.lock().clone();
            let image = from.with_extension(count.fetch_add(1, Relaxed).to_string());
            copy_folder(&from, &image);
            if step == Step::SnapshotWritten {
                // Not synced yet: nothing of it may be on the disk.
                std::fs::write(last_snapshot(&image), "").unwrap();
            }
            let answered = images.answered.clone();
            images.made.push((image, format!("{step:?}"), answered));
        }
        Ok(())
    });
    *folder.lock() = rig.path();
    rig.options.journal_records_min = journal_records_min;
    (rig, images)
}

fn last_snapshot(folder: &Path) -> PathBuf {
    let paths = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path());
    let snapshots = paths.filter(|path| path.to_string_lossy().contains("/snapshot-"));
    snapshots.max().unwrap()
}

/// Returns the steps at which it was looked what a crash leaves.
fn history(
    capacity: u64,
    journal_records_min: u64,
    acts: &[Act],
    evicts: bool,
) -> BTreeSet<String> {
    let (rig, images) = imaged(capacity, journal_records_min);
    let disk = rig.open();
    for act in acts {
        images.lock().on = true;
        match act {
            Act::Put(i, length) => {
                let there = rig.has(&disk, *i);
                rig.put(&disk, *i, &[*length, 3]).unwrap();
                // What lay there of that name stays, of whatever length it is.
                assert!(there || rig.get(&disk, &object(*i, &[*length, 3])).is_ok());
                images.lock().answered.insert(*i);
            }
            Act::Remove(i) => {
                images.lock().answered.remove(i);
                rig.remove(&disk, *i);
            }
            Act::Get(i) => {
                let _ = block_on(disk.head(&object(*i, &[1]).name()));
            }
        }
        // What goes for others goes after the answer: nothing may be under way when the next image is made.
        rig.settle(&disk);
        images.lock().on = false;
    }
    Rig::die(disk);
    let plain = Options {
        watch: super::Watch::default(),
        ..rig.options.clone()
    };
    let mut steps = BTreeSet::new();
    for (image, step, answered) in std::mem::take(&mut images.lock().made) {
        let disk = super::super::Disk::open(&image, capacity, plain.clone()).unwrap();
        let there = all_whole(&disk, &rig.memory);
        let counts = disk.counts();
        assert_eq!((counts.corrupt_records, counts.corrupt_objects), (0, 0));
        for i in answered.iter().filter(|_| !evicts) {
            assert!(there.contains(&object(*i, &[1]).name()), "{i} at {step}");
        }
        drop(disk);
        std::fs::remove_dir_all(image).unwrap();
        steps.insert(step);
    }
    steps
}

#[test]
fn every_step_of_a_snapshot_leaves_all_that_was_answered_for() {
    let put = |i| Act::Put(i, 3000);
    let acts = [
        put(0),
        put(1),
        Act::Remove(0),
        put(2),
        Act::Remove(1),
        put(3),
    ];
    let steps = history(4 << 20, 0, &acts, false);
    for step in [
        Step::SnapshotWritten,
        Step::JournalMade,
        Step::SnapshotNamed,
    ] {
        assert!(steps.contains(&format!("{step:?}")), "{steps:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn every_step_leaves_whole_objects_and_all_that_was_answered_for(
        acts in proptest::collection::vec(act(3), 1..14),
        records in prop_oneof![Just(0u64), Just(1000)],
    ) {
        history(4 << 20, records, &acts, false);
    }

    #[test]
    fn every_step_of_a_full_tier_leaves_whole_objects(
        acts in proptest::collection::vec(act(2), 8..24),
        records in prop_oneof![Just(0u64), Just(1000)],
    ) {
        history(100_000, records, &acts, true);
    }
}

#[test]
fn a_journal_cut_anywhere_is_a_state_that_was_there_once() {
    let rig = Rig::new(4 << 20);
    let disk = rig.open();
    // What is there after each record. No slot is written twice, so every cut is what a crash can leave.
    let mut states = vec![BTreeSet::new()];
    let mut now = BTreeSet::new();
    for i in 0..6 {
        rig.put(&disk, i, &[3000]).unwrap();
        now.insert(i);
        states.push(now.clone());
    }
    for i in [4, 1] {
        rig.remove(&disk, i);
        now.remove(&i);
        states.push(now.clone());
    }
    Rig::die(disk);
    let whole = std::fs::read(rig.path().join("journal-0000000000000000")).unwrap();
    assert_eq!(whole.len(), 8 * RECORD_BYTES);
    let journal = rig.path().join("journal-0000000000000000");
    for cut in 0..=whole.len() {
        std::fs::write(&journal, &whole[..cut]).unwrap();
        let disk = rig.open();
        let expected = &states[cut / RECORD_BYTES];
        let there: BTreeSet<u32> = (0..6).filter(|i| rig.has(&disk, *i)).collect();
        assert_eq!(there, *expected, "cut at {cut}");
        let torn = u64::from(cut % RECORD_BYTES > 0);
        assert_eq!(disk.counts().torn_tails, torn);
        Rig::die(disk);
        let length = std::fs::metadata(&journal).unwrap().len();
        assert_eq!(length, (cut / RECORD_BYTES * RECORD_BYTES) as u64);
    }
}

#[test]
fn what_is_written_behind_a_torn_tail_is_read_back() {
    let rig = Rig::new(4 << 20);
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    rig.put(&disk, 2, &[3000]).unwrap();
    Rig::die(disk);
    let journal = rig.path().join("journal-0000000000000000");
    let mut bytes = std::fs::read(&journal).unwrap();
    bytes.truncate(RECORD_BYTES + 50);
    std::fs::write(&journal, bytes).unwrap();
    let disk = rig.open();
    rig.put(&disk, 3, &[3000]).unwrap();
    Rig::die(disk);
    let disk = rig.open();
    assert_eq!([1, 2, 3].map(|i| rig.has(&disk, i)), [true, false, true]);
    all_whole(&disk, &rig.memory);
}

#[test]
fn a_corrupt_record_costs_its_object_and_is_counted() {
    let rig = Rig::new(4 << 20);
    let disk = rig.open();
    for i in 0..4 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    Rig::die(disk);
    let journal = rig.path().join("journal-0000000000000000");
    let mut bytes = std::fs::read(&journal).unwrap();
    bytes[RECORD_BYTES + 30] ^= 1;
    std::fs::write(&journal, bytes).unwrap();
    let disk = rig.open();
    assert_eq!(disk.counts().corrupt_records, 1);
    let there = [0, 1, 2, 3].map(|i| rig.has(&disk, i));
    assert_eq!(there, [true, false, true, true]);
    // Its slot is free for others.
    rig.put(&disk, 9, &[3000]).unwrap();
    assert_eq!(all_whole(&disk, &rig.memory).len(), 4);
}

#[test]
fn a_snapshot_keeps_what_is_there_and_the_order_of_use() {
    let rig = Rig::new(4 << 20);
    let disk = rig.open();
    for i in 0..20 {
        rig.put(&disk, i, &[3000]).unwrap();
    }
    for i in [3, 5, 0] {
        rig.get(&disk, &object(i, &[3000])).unwrap();
    }
    rig.remove(&disk, 7);
    disk.close();
    let disk = rig.open();
    assert_eq!(disk.order(), {
        let mut order: Vec<u32> = (0..20).filter(|i| ![3, 5, 0, 7].contains(i)).collect();
        order.extend([3, 5, 0]);
        order
            .iter()
            .map(|i| object(*i, &[1]).name())
            .collect::<Vec<_>>()
    });
}

/// How long an open takes is printed; `KVCACHEPOOL_DISK_OBJECTS` sets how many there are.
#[test]
fn thousands_of_objects_come_back_in_the_order_of_use() {
    let count = std::env::var("KVCACHEPOOL_DISK_OBJECTS").ok();
    let count: u32 = count.map_or(5000, |text| text.parse().unwrap());
    let mut rig = Rig::new(u64::from(count) * 8192 + (1 << 30));
    rig.options.high_percent = 100;
    rig.open().close();
    let slots = 16_384;
    for id in 0..count.div_ceil(slots) {
        let (units, name) = (2, format!("slots-{id:08x}-00000002-{slots:08x}"));
        let file = std::fs::File::create(rig.path().join(name)).unwrap();
        file.set_len(u64::from(slots) * units * 4096).unwrap();
    }
    let name = |i: u32| ObjectName {
        model: ModelId([1; 32]).hex16(),
        layout: LayoutId([2; 32]).hex16(),
        key: ChunkKey(*blake3::hash(&i.to_le_bytes()).as_bytes()),
        fidelity: Fidelity::Exact,
    };
    let (mut snapshot, mut journal) = (Vec::new(), Vec::new());
    for i in 0..count {
        let record = |what| Record {
            what,
            name: NameKey::of(&name(i)).unwrap(),
            at: At {
                container: i / slots,
                slot: i % slots,
            },
            bytes: 8000,
            written_unix_s: 1_800_000_000,
        };
        record(What::Put).write(&mut snapshot);
        // As long as a journal gets: one for each.
        if i % 2 == 0 {
            record(What::Remove).write(&mut journal);
            record(What::Put).write(&mut journal);
        }
    }
    std::fs::write(rig.path().join("snapshot-0000000000000001"), snapshot).unwrap();
    std::fs::write(rig.path().join("journal-0000000000000001"), journal).unwrap();
    let began = std::time::Instant::now();
    let disk = rig.open();
    println!(
        "{count} objects and {} records in {:?}",
        2 * u64::from(count),
        began.elapsed()
    );
    assert_eq!(block_on(disk.usage()).unwrap().objects, u64::from(count));
    let order = disk.order();
    let used = (1..count).step_by(2).chain((0..count).step_by(2));
    assert!(used.zip(order).all(|(i, there)| there == name(i)));
    let began = std::time::Instant::now();
    let names: Vec<ObjectName> = (0..512).map(|i| name(i * (count / 512))).collect();
    assert_eq!(block_on(disk.lookup(&names)), Ok(vec![true; 512]));
    println!("512 names looked up in {:?}", began.elapsed());
    disk.close();
    assert_eq!(
        block_on(rig.open().usage()).unwrap().objects,
        u64::from(count)
    );
}

#[test]
fn a_journal_that_grows_long_gives_way_to_a_snapshot() {
    let mut rig = Rig::new(4 << 20);
    rig.options.journal_records_min = 10;
    let disk = rig.open();
    for round in 0..30 {
        rig.put(&disk, round % 3, &[3000]).unwrap();
        rig.remove(&disk, round % 3);
    }
    rig.put(&disk, 50, &[3000]).unwrap();
    rig.settle(&disk);
    Rig::die(disk);
    let mut journals = Vec::new();
    for entry in std::fs::read_dir(rig.path()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_string_lossy().starts_with("journal-") {
            journals.push(entry.metadata().unwrap().len() / RECORD_BYTES as u64);
        }
    }
    assert!(journals.len() == 1 && journals[0] <= 13, "{journals:?}");
    let disk = rig.open();
    assert_eq!(all_whole(&disk, &rig.memory), [object(50, &[1]).name()]);
}
