//! On or off: a folder that failed is not touched until it is due to be tried again, and is then opened anew.

use super::Options;
use super::commit::End;
use super::core::{Core, Fault};
use super::fault::closed;
use super::lock::Lock;
use super::space::At;
use super::state::Counts;
use crate::TierError;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

/// What an operation may use.
#[derive(Debug)]
pub enum Answer {
    /// The folder.
    Core(Arc<Core>),
    /// Nothing, and why.
    Off(TierError),
    /// It is due: call [`Live::probe`] where blocking is allowed.
    Probe,
}

#[derive(Debug)]
enum State {
    On(Arc<Core>),
    Off {
        fault: Fault,
        /// Operations may still be under way in it; while they are, the folder is not opened again.
        before: Weak<Core>,
        due: Instant,
    },
    /// It was off when it ended: the folder is not opened any more.
    Ended,
}

/// A folder, on or off.
#[derive(Debug)]
pub struct Live {
    path: PathBuf,
    capacity: u64,
    options: Options,
    state: Mutex<State>,
    /// Held also while the tier is off: the folder stays this process's.
    lock: Mutex<Arc<Lock>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Slots that could not be read since this process began.
    bad: Mutex<BTreeSet<At>>,
    /// One at a time opens the folder.
    probing: Mutex<()>,
}

impl Live {
    /// Opens the folder.
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

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Most bytes of container files.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// What an operation may use now.
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
            return Answer::Off(closed());
        };
        if now < *due {
            return Answer::Off(fault.error.clone());
        }
        // One operation probes; the others go on being refused.
        *due = now + self.options.probe_every;
        Answer::Probe
    }

    /// Opens the folder again. Blocks.
    pub fn probe(&self) -> Result<Arc<Core>, TierError> {
        let _one = self.probing.lock();
        let (fault, busy) = match &*self.state.lock() {
            State::On(core) => return Ok(core.clone()),
            State::Off { fault, before, .. } => (fault.clone(), before.strong_count() > 0),
            State::Ended => return Err(closed()),
        };
        if busy {
            // Whoever writes there still may write to a slot that would be another object's.
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
        self.threads.lock().push(thread);
        let mut state = self.state.lock();
        if matches!(*state, State::Ended) {
            // Nobody else would end its thread.
            core.end(End::AsItIs);
            return Err(closed());
        }
        *state = State::On(core.clone());
        Ok(core)
    }

    /// The folder, where it is on.
    pub fn now(&self) -> Option<Arc<Core>> {
        match &*self.state.lock() {
            State::On(core) if core.fault().is_none() => Some(core.clone()),
            _ => None,
        }
    }

    /// What happened since the folder was opened; zero while it is off.
    pub fn counts(&self) -> Counts {
        let now = self.now();
        now.map(|core| core.state.lock().counts).unwrap_or_default()
    }

    /// Why it is off.
    pub fn off(&self) -> Option<TierError> {
        let fault = match &*self.state.lock() {
            State::On(core) => core.fault(),
            State::Off { fault, .. } => Some(fault.clone()),
            State::Ended => return Some(closed()),
        };
        fault.map(|fault| fault.error)
    }

    /// Ends the thread that commits, and that of an opening that is under way.
    pub fn end(&self, end: End) {
        let mut state = self.state.lock();
        match &*state {
            State::On(core) => core.end(end),
            State::Off { .. } | State::Ended => *state = State::Ended,
        }
    }

    /// Waits for threads that commit.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }
}
