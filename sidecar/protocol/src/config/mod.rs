//! The config file of the sidecar, `config.v1.yaml`: one YAML document, one Rust type, every value with its unit.
//! Which keys there are, their meaning, range and default stand in `keys.rs` and in the `Default` impls here.
//! Nothing here reads files or knows the machine: limits of a container are checked by the caller. No secret is ever a value.

mod footprint;
mod keys;
mod parse;
mod s3;
mod units;

pub use footprint::{
    CHUNK_BYTES, CONTEXT_BYTES, PACKING_BYTES, PAGE_BYTES, UNPACKING_BYTES, beside_arena,
    disk_objects_max,
};
pub use keys::{Changes, Reload};
pub use parse::{ConfigError, Problem, UnknownKey};
pub use s3::{AddressingStyle, Checksums, HttpVersion, S3};
pub use units::{BadUnit, ByteSize, Duration, Percent};

use crate::message::{Save, Settings};
use crate::object;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// Name of the file; the version of its format is part of it.
pub const FILE_NAME: &str = "config.v1.yaml";

/// The whole config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Path of the Unix socket; its folder holds the lock file, `settings.json` and the exported connector too.
    pub socket: PathBuf,
    /// Admin HTTP.
    pub admin: Admin,
    /// Which pool this sidecar belongs to.
    pub pool: Pool,
    /// What is cached, and when a hit is taken.
    pub cache: Cache,
    /// The memory tier.
    pub memory: Memory,
    /// The disk tier.
    pub disk: Disk,
    /// The Redis tier.
    pub redis: Redis,
    /// What is written to the tiers below memory, and when.
    pub write: Write,
    /// The S3 tier.
    pub s3: S3,
    /// Bytes per second that the tiers below memory may move.
    pub pacing: Pacing,
    /// What the GPUs that the sidecar is given cost it.
    pub gpu: Gpu,
    /// Who moves bytes between vLLM and the memory tier.
    pub transfer: Transfer,
    /// Bounds of everything that a peer can make grow.
    pub limits: Limits,
    /// Logs.
    pub log: Log,
    /// The file is written by an operator: unknown keys are warnings, not errors.
    pub managed: bool,
}

/// Admin HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admin {
    /// Address and port.
    pub listen: SocketAddr,
    /// File with the bearer token of `/v1/config` and `/v1/objects`; none = both are off.
    pub token_file: Option<PathBuf>,
}

/// Names that logs, metrics and status carry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pool {
    /// Name of the pool; empty outside of Kubernetes.
    pub name: String,
    /// Kubernetes namespace of the pool.
    pub namespace: String,
    /// Counts the changes of the pool: of two files the one with the higher number is in effect.
    pub generation: u64,
}

/// What is cached, and when a hit is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    /// Least tokens of a chunk.
    pub chunk_tokens: u32,
    /// What of a request is stored.
    pub save: Save,
    /// Hits shorter than this many tokens are recomputed.
    pub min_load_tokens: u32,
    /// Longest wait of a request for a load.
    pub load_timeout: Duration,
    /// Whether what tiers below memory have is fetched where computing it is expected to be quicker.
    pub load_or_recompute: LoadOrRecompute,
}

/// The memory tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of the arena.
    pub size: ByteSize,
    /// Page size of the arena.
    pub huge_pages: HugePages,
    /// What goes first when room is needed.
    pub eviction_policy: EvictionPolicy,
    /// When the bytes of a hit are compared with their digest.
    pub verify: Verify,
    /// With `Background`: a hit is checked again when its last check is older.
    pub verify_age: Duration,
    /// Threads that take and check digests.
    pub verify_threads: u32,
    /// Bytes per second that checks which nobody waits for may read, all together.
    pub verify_bytes_per_second: ByteSize,
    /// Threads that populate the arena.
    pub populate_threads: u32,
}

/// The disk tier, below memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Folder of the tier's own; none = there is no such tier.
    pub path: Option<PathBuf>,
    /// Bytes of the files with objects.
    pub size: ByteSize,
}

/// The Redis tier. Its `Debug` form does not show the URLs: they may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Redis {
    /// Servers, each an independent shard; none = there is no such tier.
    pub urls: Vec<String>,
    /// Folder with the files `password` and `username`; none = what the URLs say.
    pub auth: Option<PathBuf>,
    /// PEM file of the authorities that TLS servers are trusted by; none = those of the system.
    pub ca: Option<PathBuf>,
    /// An object goes when it was neither written nor read for so long; 0 = never.
    pub ttl: Duration,
}

/// What is written to the tiers below memory, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// When.
    pub policy: WritePolicy,
    /// With `WriteBack`: a chunk waits for so long.
    pub back_after: Duration,
    /// Which chunks.
    pub admission: Admission,
    /// How they are packed there.
    pub codec: Codec,
}

/// Bytes per second that the tiers below memory may move, all together; 0 = no bound.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pacing {
    /// From tiers into memory.
    pub read_bytes_per_second: ByteSize,
    /// From memory to tiers, with what checks read that nobody waits for.
    pub write_bytes_per_second: ByteSize,
}

/// What the GPUs that the sidecar is given cost it; nothing where it is given none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Bytes of the container's memory that CUDA contexts may take.
    pub context_memory: ByteSize,
}

/// Who moves bytes between vLLM and the memory tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Who.
    pub mode: TransferMode,
    /// Bytes of a worker's window.
    pub window_size: ByteSize,
}

/// Bounds of everything that a peer can make grow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Open connections on the socket.
    pub connections: u32,
    /// Sessions (roles of processes).
    pub sessions: u32,
    /// Requests with an open probe, pin or lease, per scheduler.
    pub requests: u32,
    /// Share of the arena that soft pins may hold; the oldest end first.
    pub pinned_share: Percent,
    /// Bytes of the arena that are granted and not committed, all workers together.
    pub granted_bytes: ByteSize,
    /// Chunks in the index; each takes 1 KiB of the slot table once used.
    pub index_entries: u32,
    /// Longest frame body; the protocol's own limit is 8Mi.
    pub frame_bytes: ByteSize,
    /// Answers that wait for one slow reader; more closes its connection.
    pub send_bytes: ByteSize,
    /// A connection without a HELLO is closed after this.
    pub hello_timeout: Duration,
    /// Events kept for EVENTS; who is further behind is told that some were lost.
    pub events: u32,
    /// Of each tier below memory.
    pub tiers: TierLimits,
}

/// Bounds of each tier below memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierLimits {
    /// Lookups under way.
    pub lookups: u32,
    /// Chunks being fetched.
    pub fetches: u32,
    /// Their bytes; a quarter of `granted_bytes` where that is less. One chunk may always be fetched.
    pub fetch_bytes: ByteSize,
    /// Chunks that wait to be fetched.
    pub fetch_queue: u32,
    /// Chunks being written.
    pub writes: u32,
    /// Their bytes; a quarter of `granted_bytes` where that is less. One chunk may always be written.
    pub write_bytes: ByteSize,
    /// Bytes of chunks that wait to be written.
    pub write_queue_bytes: ByteSize,
    /// What could have been written for so long and was not is dropped.
    pub write_queue_age: Duration,
}

/// Logs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    /// Least level that is written.
    pub level: LogLevel,
    /// One JSON object a line, or text.
    pub format: LogFormat,
}

/// A value out of a fixed list of names.
pub(crate) trait Choice {
    fn names(&self) -> &'static [&'static str];
    fn name(&self) -> &'static str;
    fn choose(&mut self, name: &str) -> bool;
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }
        choice!(@impl $name { $($variant = $text),+ });
    };
    (@impl $name:ident { $($variant:ident = $text:literal),+ }) => {
        impl Choice for $name {
            fn names(&self) -> &'static [&'static str] { &[$($text),+] }
            fn name(&self) -> &'static str { match self { $(Self::$variant => $text),+ } }
            fn choose(&mut self, name: &str) -> bool {
                match name { $($text => *self = Self::$variant,)+ _ => return false }
                true
            }
        }
    };
}

use choice;

choice!(
    /// Whether what tiers below memory have is fetched where computing it is expected to be quicker.
    LoadOrRecompute {
        /// The quicker one, once it is known how quick both are.
        #[default]
        Auto = "Auto",
        /// It is fetched.
        AlwaysLoad = "AlwaysLoad",
    }
);
choice!(
    /// Who moves bytes between vLLM's KV blocks and the memory tier.
    TransferMode {
        /// What is known to be better on the machine; nothing was measured yet, so it is `Engine`.
        #[default]
        Auto = "Auto",
        /// vLLM's worker.
        Engine = "Engine",
        /// The sidecar, by a window that the worker fills and empties.
        CudaWindow = "CudaWindow",
    }
);
choice!(
    /// Page size of the arena.
    HugePages {
        /// Normal pages.
        #[default]
        None = "None",
        /// 2 MiB pages, which the node must have reserved.
        Size2Mi = "2Mi",
        /// 1 GiB pages, which the node must have reserved.
        Size1Gi = "1Gi",
    }
);
choice!(
    /// What goes first when room is needed.
    EvictionPolicy {
        /// Three FIFO queues: resists scans.
        #[default]
        S3Fifo = "S3FIFO",
        /// Least recently used.
        Lru = "LRU",
        /// Least frequently used.
        Lfu = "LFU",
        /// First in, first out.
        Fifo = "FIFO",
    }
);
choice!(
    /// When the bytes of a hit are compared with their digest.
    Verify {
        /// Before the answer, by a check that began after the request came.
        #[default]
        Always = "Always",
        /// Beside the answer, when the last check is older than `verifyAge`.
        Background = "Background",
    }
);
choice!(
    /// When a chunk that memory holds is written to the tiers below.
    WritePolicy {
        /// As soon as it can be read.
        #[default]
        WriteThrough = "WriteThrough",
        /// After a minute; sooner where much waits.
        WriteBack = "WriteBack",
        /// Never.
        None = "None",
    }
);
choice!(
    /// Which chunks are written to the tiers below.
    Admission {
        /// All.
        #[default]
        All = "All",
        /// Those that are used a second time.
        Reused = "Reused",
    }
);
choice!(
    /// How chunks are packed in the tiers below.
    Codec {
        /// Not at all.
        #[default]
        None = "None",
        /// So that every bit comes back.
        Lossless = "Lossless",
        /// As FP8 with a scale per 128 numbers: something is lost.
        Fp8 = "FP8",
        /// As whole numbers of 8 bits with a scale per 128 numbers: something is lost.
        Int8 = "INT8",
        /// As whole numbers of 4 bits between the least and the greatest of 64: much is lost.
        Int4 = "INT4",
        /// As few steps per token and layer, then an entropy coder: most is lost, and most is saved.
        CacheGen = "CacheGen",
    }
);
impl Codec {
    /// As objects name it.
    pub fn of_objects(self) -> object::Codec {
        match self {
            Self::None => object::Codec::None,
            Self::Lossless => object::Codec::Lossless,
            Self::Fp8 => object::Codec::Fp8,
            Self::Int8 => object::Codec::Int8,
            Self::Int4 => object::Codec::Int4,
            Self::CacheGen => object::Codec::CacheGen,
        }
    }
}
choice!(
    /// Least level that is written.
    LogLevel {
        /// Errors.
        Error = "error",
        /// And warnings.
        Warn = "warn",
        /// And what changes.
        #[default]
        Info = "info",
        /// And sessions in detail.
        Debug = "debug",
        /// And frames.
        Trace = "trace",
    }
);
choice!(
    /// Form of a log line.
    LogFormat {
        /// One object a line.
        #[default]
        Json = "json",
        /// For people.
        Text = "text",
    }
);
choice!(@impl Save { Prompt = "Prompt", PromptAndDecode = "PromptAndDecode" });

macro_rules! shown {
    ($($name:ident),+) => { $(impl std::fmt::Display for $name {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.name()) }
    })+ };
}
shown!(
    LoadOrRecompute,
    HugePages,
    EvictionPolicy,
    Verify,
    WritePolicy,
    Admission,
    Codec,
    LogLevel,
    LogFormat,
    AddressingStyle,
    Checksums,
    HttpVersion
);

impl HugePages {
    /// Bytes of a page; the arena is a multiple of it.
    pub fn page_bytes(self) -> u64 {
        match self {
            Self::None => 4 << 10,
            Self::Size2Mi => 2 << 20,
            Self::Size1Gi => 1 << 30,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: "/kvcachepool/sidecar.sock".into(),
            admin: Admin::default(),
            pool: Pool::default(),
            cache: Cache::default(),
            memory: Memory::default(),
            disk: Disk::default(),
            redis: Redis::default(),
            write: Write::default(),
            s3: S3::default(),
            pacing: Pacing::default(),
            gpu: Gpu::default(),
            transfer: Transfer::default(),
            limits: Limits::default(),
            log: Log::default(),
            managed: false,
        }
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 9797)),
            token_file: None,
        }
    }
}

impl Default for Transfer {
    fn default() -> Self {
        Self {
            mode: TransferMode::Auto,
            window_size: ByteSize(128 << 20),
        }
    }
}

impl Default for Cache {
    fn default() -> Self {
        Self {
            chunk_tokens: 256,
            save: Save::Prompt,
            min_load_tokens: 512,
            load_timeout: Duration::from_ms(2_000),
            load_or_recompute: LoadOrRecompute::Auto,
        }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            size: ByteSize(4 << 30),
            huge_pages: HugePages::None,
            eviction_policy: EvictionPolicy::S3Fifo,
            verify: Verify::Always,
            verify_age: Duration::from_ms(60_000),
            verify_threads: 2,
            verify_bytes_per_second: ByteSize(1 << 30),
            populate_threads: 2,
        }
    }
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            path: None,
            size: ByteSize(16 << 30),
        }
    }
}

impl Default for Redis {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            auth: None,
            ca: None,
            ttl: Duration::from_ms(0),
        }
    }
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redis")
            .field("urls", &self.urls.len())
            .field("auth", &self.auth)
            .field("ca", &self.ca)
            .field("ttl", &self.ttl)
            .finish()
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            sessions: 256,
            requests: 8_192,
            pinned_share: Percent(50),
            granted_bytes: ByteSize(2 << 30),
            index_entries: 65_536,
            frame_bytes: ByteSize(crate::frame::MAX_BODY as u64),
            send_bytes: ByteSize(32 << 20),
            hello_timeout: Duration::from_ms(5_000),
            events: 16_384,
            tiers: TierLimits::default(),
        }
    }
}

impl Default for TierLimits {
    fn default() -> Self {
        Self {
            lookups: 256,
            fetches: 32,
            fetch_bytes: ByteSize(256 << 20),
            fetch_queue: 16_384,
            writes: 8,
            write_bytes: ByteSize(64 << 20),
            write_queue_bytes: ByteSize(1 << 30),
            write_queue_age: Duration::from_ms(60_000),
        }
    }
}

impl Default for Write {
    fn default() -> Self {
        Self {
            policy: WritePolicy::default(),
            back_after: Duration::from_ms(60_000),
            admission: Admission::default(),
            codec: Codec::default(),
        }
    }
}

/// Longest wait of vLLM's scheduler at a request's first poll.
const FIRST_POLL_WAIT_US: u32 = 1_000;
/// Longest waits in one step of vLLM's scheduler together.
const STEP_WAIT_US: u32 = 2_000;
/// After this an unanswered GRANT is given up and its blocks go back to vLLM.
const GRANT_TIMEOUT_MS: u64 = 1_000;
/// Least bytes that stores of one instance may have in flight.
const STORE_BYTES_IN_FLIGHT: u64 = 256 << 20;

impl Config {
    /// What the connector is told in HELLO's answer.
    pub fn settings(&self) -> Settings {
        Settings {
            chunk_tokens: self.cache.chunk_tokens,
            save: self.cache.save,
            min_load_tokens: self.cache.min_load_tokens,
            load_timeout_ms: self.cache.load_timeout.ms,
            first_poll_wait_us: FIRST_POLL_WAIT_US,
            step_wait_us: STEP_WAIT_US,
            grant_timeout_ms: GRANT_TIMEOUT_MS,
            store_bytes_in_flight: STORE_BYTES_IN_FLIGHT,
        }
    }
}
