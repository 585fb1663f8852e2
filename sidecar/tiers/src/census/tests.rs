//! Which objects go first, and how often a place is listed.

use super::*;
use crate::testing::suite::Sample;
use crate::{Cause, Swept};
use std::sync::atomic::AtomicUsize;
use tokio::time::sleep;

fn listed(number: u64, written_unix_s: u64, bytes: u64) -> Listed {
    Listed {
        name: Sample::new(1, number, &[1]).name(),
        bytes,
        written_unix_s,
    }
}

#[test]
fn the_oldest_bytes_go_and_of_those_written_together_no_more_than_needed() {
    let all: Vec<_> = (0..10).map(|n| listed(n, 1_000 + n / 4, 10)).collect();
    let mut ages = Ages::default();
    for listed in &all {
        ages.add(listed);
    }
    let went = |excess, expired| {
        let Some(mut cut) = ages.cut(excess, expired) else {
            return 0;
        };
        // A listing has its own order: the youngest come first here.
        let went = all.iter().rev().filter(|listed| cut.takes(listed));
        let went: Vec<u64> = went.map(|listed| listed.written_unix_s).collect();
        let until = 1_000 + excess.div_ceil(40);
        assert!(expired > 0 || went.iter().all(|at| *at < until), "{went:?}");
        went.len()
    };
    for (excess, count) in [
        (0, 0),
        (1, 1),
        (10, 1),
        (35, 4),
        (40, 4),
        (41, 5),
        (100, 10),
        (1_000, 10),
    ] {
        assert_eq!(went(excess, 0), count, "{excess}");
    }
    assert_eq!(went(0, 1_001), 4, "what is too old");
    assert_eq!(went(10, 1_002), 8, "the older of both");
    assert_eq!(went(0, 500), 0);
}

#[test]
fn many_ages_are_told_apart_less_finely() {
    let mut ages = Ages::default();
    for n in 0..100_000 {
        ages.add(&listed(0, n, 1));
        assert!(ages.bytes.len() <= AGES_MAX);
    }
    assert_eq!(ages.bytes.values().sum::<u64>(), 100_000);
    let cut = ages.cut(50_000, 0).unwrap();
    assert!((49_000..=50_000).contains(&cut.before_s), "{cut:?}");
}

/// How long a listing takes.
const LISTING: Duration = Duration::from_secs(5);
/// Objects of one byte that there is room for.
const ROOM: u64 = 100;

/// What several sidecars share.
#[derive(Default)]
struct Shelf {
    objects: Mutex<Vec<Listed>>,
    /// No object can be removed.
    locked: bool,
    listings: AtomicUsize,
    marker: Mutex<Option<(Instant, Option<Sum>)>>,
}

/// One of the sidecars.
struct Place {
    shelf: Arc<Shelf>,
    census: Census,
}

impl Place {
    fn new(shelf: &Arc<Shelf>) -> Arc<Self> {
        let bounds = Bounds {
            capacity_bytes: ROOM,
            evict_at_percent: 95,
            evict_to_percent: 50,
            ..Bounds::default()
        };
        Arc::new(Self {
            shelf: shelf.clone(),
            census: Census::new(Kind::S3, Writes::default(), bounds, &Page::default()),
        })
    }

    fn put(&self, number: u64) {
        self.shelf.objects.lock().push(listed(number, number, 1));
        self.census.came(1);
    }

    fn marker(&self, young: Duration) -> Option<Turn> {
        let (at, sum) = (*self.shelf.marker.lock())?;
        let taken = at.elapsed() < young;
        taken.then(|| sum.map_or(Turn::Counting, Turn::Counted))
    }

    fn mark(&self, sum: Option<Sum>) {
        *self.shelf.marker.lock() = Some((Instant::now(), sum));
    }
}

impl Source for Place {
    fn page<'a>(&'a self, _: Option<&'a str>) -> Operation<'a, Page> {
        Box::pin(async {
            sleep(LISTING).await;
            self.shelf.listings.fetch_add(1, Relaxed);
            Ok(Page {
                objects: self.shelf.objects.lock().clone(),
                ..Page::default()
            })
        })
    }

    fn remove_chosen<'a>(&'a self, chosen: &'a [Listed]) -> Operation<'a, Swept> {
        let mut swept = Swept::default();
        if self.shelf.locked && !chosen.is_empty() {
            swept.kept = chosen.iter().map(|listed| listed.name.clone()).collect();
            swept.why = Some(TierError::new(Kind::S3, Cause::Denied, "locked"));
        } else {
            let mut objects = self.shelf.objects.lock();
            objects.retain(|listed| !chosen.contains(listed));
            swept.objects = chosen.len() as u64;
            chosen
                .iter()
                .for_each(|listed| self.census.went(listed.bytes));
        }
        Box::pin(async { Ok(swept) })
    }
}

impl Shared for Place {
    fn census(&self) -> &Census {
        &self.census
    }

    fn unix_s(&self) -> Option<u64> {
        None
    }

    fn turn(&self, young: Duration) -> Operation<'_, Turn> {
        let turn = self.marker(young).unwrap_or_else(|| {
            let last = *self.shelf.marker.lock();
            self.mark(last.and_then(|(_, sum)| sum));
            Turn::Mine
        });
        Box::pin(async move { Ok(turn) })
    }

    fn counted_lately(&self, young: Duration) -> Operation<'_, Option<Turn>> {
        let turn = self.marker(young);
        Box::pin(async move { Ok(turn) })
    }

    fn publish(&self, sum: Sum) -> Operation<'_, ()> {
        self.mark(Some(sum));
        Box::pin(async { Ok(()) })
    }

    fn tidy(&self, _: Duration) -> Operation<'_, u64> {
        Box::pin(async { Ok(0) })
    }
}

/// Three sidecars that put an object a second for an hour. Returns the number of listings, and of the objects that are there.
async fn an_hour_of_puts(locked: bool) -> (usize, usize) {
    let shelf = Arc::new(Shelf {
        locked,
        ..Shelf::default()
    });
    let places = [(); 3].map(|()| Place::new(&shelf));
    let running = places
        .clone()
        .map(|p| tokio::spawn(run(p, Options::default())));
    for (number, place) in (0..3_600).zip(places.iter().cycle()) {
        place.put(number);
        sleep(Duration::from_secs(1)).await;
    }
    running.iter().for_each(tokio::task::JoinHandle::abort);
    let objects = shelf.objects.lock().len();
    (shelf.listings.load(Relaxed), objects)
}

#[tokio::test(start_paused = true)]
async fn a_place_where_no_room_can_be_made_is_not_listed_for_every_put() {
    let (listings, objects) = an_hour_of_puts(true).await;
    assert_eq!(objects, 3_600);
    // A pass lists it eight times.
    assert!(listings <= 8 * 20, "{listings}");
}

#[tokio::test(start_paused = true)]
async fn a_place_where_room_can_be_made_is_listed_when_it_is_needed() {
    let (listings, objects) = an_hour_of_puts(false).await;
    assert!(objects as u64 <= 2 * ROOM, "{objects} after {listings}");
}
