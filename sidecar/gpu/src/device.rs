//! Copies between a window and the arena. Each window has one device object, which only its thread uses.

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
    pub fn new(why: Unavailable, detail: impl ToString) -> Self {
        Self {
            why,
            detail: detail.to_string(),
        }
    }
}

/// A device operation failed, with the device's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// How a worker maps the window.
#[derive(Debug, Clone)]
pub struct Export {
    pub kind: WindowKind,
    /// Descriptor to pass; none if a handle is used.
    pub fd: Option<Arc<OwnedFd>>,
    /// Bytes of a legacy IPC handle.
    pub handle: Vec<u8>,
}

/// One run of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Offset of the first byte in the window.
    pub window: u64,
    /// Offset of the first byte in the arena.
    pub arena: u64,
    pub bytes: u64,
}

/// A copy that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Bytes may still move.
    Running,
    /// All bytes have arrived, and the copy has ended.
    Done,
    /// The copy has ended; the content of its target is undefined.
    Failed(DeviceError),
    /// The copy failed, and bytes may still move. Poll again.
    Unknown(DeviceError),
}

/// A window's memory and its copies from and to an arena.
pub trait Device: Send {
    /// Kind of memory, for display.
    fn memory(&self) -> String;
    /// The descriptor or handle by which a worker maps the window.
    fn export(&self) -> Export;
    /// Writes bytes at `offset` of the window, and returns after they have arrived.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Reads bytes at `offset` of the window.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError>;
    /// Starts a copy and returns at once. On failure nothing has started. The caller checks that the parts are within window and arena.
    fn begin(
        &mut self,
        direction: Direction,
        arena: &Arc<Mapping>,
        parts: Vec<Part>,
    ) -> Result<Ticket, DeviceError>;
    /// State of a copy. A ticket is forgotten once its end was returned.
    fn progress(&mut self, ticket: Ticket) -> Progress;
    /// Called when both sides have verified that they share the memory. Only now are permanent resources for copies with this arena taken.
    fn works(&mut self, _arena: &Arena) {}
    /// The copy has not ended in time. [`Device::progress`] continues to report it. Nothing new begins on resources that it shares with
    /// others.
    fn doubt(&mut self, _ticket: Ticket) {}
    /// True if the end of a copy adds to the eventfd passed at open; otherwise copies must be polled.
    fn tells_ends(&self) -> bool;
}
