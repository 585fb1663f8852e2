//! A window in host memory, for engines on CPUs and for tests of the protocol. A thread makes the copies one by one.

use super::device::{Device, DeviceError, Export, NoWindow, Part, Progress, Ticket};
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::message::WindowKind;
use kvcachepool_protocol::window::{Direction, Unavailable};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Sender, channel};

/// Bytes copied at a time, so that they stay in the cache.
const STEP_BYTES: usize = 128 << 10;

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const OUT_OF_RANGE: u8 = 2;

/// Called by the copying thread after about half of a copy's bytes.
pub type HalfWay = Box<dyn Fn() + Send>;

struct Job {
    direction: Direction,
    arena: Arc<Mapping>,
    parts: Vec<Part>,
    state: Arc<AtomicU8>,
}

/// A memfd and its copying thread.
pub struct HostDevice {
    fd: Arc<OwnedFd>,
    window: Arc<Mapping>,
    jobs: Sender<Job>,
    tickets: HashMap<Ticket, Arc<AtomicU8>>,
    next: u64,
}

impl HostDevice {
    /// Creates a window of this many bytes.
    pub fn new(bytes: u64, ended: Arc<OwnedFd>) -> Result<Self, NoWindow> {
        Self::with(bytes, ended, Box::new(|| ()))
    }

    /// Like [`HostDevice::new`], with a callback in the middle of every copy.
    pub fn with(bytes: u64, ended: Arc<OwnedFd>, half_way: HalfWay) -> Result<Self, NoWindow> {
        let none = |e: &dyn std::fmt::Display| NoWindow::new(Unavailable::OutOfMemory, e);
        let mapped = Mapping::with_fd("kvcachepool-window", bytes);
        let (fd, window) = mapped.map_err(|e| none(&e))?;
        let window = Arc::new(window);
        // Populated here, because the process that touches a page first is charged for it, and this must not be the worker.
        window.populate(0, bytes).map_err(|e| none(&e))?;
        let (jobs, queue) = channel::<Job>();
        let memory = window.clone();
        std::thread::Builder::new()
            .name("window-copy".into())
            .spawn(move || {
                for job in queue {
                    let moved = copy(&job, &memory, &half_way);
                    let state = if moved { DONE } else { OUT_OF_RANGE };
                    job.state.store(state, Ordering::Release);
                    // A full eventfd wakes its reader as well.
                    let _ = rustix::io::write(ended.as_fd(), &1u64.to_ne_bytes());
                }
            })
            .map_err(|e| none(&e))?;
        Ok(Self {
            fd: Arc::new(fd),
            window,
            jobs,
            tickets: HashMap::new(),
            next: 0,
        })
    }
}

fn copy(job: &Job, window: &Mapping, half_way: &HalfWay) -> bool {
    let bytes: u64 = job.parts.iter().map(|p| p.bytes).sum();
    let (mut moved, mut notified, mut buffer) = (0, false, vec![0; STEP_BYTES]);
    for part in &job.parts {
        let mut at = 0;
        while at < part.bytes {
            if !notified && moved >= bytes / 2 {
                half_way();
                notified = true;
            }
            let step = (part.bytes - at).min(STEP_BYTES as u64);
            let (step_buffer, _) = buffer.split_at_mut(step as usize);
            let (window_at, arena_at) = (part.window + at, part.arena + at);
            let inside = match job.direction {
                Direction::Store => {
                    window.read(window_at, step_buffer) && job.arena.write(arena_at, step_buffer)
                }
                Direction::Load => {
                    job.arena.read(arena_at, step_buffer) && window.write(window_at, step_buffer)
                }
            };
            if !inside {
                return false;
            }
            at += step;
            moved += step;
        }
    }
    true
}

impl Device for HostDevice {
    fn memory(&self) -> String {
        "host memory".into()
    }

    fn export(&self) -> Export {
        Export {
            kind: WindowKind::Host,
            fd: Some(self.fd.clone()),
            handle: Vec::new(),
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        match self.window.write(offset, bytes) {
            true => Ok(()),
            false => Err(outside()),
        }
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        match self.window.read(offset, into) {
            true => Ok(()),
            false => Err(outside()),
        }
    }

    fn begin(
        &mut self,
        direction: Direction,
        arena: &Arc<Mapping>,
        parts: Vec<Part>,
    ) -> Result<Ticket, DeviceError> {
        let state = Arc::new(AtomicU8::new(RUNNING));
        let job = Job {
            direction,
            arena: arena.clone(),
            parts,
            state: state.clone(),
        };
        self.jobs
            .send(job)
            .map_err(|_| DeviceError("the copying thread has ended".into()))?;
        self.next += 1;
        let ticket = Ticket(self.next);
        self.tickets.insert(ticket, state);
        Ok(ticket)
    }

    fn progress(&mut self, ticket: Ticket) -> Progress {
        let state = match self.tickets.get(&ticket) {
            Some(state) => state.load(Ordering::Acquire),
            None => return Progress::Failed(DeviceError("unknown ticket".into())),
        };
        if state == RUNNING {
            return Progress::Running;
        }
        self.tickets.remove(&ticket);
        match state {
            DONE => Progress::Done,
            _ => Progress::Failed(outside()),
        }
    }

    fn tells_ends(&self) -> bool {
        true
    }
}

fn outside() -> DeviceError {
    DeviceError("a part is outside of the window or the arena".into())
}
