//! What every tier must do, done by this one: with hard links and without, and with all layers.

use super::{Rig, quiet};
use crate::Tier;
use crate::filesystem::{FileSystem, Options};
use crate::layers::{Options as LayerOptions, layered};
use crate::testing::suite::{Opening, Subject, passes_the_suite};
use std::sync::Arc;

struct Shared {
    rig: Rig,
    options: Options,
    layers: Option<LayerOptions>,
}

impl Shared {
    fn new(options: Options, layers: Option<LayerOptions>) -> Self {
        let rig = Rig::new();
        std::fs::create_dir(rig.path()).unwrap();
        Self {
            rig,
            options,
            layers,
        }
    }

    fn open(&self) -> Opening<'_> {
        Box::pin(async {
            let opened = FileSystem::open(&self.rig.config(), self.options.clone()).await;
            let tier: Arc<dyn Tier> = Arc::new(opened.unwrap());
            match &self.layers {
                None => tier,
                Some(options) => layered(tier, options).tier,
            }
        })
    }
}

impl Subject for Shared {
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
    passes_the_suite!(Shared::new(Options::default(), None));
}

mod without_links {
    use super::*;

    fn renaming() -> Options {
        Options {
            links: false,
            ..quiet()
        }
    }

    passes_the_suite!(Shared::new(renaming(), None));
}

mod with_layers {
    use super::*;
    passes_the_suite!(Shared::new(
        Options::default(),
        Some(LayerOptions::default())
    ));
}
