//! Passed descriptors, by the id under which the core knows them.

use kvcachepool_engine::sessions::{FdFacts, FdId, FdType};
use kvcachepool_memory::facts::{self, Kind};
use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;

/// Device and inode of the live arena and slot table.
pub type Inodes = Option<[(u64, u64); 2]>;

/// Owner of every passed descriptor until it is taken or its frame is handled.
#[derive(Debug, Default)]
pub struct Descriptors {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    open: HashMap<FdId, OwnedFd>,
    live: Inodes,
}

impl Descriptors {
    /// Registers a descriptor and returns its facts.
    pub fn admit(&self, fd: OwnedFd) -> FdFacts {
        let kind = facts::look(fd.as_fd());
        let mut inner = self.inner.lock();
        let kind = match kind {
            Kind::Pidfd { .. } => FdType::Pidfd,
            Kind::Memfd { sealed, inode, .. } => FdType::Memfd {
                sealed,
                live: inner.live.is_some_and(|live| live.contains(&inode)),
            },
            Kind::Other => FdType::Other,
        };
        let id = FdId(inner.next);
        inner.next += 1;
        inner.open.insert(id, fd);
        FdFacts { id, kind }
    }

    /// Hands a descriptor over.
    pub fn take(&self, id: FdId) -> Option<OwnedFd> {
        self.inner.lock().open.remove(&id)
    }

    /// Closes those that were not taken.
    pub fn close<'a>(&self, facts: impl IntoIterator<Item = &'a FdFacts>) {
        let mut inner = self.inner.lock();
        for fact in facts {
            inner.open.remove(&fact.id);
        }
    }

    /// Sets the files of the live arena.
    pub fn set_live(&self, live: Inodes) {
        self.inner.lock().live = live;
    }
}
