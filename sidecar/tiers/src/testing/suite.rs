//! The behaviour that every tier must have: one set of tests, run against each tier over its real server or disk, and against each with
//! its layers. A tier provides a [`Subject`], and `passes_the_suite!` creates the tests.

mod holds;
mod many;
mod objects;
mod sample;
pub mod seeds;

pub use holds::*;
pub use many::*;
pub use objects::*;
pub use sample::{LATER, Memory, Sample, bytes_of, sealed_again, untouched};

use kvcachepool_tiers::disk::Disk;
use kvcachepool_tiers::{Cause, Get, Listed, Put, Tier, TierError};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Timeout of a test.
pub const LONGEST: Duration = Duration::from_secs(120);

/// A tier that is being opened.
pub type Opening<'a> = Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + 'a>>;

/// Opens a folder of the disk tier as soon as an earlier instance has released it: its threads end on their own, and a child process
/// that another test has forked holds the lock until its exec.
pub async fn once_free(open: impl Fn() -> Result<Disk, TierError>) -> Disk {
    let end = Instant::now() + LONGEST;
    loop {
        match open() {
            Err(e) if e.cause == Cause::InUse && Instant::now() < end => {}
            opened => return opened.unwrap_or_else(|e| panic!("{e}")),
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// Opens the tier under test. It needs room for 256 MiB, and objects of 16 MiB.
pub trait Subject: Send + Sync {
    /// Opens an empty tier; called once.
    fn empty(&self) -> Opening<'_>;

    /// Opens the same tier again after the first was dropped. `None`: its objects do not outlive it.
    fn again(&self) -> Option<Opening<'_>>;

    /// Whether a lookup checks each name. If each lookup costs a request, names are treated as a prefix.
    fn asks_each_name(&self) -> bool {
        true
    }

    /// Whether the tier may use fewer bytes than the objects have.
    fn packs(&self) -> bool {
        false
    }

    /// Tolerance of the usage in bytes, for buffers that a server counts too.
    fn usage_noise(&self) -> u64 {
        0
    }
}

/// Tier, memory and seed of one test. A test that fails prints the seed; `KVCACHEPOOL_SUITE_SEED` sets it.
pub struct Rig<'a> {
    subject: &'a dyn Subject,
    tier: Option<Arc<dyn Tier>>,
    /// Source and destination of objects.
    pub memory: Memory,
    /// Seed of all random choices.
    pub seed: u64,
}

impl<'a> Rig<'a> {
    /// An empty tier.
    pub async fn new(subject: &'a dyn Subject) -> Self {
        let seed = std::env::var("KVCACHEPOOL_SUITE_SEED").ok();
        Self {
            subject,
            tier: Some(subject.empty().await),
            memory: Memory::new(1 << 30),
            seed: seed.map_or(1, |text| text.parse().expect("a number")),
        }
    }

    pub fn tier(&self) -> &Arc<dyn Tier> {
        self.tier.as_ref().expect("it is open")
    }

    /// Whether a lookup checks each name.
    pub fn asks_each_name(&self) -> bool {
        self.subject.asks_each_name()
    }

    /// Closes the tier and opens it again; false if that is impossible.
    pub async fn again(&mut self) -> bool {
        let Some(opening) = self.subject.again() else {
            return false;
        };
        // The first tier must be gone before the second opens.
        self.tier = None;
        self.tier = Some(opening.await);
        true
    }

    /// Least bytes that the tier uses for this many.
    pub fn at_least(&self, bytes: u64) -> u64 {
        match self.subject.packs() {
            true => bytes / 2,
            false => bytes,
        }
    }

    /// Tolerance of its usage in bytes.
    pub fn noise(&self) -> u64 {
        self.subject.usage_noise()
    }

    /// Object `number` of this test.
    pub fn sample(&self, number: u64, lengths: &[u64]) -> Sample {
        Sample::new(self.seed, number, lengths)
    }

    /// Puts an object, which must succeed.
    pub async fn put(&self, sample: &Sample) {
        let name = sample.name().s3("");
        if let Err(e) = self.tier().put(sample.put(&self.memory)).await {
            panic!("put of {name}: {e}");
        }
    }

    /// Gets an object, whose bytes must be those of the put.
    pub async fn check(&self, sample: &Sample) {
        self.check_some(sample, &Vec::from_iter(0..sample.bytes.len()))
            .await;
    }

    /// Gets the sections with these indexes, whose bytes must be those of the put.
    pub async fn check_some(&self, sample: &Sample, wanted: &[usize]) {
        let name = sample.name().s3("");
        let get = sample.get(&self.memory, wanted);
        match self.tier().get(get.clone()).await {
            Ok(head) => assert_eq!(head, sample.object, "head of {name}"),
            Err(e) => panic!("get of {name}: {e}"),
        }
        assert!(sample.lies_in(&get.places), "sections {wanted:?} of {name}");
    }

    /// The cause of a failed get.
    pub async fn get_fails(&self, get: Get) -> Option<Cause> {
        self.tier().get(get).await.err().map(|e| e.cause)
    }

    /// The cause of a failed put.
    pub async fn put_fails(&self, put: Put) -> Option<Cause> {
        self.tier().put(put).await.err().map(|e| e.cause)
    }

    /// Whether the object exists.
    pub async fn has(&self, sample: &Sample) -> bool {
        let there = self.tier().lookup(&[sample.name()]).await.unwrap();
        assert_eq!(there.len(), 1);
        there[0]
    }

    /// All objects, in pages of `limit`.
    pub async fn listed(&self, limit: usize) -> Vec<Listed> {
        let (mut all, mut from) = (Vec::new(), None);
        loop {
            let page = self.tier().list(from.as_deref(), limit).await.unwrap();
            assert!(
                page.objects.len() <= limit,
                "{} of {limit}",
                page.objects.len()
            );
            assert_eq!(page.foreign, 0);
            all.extend(page.objects);
            let Some(next) = page.next else { return all };
            assert_ne!(from.as_ref(), Some(&next), "the listing stands still");
            from = Some(next);
        }
    }
}

impl Drop for Rig<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let kind = self.tier.as_ref().map(|tier| tier.info().kind);
            let seed = self.seed;
            eprintln!("the tier was {kind:?}, the seed KVCACHEPOOL_SUITE_SEED={seed}");
        }
    }
}

/// Creates one test per case of the suite, for the [`Subject`] of an expression.
macro_rules! passes_the_suite {
    ($subject:expr) => {
        $crate::testing::suite::passes_the_suite!($subject;
            what_is_put_comes_back_whatever_its_length,
            sections_that_are_not_wanted_are_left_where_they_are,
            an_object_that_is_there_already_stays_as_it_is,
            what_was_never_put_is_missing,
            a_place_of_another_length_or_section_is_refused_and_nothing_is_written,
            a_put_whose_spans_are_not_its_sections_is_refused_and_nothing_is_visible,
            what_is_removed_is_gone_and_can_be_put_again,
            what_another_wrote_since_it_was_read_is_removed_all_the_same,
            what_a_listing_told_of_is_removed_and_nothing_else,
            what_was_there_before_it_was_closed_is_there_after,
            a_lookup_answers_every_name_in_order,
            a_listing_has_every_object_once_whatever_its_pages,
            usage_is_the_sum_of_what_is_held,
            sixty_four_puts_and_gets_run_at_once,
            puts_of_one_name_at_once_leave_one_whole_object,
            a_get_beside_puts_and_removes_is_right_or_missing,
            a_get_that_is_dropped_writes_nothing_after_its_hold_is_gone,
            a_put_that_is_dropped_leaves_a_whole_object_or_none,
            an_operation_that_nobody_waits_for_holds_up_no_other,
        );
    };
    ($subject:expr; $($case:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let subject = $subject;
                let case = $crate::testing::suite::$case(&subject);
                tokio::time::timeout($crate::testing::suite::LONGEST, case)
                    .await
                    .expect("it ended");
            }
        )*
    };
}
pub(crate) use passes_the_suite;
