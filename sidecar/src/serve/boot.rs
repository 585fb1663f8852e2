//! The start of an engine process: what the supervisor hands over, and which memory is found.

use crate::shm::arena::Arena;
use crate::supervisor::link::{self, Boot, FromEngine, LinkError, ToEngine};
use rustix::fd::{AsFd, OwnedFd};
use std::net::TcpListener;
use tracing::{error, info, warn};

/// The engine's end of the link to its supervisor.
#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
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
        Ok(Self {
            fd: std::io::stdin().as_fd().try_clone_to_owned()?,
        })
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
        self.say(&FromEngine::Serving, &[]);
    }

    /// Asks the supervisor to hold this memory.
    pub fn keep(&self, arena: &Arena) {
        self.say(
            &FromEngine::Keep {
                region: arena.geometry.region,
            },
            &[arena.arena_fd.as_ref(), arena.table_fd.as_ref()],
        );
    }

    /// Tells the supervisor that this process still answers.
    pub fn alive(&self) {
        // A supervisor that does not read for minutes is stopped; it starts anew to count when it is woken.
        let _ = link::send(&self.fd, &FromEngine::Alive, &[]);
    }

    /// Asks the supervisor to let go of the memory that it holds.
    pub fn let_go(&self) {
        self.say(&FromEngine::LetGo, &[]);
    }

    fn say(&self, message: &FromEngine, fds: &[&OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        if let Err(e) = link::send(&self.fd, message, &fds) {
            warn!(error = %e, "the supervisor does not hear");
        }
    }
}
