//! The config file of the sidecar, `config.v1.yaml`: one YAML document, one Rust type, every value with its unit. Each section declares its
//! keys with their defaults, ranges and descriptions (`section`). This module reads no files and does not know the machine: the caller
//! checks limits of the container. Only Redis URLs may contain secrets.

mod cache;
mod choice;
mod document;
mod footprint;
mod limits;
mod memory;
mod parse;
mod reload;
mod s3;
mod section;
mod slot;
mod tiers;
mod units;

pub use cache::{Cache, LoadOrRecompute};
pub use choice::Choice;
pub use document::mapping;
pub use footprint::{
    CHUNK_BYTES, CONTEXT_BYTES, CONVERTING_BYTES, Footprint, PACKING_BYTES, PAGE_BYTES,
    UNPACKING_BYTES, beside_arena, disk_objects_max,
};
pub use limits::{Limits, TierLimits};
pub use memory::{EvictionPolicy, Gpu, HugePages, Memory, Transfer, TransferMode, Verify};
pub use parse::{ConfigError, Problem, UnknownKey, similar};
pub use reload::{Changes, Reload};
pub use s3::{AddressingStyle, Checksums, S3};
pub use section::{PoolKey, Values, pool_keys};
pub use slot::{Form, SERVERS, URL_BYTES};
pub use tiers::{Admission, Codec, Disk, FileSystem, Pacing, Redis, TierMode, Write, WritePolicy};
pub use units::{BadUnit, ByteSize, Duration, Percent};

use choice::choice;
use section::{field, section};
use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;

/// Name of the file, including its format version.
pub const FILE_NAME: &str = "config.v1.yaml";

section! {
    #[derive(Debug)]
    Config {
        /// Unix socket for vLLM's connector. An absolute path of at most 107 bytes. The lock file and the exported connector are in the same
        /// folder.
        "socket" socket: PathBuf = "/kvcachepool/sidecar.sock".into(), Socket, Restart;
        /// Set by the operator. Unknown keys become warnings, so that an older sidecar starts under a newer operator.
        "managed" managed: bool, Flag, Live;
        sections {
            admin: Admin,
            /// The pool that this sidecar belongs to.
            pool: Pool,
            cache: Cache,
            memory: Memory,
            disk: Disk,
            redis: Redis,
            file_system: FileSystem,
            write: Write,
            s3: S3,
            pacing: Pacing,
            gpu: Gpu,
            transfer: Transfer,
            limits: Limits,
            log: Log,
        }
    }
}

section! {
    /// The administration endpoint.
    #[derive(Debug)]
    Admin {
        /// Address and port of /healthz, /readyz, /metrics and /v1/status. `[::]` is every address of both families.
        "admin.listen" listen: SocketAddr = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9797)), Listen, Restart;
        /// File with the bearer token for /v1/config, /v1/objects and the ADMIN operations on the socket that need a token. Empty: these are
        /// off.
        "admin.tokenFile" token_file: Option<PathBuf>, File, Live;
    }
}

section! {
    /// Identifies the pool in logs, metrics and status.
    #[derive(Debug)]
    Pool {
        /// Name of the pool in status and logs.
        "pool.name" name: String, Name, Restart;
        /// Kubernetes namespace of the pool.
        "pool.namespace" namespace: String, Name, Restart;
        /// Generation of the pool's spec. Of two config files, the one with the higher number is in effect.
        "pool.generation" generation: u64, Number(0..=i64::MAX as u64), Live;
    }
}

section! {
    /// The log.
    #[derive(Debug)]
    Log {
        /// Minimum level of log lines.
        "log.level" level: LogLevel, Choice, Live, field("spec.sidecar.logLevel");
        /// json: one JSON object per line. text: lines for people.
        "log.format" format: LogFormat, Choice, Restart;
    }
}

choice!(
    /// Minimum level of log lines.
    LogLevel {
        /// Failures.
        Error = "error",
        /// Failures, and what needs attention.
        Warn = "warn",
        /// Also normal operation.
        #[default]
        Info = "info",
        /// Also details.
        Debug = "debug",
        /// Everything.
        Trace = "trace",
    }
);
choice!(
    /// Format of a log line.
    LogFormat {
        /// One JSON object per line.
        #[default]
        Json = "json",
        /// Text for people.
        Text = "text",
    }
);
