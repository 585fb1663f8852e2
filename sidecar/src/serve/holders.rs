//! Which processes have a window, or may still have an old one mapped. One per process, so that unreleased windows cannot pile up.

use kvcachepool_engine::sessions::ProcessId;
use kvcachepool_gpu::device::NoWindow;
use kvcachepool_protocol::window::Unavailable;
use parking_lot::{Condvar, Mutex};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a new window waits for the previous one: its running copies end, and the worker unmaps it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Eventfds that wake the window threads, by process.
#[derive(Default)]
pub(super) struct Holders {
    by_process: Mutex<HashMap<ProcessId, Arc<OwnedFd>>>,
    left: Condvar,
}

/// A process holds its window for as long as this value lives.
pub(super) struct Hold {
    holders: Arc<Holders>,
    process: ProcessId,
}

impl Holders {
    /// Registers a window of the process; `poke` is its thread's eventfd. Waits a short time for the previous window.
    pub(super) fn take(
        self: &Arc<Self>,
        process: ProcessId,
        poke: Arc<OwnedFd>,
    ) -> Result<Hold, NoWindow> {
        let until = Instant::now() + PATIENCE;
        let mut by_process = self.by_process.lock();
        while by_process.contains_key(&process) {
            if self.left.wait_until(&mut by_process, until).timed_out() {
                let said = "the previous window is still mapped, or its copies are in flight";
                return Err(NoWindow::new(Unavailable::Busy, said));
            }
        }
        by_process.insert(process, poke);
        Ok(Hold {
            holders: self.clone(),
            process,
        })
    }

    /// Wakes the thread of the process's window.
    pub(super) fn wake(&self, process: ProcessId) {
        if let Some(poke) = self.by_process.lock().get(&process) {
            // A full counter wakes its reader too.
            let _ = rustix::io::write(poke.as_fd(), &1u64.to_ne_bytes());
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.holders.by_process.lock().remove(&self.process);
        self.holders.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn a_process_has_one_window_and_the_next_waits_for_its_end() {
        let holders = Arc::new(Holders::default());
        let poke = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let first = holders.take(ProcessId(1), poke.clone()).unwrap();
        let other = holders.take(ProcessId(2), poke.clone());
        assert!(other.is_ok(), "another process");
        let (waiting, fd) = (holders.clone(), poke.clone());
        let next = std::thread::spawn(move || waiting.take(ProcessId(1), fd).map(drop));
        holders.wake(ProcessId(1));
        let mut count = [0u8; 8];
        rustix::io::read(poke.as_fd(), &mut count).unwrap();
        drop(first);
        assert!(next.join().unwrap().is_ok());
    }
}
