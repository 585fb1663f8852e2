//! Interface between the state machine and the shell: inputs, outputs, and the system calls whose results are needed at once.

pub use crate::Time as Now;
use crate::table::{Geometry, Table};
use crate::{Completion, Effect};
use kvcachepool_protocol::frame::{Header, Op};
use kvcachepool_protocol::message::Admin;
use std::ops::Range;

/// An accepted connection. The shell never reuses a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// A descriptor held by the shell. Valid until the `handle` call that passed it returns; then the shell closes it, unless
/// [`Output::WatchProcess`] or [`Host::adopt`] took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FdId(pub u64);

/// One incarnation of a process. The state machine assigns the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId(pub u64);

/// The properties of a passed descriptor, as checked by the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FdFacts {
    pub id: FdId,
    pub kind: FdType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FdType {
    /// A pidfd that poll() works on, so that the process can be watched.
    Pidfd,
    /// A memfd or other regular file.
    Memfd {
        sealed: bool,
        /// The file (device and inode) is the live arena or the live slot table.
        live: bool,
    },
    Other,
}

/// Descriptors that the shell attaches to an outgoing frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FdKind {
    Lock,
    Arena,
    Table,
}

impl FdKind {
    /// Name of the descriptor in HELLO's reply.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Arena => "arena",
            Self::Table => "table",
        }
    }
}

/// An event that the state machine handles.
#[derive(Debug)]
pub enum Input<'a> {
    Connected {
        conn: ConnId,
        /// The peer's pidfd by SO_PEERPIDFD, if the kernel provides one.
        peer: Option<FdFacts>,
        /// The peer's process id by SO_PEERCRED, for display only; 0 if the container hides it.
        pid: u32,
    },
    /// A complete frame was read.
    Frame {
        conn: ConnId,
        /// Decoded header. Version and length are checked.
        header: Header,
        body: &'a [u8],
        /// Descriptors passed with the frame, in order.
        fds: &'a [FdFacts],
    },
    /// The peer closed, or reading or writing failed. Not sent for connections that [`Output::Close`] named.
    Disconnected {
        /// No further input names this connection.
        conn: ConnId,
    },
    /// A watched pidfd became readable: the process is dead, and none of its threads runs.
    ProcessDied {
        /// As named in [`Output::WatchProcess`].
        process: ProcessId,
    },
    /// The arena's first `rows` rows are populated.
    Populated {
        /// Grows only.
        rows: u32,
    },
    /// Result of [`Output::OpenWindow`] or [`Output::ConfirmWindow`], or a later change of that window.
    Window { window: WindowId, news: WindowNews },
    /// An effect has ended, or a tier went up or down.
    Completed(Completion),
    /// Timer. Sent about every 100 ms, and only after all readable sockets were read: a sidecar that was suspended must handle waiting PINs
    /// and COMMITs before its timers run.
    Tick,
    /// SIGTERM was received: no more grants.
    Drain,
}

/// A frame to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub op: Op,
    /// `protocol::frame::FLAG_*`.
    pub flags: u16,
    pub tag: u64,
    pub body: Vec<u8>,
}

/// A window, named by its connection and the tag of the WINDOW request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WindowId {
    pub conn: ConnId,
    pub tag: u64,
}

/// A window to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowJob {
    pub window: WindowId,
    pub process: ProcessId,
    /// Device UUID; empty = host memory.
    pub device_uuid: String,
    pub bytes: u64,
}

/// A change of a window's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WindowNews {
    /// Each side has read the other's test pattern.
    Works {
        /// Kind of memory, for display.
        memory: String,
    },
    /// The window could not be made, or has ended.
    Unavailable {
        /// `Unavailable` of the protocol, with its detail.
        reason: String,
    },
}

/// A command to the shell. Commands are carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame. If the socket's bounded queue is full, close the connection and report [`Input::Disconnected`].
    Send {
        conn: ConnId,
        frame: Frame,
        fds: Vec<FdKind>,
    },
    /// Close a connection after sending its queued frames. Unhandled frames from it are dropped.
    Close { conn: ConnId, reason: &'static str },
    /// Poll this pidfd, and report [`Input::ProcessDied`] when it is readable. The shell keeps the descriptor until then.
    WatchProcess { process: ProcessId, fd: FdId },
    /// Carry out an effect, and report its end with [`Input::Completed`].
    Effect(Effect),
    /// Make a window for this connection and reply with `Op::Window`: a `WindowReply`, or the refusal `WindowUnavailable`. Ends the
    /// connection's earlier window. The window also ends with its connection.
    OpenWindow(WindowJob),
    /// Compare the pattern's complement in the connection's window. Report [`Input::Window`], then reply.
    ConfirmWindow { conn: ConnId, tag: u64 },
    /// A tool's request. The shell checks the token, carries the request out (`Core::lookup`, `clear`, ..., status), and replies with this
    /// tag and `Op::Admin`.
    Admin {
        conn: ConnId,
        tag: u64,
        request: Admin,
    },
    Log {
        /// Name of the event, as in metrics.
        event: &'static str,
        /// Text for people.
        detail: String,
    },
}

/// A system call of [`Host`] failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostError(pub String);

/// Quick system calls whose results are needed at once.
pub trait Host {
    type Table: Table;

    /// Allocates a lock number. Raises the counter in the lock file before it returns, so no number is given twice.
    fn next_lock(&mut self) -> Result<u32, HostError>;
    /// Allocates a region number. Raises the counter in the lock file before it returns.
    fn next_region(&mut self) -> Result<u64, HostError>;
    /// F_GETLK: true if a process holds the byte of lock `number`.
    fn lock_held(&mut self, number: u32) -> Result<bool, HostError>;
    /// F_GETLK over the whole range: the held numbers. At start, their holders are processes that an earlier boot served.
    fn locks_held(&mut self) -> Result<Vec<u32>, HostError>;
    /// Bytes to which a new arena may grow later; 0: it keeps its size.
    fn most_bytes(&mut self) -> u64 {
        0
    }
    /// Creates an arena and a slot table (sealed memfds, mapped; the table holds `geometry.header()` with this capacity, and zeros), passes
    /// both to the supervisor, and starts to populate these rows in the background ([`Input::Populated`]).
    fn create(&mut self, geometry: Geometry, capacity_rows: u32) -> Result<Self::Table, HostError>;
    /// Starts to populate these rows, up to a new end of the arena, if this container may use as much memory. The error says what to do.
    fn grow(&mut self, rows: Range<u32>) -> Result<(), HostError>;
    /// Frees the pages of these rows, from a new end of the arena to its old one.
    fn release(&mut self, rows: Range<u32>) -> Result<(), HostError>;
    /// True if the arena's pages can be given back.
    fn can_resize(&self) -> bool {
        true
    }
    /// True while pages are being populated.
    fn is_populating(&self) -> bool {
        false
    }
    /// Maps an arena and a table that a connector handed back, after checking size, seals and header ([`Geometry::of_header`]). Does
    /// nothing else with them before [`Host::keep`]: they may belong to another region, or their content may crash this process.
    fn adopt(&mut self, arena: FdId, table: FdId) -> Result<Self::Table, HostError>;
    /// Accepts the last adopted arena after its index was rebuilt: passes both descriptors to the supervisor, and populates the missing
    /// rows.
    fn keep(&mut self) {}
    /// Frees the last adopted arena unless it was accepted.
    fn drop_adopted(&mut self) {}
}

/// Start parameters of this boot.
#[derive(Debug)]
pub struct Start<T> {
    /// Boot number, new at every start of the engine process.
    pub boot: u64,
    /// Version of the binary, for HELLO's reply.
    pub version: String,
    /// The arena and table that the supervisor kept, mapped and checked.
    pub found: Option<T>,
    /// Free everything PUBLISHED and keep the memory. Set after three boots that were not healthy for 60 s.
    pub cold: bool,
}
