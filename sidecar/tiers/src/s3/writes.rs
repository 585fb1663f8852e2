//! May anything of a bucket be changed? The settings say so, and may say otherwise while the tier is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What the settings say now. Clones say the same.
#[derive(Debug, Clone)]
pub struct Writes(Arc<AtomicBool>);

impl Writes {
    /// From the beginning on.
    pub fn new(writes: bool) -> Self {
        Self(Arc::new(AtomicBool::new(writes)))
    }

    /// From now on.
    pub fn set(&self, writes: bool) {
        self.0.store(writes, Relaxed);
    }

    /// Now.
    pub fn get(&self) -> bool {
        self.0.load(Relaxed)
    }
}

impl Default for Writes {
    fn default() -> Self {
        Self::new(true)
    }
}
