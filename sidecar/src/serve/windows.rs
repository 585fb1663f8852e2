//! Windows of workers: one thread each (`window.rs`), and their messages to the core and the socket. A window ends with its
//! connection, after the copies in flight.

use super::holders::{Hold, Holders};
use super::shell::Shell;
use super::window::Window;
use kvcachepool_engine::sessions::{ConnId, Input, ProcessId, WindowId, WindowNews};
use kvcachepool_gpu::copy_engine::Slots;
use kvcachepool_gpu::device::NoWindow;
use kvcachepool_gpu::room::{Place, Room};
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::limit;
use kvcachepool_memory::memfd::Pages;
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_FDS, FLAG_REPLY, Op, frame};
use kvcachepool_protocol::message::{ErrorBody, ErrorCode, WindowReply, encode};
use kvcachepool_protocol::window::{Order, Reason, Unavailable};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};

/// A window's reply to WINDOW.
pub(super) type Answer = Result<Passed, NoWindow>;
/// Body and descriptors of a successful reply.
pub(super) type Passed = (WindowReply, Vec<Arc<OwnedFd>>);

/// What a window occupies while it exists.
type Places = (Hold, Option<Place>);

pub(super) enum Command {
    /// The worker reports that it wrote the pattern's complement.
    Confirm { tag: u64 },
}

/// Sends commands to a window's thread, which ends when this is dropped.
struct Handle {
    commands: Option<Sender<Command>>,
    poke: Arc<OwnedFd>,
}

impl Handle {
    fn wake(&self) {
        // A full counter wakes its reader too.
        let _ = rustix::io::write(self.poke.as_fd(), &1u64.to_ne_bytes());
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.commands = None;
        self.wake();
    }
}

#[derive(Default)]
pub struct Windows {
    by_conn: Mutex<HashMap<ConnId, Handle>>,
    host_room: Arc<Room>,
    holders: Arc<Holders>,
    /// Copies that failed or hang and may not have ended.
    doubts: Mutex<u64>,
}

impl Windows {
    /// Starts to create a window; its own thread sends the reply.
    pub fn open(
        &self,
        shell: &Weak<Shell>,
        arena: Option<Arena>,
        window: WindowId,
        process: ProcessId,
        device_uuid: String,
        bytes: u64,
    ) {
        let begun = arena
            .ok_or_else(|| NoWindow::new(Unavailable::Busy, "there is no arena"))
            .and_then(|arena| {
                let wish = Wish {
                    window,
                    process,
                    device_uuid,
                    bytes,
                };
                let (room, holders) = (self.host_room.clone(), self.holders.clone());
                begin(shell.clone(), arena, room, holders, wish)
            });
        match begun {
            Ok(handle) => {
                self.by_conn.lock().insert(window.conn, handle);
            }
            Err(none) => refuse_later(shell, window, none),
        }
    }

    /// Asks the connection's window to check for the pattern's complement.
    pub fn confirm(&self, shell: &Weak<Shell>, window: WindowId) {
        let by_conn = self.by_conn.lock();
        let told = by_conn.get(&window.conn).is_some_and(|handle| {
            let tag = window.tag;
            let commands = handle.commands.as_ref();
            let told = commands.is_some_and(|c| c.send(Command::Confirm { tag }).is_ok());
            handle.wake();
            told
        });
        if !told {
            let none = NoWindow::new(Unavailable::Busy, "this connection has no window");
            refuse_later(shell, window, none);
        }
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
    pub fn died(&self, process: ProcessId) {
        self.holders.wake(process);
    }

    pub fn close(&self, conn: ConnId) {
        self.by_conn.lock().remove(&conn);
    }
}

/// A worker's request for a window.
struct Wish {
    window: WindowId,
    process: ProcessId,
    device_uuid: String,
    bytes: u64,
}

fn begin(
    shell: Weak<Shell>,
    arena: Arena,
    room: Arc<Room>,
    holders: Arc<Holders>,
    wish: Wish,
) -> Result<Handle, NoWindow> {
    let failed = |e: &dyn std::fmt::Display| NoWindow::new(Unavailable::OutOfMemory, e);
    let poke = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let poke = Arc::new(poke.map_err(|e| failed(&e))?);
    let (commands, queue) = channel();
    let handle = Handle {
        commands: Some(commands),
        poke: poke.clone(),
    };
    std::thread::Builder::new()
        .name("window".into())
        .spawn(move || {
            let owner = Owner {
                shell,
                id: wish.window,
                process: wish.process,
                region: arena.geometry.region,
            };
            match owner.make(arena, &room, &holders, &wish, poke) {
                Ok((_places, mut made, reply)) => {
                    let passed = owner.answer(wish.window.tag, Ok(reply), None);
                    made.run(&owner, &queue);
                    owner.over();
                    // A worker that never got the reply has nothing mapped.
                    if passed {
                        made.outlive(&owner);
                    }
                }
                Err(none) => {
                    owner.answer(wish.window.tag, Err(none), None);
                }
            }
        })
        .map_err(|e| failed(&e))?;
    Ok(handle)
}

/// For a caller that holds the shell's lock.
fn refuse_later(shell: &Weak<Shell>, window: WindowId, none: NoWindow) {
    let Some(shell) = shell.upgrade() else {
        return;
    };
    tokio::spawn(async move {
        let reason = none.to_string();
        tell(
            &shell,
            window,
            window.tag,
            Err(none),
            Some(WindowNews::Unavailable { reason }),
        );
    });
}

/// Replies to WINDOW. The core learns of the window before the worker can use it. False: the worker does not get the reply.
fn tell(
    shell: &Shell,
    window: WindowId,
    tag: u64,
    answer: Answer,
    news: Option<WindowNews>,
) -> bool {
    if let Some(news) = news {
        shell.drive(Input::Window { window, news });
    }
    let (flags, body, fds) = match answer {
        Ok((reply, fds)) => {
            let flags = if fds.is_empty() { 0 } else { FLAG_FDS };
            (flags, encode(&reply), fds)
        }
        Err(none) => {
            let error = ErrorBody {
                code: ErrorCode::WindowUnavailable,
                message: none.to_string(),
                retryable: false,
            };
            (FLAG_ERROR, encode(&error), Vec::new())
        }
    };
    body.is_ok_and(|body| {
        let reply = frame(Op::Window, FLAG_REPLY | flags, tag, &body);
        shell.send(window.conn, reply, fds)
    })
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
        let news = match (&answer, memory) {
            (Err(none), _) => Some(WindowNews::Unavailable {
                reason: none.to_string(),
            }),
            (Ok(_), memory) => memory.map(|memory| WindowNews::Works { memory }),
        };
        tell(&shell, self.id, tag, answer, news)
    }

    /// Creates the window and what it occupies.
    fn make(
        &self,
        arena: Arena,
        room: &Arc<Room>,
        holders: &Arc<Holders>,
        wish: &Wish,
        poke: Arc<OwnedFd>,
    ) -> Result<(Places, Window, Passed), NoWindow> {
        let hold = holders.take(self.process, poke.clone())?;
        let place = match wish.device_uuid.is_empty() {
            true => Some(self.host_place(room, &arena, wish.bytes)?),
            false => None,
        };
        let (made, reply) = Window::make(arena, &wish.device_uuid, wish.bytes, poke)?;
        Ok(((hold, place), made, reply))
    }

    /// Whether the worker's process is proven dead. [`Windows::died`] wakes the waiting thread.
    pub(super) fn worker_died(&self) -> bool {
        let shell = self.shell.upgrade();
        shell.is_none_or(|shell| !shell.with_core(|core, _, _| core.lives(self.process)))
    }

    /// Reserves room for a window in host memory, beside the arena and all other windows.
    fn host_place(&self, room: &Arc<Room>, arena: &Arena, bytes: u64) -> Result<Place, NoWindow> {
        let shell = self.shell.upgrade();
        let config = shell.map(|shell| shell.config()).unwrap_or_default();
        let (geometry, pages) = (arena.geometry, Pages::of(&arena.arena_fd));
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
        let (window, reason) = (
            self.id,
            "CopyInDoubt: no more copies for this window".into(),
        );
        let news = WindowNews::Unavailable { reason };
        shell.drive(Input::Window { window, news });
    }

    /// Ends copying. If the connection continues, it has no window then.
    fn over(&self) {
        if let Some(shell) = self.shell.upgrade() {
            let (window, reason) = (self.id, "HungUp".into());
            let news = WindowNews::Unavailable { reason };
            shell.drive(Input::Window { window, news });
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
