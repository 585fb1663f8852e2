use super::*;
use crate::Kind;
use crate::layers::Op;
use crate::layers::scripted::Scripted;
use crate::testing::shelf::Shelf;
use crate::testing::suite::{Memory, Opening, Sample, Subject, passes_the_suite};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Marks in this process.
#[derive(Debug, Default)]
struct Notes {
    marked: Mutex<BTreeSet<String>>,
    silent: AtomicBool,
}

impl Notes {
    fn names(&self) -> Vec<String> {
        self.marked.lock().iter().cloned().collect()
    }

    async fn answers(&self) {
        if self.silent.load(Relaxed) {
            std::future::pending::<()>().await;
        }
    }
}

impl Marks for Notes {
    fn marked<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(async move {
            self.answers().await;
            let marked = self.marked.lock();
            let there = names.iter().map(|name| marked.contains(&name.s3("")));
            Ok(there.collect())
        })
    }

    fn mark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()> {
        Box::pin(async move {
            self.answers().await;
            let names = names.iter().map(|name| name.s3(""));
            self.marked.lock().extend(names);
            Ok(())
        })
    }

    fn unmark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()> {
        Box::pin(async move {
            self.answers().await;
            let mut marked = self.marked.lock();
            names.iter().for_each(|name| {
                marked.remove(&name.s3(""));
            });
            Ok(())
        })
    }
}

fn samples(count: u64) -> Vec<Sample> {
    (0..count).map(|n| Sample::new(1, n, &[100])).collect()
}

fn names(samples: &[Sample]) -> Vec<ObjectName> {
    samples.iter().map(Sample::name).collect()
}

/// A directory with its marks and its shelf.
fn opened(writes: Writes) -> (Arc<Notes>, Arc<Shelf>, Directory) {
    let (notes, shelf) = (
        Arc::new(Notes::default()),
        Arc::new(Shelf::new(Kind::S3, 0)),
    );
    let directory = Directory::new(shelf.clone(), notes.clone(), writes);
    (notes, shelf, directory)
}

/// Until what was spawned has run.
async fn settled() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

/// Names that were marked and that were not, questions without an answer, changes that were not made.
fn counted(directory: &Directory) -> [u64; 4] {
    let counters = directory.info().counters.now();
    counters
        .into_iter()
        .map(|(_, count)| count)
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

#[test]
fn a_directory_says_what_its_tier_says_and_counts_besides() {
    let tier = Scripted::saying(TierInfo {
        compares_puts: true,
        counters: Reading::new(|| vec![("RemovalRefused", 3)]),
        unix_s: Reading::new(|| Some(784_111_777)),
        ..TierInfo::new(Kind::S3)
    });
    let notes = Arc::new(Notes::default());
    let directory = Directory::new(tier, notes, Writes::default());
    let info = directory.info();
    assert_eq!((info.kind, info.compares_puts), (Kind::S3, true));
    assert_eq!(info.unix_s.now(), Some(784_111_777));
    assert_eq!(info.servers.now(), []);
    let counters = info.counters.now();
    assert_eq!(counters[0], ("RemovalRefused", 3));
    assert_eq!(counters.len(), 5);
}

/// A shelf and its marks, opened again over the same ones.
#[derive(Default)]
struct Marked {
    kept: Mutex<Option<(Shelf, Arc<Notes>)>>,
}

impl Marked {
    fn open(&self, shelf: Shelf, notes: Arc<Notes>) -> Opening<'_> {
        Box::pin(async {
            Arc::new(Directory::new(Arc::new(shelf), notes, Writes::default())) as Arc<dyn Tier>
        })
    }
}

impl Subject for Marked {
    fn empty(&self) -> Opening<'_> {
        let (shelf, notes) = (Shelf::new(Kind::S3, 0), Arc::new(Notes::default()));
        *self.kept.lock() = Some((shelf.clone(), notes.clone()));
        self.open(shelf, notes)
    }

    fn again(&self) -> Option<Opening<'_>> {
        let (shelf, notes) = self.kept.lock().clone()?;
        Some(self.open(shelf, notes))
    }
}

mod behaves_as_the_tier_does {
    use super::*;
    passes_the_suite!(Marked::default());
}

#[tokio::test]
async fn what_is_marked_costs_no_question_and_the_tier_is_asked_for_the_rest_alone() {
    let (notes, tier) = (Arc::new(Notes::default()), Scripted::new());
    let directory = Directory::new(tier.clone(), notes.clone(), Writes::default());
    let all = names(&samples(4));
    notes.mark(&all).await.unwrap();
    assert_eq!(directory.lookup(&all).await.unwrap(), [true; 4]);
    assert_eq!(tier.calls(), []);
    notes.unmark(&all[2..3]).await.unwrap();
    directory.lookup(&all).await.unwrap();
    assert_eq!(tier.calls(), [Op::Lookup]);
    assert_eq!(counted(&directory), [6, 2, 0, 0]);
}

#[tokio::test]
async fn objects_are_marked_when_they_are_written_or_read_and_not_when_they_are_gone() {
    let (notes, shelf, directory) = opened(Writes::default());
    let (memory, samples) = (Memory::new(1 << 20), samples(2));
    let all = names(&samples);
    directory.put(samples[0].put(&memory)).await.unwrap();
    shelf.put(samples[1].put(&memory)).await.unwrap();
    settled().await;
    assert_eq!(notes.names(), [all[0].s3("")]);
    directory.get(samples[1].get_all(&memory)).await.unwrap();
    settled().await;
    assert_eq!(notes.names().len(), 2);
    // somebody else removes one: its mark is believed once
    shelf.remove(Removal::Named(&all[..1])).await.unwrap();
    assert_eq!(directory.lookup(&all).await.unwrap(), [true; 2]);
    let gone = directory.get(samples[0].get_all(&memory)).await;
    assert_eq!(gone.unwrap_err().cause, Cause::Missing);
    settled().await;
    assert_eq!(directory.lookup(&all).await.unwrap(), [false, true]);
    directory.remove(Removal::Named(&all)).await.unwrap();
    settled().await;
    assert!(notes.names().is_empty());
}

#[tokio::test]
async fn a_head_is_the_tiers_own_and_mends_the_mark() {
    let (notes, shelf, directory) = opened(Writes::default());
    let (memory, samples) = (Memory::new(1 << 20), samples(2));
    let all = names(&samples);
    shelf.put(samples[0].put(&memory)).await.unwrap();
    notes.mark(&all[1..]).await.unwrap();
    let [there, gone] = [directory.head(&all[0]).await, directory.head(&all[1]).await];
    assert_eq!(there, Ok(samples[0].object.clone()));
    assert_eq!(gone.unwrap_err().cause, Cause::Missing);
    settled().await;
    assert_eq!(notes.names(), [all[0].s3("")]);
}

#[tokio::test]
async fn where_nothing_is_written_nothing_is_marked_and_what_is_wrong_goes_all_the_same() {
    let writes = Writes::new(false);
    let (notes, shelf, directory) = opened(writes.clone());
    let (memory, samples) = (Memory::new(1 << 20), samples(2));
    let all = names(&samples);
    shelf.put(samples[0].put(&memory)).await.unwrap();
    notes.mark(&all[1..]).await.unwrap();
    directory.get(samples[0].get_all(&memory)).await.unwrap();
    let gone = directory.get(samples[1].get_all(&memory)).await;
    assert_eq!(gone.unwrap_err().cause, Cause::Missing);
    settled().await;
    assert!(notes.names().is_empty(), "{:?}", notes.names());
    assert_eq!(counted(&directory), [0; 4]);
    // That may change meanwhile.
    writes.set(true);
    directory.get(samples[0].get_all(&memory)).await.unwrap();
    settled().await;
    assert_eq!(notes.names(), [all[0].s3("")]);
}

#[tokio::test(start_paused = true)]
async fn marks_that_do_not_answer_cost_a_tenth_of_a_second_now_and_then_and_no_answer() {
    let (notes, _, directory) = opened(Writes::default());
    let (memory, samples) = (Memory::new(1 << 20), samples(100));
    notes.silent.store(true, Relaxed);
    for sample in &samples {
        directory.put(sample.put(&memory)).await.unwrap();
    }
    assert_eq!(
        directory.changes.available_permits(),
        0,
        "no more wait than may"
    );
    let all = names(&samples);
    for (again, wait) in [
        (Duration::ZERO, QUESTION),
        (Duration::ZERO, Duration::ZERO),
        (PAUSE, QUESTION),
    ] {
        tokio::time::sleep(again).await;
        let begun = Instant::now();
        let there = directory.lookup(&all).await.unwrap();
        assert!(there.iter().all(|there| *there));
        assert_eq!(begun.elapsed(), wait);
    }
    tokio::time::sleep(CHANGE).await;
    settled().await;
    assert_eq!(directory.changes.available_permits(), CHANGES as usize);
    assert_eq!(counted(&directory), [0, 300, 2, 100]);
}

#[tokio::test(start_paused = true)]
async fn a_removal_waits_no_longer_for_marks_than_a_question_and_takes_them_away_all_the_same() {
    let (notes, shelf, directory) = opened(Writes::default());
    let (memory, samples) = (Memory::new(1 << 20), samples(3));
    let all = names(&samples);
    for sample in &samples {
        directory.put(sample.put(&memory)).await.unwrap();
    }
    settled().await;
    notes.silent.store(true, Relaxed);
    let listed = directory.list(None, 10).await.unwrap().objects;
    let begun = Instant::now();
    assert_eq!(directory.remove(Removal::Listed(&listed[..1])).await, Ok(1));
    assert_eq!(begun.elapsed(), QUESTION);
    assert_eq!(
        directory.remove(Removal::Unusable(&listed[1].name)).await,
        Ok(1)
    );
    assert_eq!(begun.elapsed(), QUESTION, "they are left alone for a while");
    notes.silent.store(false, Relaxed);
    tokio::time::sleep(CHANGE).await;
    settled().await;
    assert_eq!(counted(&directory), [0, 0, 1, 2]);
    // Where marks answer again, who is told of an object's end finds none.
    let last = [listed[2].name.clone()];
    assert_eq!(directory.remove(Removal::Named(&last)).await, Ok(1));
    assert!(!notes.names().contains(&last[0].s3("")));
    assert_eq!(shelf.lookup(&all).await, Ok(vec![false; 3]));
}

#[tokio::test(start_paused = true)]
async fn a_removal_behind_many_changes_says_nothing_of_who_answers_them() {
    let (notes, _, directory) = opened(Writes::default());
    let all = names(&samples(2));
    notes.mark(&all).await.unwrap();
    let busy = directory.changes.clone().acquire_many_owned(CHANGES).await;
    let begun = Instant::now();
    assert_eq!(directory.remove(Removal::Named(&all[..1])).await, Ok(0));
    assert_eq!(begun.elapsed(), QUESTION, "it waits no longer");
    // The next prefix is looked up as if nothing were.
    assert_eq!(directory.lookup(&all[1..]).await, Ok(vec![true]));
    drop(busy);
    settled().await;
    assert_eq!(notes.names(), [all[1].s3("")]);
    assert_eq!(counted(&directory), [1, 0, 0, 0]);
}
