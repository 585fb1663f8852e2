//! The start of an engine process: what the supervisor hands over, and which memory is found.

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
    /// What did not fit into the link so far, in order.
    unsent: Mutex<VecDeque<Message>>,
}

#[derive(Debug)]
struct Message {
    body: FromEngine,
    fds: Vec<Arc<OwnedFd>>,
}

/// What the supervisor handed over.
#[derive(Debug)]
pub struct Handover {
    /// Counts and the reason of the last end.
    pub boot: Boot,
    /// Admin listener, non-blocking.
    pub admin: Option<TcpListener>,
    /// The memory that was kept, mapped and checked; none where it cannot be used.
    pub arena: Option<Arena>,
}

impl Link {
    /// The link is the standard input of an engine.
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
                    info!(region, "memory of the last engine taken over");
                    Some(arena)
                }
                Err(e) => {
                    error!(region, error = %e, "memory of the last engine cannot be used");
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

    /// Waits for the admin port, which the supervisor opens and hands over when it can.
    pub fn admin(&self) -> Result<TcpListener, LinkError> {
        loop {
            if let Some((ToEngine::Admin, fds)) = link::receive(&self.fd, true)?
                && let Some(listener) = fds.into_iter().next()
            {
                return Ok(listener.into());
            }
        }
    }

    /// HTTP is answered here from now on.
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

    /// Tells the supervisor that this process still answers, after what it could not be told before. One that does not read for
    /// minutes is stopped: it starts anew to count when it is woken, and must not lose what counts behind old signs of life.
    pub fn alive(&self) {
        let mut unsent = self.unsent.lock();
        self.flush(&mut unsent);
        if unsent.is_empty() {
            // One that does not fit is not needed: others wait to be read.
            let _ = link::send(&self.fd, &FromEngine::Alive, &[]);
        }
    }

    /// Tells the supervisor that the slot table of this arena is read next, without a sign of life meanwhile.
    pub fn reads(&self, arena: &Arena) {
        let (rows, chunks) = (arena.geometry.rows, arena.geometry.chunks);
        self.say(FromEngine::Reads { rows, chunks }, Vec::new());
    }

    /// Asks the supervisor to let go of the memory that it holds.
    pub fn let_go(&self) {
        self.say(FromEngine::LetGo, Vec::new());
    }

    /// Tells the supervisor that the end takes a little longer.
    pub fn flushing(&self) {
        self.say(FromEngine::Flushing, Vec::new());
    }

    fn say(&self, body: FromEngine, fds: Vec<Arc<OwnedFd>>) {
        let mut unsent = self.unsent.lock();
        unsent.push_back(Message { body, fds });
        self.flush(&mut unsent);
    }

    /// Sends what waits, as far as there is room; the next sign of life tries again.
    fn flush(&self, unsent: &mut VecDeque<Message>) {
        while let Some(message) = unsent.front() {
            let fds: Vec<_> = message.fds.iter().map(|fd| fd.as_fd()).collect();
            match link::send(&self.fd, &message.body, &fds) {
                Err(LinkError::Io(Errno::AGAIN)) => return,
                Err(e) => warn!(error = %e, "the supervisor does not hear"),
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
        let arena = Arena::create(Geometry::new(7, 4 << 20, 64), Pages::Base).unwrap();
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
