//! On or off: after a failure a folder is not used until a retry is due, and is then opened again.

use super::Options;
use super::commit::End;
use super::core::{Core, Fault};
use super::fault::closed;
use super::lock::Lock;
use super::space::At;
use super::state::Counts;
use crate::{Kind, TierError};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

/// Access of an operation to the folder.
#[derive(Debug)]
pub enum Answer {
    Core(Arc<Core>),
    /// No access, with the reason.
    Off(TierError),
    /// A retry is due: call [`Live::probe`] where blocking is allowed.
    Probe,
}

#[derive(Debug)]
enum State {
    On(Arc<Core>),
    Off {
        fault: Fault,
        /// Operations may still run in it; until they end, the folder is not opened again.
        before: Weak<Core>,
        due: Instant,
    },
    /// Ended while off: the folder is not opened any more.
    Ended,
}

/// A folder, on or off.
#[derive(Debug)]
pub struct Live {
    path: PathBuf,
    capacity: u64,
    options: Options,
    state: Mutex<State>,
    /// Held also while the tier is off, so that no other process takes the folder.
    lock: Mutex<Arc<Lock>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Slots that could not be read since this process began.
    bad: Mutex<BTreeSet<At>>,
    /// Held by the operation that opens the folder.
    probing: Mutex<()>,
}

impl Live {
    pub fn open(path: &Path, capacity: u64, options: Options) -> Result<Self, TierError> {
        let (core, thread) = Core::open(path, capacity, &options, None)?;
        Ok(Self {
            path: path.to_owned(),
            capacity,
            options,
            lock: Mutex::new(core.lock()),
            state: Mutex::new(State::On(core)),
            threads: Mutex::new(vec![thread]),
            bad: Mutex::default(),
            probing: Mutex::new(()),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Most bytes of container files.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Access for an operation that begins now.
    pub fn core(&self) -> Answer {
        let mut state = self.state.lock();
        let now = Instant::now();
        if let State::On(core) = &*state {
            let Some(fault) = core.fault() else {
                return Answer::Core(core.clone());
            };
            *state = State::Off {
                before: Arc::downgrade(core),
                due: now + self.options.probe_every,
                fault: fault.clone(),
            };
            return Answer::Off(fault.error);
        }
        let State::Off { fault, due, .. } = &mut *state else {
            return Answer::Off(closed(Kind::Disk));
        };
        if now < *due {
            return Answer::Off(fault.error.clone());
        }
        // One operation probes; the others are still refused.
        *due = now + self.options.probe_every;
        Answer::Probe
    }

    /// Opens the folder again. Blocks.
    pub fn probe(&self) -> Result<Arc<Core>, TierError> {
        let _one = self.probing.lock();
        let (fault, busy) = match &*self.state.lock() {
            State::On(core) => return Ok(core.clone()),
            State::Off { fault, before, .. } => (fault.clone(), before.strong_count() > 0),
            State::Ended => return Err(closed(Kind::Disk)),
        };
        if busy {
            // An old writer could write to a slot that now belongs to another object.
            return Err(fault.error);
        }
        let before = self.lock.lock().clone();
        let opened = Core::open(&self.path, self.capacity, &self.options, Some(before));
        let (core, thread) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                if let State::Off { fault, .. } = &mut *self.state.lock() {
                    fault.error = error.clone();
                }
                return Err(error);
            }
        };
        let mut bad = self.bad.lock();
        bad.extend(fault.suspect);
        for at in bad.iter() {
            core.give_up(*at);
        }
        drop(bad);
        *self.lock.lock() = core.lock();
        {
            let mut threads = self.threads.lock();
            // Those of earlier openings.
            threads.retain(|thread| !thread.is_finished());
            threads.push(thread);
        }
        let mut state = self.state.lock();
        if matches!(*state, State::Ended) {
            // Nothing else would end its thread.
            core.end(End::AsItIs);
            return Err(closed(Kind::Disk));
        }
        *state = State::On(core.clone());
        Ok(core)
    }

    /// The folder, if it is on.
    pub fn now(&self) -> Option<Arc<Core>> {
        match &*self.state.lock() {
            State::On(core) if core.fault().is_none() => Some(core.clone()),
            _ => None,
        }
    }

    /// Counters since the folder was opened; zero while it is off.
    pub fn counts(&self) -> Counts {
        let now = self.now();
        now.map(|core| core.state.lock().counts).unwrap_or_default()
    }

    /// The error that turned it off.
    pub fn off(&self) -> Option<TierError> {
        let fault = match &*self.state.lock() {
            State::On(core) => core.fault(),
            State::Off { fault, .. } => Some(fault.clone()),
            State::Ended => return Some(closed(Kind::Disk)),
        };
        fault.map(|fault| fault.error)
    }

    /// Ends the commit thread, also that of an opening in progress.
    pub fn end(&self, end: End) {
        let mut state = self.state.lock();
        match &*state {
            State::On(core) => core.end(end),
            State::Off { .. } | State::Ended => *state = State::Ended,
        }
    }

    /// Commit threads that are kept to be waited for.
    #[cfg(test)]
    pub fn threads(&self) -> usize {
        self.threads.lock().len()
    }

    /// Waits for commit threads.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }
}
