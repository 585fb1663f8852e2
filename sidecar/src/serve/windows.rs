//! Windows of workers: one thread each (`window.rs`), and their messages to the driver. A window ends with its connection, after the
//! copies in flight.

use super::shell::Shell;
use super::window::Window;
use kvcachepool_engine::driver;
use kvcachepool_engine::sessions::{ConnId, ProcessId, WindowId, WindowJob};
use kvcachepool_gpu::copy_engine::Slots;
use kvcachepool_gpu::device::NoWindow;
use kvcachepool_gpu::room::{Place, Room};
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::limit;
use kvcachepool_memory::memfd::Pages;
use kvcachepool_protocol::message::WindowReply;
use kvcachepool_protocol::window::{Order, Reason, Unavailable};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};

/// A window's reply to WINDOW.
pub(super) type Answer = Result<Passed, NoWindow>;
/// Body and descriptors of a successful reply.
pub(super) type Passed = (WindowReply, Vec<Arc<OwnedFd>>);

pub(super) enum Command {
    /// The worker reports that it wrote the pattern's complement.
    Confirm { tag: u64 },
}

/// Sends commands to a window's thread, which ends when this is dropped.
struct Handle {
    commands: Option<Sender<Command>>,
    poke: Arc<OwnedFd>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.commands = None;
        wake(&self.poke);
    }
}

fn wake(poke: &OwnedFd) {
    // A full counter wakes its reader too.
    let _ = rustix::io::write(poke.as_fd(), &1u64.to_ne_bytes());
}

#[derive(Default)]
pub struct Windows {
    by_conn: Mutex<HashMap<ConnId, Handle>>,
    /// Wake the threads of windows, which may outlive their connections.
    pokes: Mutex<HashMap<ProcessId, Arc<OwnedFd>>>,
    host_room: Arc<Room>,
    /// Copies that failed or hang and may not have ended.
    doubts: Mutex<u64>,
}

impl Windows {
    /// Starts to create a window; its own thread sends the reply.
    pub fn open(
        &self,
        shell: &Weak<Shell>,
        arena: Option<Arena>,
        job: WindowJob,
    ) -> Result<(), NoWindow> {
        let arena = arena
            .ok_or_else(|| NoWindow::new(Unavailable::Busy, "the sidecar has no memory tier"))?;
        let failed = |e: &dyn std::fmt::Display| NoWindow::new(Unavailable::OutOfMemory, e);
        let poke = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let poke = Arc::new(poke.map_err(|e| failed(&e))?);
        let (commands, queue) = channel();
        let (conn, process) = (job.window.conn, job.process);
        let owner = Owner {
            shell: shell.clone(),
            id: job.window,
            process,
            region: arena.geometry.region,
        };
        let (room, theirs) = (self.host_room.clone(), poke.clone());
        std::thread::Builder::new()
            .name("window".into())
            .spawn(move || {
                owner.serve(arena, &room, &job, theirs, &queue);
                owner.released();
            })
            .map_err(|e| failed(&e))?;
        self.pokes.lock().insert(process, poke.clone());
        let commands = Some(commands);
        self.by_conn.lock().insert(conn, Handle { commands, poke });
        Ok(())
    }

    /// Asks the connection's window to check for the pattern's complement. False: it has none.
    pub fn confirm(&self, window: WindowId) -> bool {
        let by_conn = self.by_conn.lock();
        by_conn.get(&window.conn).is_some_and(|handle| {
            let tag = window.tag;
            let commands = handle.commands.as_ref();
            let told = commands.is_some_and(|c| c.send(Command::Confirm { tag }).is_ok());
            wake(&handle.poke);
            told
        })
    }

    fn in_doubt(&self, shell: &Shell, now: u64, before: u64) {
        let mut doubts = self.doubts.lock();
        *doubts = *doubts + now - before;
        match *doubts {
            0 => shell.daemon.recovered("CopyInDoubt"),
            copies => shell.daemon.degrade(
                "CopyInDoubt",
                format!(
                    "{copies} GPU copies failed or hang and may still run; their slots are not used until the sidecar restarts"
                ),
            ),
        }
    }

    /// A process is proven dead; the core already knows.
    pub fn unmapped(&self, process: ProcessId) {
        if let Some(poke) = self.pokes.lock().get(&process) {
            wake(poke);
        }
    }

    pub fn close(&self, conn: ConnId) {
        self.by_conn.lock().remove(&conn);
    }
}

/// The connection that a window belongs to, and the way to the core.
pub(super) struct Owner {
    shell: Weak<Shell>,
    id: WindowId,
    process: ProcessId,
    region: u64,
}

impl Owner {
    /// Replies to WINDOW; with `memory` the window works from now on. False: the worker does not get the reply.
    pub(super) fn answer(&self, tag: u64, answer: Answer, memory: Option<String>) -> bool {
        let Some(shell) = self.shell.upgrade() else {
            return false;
        };
        let answer = answer.map_err(|none| none.to_string());
        driver::window_answered(&mut shell.devices(), self.id, tag, answer, memory)
    }

    /// Creates the window and runs it to its end.
    fn serve(
        &self,
        arena: Arena,
        room: &Arc<Room>,
        job: &WindowJob,
        poke: Arc<OwnedFd>,
        queue: &Receiver<Command>,
    ) {
        let tag = self.id.tag;
        match self.make(arena, room, job, poke) {
            Ok((_place, mut made, reply)) => {
                let passed = self.answer(tag, Ok(reply), None);
                made.run(self, queue);
                self.over();
                // A worker that never got the reply has nothing mapped.
                if passed {
                    made.outlive(self);
                }
            }
            Err(none) => {
                self.answer(tag, Err(none), None);
            }
        }
    }

    /// Creates the window and reserves its place.
    fn make(
        &self,
        arena: Arena,
        room: &Arc<Room>,
        job: &WindowJob,
        poke: Arc<OwnedFd>,
    ) -> Result<(Option<Place>, Window, Passed), NoWindow> {
        let place = match job.device_uuid.is_empty() {
            true => Some(self.host_place(room, &arena, job.bytes)?),
            false => None,
        };
        let (made, reply) = Window::make(arena, &job.device_uuid, job.bytes, poke)?;
        Ok((place, made, reply))
    }

    /// Whether the worker's process is proven dead. [`Windows::unmapped`] wakes the waiting thread.
    pub(super) fn worker_died(&self) -> bool {
        let shell = self.shell.upgrade();
        shell.is_none_or(|shell| !shell.with_core(|core, _, _| core.lives(self.process)))
    }

    /// Reserves room for a window in host memory, beside the arena and all other windows.
    fn host_place(&self, room: &Arc<Room>, arena: &Arena, bytes: u64) -> Result<Place, NoWindow> {
        let shell = self.shell.upgrade();
        let config = shell.map(|shell| shell.config()).unwrap_or_default();
        let geometry = arena.geometry.of_size(arena.capacity_bytes());
        let pages = Pages::of(&arena.arena_fd);
        room.take(|windows| {
            let others = config.extras_bytes() + (windows - 1) * bytes;
            limit::check(&geometry, pages, others).map_err(|e| e.to_string())
        })
    }

    /// Updates the count of copies in doubt from `before` to `now`.
    pub(super) fn in_doubt(&self, now: u64, before: u64) {
        let Some(shell) = self.shell.upgrade() else {
            return;
        };
        shell.windows.in_doubt(&shell, now, before);
        let reason =
            "CopyInDoubt: a GPU copy failed or hangs; this window is not used any more".into();
        driver::window_ended(&mut shell.devices(), self.id, reason);
    }

    /// Ends copying. If the connection continues, it has no window then.
    fn over(&self) {
        if let Some(shell) = self.shell.upgrade() {
            driver::window_ended(&mut shell.devices(), self.id, "HungUp".into());
        }
    }

    /// Nothing of the window is left.
    fn released(&self) {
        if let Some(shell) = self.shell.upgrade() {
            // Under the lock: the process's next window adds another one.
            let mut devices = shell.devices();
            shell.windows.pokes.lock().remove(&self.process);
            driver::window_released(&mut devices, self.process);
        }
    }
}

impl Slots for Owner {
    fn begins(&self, order: &Order) -> Result<(), Reason> {
        let shell = self.shell.upgrade().ok_or(Reason::Closed)?;
        let begins =
            shell.with_core(|core, _, _| core.window_copy_begins(self.id, self.region, order));
        if let Err(reason) = begins {
            let labels = [order.direction.name(), &format!("{reason:?}")];
            shell.metrics.add("window_copies_total", &labels, 1);
        }
        begins
    }

    fn in_doubt(&self, order: &Order) {
        if let Some(shell) = self.shell.upgrade() {
            let labels = [order.direction.name(), "InDoubt"];
            shell.metrics.add("window_copies_total", &labels, 1);
        }
    }

    fn ended(&self, order: &Order, moved: bool) {
        let Some(shell) = self.shell.upgrade() else {
            return;
        };
        shell.with_core(|core, now, out| core.window_copy_ended(now, order, out));
        let direction = order.direction.name();
        let result = if moved { "Moved" } else { "CopyFailed" };
        shell
            .metrics
            .add("window_copies_total", &[direction, result], 1);
        if moved {
            let bytes = order.runs.iter().map(|(_, run)| u64::from(run.bytes)).sum();
            shell
                .metrics
                .add("window_copied_bytes_total", &[direction], bytes);
        }
    }
}
