//! What every tier must do, done by this one: with direct I/O, and without.

use super::super::{Disk, Options};
use crate::Tier;
use crate::testing::suite::{Opening, Subject, once_free, passes_the_suite};
use std::sync::Arc;

struct Folder {
    temp: tempfile::TempDir,
    direct: bool,
}

impl Folder {
    fn new(direct: bool) -> Self {
        let temp = tempfile::tempdir().unwrap();
        Self { temp, direct }
    }

    async fn open(&self) -> Arc<dyn Tier> {
        let options = Options {
            direct: self.direct,
            journal_records_min: 20,
            ..Options::default()
        };
        let open = || Disk::open(self.temp.path(), 512 << 20, options.clone());
        Arc::new(once_free(open).await)
    }
}

impl Subject for Folder {
    fn empty(&self) -> Opening<'_> {
        Box::pin(self.open())
    }

    fn again(&self) -> Option<Opening<'_>> {
        Some(Box::pin(self.open()))
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
