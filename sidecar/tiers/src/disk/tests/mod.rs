//! The disk tier as its users see it, stopped and failed at each of its steps.

mod crash;
mod drops;
mod faults;
mod folders;
mod objects;
mod processes;
mod refused;
mod rig;
mod room;
mod slots;
mod suite;
mod syncs;

use super::core::Step;
use std::fmt;
use std::io;
use std::sync::Arc;

type Watcher = dyn Fn(Step) -> io::Result<()> + Send + Sync;

/// Is asked at every step of every operation: may block it, or fail it.
#[derive(Clone, Default)]
pub(crate) struct Watch(Option<Arc<Watcher>>);

impl Watch {
    /// What `f` says.
    pub(crate) fn new(f: impl Fn(Step) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(f)))
    }

    /// What happens at this step.
    pub(crate) fn step(&self, step: Step) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |watcher| watcher(step))
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}
