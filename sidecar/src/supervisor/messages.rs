//! Messages between supervisor and engine over a [`kvcachepool_memory::link`].

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The supervisor's claim on the socket that its engines serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// The config file cannot be read, or contains no valid socket.
    #[default]
    NoConfig,
    /// The lock file beside the socket cannot be used; the error.
    LockFileUnusable(String),
    /// Another running sidecar holds this socket.
    SocketTaken(PathBuf),
    /// The sidecar's byte of the lock file beside this socket is locked until the container ends. All engines serve on this socket,
    /// even if the config file names another one later.
    Held(PathBuf),
}

/// First message of the supervisor to a new engine. Descriptors: `admin` (when `admin`), then arena and slot table (when `region`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// Socket to serve on, or the reason why there is none.
    pub claim: Claim,
    /// Starts of the engine in this container, including this one.
    pub starts: u64,
    /// How the last engine ended; empty at the first start.
    pub last_exit: String,
    /// Seconds since the supervisor started.
    pub container_uptime_s: u64,
    /// The admin listener is passed with this message.
    pub admin: bool,
    /// Why the admin listener is missing; empty when it is passed.
    pub admin_error: String,
    /// Region of the memory that is passed.
    pub region: Option<u64>,
}

/// From the supervisor to a running engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToEngine {
    /// The admin port, which the boot message lacked, is open. Its listener is passed with this message.
    Admin,
}

/// From the engine to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromEngine {
    /// The engine answers HTTP from now on.
    Serving,
    /// Heartbeat, sent once a second.
    Alive,
    /// The engine reads a slot table of this size next and sends no heartbeat meanwhile.
    Reads { rows: u32, chunks: u32 },
    /// Hold the passed descriptors: arena and slot table of this region. Memory held before is dropped.
    Keep { region: u64 },
    /// Drop the held memory: no engine will use it.
    LetGo,
    /// The engine was asked to end and is still flushing chunks to lower tiers. Sent once a second.
    Flushing,
}
