//! What every tier must do, whatever lies below it: one set of tests, run against each tier over its real server or disk, and against
//! each with its layers. A tier says how it is opened, and `passes_the_suite!` makes the tests.

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

/// A test that takes longer hangs.
pub const LONGEST: Duration = Duration::from_secs(120);

/// A tier that is being opened.
pub type Opening<'a> = Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + 'a>>;

/// Opens a folder of the disk once the one before has let go of it: its threads end by themselves, and a process that another test is
/// starting holds its lock until it has become another program.
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

/// How the tier under test is opened. It needs room for 256 MiB, and objects of 16 MiB.
pub trait Subject: Send + Sync {
    /// Opens it with nothing in it; called once.
    fn empty(&self) -> Opening<'_>;

    /// Opens what [`Subject::empty`] opened another time, after the first one was dropped. None: it holds nothing longer than it lives.
    fn again(&self) -> Option<Opening<'_>>;

    /// Does a lookup ask for each name? Where each question costs a request, what is there is taken for a prefix of the names.
    fn asks_each_name(&self) -> bool {
        true
    }

    /// May it have less bytes than objects have?
    fn packs(&self) -> bool {
        false
    }

    /// Bytes by which its usage may be off: of buffers that a server counts too.
    fn usage_noise(&self) -> u64 {
        0
    }
}

/// One test's tier, memory and seed. A test that fails says the seed on the way out; `KVCACHEPOOL_SUITE_SEED` sets it.
pub struct Rig<'a> {
    subject: &'a dyn Subject,
    tier: Option<Arc<dyn Tier>>,
    /// Where objects come from and go to.
    pub memory: Memory,
    /// Of all that is random.
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

    /// The tier.
    pub fn tier(&self) -> &Arc<dyn Tier> {
        self.tier.as_ref().expect("it is open")
    }

    /// Does a lookup ask for each name?
    pub fn asks_each_name(&self) -> bool {
        self.subject.asks_each_name()
    }

    /// Closes the tier and opens it another time; false where that cannot be.
    pub async fn again(&mut self) -> bool {
        let Some(opening) = self.subject.again() else {
            return false;
        };
        // Nothing of the first one may be alive when the second begins to open.
        self.tier = None;
        self.tier = Some(opening.await);
        true
    }

    /// Least bytes that it has of so many.
    pub fn at_least(&self, bytes: u64) -> u64 {
        match self.subject.packs() {
            true => bytes / 2,
            false => bytes,
        }
    }

    /// Bytes by which its usage may be off.
    pub fn noise(&self) -> u64 {
        self.subject.usage_noise()
    }

    /// Object `number` of this test.
    pub fn sample(&self, number: u64, lengths: &[u64]) -> Sample {
        Sample::new(self.seed, number, lengths)
    }

    /// Puts it, which must succeed.
    pub async fn put(&self, sample: &Sample) {
        let name = sample.name().s3("");
        if let Err(e) = self.tier().put(sample.put(&self.memory)).await {
            panic!("put of {name}: {e}");
        }
    }

    /// Gets all of it, and it must be what was put.
    pub async fn check(&self, sample: &Sample) {
        self.check_some(sample, &Vec::from_iter(0..sample.bytes.len()))
            .await;
    }

    /// Gets the sections with these indexes, and they must be what was put.
    pub async fn check_some(&self, sample: &Sample, wanted: &[usize]) {
        let name = sample.name().s3("");
        let get = sample.get(&self.memory, wanted);
        match self.tier().get(get.clone()).await {
            Ok(head) => assert_eq!(head, sample.object, "head of {name}"),
            Err(e) => panic!("get of {name}: {e}"),
        }
        assert!(sample.lies_in(&get.places), "sections {wanted:?} of {name}");
    }

    /// The name of what is wrong with a get.
    pub async fn get_fails(&self, get: Get) -> Option<Cause> {
        self.tier().get(get).await.err().map(|e| e.cause)
    }

    /// The name of what is wrong with a put.
    pub async fn put_fails(&self, put: Put) -> Option<Cause> {
        self.tier().put(put).await.err().map(|e| e.cause)
    }

    /// Is it there?
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

/// Makes one test of each case of the suite, against the [`Subject`] of an expression.
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
