//! What every tier must do, done by this one: with direct I/O, and without.

use super::super::{Disk, Options};
use crate::tiers::suite::{Opening, Subject, passes_the_suite};
use crate::tiers::{Cause, Tier};
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Folder {
    temp: tempfile::TempDir,
    direct: bool,
}

impl Folder {
    fn new(direct: bool) -> Self {
        let temp = tempfile::tempdir().unwrap();
        Self { temp, direct }
    }

    fn open(&self) -> Arc<dyn Tier> {
        let options = Options {
            direct: self.direct,
            journal_records_min: 20,
            ..Options::default()
        };
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match Disk::open(self.temp.path(), 512 << 20, options.clone()) {
                Ok(disk) => return Arc::new(disk),
                // The one before ends soon after it was dropped.
                Err(e) if e.cause == Cause::InUse && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(e) => panic!("{e}"),
            }
        }
    }
}

impl Subject for Folder {
    fn empty(&self) -> Opening<'_> {
        Box::pin(async { self.open() })
    }

    fn again(&self) -> Option<Opening<'_>> {
        Some(Box::pin(async { self.open() }))
    }
}

mod direct {
    use super::*;
    passes_the_suite!(Folder::new(true));
}

mod buffered {
    use super::*;
    passes_the_suite!(Folder::new(false));
}
