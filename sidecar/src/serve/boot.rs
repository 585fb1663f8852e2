//! The start of an engine process: the supervisor's handover, and the memory that is found.

use crate::supervisor::messages::{Boot, FromEngine, ToEngine};
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::link::{self, LinkError};
use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::TcpListener;
use std::sync::Arc;
use tracing::{error, info, warn};

/// The engine's end of the link to its supervisor.
#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
    /// Messages that did not fit into the link yet, in order.
    unsent: Mutex<VecDeque<Message>>,
}

#[derive(Debug)]
struct Message {
    body: FromEngine,
    fds: Vec<Arc<OwnedFd>>,
}

#[derive(Debug)]
pub struct Handover {
    /// Counts, and the reason of the last end.
    pub boot: Boot,
    /// Admin listener, non-blocking.
    pub admin: Option<TcpListener>,
    /// The kept memory, mapped and checked; `None` when it cannot be used.
    pub arena: Option<Arena>,
}

impl Link {
    /// The link on an engine's standard input.
    pub fn of_stdin() -> std::io::Result<Self> {
        Ok(Self::new(std::io::stdin().as_fd().try_clone_to_owned()?))
    }

    fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            unsent: Mutex::default(),
        }
    }

    /// Waits for the supervisor's first message.
    pub fn handover(&self) -> Result<Handover, LinkError> {
        let Some((boot, fds)) = link::receive::<Boot>(&self.fd, true)? else {
            return Err(LinkError::Ended);
        };
        let mut fds = fds.into_iter();
        let admin = if boot.admin { fds.next() } else { None };
        let arena = match (boot.region, fds.next(), fds.next()) {
            (Some(region), Some(arena), Some(table)) => match Arena::adopt(arena, table) {
                Ok(arena) => {
                    info!(region, "adopted the memory of the last engine process");
                    Some(arena)
                }
                Err(e) => {
                    error!(region, error = %e, "cannot use the memory of the last engine process");
                    None
                }
            },
            _ => None,
        };
        Ok(Handover {
            boot,
            admin: admin.map(TcpListener::from),
            arena,
        })
    }

    /// Waits for the admin port, which the supervisor opens and passes when it can.
    pub fn admin(&self) -> Result<TcpListener, LinkError> {
        loop {
            if let Some((ToEngine::Admin, fds)) = link::receive(&self.fd, true)?
                && let Some(listener) = fds.into_iter().next()
            {
                return Ok(listener.into());
            }
        }
    }

    /// Announces that this process answers HTTP from now on.
    pub fn serving(&self) {
        self.say(FromEngine::Serving, Vec::new());
    }

    /// Asks the supervisor to hold this memory.
    pub fn keep(&self, arena: &Arena) {
        self.say(
            FromEngine::Keep {
                region: arena.geometry.region,
            },
            vec![arena.arena_fd.clone(), arena.table_fd.clone()],
        );
    }

    /// Sends a heartbeat, after the messages that did not fit before. A supervisor that does not read for minutes is stopped. When it
    /// resumes, it restarts its count of silence, so old heartbeats may be dropped, but no other message.
    pub fn alive(&self) {
        let mut unsent = self.unsent.lock();
        self.flush(&mut unsent);
        if unsent.is_empty() {
            // A heartbeat that does not fit is not needed: others wait to be read.
            let _ = link::send(&self.fd, &FromEngine::Alive, &[]);
        }
    }

    /// Announces that the slot table of this arena is read next, during which no heartbeat is sent.
    pub fn reads(&self, arena: &Arena) {
        let used = arena.geometry.of_size(arena.capacity_bytes());
        let (rows, chunks) = (used.rows, used.chunks);
        self.say(FromEngine::Reads { rows, chunks }, Vec::new());
    }

    /// Asks the supervisor to drop the memory that it holds.
    pub fn let_go(&self) {
        self.say(FromEngine::LetGo, Vec::new());
    }

    /// Announces that the shutdown takes longer.
    pub fn flushing(&self) {
        self.say(FromEngine::Flushing, Vec::new());
    }

    fn say(&self, body: FromEngine, fds: Vec<Arc<OwnedFd>>) {
        let mut unsent = self.unsent.lock();
        unsent.push_back(Message { body, fds });
        self.flush(&mut unsent);
    }

    /// Sends queued messages while there is room; the next heartbeat retries.
    fn flush(&self, unsent: &mut VecDeque<Message>) {
        while let Some(message) = unsent.front() {
            let fds: Vec<_> = message.fds.iter().map(|fd| fd.as_fd()).collect();
            match link::send(&self.fd, &message.body, &fds) {
                Err(LinkError::Io(Errno::AGAIN)) => return,
                Err(e) => warn!(error = %e, "cannot send a message to the supervisor"),
                Ok(()) => {}
            }
            unsent.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_engine::table::Geometry;
    use kvcachepool_memory::memfd::Pages;

    #[test]
    fn what_counts_reaches_a_supervisor_that_was_stopped_for_minutes() {
        let (ours, theirs) = link::pair().unwrap();
        let link = Link::new(theirs);
        let hear = || link::receive::<FromEngine>(&ours, false).unwrap();
        let arena = Arena::create(Geometry::new(7, 4 << 20, 64), 64, Pages::Base).unwrap();
        for _ in 0..10_000 {
            link.alive();
        }
        link.let_go();
        link.keep(&arena);
        while let Some((message, _)) = hear() {
            assert_eq!(message, FromEngine::Alive);
        }
        link.alive();
        assert_eq!(hear().unwrap().0, FromEngine::LetGo);
        let (message, fds) = hear().unwrap();
        assert_eq!((message, fds.len()), (FromEngine::Keep { region: 7 }, 2));
        assert_eq!(hear().unwrap().0, FromEngine::Alive);
        assert!(hear().is_none());
    }
}
