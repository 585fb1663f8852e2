//! All layers over a real folder, alone and with failures between.

use super::*;
use crate::Tier;
use crate::disk::{Disk, Options as DiskOptions};
use crate::testing::suite::once_free;
use kvcachepool_protocol::object::Codec;
use tempfile::TempDir;

/// Layers over one folder, opened again over the same one.
struct Folder {
    folder: TempDir,
    options: Options,
    faults: Faults,
}

impl Folder {
    fn new(options: Options, faults: Faults) -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            options,
            faults,
        }
    }

    fn open(&self) -> Opening<'_> {
        Box::pin(async {
            let open = || Disk::open(self.folder.path(), 512 << 20, DiskOptions::default());
            let disk = once_free(open).await;
            let chaos = Chaos::new(Arc::new(disk), self.faults.clone());
            let tier: Arc<dyn Tier> = Arc::new(chaos);
            layered(tier, &self.options).tier
        })
    }
}

impl Subject for Folder {
    fn empty(&self) -> Opening<'_> {
        self.open()
    }

    fn again(&self) -> Option<Opening<'_>> {
        Some(self.open())
    }

    fn packs(&self) -> bool {
        self.options.packing.codec() == Codec::Lossless
    }
}

mod that_works {
    use super::*;
    passes_the_suite!(Folder::new(Options::default(), Faults::none(1)));
}

mod that_packs {
    use super::*;

    fn packs(options: Options) -> Options {
        Options {
            packing: PackingOptions::new(Codec::Lossless),
            ..options
        }
    }

    passes_the_suite!(Folder::new(packs(Options::default()), Faults::none(1)));

    mod and_fails_now_and_then {
        use super::*;
        passes_the_suite!(Folder::new(packs(stubborn()), sometimes()));
    }
}

mod that_loses_something {
    use super::*;

    // Nothing is known of the suite's bytes, so that all come back; what they are called within is another name.
    passes_the_suite!(Folder::new(
        Options {
            packing: PackingOptions::new(Codec::Fp8),
            ..Options::default()
        },
        Faults::none(1)
    ));
}

mod that_fails_now_and_then {
    use super::*;
    passes_the_suite!(Folder::new(stubborn(), sometimes()));
}
