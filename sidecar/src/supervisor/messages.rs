//! Messages between supervisor and engine over a [`kvcachepool_memory::link`].

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What the supervisor has of the socket that its engines serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// The config file cannot be read, or does not say which socket.
    #[default]
    NoConfig,
    /// The lock file beside the socket cannot be used, for this reason.
    LockFileUnusable(String),
    /// A live sidecar holds this socket.
    SocketTaken(PathBuf),
    /// The sidecar's byte of the lock file beside this socket is locked until the container ends: engines serve here, whatever
    /// the config file says by now.
    Held(PathBuf),
}

/// First message of the supervisor to a new engine. Descriptors: `admin` (when `admin`), then arena and slot table (when `region`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// Where to serve, or why nowhere.
    pub claim: Claim,
    /// Starts of the engine in this container, this one included.
    pub starts: u64,
    /// How the last one ended; empty at the first start.
    pub last_exit: String,
    /// Seconds since the supervisor started.
    pub container_uptime_s: u64,
    /// The admin listener comes along.
    pub admin: bool,
    /// Why it does not; empty when it does.
    pub admin_error: String,
    /// Region of the memory that comes along.
    pub region: Option<u64>,
}

/// From the supervisor to a running engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToEngine {
    /// The admin port, which the boot message lacked, is open: its listener comes along.
    Admin,
}

/// From the engine to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromEngine {
    /// The engine answers HTTP from now on.
    Serving,
    /// The engine still answers; said once a second.
    Alive,
    /// The engine reads a slot table of these counts next, without a sign of life meanwhile.
    Reads {
        /// Rows.
        rows: u32,
        /// Chunk records.
        chunks: u32,
    },
    /// Hold these: arena and slot table descriptors of this region come along. What was held before is let go.
    Keep {
        /// Region number.
        region: u64,
    },
    /// Let go of what is held: no engine wants it any more.
    LetGo,
    /// Told to end, the engine still writes what only memory holds to the tiers below; said once a second.
    Flushing,
}
