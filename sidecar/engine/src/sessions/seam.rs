//! The seam between the state machine and the shell: what goes in, what comes out, and the few questions whose answers are
//! needed at once.

pub use crate::Time as Now;
use crate::table::{Geometry, Table};
use crate::{Order, Report};
use kvcachepool_protocol::frame::{Header, Op};
use kvcachepool_protocol::message::Admin;

/// One accepted connection; numbers are never reused by the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// A descriptor that the shell keeps. Valid until the `handle` call that brought it returns, unless [`Output::WatchProcess`]
/// or [`Host::adopt`] took it: the shell closes all others then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FdId(pub u64);

/// One incarnation of a process, numbered by the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId(pub u64);

/// What the shell found out about a passed descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FdFacts {
    /// Its name between shell and state machine.
    pub id: FdId,
    pub kind: FdType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FdType {
    Pidfd {
        /// poll() works on it (it can be watched).
        pollable: bool,
    },
    /// A memfd or other regular file.
    Memfd {
        /// F_SEAL_SHRINK and F_SEAL_GROW are set.
        sealed: bool,
        /// It is the very file (device and inode) of the live arena or of the live slot table.
        live: bool,
    },
    /// Anything else.
    Other,
}

/// Descriptors that the shell adds to a frame that goes out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FdKind {
    Lock,
    Arena,
    Table,
}

impl FdKind {
    /// Its name in HELLO's answer.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Arena => "arena",
            Self::Table => "table",
        }
    }
}

/// What happens to the state machine.
#[derive(Debug)]
pub enum Input<'a> {
    Connected {
        conn: ConnId,
        /// The peer's pidfd by SO_PEERPIDFD, where the kernel gives one.
        peer: Option<FdFacts>,
        /// The peer's process id by SO_PEERCRED, for people only; 0 where the container hides it.
        pid: u32,
    },
    /// A whole frame was read.
    Frame {
        conn: ConnId,
        /// As decoded (version and length are checked).
        header: Header,
        body: &'a [u8],
        /// Descriptors that came with it, in order.
        fds: &'a [FdFacts],
    },
    /// The peer closed, or reading or writing failed. Not sent for connections that [`Output::Close`] named.
    Disconnected {
        /// The connection; nothing more comes of it.
        conn: ConnId,
    },
    /// A watched pidfd became readable: the process is dead, no thread of it runs.
    ProcessDied {
        /// As named in [`Output::WatchProcess`].
        process: ProcessId,
    },
    /// A digest that [`Output::Digest`] asked for was taken. `None`: it could not be.
    DigestDone {
        /// First row of the slot.
        slot: u32,
        /// The generation that was asked for.
        generation: u32,
        /// The check that it was asked for.
        check: u64,
        /// xxh3-128, little-endian.
        digest: Option<[u8; 16]>,
    },
    /// The arena's first `rows` rows are populated.
    Populated {
        /// Grows only.
        rows: u32,
    },
    /// What became of a window that [`Output::OpenWindow`] or [`Output::ConfirmWindow`] named.
    Window {
        window: WindowId,
        news: WindowNews,
    },
    /// What became of a tier, or of something that [`Output::Tier`] asked for.
    Tier(Report),
    /// Time passed. Sent about every 100 ms, and only after everything readable was read: a sidecar that was stopped must see
    /// the PINs and COMMITs that wait in its sockets before its timers run.
    Tick,
    /// SIGTERM: nothing new is granted.
    Drain,
}

/// A window: the connection that asked for it, and the tag of its question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WindowId {
    pub conn: ConnId,
    pub tag: u64,
}

/// What became of a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WindowNews {
    /// Each side has read what the other wrote.
    Works {
        /// Where its memory is, for people.
        memory: String,
    },
    /// There is none, or none any more.
    Unavailable {
        /// `Unavailable` of the protocol, with its detail.
        reason: String,
    },
}

/// What the shell shall do, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame. Where it does not fit into the socket's bounded queue, close the connection and report
    /// [`Input::Disconnected`].
    Send {
        conn: ConnId,
        op: Op,
        /// `protocol::frame::FLAG_*`.
        flags: u16,
        tag: u64,
        body: Vec<u8>,
        fds: Vec<FdKind>,
    },
    /// Close a connection after what was sent to it; frames of it that were not handled yet are dropped.
    Close {
        conn: ConnId,
        reason: &'static str,
    },
    /// Poll this pidfd and say [`Input::ProcessDied`] when it is readable. The shell keeps the descriptor until then.
    WatchProcess {
        process: ProcessId,
        fd: FdId,
    },
    /// Take the xxh3-128 of `length` bytes at `slot * 64 KiB` of the arena and say [`Input::DigestDone`].
    Digest {
        /// First row of the slot.
        slot: u32,
        generation: u32,
        check: u64,
        length: u64,
        /// Somebody waits for it: before all that is not urgent.
        urgent: bool,
    },
    /// Do something with a tier below memory and say how it ended by [`Input::Tier`]. Never sent where none is configured.
    Tier(Order),
    /// Make a window for this connection and answer with `Op::Window`: a `WindowReply`, or the refusal `WindowUnavailable`. What the
    /// connection had before ends, as it does with the connection.
    OpenWindow {
        conn: ConnId,
        process: ProcessId,
        tag: u64,
        /// Device; empty = host memory.
        device_uuid: String,
        bytes: u64,
    },
    /// Look for the pattern's complement in the window of this connection and answer; say [`Input::Window`] before that.
    ConfirmWindow {
        conn: ConnId,
        tag: u64,
    },
    /// A tool asks on its connection; the shell checks the token, does it (`Core::lookup`, `clear`, ..., status) and answers
    /// with this tag and `Op::Admin`.
    Admin {
        conn: ConnId,
        tag: u64,
        request: Admin,
    },
    /// Something worth a log line, by name and with details.
    Log {
        /// Name, as in metrics.
        event: &'static str,
        /// For people.
        detail: String,
    },
}

/// The operating system did not do what [`Host`] asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostError(pub String);

/// Quick system calls whose answer is needed at once.
pub trait Host {
    type Table: Table;

    /// The next lock number; the counter in the lock file is raised before this returns. Never gives a number twice.
    fn next_lock(&mut self) -> Result<u32, HostError>;
    /// The next region number; the counter in the lock file is raised before this returns.
    fn next_region(&mut self) -> Result<u64, HostError>;
    /// F_GETLK: some process holds the byte of lock `number`.
    fn lock_held(&mut self, number: u32) -> Result<bool, HostError>;
    /// F_GETLK over the whole range: numbers that are held now. At a start these are processes that an earlier boot served.
    fn locks_held(&mut self) -> Result<Vec<u32>, HostError>;
    /// Makes a new arena and slot table (sealed memfds, mapped; the table holds `geometry.header()` and zeros), hands both to
    /// the supervisor, and begins to populate the arena in the background ([`Input::Populated`]).
    fn create(&mut self, geometry: Geometry) -> Result<Self::Table, HostError>;
    /// Maps an arena and a table that a connector handed back, after checking size, seals and header
    /// ([`Geometry::of_header`]). Nothing else is done with them before [`Host::keep`]: they may be another region, or what
    /// stands in them may end this process.
    fn adopt(&mut self, arena: FdId, table: FdId) -> Result<Self::Table, HostError>;
    /// What [`Host::adopt`] gave last is the live arena, its index is rebuilt: hand both descriptors to the supervisor and
    /// populate what of it is not.
    fn keep(&mut self) {}
}

/// How this boot of the engine begins.
#[derive(Debug)]
pub struct Start<T> {
    /// New at every start of the engine process.
    pub boot: u64,
    /// Version of the binary, for HELLO's answer.
    pub version: String,
    /// The arena and table that the supervisor kept, mapped and checked.
    pub found: Option<T>,
    /// Three boots without 60 s of health: everything PUBLISHED is freed, in the same memory.
    pub cold: bool,
}
