//! Whether a shared tier may be changed. The settings decide, and may change while the tier is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The current setting, shared by all clones.
#[derive(Debug, Clone)]
pub struct Writes(Arc<AtomicBool>);

impl Writes {
    pub fn new(writes: bool) -> Self {
        Self(Arc::new(AtomicBool::new(writes)))
    }

    pub fn set(&self, writes: bool) {
        self.0.store(writes, Relaxed);
    }

    pub fn get(&self) -> bool {
        self.0.load(Relaxed)
    }
}

impl Default for Writes {
    fn default() -> Self {
        Self::new(true)
    }
}
