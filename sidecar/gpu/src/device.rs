//! What moves bytes between a window and the arena. One device object per window, used by that window's thread alone.

use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::message::WindowKind;
use kvcachepool_protocol::window::{Direction, Unavailable};
use rustix::fd::OwnedFd;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why:?}: {detail}")]
pub struct NoWindow {
    pub why: Unavailable,
    /// For people.
    pub detail: String,
}

impl NoWindow {
    /// With what the system said.
    pub fn new(why: Unavailable, detail: impl ToString) -> Self {
        Self {
            why,
            detail: detail.to_string(),
        }
    }
}

/// A device did not do something; in its words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// How a worker maps the window.
#[derive(Debug, Clone)]
pub struct Export {
    pub kind: WindowKind,
    /// Descriptor to pass; none with a handle.
    pub fd: Option<Arc<OwnedFd>>,
    /// Bytes of a legacy IPC handle.
    pub handle: Vec<u8>,
}

/// One run of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// First byte in the window.
    pub window: u64,
    /// First byte in the arena.
    pub arena: u64,
    pub bytes: u64,
}

/// A copy that was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What became of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Bytes may still move.
    Running,
    /// All bytes are there, and nothing of it runs any more.
    Done,
    /// Nothing of it runs any more; what bytes are there is not known.
    Failed(DeviceError),
    /// It failed, and bytes may still move: nobody says that they do not. To be asked again.
    Unknown(DeviceError),
}

/// A window's memory and the copies between it and an arena.
pub trait Device: Send {
    /// Where the memory is, for people.
    fn memory(&self) -> String;
    /// How the worker gets at it.
    fn export(&self) -> Export;
    /// Puts bytes at `offset` of the window; they are there when it returns.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Takes bytes from `offset` of the window.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError>;
    /// Begins a copy and returns at once; where it fails nothing has begun. Parts lie in window and arena; the caller has checked them.
    fn begin(
        &mut self,
        direction: Direction,
        arena: &Arc<Mapping>,
        parts: Vec<Part>,
    ) -> Result<Ticket, DeviceError>;
    /// How a copy stands. A ticket is forgotten once this said that it ended.
    fn progress(&mut self, ticket: Ticket) -> Progress;
    /// Both sides have seen that they share the memory: what is kept for good, for copies from and to this arena, is taken only now.
    fn works(&mut self, _arena: &Arena) {}
    /// Nobody waits for this copy any more, and it has not ended: until it has, [`Device::progress`] says so as ever, and where others share
    /// what it runs on, nothing new is begun there.
    fn doubt(&mut self, _ticket: Ticket) {}
    /// The end of a copy adds to the eventfd that the device was opened with; otherwise it must be asked for.
    fn tells_ends(&self) -> bool;
}
