//! The behaviour suite against a real server: alone, with all layers, and with failures between.

use super::Server;
use crate::Tier;
use crate::layers::{Options as LayerOptions, layered};
use crate::s3::{Options, S3};
use crate::testing::chaos::{Chaos, Faults};
use crate::testing::suite::{Opening, Subject, passes_the_suite};
use std::sync::Arc;

/// A bucket, opened again as it is.
struct Bucket {
    server: Server,
    options: Options,
    layers: Option<LayerOptions>,
}

impl Bucket {
    fn new(options: Options, layers: Option<LayerOptions>) -> Self {
        Self {
            server: Server::start(),
            options,
            layers,
        }
    }

    fn open(&self) -> Opening<'_> {
        Box::pin(async {
            let s3 = S3::open(&self.server.config(), self.options.clone())
                .await
                .unwrap();
            let tier: Arc<dyn Tier> = Arc::new(s3);
            match &self.layers {
                None => tier,
                Some(options) => {
                    let chaos: Arc<dyn Tier> = Arc::new(Chaos::new(tier, Faults::none(1)));
                    layered(chaos, options).tier
                }
            }
        })
    }
}

impl Subject for Bucket {
    fn empty(&self) -> Opening<'_> {
        self.open()
    }

    fn again(&self) -> Option<Opening<'_>> {
        Some(self.open())
    }

    fn asks_each_name(&self) -> bool {
        false
    }
}

mod alone {
    use super::*;
    passes_the_suite!(Bucket::new(Options::default(), None));
}

mod in_many_parts {
    use super::*;
    use crate::s3::{Parts, Uploads};

    /// Every object of more than a few KiB is written in parts and read in ranges.
    fn small() -> Options {
        Options {
            parts: Parts {
                bytes: 32 << 10,
                at_once: 3,
            },
            uploads: Uploads {
                from_bytes: 1 << 20,
                part_bytes: 5 << 20,
                at_once: 2,
            },
            ..Options::default()
        }
    }

    passes_the_suite!(Bucket::new(small(), None));
}

mod with_layers {
    use super::*;
    passes_the_suite!(Bucket::new(
        Options::default(),
        Some(LayerOptions::default())
    ));
}
