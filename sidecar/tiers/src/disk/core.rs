//! One opening of a folder: what is known of it, whether it can be used, and what operations on it hold.

use super::Options;
use super::commit::{Changes, End};
use super::fault::{failed, of_the_folder};
use super::folder::Folder;
use super::load::load;
use super::lock::Lock;
use super::name::NameKey;
use super::space::At;
use super::state::{Bounds, Plan, State};
use crate::{Cause, TierError};
use kvcachepool_protocol::config::disk_objects_max;
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::watch;

/// Where an operation is. Tests stop or fail it there; else it means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// A container is about to be made.
    Make,
    /// A slot was taken, nothing is written.
    Write,
    /// All bytes are written.
    Written,
    /// They are about to be synced.
    SyncData,
    /// The journal is about to be extended.
    Reserve,
    /// Records are about to be written.
    Append,
    /// They are about to be synced.
    SyncJournal,
    /// They are durable.
    Durable,
    /// An object is pinned; its head is about to be read.
    Read,
    /// Its sections are about to be read.
    ReadSections,
    /// A snapshot is written, not synced.
    SnapshotWritten,
    /// The next journal is there; the snapshot has no name yet.
    JournalMade,
    /// It has its name; files of the generation before are still there.
    SnapshotNamed,
}

/// Why a folder cannot be used any more.
#[derive(Debug, Clone)]
pub struct Fault {
    /// What every operation answers.
    pub error: TierError,
    /// Where something could not be read or written: what lies there is given up when the folder is opened again, and the slot is not used any more.
    pub suspect: Option<At>,
}

/// An open folder in use.
#[derive(Debug)]
pub struct Core {
    /// The folder.
    pub folder: Folder,
    /// Index and slots.
    pub state: Mutex<State>,
    /// What waits to be made durable.
    pub changes: Changes,
    /// As it was opened.
    pub options: Options,
    /// Direct I/O is used.
    pub direct: bool,
    /// Most bytes of container files.
    pub capacity: u64,
    fault: Mutex<Option<Fault>>,
    /// One at a time makes room.
    pub making: Mutex<()>,
    lock: Arc<Lock>,
}

impl Core {
    /// Claims and reads the folder, and starts the thread that commits. Returns that too.
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
                    let plan = state.lock().drain_coldest(None);
                    let Some(Plan::Unlink(file)) = plan else {
                        return Err(e);
                    };
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

    /// The lock of the folder.
    pub fn lock(&self) -> Arc<Lock> {
        self.lock.clone()
    }

    /// Tests stop or fail operations here.
    #[cfg(test)]
    pub fn step(&self, step: Step) -> io::Result<()> {
        self.options.watch.step(step)
    }

    /// Tests stop or fail operations here.
    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    pub fn step(&self, _: Step) -> io::Result<()> {
        Ok(())
    }

    /// [`Core::step`] where no other error says what was being done.
    pub fn step_of(&self, what: &str, step: Step) -> Result<(), TierError> {
        self.step(step).map_err(|e| failed("write", what, e))
    }

    /// Why it cannot be used, if so.
    pub fn fault(&self) -> Option<Fault> {
        self.fault.lock().clone()
    }

    /// Can it be used?
    pub fn check(&self) -> Result<(), TierError> {
        match &*self.fault.lock() {
            Some(fault) => Err(fault.error.clone()),
            None => Ok(()),
        }
    }

    /// Ends all use of it: nothing is written any more.
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

    /// Ends the thread that commits.
    pub fn end(&self, end: End) {
        self.changes.end(end);
    }

    /// An error that is the folder's ends all use of it.
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

/// A slot that is being written; free again where its object is never published.
#[derive(Debug)]
pub struct HeldSlot {
    core: Arc<Core>,
    /// Which.
    pub at: At,
    published: bool,
}

impl HeldSlot {
    /// A slot that was taken.
    pub fn new(core: &Arc<Core>, at: At) -> Self {
        Self {
            core: core.clone(),
            at,
            published: false,
        }
    }

    /// It is an object's.
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

/// The right to write an object; the next one may when it is dropped.
#[derive(Debug)]
pub struct Claim {
    core: Arc<Core>,
    key: NameKey,
    _ends: watch::Sender<()>,
}

impl Claim {
    /// Of an object that nobody else has claimed.
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
