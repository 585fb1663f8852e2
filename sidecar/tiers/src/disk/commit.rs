//! Makes puts and removals durable and then visible, in batches: syncs data, appends and syncs records, updates the index. One thread
//! does it, so that the index changes in the order of the journal.

use super::core::{Claim, Core, HeldSlot, Step};
use super::fault::{closed, failed};
use super::journal::Journal;
use super::record::{RECORD_BYTES, Record};
use crate::{Cause, Kind, Stored, TierError};
use parking_lot::{Condvar, Mutex};
use rustix::fd::OwnedFd;
use rustix::fs::fdatasync;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Most changes that share a sync.
const TOGETHER: usize = 4096;

/// Receives the result of a change.
pub type Answer<T> = oneshot::Sender<Result<T, TierError>>;

/// An object whose bytes are written, but neither durable nor visible.
#[derive(Debug)]
pub struct Written {
    pub record: Record,
    pub file: Arc<OwnedFd>,
    pub slot: HeldSlot,
    /// Keeps other writers of the object out.
    pub claim: Claim,
    pub answer: Answer<Stored>,
}

#[derive(Debug)]
pub enum Change {
    /// Publish an object.
    Put(Box<Written>),
    /// Objects that are out of the index; frees their slots.
    Remove(Vec<Record>, Option<Answer<()>>),
}

impl Change {
    fn fail(self, error: &TierError) {
        match self {
            Self::Put(written) => {
                let Written {
                    slot,
                    claim,
                    answer,
                    ..
                } = *written;
                drop((slot, claim));
                let _ = answer.send(Err(error.clone()));
            }
            Self::Remove(_, Some(answer)) => {
                let _ = answer.send(Err(error.clone()));
            }
            Self::Remove(_, None) => {}
        }
    }
}

/// How the thread ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// With a snapshot, so that the next open is fast.
    Snapshot,
    /// Without a snapshot.
    AsItIs,
}

#[derive(Debug, Default)]
struct Inner {
    changes: VecDeque<Change>,
    end: Option<End>,
    /// The thread has ended or is ending: no more changes are accepted.
    ended: Option<TierError>,
}

/// Changes queued for the thread. Bounded by the number of concurrent operations.
#[derive(Debug, Default)]
pub struct Changes {
    inner: Mutex<Inner>,
    wake: Condvar,
}

impl Changes {
    /// Queues a change. Its answer is always sent.
    pub fn push(&self, change: Change) {
        let refused = {
            let mut inner = self.inner.lock();
            match (&inner.ended, inner.end) {
                (Some(error), _) => Some((error.clone(), change)),
                (None, Some(_)) => Some((closed(Kind::Disk), change)),
                (None, None) => {
                    inner.changes.push_back(change);
                    None
                }
            }
        };
        match refused {
            Some((error, change)) => change.fail(&error),
            None => {
                self.wake.notify_one();
            }
        }
    }

    /// Number of queued changes.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.inner.lock().changes.len()
    }

    /// Ends the thread after the queued changes.
    pub fn end(&self, end: End) {
        self.inner.lock().end.get_or_insert(end);
        self.wake.notify_one();
    }

    /// Ends the thread now; queued changes fail.
    pub fn fail(&self, error: &TierError) {
        let left = {
            let mut inner = self.inner.lock();
            inner.ended.get_or_insert_with(|| error.clone());
            std::mem::take(&mut inner.changes)
        };
        self.wake.notify_one();
        for change in left {
            change.fail(error);
        }
    }

    /// The next batch; `Err`: the thread must end.
    fn next(&self) -> Result<Vec<Change>, Option<End>> {
        let mut inner = self.inner.lock();
        loop {
            if inner.ended.is_some() {
                return Err(None);
            }
            if !inner.changes.is_empty() {
                let count = inner.changes.len().min(TOGETHER);
                return Ok(inner.changes.drain(..count).collect());
            }
            if let Some(end) = inner.end {
                inner.ended = Some(closed(Kind::Disk));
                return Err(Some(end));
            }
            self.wake.wait(&mut inner);
        }
    }
}

fn lost() -> TierError {
    TierError::new(Kind::Disk, Cause::Gone, "the container's file was removed")
}

/// The thread's main function.
pub fn run(core: &Core, mut journal: Journal) {
    let end = loop {
        let changes = match core.changes.next() {
            Ok(changes) => changes,
            Err(end) => break end,
        };
        match make_durable(core, &mut journal, &changes) {
            Ok(()) => make_visible(core, changes),
            Err(error) => {
                core.turn_off(&error, None);
                for change in changes {
                    change.fail(&error);
                }
            }
        }
        let objects = core.state.lock().index.len() as u64;
        if journal.is_long(objects, core.options.journal_records_min) {
            snapshot(core, &mut journal);
        }
    };
    if end == Some(End::Snapshot) && journal.records() > 0 {
        snapshot(core, &mut journal);
    }
}

fn snapshot(core: &Core, journal: &mut Journal) {
    if let Err(error) = journal.next_generation(core) {
        core.blame(error, None);
    }
}

fn make_durable(core: &Core, journal: &mut Journal, changes: &[Change]) -> Result<(), TierError> {
    core.check()?;
    journal.check(&core.folder)?;
    let mut files: HashMap<u32, &OwnedFd> = HashMap::new();
    let mut records = Vec::new();
    for change in changes {
        match change {
            Change::Put(written) => {
                files.insert(written.record.at.container, &written.file);
                written.record.write(&mut records);
            }
            Change::Remove(removed, _) => removed.iter().for_each(|r| r.write(&mut records)),
        }
    }
    for file in files.values() {
        core.step(Step::SyncData)
            .and_then(|()| Ok(fdatasync(file)?))
            .map_err(|e| failed("sync", "a container", e))?;
    }
    debug_assert!(records.len().is_multiple_of(RECORD_BYTES));
    if records.is_empty() {
        return Ok(());
    }
    make_room(core, journal, records.len() as u64)?;
    journal.append(core, &records)
}

/// A full file system has room for records again after a container is deleted, and deleting one needs no record.
fn make_room(core: &Core, journal: &mut Journal, bytes: u64) -> Result<(), TierError> {
    while let Err(e) = core
        .step(Step::Reserve)
        .and_then(|()| journal.reserve(bytes))
    {
        let error = failed("extend", "the journal", e);
        if error.cause != Cause::Full {
            return Err(error);
        }
        let coldest = core.state.lock().drain_coldest(None);
        match coldest {
            Some(file) => core.folder.remove(&file.name())?,
            // Blocks that are already allocated may suffice.
            None => return Ok(()),
        }
    }
    Ok(())
}

fn make_visible(core: &Core, changes: Vec<Change>) {
    let (mut too_many, mut published) = (Vec::new(), Vec::with_capacity(changes.len()));
    {
        let mut state = core.state.lock();
        for change in &changes {
            match change {
                Change::Put(written) => published.push(state.publish(&written.record)),
                Change::Remove(records, _) => {
                    published.push(true);
                    records.iter().for_each(|r| state.release(r.at));
                }
            }
        }
        too_many.extend(state.over_high());
    }
    if !too_many.is_empty() {
        core.changes.push(Change::Remove(too_many, None));
    }
    for (change, published) in changes.into_iter().zip(published) {
        match change {
            change if !published => change.fail(&lost()),
            Change::Put(written) => {
                let Written {
                    slot,
                    claim,
                    answer,
                    ..
                } = *written;
                slot.publish();
                drop(claim);
                let _ = answer.send(Ok(Stored::New));
            }
            Change::Remove(_, Some(answer)) => {
                let _ = answer.send(Ok(()));
            }
            Change::Remove(_, None) => {}
        }
    }
}
