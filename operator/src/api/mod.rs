//! The `KVCachePool` resource: types, schema, rules, and the description of every field. A stored object may be older than a rule, so sizes
//! and times are read as text and validated by [`check`]. This module does not make decisions about objects or pods, and does not use a
//! cluster.

mod injection;
mod local;
mod pool;
mod reason;
mod reference;
mod rules;
mod schema;
mod shared;
mod sidecar;
mod status;
mod text;

pub use injection::{ExistingConnector, Injection, Mode, OnMissed};
pub use local::{Disk, Ephemeral, EvictionPolicy, HugePages, Local, Memory, NodeDirectory};
pub use pool::{
    Admission, Cache, Codec, DeletionPolicy, KVCachePool, KVCachePoolSpec, Monitoring, PodMonitor,
    Save, Write, WritePolicy,
};
pub use reason::Reason;
pub use reference::reference;
pub use rules::{Problem, Rule, check, rules};
pub use schema::crd;
pub use shared::{
    AddressingStyle, CaSource, CaSourceKind, Checksums, HttpVersion, ManagedRedis, Redis,
    RedisEndpoint, S3, SecretName, Shared,
};
pub use sidecar::{
    GpuAccess, ImagePullPolicy, LogLevel, Sidecar, Transfer, UpdateStrategy, UpdateStrategyType,
};
pub use status::{
    InjectionPaused, KVCachePoolStatus, PausedOwner, Pods, Skipped, Tier, TierState, Version,
};
pub use text::{Duration, Size};
