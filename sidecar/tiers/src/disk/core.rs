//! One opening of a folder: its state, its faults, and what operations on it hold.

use super::Options;
use super::commit::{Changes, End};
use super::fault::{failed, of_the_folder};
use super::folder::Folder;
use super::load::load;
use super::lock::Lock;
use super::name::NameKey;
use super::space::At;
use super::state::{Bounds, State};
use crate::{Cause, TierError};
use kvcachepool_protocol::config::disk_objects_max;
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::watch;

/// Points in operations at which tests stop them or make them fail. No effect otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Before a container is created.
    Make,
    /// A slot is taken, nothing is written.
    Write,
    /// All bytes are written.
    Written,
    /// Before the bytes are synced.
    SyncData,
    /// Before the journal is extended.
    Reserve,
    /// Before records are written.
    Append,
    /// Before records are synced.
    SyncJournal,
    /// The records are durable.
    Durable,
    /// An object is pinned; before its header is read.
    Read,
    /// Before its sections are read.
    ReadSections,
    /// A snapshot is written, not synced.
    SnapshotWritten,
    /// The next journal exists; the snapshot is not renamed yet.
    JournalMade,
    /// The snapshot is renamed; files of the previous generation still exist.
    SnapshotNamed,
}

/// Why a folder cannot be used any more.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The result of every operation.
    pub error: TierError,
    /// The slot that could not be read or written. Its object is dropped at the next open, and the slot is not used any more.
    pub suspect: Option<At>,
}

/// An open folder in use.
#[derive(Debug)]
pub struct Core {
    pub folder: Folder,
    pub state: Mutex<State>,
    /// Changes that wait to be made durable.
    pub changes: Changes,
    pub options: Options,
    /// Whether direct I/O is used.
    pub direct: bool,
    /// Most bytes of container files.
    pub capacity: u64,
    fault: Mutex<Option<Fault>>,
    /// Held while room is made: one operation at a time.
    pub making: Mutex<()>,
    lock: Arc<Lock>,
}

impl Core {
    /// Claims and reads the folder, and starts the commit thread, which is also returned.
    pub fn open(
        path: &Path,
        capacity: u64,
        options: &Options,
        lock: Option<Arc<Lock>>,
    ) -> Result<(Arc<Self>, std::thread::JoinHandle<()>), TierError> {
        let folder = Folder::open(path)?;
        let lock = folder.claim(lock)?;
        let bounds = Bounds {
            capacity,
            high: percent(capacity, options.high_percent),
            low: percent(capacity, options.low_percent.min(options.high_percent)),
            objects: usize::try_from(disk_objects_max(capacity)).unwrap_or(usize::MAX),
        };
        let (state, journal) = load(&folder, bounds)?;
        let state = Mutex::new(state);
        let direct = loop {
            match folder.probe(options.direct) {
                Ok(direct) => break direct,
                Err(e) if e.cause == Cause::Full => {
                    let coldest = state.lock().drain_coldest(None);
                    let file = coldest.ok_or(e)?;
                    folder.remove(&file.name())?;
                }
                Err(e) => return Err(e),
            }
        };
        let core = Arc::new(Self {
            folder,
            state,
            changes: Changes::default(),
            options: options.clone(),
            direct,
            capacity,
            fault: Mutex::new(None),
            making: Mutex::new(()),
            lock,
        });
        let committing = core.clone();
        let thread = std::thread::Builder::new()
            .name("disk-commit".to_string())
            .spawn(move || super::commit::run(&committing, journal))
            .map_err(|e| failed("start a thread for", &path.display().to_string(), e))?;
        Ok((core, thread))
    }

    pub fn lock(&self) -> Arc<Lock> {
        self.lock.clone()
    }

    /// Lets tests stop or fail operations here.
    #[cfg(test)]
    pub fn step(&self, step: Step) -> io::Result<()> {
        self.options.watch.step(step)
    }

    /// Lets tests stop or fail operations here.
    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    pub fn step(&self, _: Step) -> io::Result<()> {
        Ok(())
    }

    /// [`Core::step`] for places where no other error names the operation.
    pub fn step_of(&self, what: &str, step: Step) -> Result<(), TierError> {
        self.step(step).map_err(|e| failed("write", what, e))
    }

    /// The fault that stopped its use, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.fault.lock().clone()
    }

    /// Fails if the folder cannot be used.
    pub fn check(&self) -> Result<(), TierError> {
        match &*self.fault.lock() {
            Some(fault) => Err(fault.error.clone()),
            None => Ok(()),
        }
    }

    /// Stops all use of the folder: nothing more is written.
    pub fn turn_off(&self, error: &TierError, suspect: Option<At>) {
        self.fault.lock().get_or_insert_with(|| Fault {
            error: TierError {
                object: None,
                ..error.clone()
            },
            suspect: suspect.filter(|_| error.cause == Cause::Io),
        });
        self.changes.fail(error);
    }

    /// Ends the commit thread.
    pub fn end(&self, end: End) {
        self.changes.end(end);
    }

    /// Stops all use of the folder if the error concerns the whole folder.
    pub fn blame(&self, error: TierError, suspect: Option<At>) -> TierError {
        if of_the_folder(error.cause) {
            self.turn_off(&error, suspect);
        }
        error
    }
}

fn percent(of: u64, percent: u8) -> u64 {
    (u128::from(of) * u128::from(percent.min(100)) / 100) as u64
}

/// A slot that is being written. It is freed on drop unless its object is published.
#[derive(Debug)]
pub struct HeldSlot {
    core: Arc<Core>,
    pub at: At,
    published: bool,
}

impl HeldSlot {
    /// Guards a slot that was taken.
    pub fn new(core: &Arc<Core>, at: At) -> Self {
        Self {
            core: core.clone(),
            at,
            published: false,
        }
    }

    /// Hands the slot to the published object.
    pub fn publish(mut self) {
        self.published = true;
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        if !self.published {
            self.core.state.lock().release(self.at);
        }
    }
}

/// The right to write an object. Its drop wakes waiting writers.
#[derive(Debug)]
pub struct Claim {
    core: Arc<Core>,
    key: NameKey,
    _ends: watch::Sender<()>,
}

impl Claim {
    /// For an object that no other writer has claimed.
    pub fn new(core: &Arc<Core>, key: NameKey, ends: watch::Sender<()>) -> Self {
        Self {
            core: core.clone(),
            key,
            _ends: ends,
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.core.state.lock().writing.remove(&self.key);
    }
}
