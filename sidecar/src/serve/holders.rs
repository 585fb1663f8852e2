//! Which processes have a window, or may still have one mapped that ended: one each, so that what a worker does not let go of cannot pile up.

use kvcachepool_engine::sessions::ProcessId;
use kvcachepool_gpu::device::NoWindow;
use kvcachepool_protocol::window::Unavailable;
use parking_lot::{Condvar, Mutex};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A window that ends makes way for the next one within this: the copies under way end, and the worker unmaps it.
const PATIENCE: Duration = Duration::from_secs(2);

/// By process, what wakes the thread of its window.
#[derive(Default)]
pub(super) struct Holders {
    by_process: Mutex<HashMap<ProcessId, Arc<OwnedFd>>>,
    left: Condvar,
}

/// A process has a window for as long as this lives.
pub(super) struct Hold {
    holders: Arc<Holders>,
    process: ProcessId,
}

impl Holders {
    /// The process has a window from now on; `poke` is its thread's eventfd. Waits a little for the one before.
    pub(super) fn take(
        self: &Arc<Self>,
        process: ProcessId,
        poke: Arc<OwnedFd>,
    ) -> Result<Hold, NoWindow> {
        let until = Instant::now() + PATIENCE;
        let mut by_process = self.by_process.lock();
        while by_process.contains_key(&process) {
            if self.left.wait_until(&mut by_process, until).timed_out() {
                let said = "the window before is still mapped, or copies of it are under way";
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
            // A counter that is full wakes its reader as well.
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
