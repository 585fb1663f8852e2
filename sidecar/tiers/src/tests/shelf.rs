//! The tier in memory passes the suite like the others.

use crate::testing::shelf::Shelf;
use crate::testing::suite::{Memory, Opening, Sample, Subject, bytes_of, passes_the_suite};
use crate::{Cause, Kind, Stored, Tier};
use parking_lot::Mutex;
use std::sync::Arc;

/// The shelf that was opened last is still there for whoever opens it again.
#[derive(Default)]
struct Shelves(Mutex<Option<Shelf>>);

impl Subject for Shelves {
    fn empty(&self) -> Opening<'_> {
        let shelf = Shelf::new(Kind::Disk, 0);
        *self.0.lock() = Some(shelf.clone());
        Box::pin(async { Arc::new(shelf) as Arc<dyn Tier> })
    }

    fn again(&self) -> Option<Opening<'_>> {
        let shelf = self.0.lock().clone()?;
        Some(Box::pin(async { Arc::new(shelf) as Arc<dyn Tier> }))
    }
}

passes_the_suite!(Shelves::default());

#[tokio::test]
async fn a_full_shelf_says_so_and_keeps_nothing_of_the_object() {
    let (memory, shelf) = (Memory::new(1 << 20), Shelf::new(Kind::Redis, 20_000));
    let (fits, not) = (
        Sample::new(1, 0, &[8_000]),
        Sample::new(1, 1, &[8_000, 4_000]),
    );
    assert_eq!(shelf.put(fits.put(&memory)).await, Ok(Stored::New));
    let error = shelf.put(not.put(&memory)).await.unwrap_err();
    assert_eq!((error.tier, error.cause), (Kind::Redis, Cause::Full));
    let names = [fits.name(), not.name()];
    assert_eq!(shelf.lookup(&names).await, Ok(vec![true, false]));
}

#[tokio::test]
async fn a_spoiled_byte_is_the_only_one_that_differs() {
    let (memory, shelf) = (Memory::new(1 << 20), Shelf::new(Kind::Disk, 0));
    let sample = Sample::new(1, 0, &[100, 200]);
    shelf.put(sample.put(&memory)).await.unwrap();
    assert!(shelf.spoil(&sample.name(), 1, 199));
    assert!(!shelf.spoil(&sample.name(), 1, 200));
    let get = sample.get(&memory, &[0, 1]);
    shelf.get(get.clone()).await.unwrap();
    assert_eq!(bytes_of(&get.places[0].span), sample.bytes[0]);
    let mut spoiled = sample.bytes[1].clone();
    spoiled[199] ^= 1;
    assert_eq!(bytes_of(&get.places[1].span), spoiled);
}
