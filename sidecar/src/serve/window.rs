//! The thread of one window. It verifies that both sides see the same memory, then moves stages until the connection or the bell ends.

use super::windows::{Command, Owner, Passed};
use kvcachepool_gpu::copy_engine::{CopyEngine, Step};
use kvcachepool_gpu::device::{DeviceError, NoWindow};
use kvcachepool_gpu::lifecycle::{Turn, WindowLifecycle};
use kvcachepool_gpu::page::FlagPage;
use kvcachepool_gpu::{STAGES, open, stage_bytes};
use kvcachepool_memory::arena::Arena;
use kvcachepool_protocol::message::{WindowKind, WindowReply};
use kvcachepool_protocol::window::{PATTERN_BYTES, RING, UNMAPPED, Unavailable};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

/// Poll interval for a device that does not signal the end of its copies.
const ASK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000,
};

/// Poll interval for copies in doubt, whose resolution may need a person.
const DOUBT_EVERY: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// State of a window's thread.
pub(super) struct Window {
    copy_engine: CopyEngine,
    arena: Arena,
    bell: OwnedFd,
    poke: Arc<OwnedFd>,
    pattern: [u8; PATTERN_BYTES],
    lifecycle: WindowLifecycle,
    /// The worker reported that it has unmapped the memory.
    unmapped: bool,
}

impl Window {
    /// Creates the memory and everything passed to the worker with it.
    pub(super) fn make(
        arena: Arena,
        device_uuid: &str,
        bytes: u64,
        poke: Arc<OwnedFd>,
    ) -> Result<(Self, Passed), NoWindow> {
        let none = |e: &dyn std::fmt::Display| NoWindow::new(Unavailable::OutOfMemory, e);
        let stage_bytes = stage_bytes(bytes)?;
        let bytes = stage_bytes * u64::from(STAGES);
        let device = open(device_uuid, bytes, poke.clone())?;
        let page = FlagPage::new(STAGES, stage_bytes).map_err(|e| none(&e))?;
        let (bell, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| none(&e))?;
        let mut pattern = [0; PATTERN_BYTES];
        fastrand::fill(&mut pattern);
        let mut window = Self {
            copy_engine: CopyEngine::new(page, device, arena.bytes.clone(), stage_bytes),
            arena,
            bell,
            poke,
            pattern,
            lifecycle: WindowLifecycle::default(),
            unmapped: false,
        };
        window
            .copy_engine
            .device()
            .write(0, &pattern)
            .map_err(failed)?;
        let export = window.copy_engine.device().export();
        let mut names = vec!["page".to_owned(), "bell".to_owned()];
        let mut fds = vec![window.copy_engine.page().fd(), Arc::new(theirs)];
        if let Some(fd) = export.fd {
            names.insert(0, "window".into());
            fds.insert(0, fd);
        }
        let reply = WindowReply {
            working: false,
            kind: export.kind,
            bytes,
            stages: STAGES,
            stage_bytes,
            pattern: pattern.to_vec(),
            handle: export.handle,
            fds: names,
        };
        Ok((window, (reply, fds)))
    }

    /// Runs until the connection ends or the worker hangs up, and then until the last copy has ended.
    pub(super) fn run(&mut self, owner: &Owner, commands: &Receiver<Command>) {
        let begun = Instant::now();
        loop {
            while !self.lifecycle.is_over() {
                match commands.try_recv() {
                    Ok(Command::Confirm { tag }) => self.confirm(owner, tag),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => self.lifecycle.end(),
                }
            }
            let Turn {
                step,
                doubted,
                ended,
            } = self
                .lifecycle
                .turn(&mut self.copy_engine, owner, begun.elapsed());
            if let Some(before) = doubted {
                let _ = shutdown(&self.bell, Shutdown::Write);
                owner.in_doubt(step.in_doubt as u64, before as u64);
            }
            if step.answered > 0 {
                // A full bell still wakes the worker; a hang-up is detected below.
                let _ = send(
                    &self.bell,
                    &[RING],
                    SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
                );
            }
            if ended {
                return;
            }
            if self.hangs_up(step) {
                self.lifecycle.end();
            }
        }
    }

    /// Sleeps until there is work. True: the worker has hung up.
    fn hangs_up(&mut self, step: Step) -> bool {
        let over = self.lifecycle.is_over();
        let asks = match step.moving - step.in_doubt {
            1.. if !self.copy_engine.device().tells_ends() => Some(&ASK_EVERY),
            // Also wakes when a running copy becomes overdue: nothing else wakes the thread then.
            _ if over || step.in_doubt > 0 => Some(&DOUBT_EVERY),
            _ => None,
        };
        let mut fds = [
            PollFd::new(&self.poke, PollFlags::IN),
            PollFd::new(&self.bell, PollFlags::IN),
        ];
        // A descriptor that was hung up stays ready for ever.
        let listens = if over { 1 } else { fds.len() };
        let fds = fds.split_at_mut(listens).0;
        match poll(fds, asks) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => tracing::warn!(%error, "cannot poll for events of a window"),
        }
        let _ = rustix::io::read(self.poke.as_fd(), &mut [0u8; 8]);
        if over {
            return true;
        }
        self.hear()
    }

    /// Reads the worker's messages on the bell. True: it has hung up.
    fn hear(&mut self) -> bool {
        let mut rings = [0u8; 64];
        match recv(&self.bell, &mut rings, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => true,
            Ok((_, count)) => {
                self.unmapped |= rings.iter().take(count).any(|ring| *ring == UNMAPPED);
                false
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(_) => true,
        }
    }

    /// Keeps memory that was passed by handle until the worker reports that it has unmapped it, or is dead: otherwise the driver would free
    /// it under the worker's copies.
    pub(super) fn outlive(&mut self, owner: &Owner) {
        if self.copy_engine.device().export().kind != WindowKind::IpcHandle {
            return;
        }
        // The worker sees the end of the window and can still send.
        let _ = shutdown(&self.bell, Shutdown::Write);
        let mut hung_up = false;
        while !self.unmapped && !owner.worker_died() {
            let mut fds = [
                PollFd::new(&self.poke, PollFlags::IN),
                PollFd::new(&self.bell, PollFlags::IN),
            ];
            let listens = if hung_up { 1 } else { fds.len() };
            // An error needs no other handling than another check.
            let _ = poll(fds.split_at_mut(listens).0, None);
            let _ = rustix::io::read(self.poke.as_fd(), &mut [0u8; 8]);
            hung_up = hung_up || self.hear();
        }
    }

    fn confirm(&mut self, owner: &Owner, tag: u64) {
        let mut seen = [0; PATTERN_BYTES];
        let read = self.copy_engine.device().read(0, &mut seen).map_err(failed);
        let wanted = self.pattern.map(|byte| !byte);
        let answer = match read {
            Err(none) => Err(none),
            Ok(()) if seen != wanted => Err(NoWindow::new(
                Unavailable::PatternMismatch,
                "memory check failed: the bytes read here differ from those that the worker wrote",
            )),
            Ok(()) => {
                self.lifecycle.works();
                self.copy_engine.device().works(&self.arena);
                let reply = WindowReply {
                    working: true,
                    ..WindowReply::default()
                };
                Ok((reply, Vec::new()))
            }
        };
        let memory = answer.is_ok().then(|| self.copy_engine.device().memory());
        owner.answer(tag, answer, memory);
    }
}

fn failed(error: DeviceError) -> NoWindow {
    NoWindow::new(Unavailable::DriverFailed, error)
}
